"""Worker in a thread of the test, with real sockets."""

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
from draftproof.metrics import WorkerStatus
from draftproof.serve.ipc.messages import (
    ENGINE_INFO,
    TIMINGS,
    AbortRequests,
    AddRequests,
    Hello,
    encode,
    encode_body,
)
from draftproof.serve.ipc.remote_llm import RemoteLLM, connect
from draftproof.serve.ipc.status import socket_address, write_status
from draftproof.serve.worker.worker import Worker
from draftproof.types import Request
from exact import check_empty

TIMEOUT_SECONDS = 300  # reached by a test that hangs only


@contextmanager
def run_worker(llm: LLM, folder: Path, **options: Any) -> Iterator[Worker]:
    """Run a worker, and check afterwards that the engine is empty."""
    write_status(folder, WorkerStatus("ready"))
    if llm.tokenizer is not None:
        llm.tokenizer.where = "none"  # clients pass their own tokenizer
    worker = Worker(llm, socket_address(folder), {"load_format": "dummy", **options})
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
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()
    if not failures:
        check_empty(llm.engine)


def run_remote(
    llm: LLM, folder: Path, body: Callable[[RemoteLLM], Awaitable[Any]], tokenizer: Any = None
) -> Any:
    """Run `body` with a RemoteLLM on a worker of `llm`, by default with the tokenizer of `llm`."""
    with run_worker(llm, folder):

        async def main() -> Any:
            remote = connect(socket_address(folder), tokenizer=tokenizer or llm.tokenizer)
            async with remote, asyncio.timeout(TIMEOUT_SECONDS):
                return await body(remote)

        return asyncio.run(main())


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return the value of `condition` once it is true."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.002)
    return found


class RawFrontend:
    """HTTP process that only sends and receives messages; it reads when the test calls `recv`."""

    def __init__(self, folder: Path, queued: int = 1) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = queued
        self.socket.rcvtimeo = TIMEOUT_SECONDS * 1000
        self.socket.connect(socket_address(folder))
        self.socket.send(encode(Hello()))
        assert self.recv().startswith(ENGINE_INFO)

    def __enter__(self) -> RawFrontend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def recv(self) -> bytes:
        """Return the next message other than TIMINGS, which are sent once a second."""
        while (data := self.socket.recv()).startswith(TIMINGS):
            pass
        return data

    def add(self, handle: int, request: Request) -> None:
        """Send a request."""
        self.socket.send_multipart([encode(AddRequests(handle, [request.seed])), encode_body(request)])

    def abort(self, *handles: int) -> None:
        """Send an abort."""
        self.socket.send(encode(AbortRequests(list(handles))))

    def close(self) -> None:
        """Disconnect."""
        self.socket.close(0)
        self.context.term()
