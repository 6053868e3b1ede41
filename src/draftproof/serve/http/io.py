"""Reading of request bodies, limited in size and time, and sending of responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from draftproof.serve.http.errors import ApiError, decode
from draftproof.serve.http.request_guard import ClientDisconnected, ClientMonitor
from draftproof.serve.settings import Settings

MAX_INLINE_BODY_BYTES = 256 << 10  # larger bodies are decoded in a thread, not on the event loop
PIECE_BYTES = 256 << 10  # of a large response: a client has `stall_seconds` to read each piece
MAX_UNWATCHED_BYTES = 64 << 10  # of a response that no client delays: it is in the socket's buffers
LINGER_SECONDS = 5.0  # for the rest of a body that is not used
T = TypeVar("T")
JSON_HEADERS = [(b"content-type", b"application/json")]
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class IncomingBody:
    """Body of a request, which may be left unread."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next part of the body, or the disconnect."""
        message = await self._receive()
        self._is_complete = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read the rest of the body for a short time.

        A connection that is closed with unread data is reset, and a client that is still sending may then
        never see the response.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._is_complete:
                    await self.receive()


class ResponseStream:
    """Streamed response. The status line is sent with the first bytes."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.started = False
        self._is_silent = True  # since the last check
        self.failure: Callable[[ApiError], bytes]  # event of an error, set before the first bytes

    @asynccontextmanager
    async def kept_alive(self, seconds: float) -> AsyncIterator[None]:
        """Send a comment after some seconds without data, which clients ignore; 0 seconds: none.

        Proxies close connections that are silent for too long.
        """
        if not seconds:
            yield
            return
        task = asyncio.create_task(self._send_comments(seconds))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _send_comments(self, seconds: float) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(seconds)
            if self._is_silent:
                await self.write(KEEP_ALIVE)

    async def write(self, data: bytes) -> None:
        """Send some bytes."""
        self._is_silent = False
        if not self.started:
            self.started = True
            await self.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        """Send the last bytes."""
        await self.write(data)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def in_thread_if(is_large: bool, call: Callable[[], T], pool: Executor | None = None) -> T:
    """Run `call`, in a thread if it takes long, so that other streams are not delayed.

    `pool`: threads other than those of generation requests.
    """
    if not is_large:
        return call()
    return await asyncio.get_running_loop().run_in_executor(pool, call)


async def gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Await several results; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def send_body(
    send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] = JSON_HEADERS
) -> None:
    """Send a complete response."""
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers + length})
    await send({"type": "http.response.body", "body": body})


async def send_last(send: Send, body: bytes, client: ClientMonitor) -> None:
    """Send the complete response of an open request, which is open until the client has read most of it."""
    if len(body) <= MAX_UNWATCHED_BYTES:
        client.complete()
        await send_body(send, body)
        return
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(body) - 1, PIECE_BYTES):
        piece = body[start : min(start + PIECE_BYTES, len(body) - 1)]
        await client.limit_send(send({"type": "http.response.body", "body": piece, "more_body": True}))
    await client.complete_when_read(send)
    await send({"type": "http.response.body", "body": body[-1:]})


async def send_json(send: Send, value: msgspec.Struct, status: int = 200) -> None:
    """Send a struct as JSON."""
    await send_body(send, msgspec.json.encode(value), status)


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error response."""
    await send_body(send, error.body, error.status, error.headers)


async def read_json(
    scope: Scope, receive: Receive, settings: Settings, kind: type[T], pool: Executor | None = None
) -> T:
    """Read and decode a body."""
    body = await read_body(scope, receive, settings)
    made: T = await in_thread_if(len(body) > MAX_INLINE_BODY_BYTES, partial(decode, body, kind), pool)
    return made


async def read_body(scope: Scope, receive: Receive, settings: Settings) -> bytes:
    """Read a body; ApiError if it is not JSON, too large, or too slow."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "the body must be JSON: send the header 'Content-Type: application/json'")
    limit = settings.max_body_bytes
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    return await read_whole(receive, limit, settings.body_seconds)


async def read_whole(receive: Receive, limit: int, seconds: float) -> bytes:
    """Read a body; ApiError if it has more than `limit` bytes, or takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await _read(receive, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("disconnected")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds the maximum of {limit} bytes", code="body_too_large")
