"""Client of a model in this process: the server's application, called without a socket.

Tool calls, reasoning and all options of a request are therefore those of the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, MutableMapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from draftproof.cli.chat.client import ChatClient, error_message, split_lines
from draftproof.errors import RequestError

if TYPE_CHECKING:
    from draftproof.llm import LLM
    from draftproof.serve.settings import Settings

SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    "client": ("127.0.0.1", 0),
    "server": ("127.0.0.1", 0),
}


class LocalClient(ChatClient):
    """Application of the server over an LLM, on an event loop in a thread of its own."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        from draftproof.async_llm import AsyncLLM
        from draftproof.serve.http.app import create_app

        self._description = llm.engine.describe()
        self._llm = AsyncLLM.from_llm(llm)
        self._app = create_app(self._llm, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """Return one line about model and engine."""
        return self._description

    def close(self) -> None:
        """Abort what is running and end the thread; the LLM can be used again."""
        asyncio.run_coroutine_threadsafe(self._llm.shutdown(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _lines(self, path: str, body: bytes) -> Iterator[bytes]:
        received: SimpleQueue[int | bytes | None] = SimpleQueue()  # the status, parts of the body, the end
        gone = asyncio.Event()
        call = asyncio.run_coroutine_threadsafe(self._call(path, body, received, gone), self._loop)
        try:
            status = received.get()
            if status is None:  # the application failed without a response
                call.result()
            parts = (part for part in iter(received.get, None) if isinstance(part, bytes))
            if status != 200:
                raise RequestError(error_message(b"".join(parts)))
            yield from split_lines(parts)
        finally:
            self._loop.call_soon_threadsafe(gone.set)
            call.result()

    async def _call(
        self, path: str, body: bytes, received: SimpleQueue[int | bytes | None], gone: asyncio.Event
    ) -> None:
        """Run one request through the application; `gone` is the disconnect of its client."""
        unread = [body]

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            received.put(message["status"] if "status" in message else message.get("body", b""))

        try:
            scope = {**SCOPE, "path": path, "raw_path": path.encode(), "state": {}}
            await self._app(scope, receive, send)
        finally:
            received.put(None)
