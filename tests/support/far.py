"""A worker in a thread of the test, with real sockets, for what needs no process of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from draftproof import LLM
from draftproof.serve.ipc.messages import TIMINGS, WELCOME, Abort, Add, Hello, body_of, encode
from draftproof.serve.ipc.remote_engine import RemoteEngine
from draftproof.serve.ipc.remote_llm import RemoteLLM, connect
from draftproof.serve.ipc.status import WorkerStatus, address_of, write_status
from draftproof.serve.ipc.worker import Worker
from draftproof.types import Request
from exact import check_empty

SECONDS = 120  # that only a hanging test takes


@contextmanager
def working(llm: LLM, folder: Path, **options: Any) -> Iterator[Worker]:
    """Nothing may be left in the engine afterwards."""
    write_status(folder, WorkerStatus("ready"))
    if llm.tokenizer is not None:
        llm.tokenizer.where = "made up"  # the servers are given theirs
    worker = Worker(llm, address_of(folder), {"load_format": "dummy", **options})
    failures: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()
    if not failures:
        check_empty(llm.engine)


def serve(llm: LLM, folder: Path, body: Callable[[RemoteLLM], Awaitable[Any]], tokenizer: Any = None) -> Any:
    """An AsyncLLM on a worker, in an event loop; by default text is as `llm` has it."""
    with working(llm, folder):

        async def main() -> Any:
            far = connect(address_of(folder), tokenizer=tokenizer or llm.tokenizer)
            async with far, asyncio.timeout(SECONDS):
                return await body(far)

        return asyncio.run(main())


def wait_for(true: Callable[[], Any]) -> Any:
    until = time.monotonic() + SECONDS
    while not (found := true()):
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.002)
    return found


class RawServer:
    """A server that speaks the wire and nothing else; it reads when it is told to."""

    def __init__(self, folder: Path, queued: int = 1) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = queued
        self.socket.rcvtimeo = SECONDS * 1000
        self.socket.connect(address_of(folder))
        self.socket.send(encode(Hello()))
        assert self.recv().startswith(WELCOME)

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def recv(self) -> bytes:
        """The next message, but for the timings that every server hears once a second."""
        while (data := self.socket.recv()).startswith(TIMINGS):
            pass
        return data

    def add(self, handle: int, request: Request) -> None:
        self.socket.send_multipart([encode(Add(handle, [request.seed])), body_of(request)])

    def abort(self, *handles: int) -> None:
        self.socket.send(encode(Abort(list(handles))))

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


__all__ = ["RawServer", "RemoteEngine", "serve", "wait_for", "working"]
