"""Connection of the worker to one HTTP process: its requests and the frames not sent yet.

A frame goes to the socket's queue. When that queue is full because the HTTP process does not read, the frame
is buffered here, so that no result is dropped and no other HTTP process is delayed. Beyond STALL_BYTES the
connection counts as stalled. If no other HTTP process has requests, the engine pauses for a stalled one, for
ONLY_CLIENT_STALL_SECONDS at most. Otherwise the engine goes on, and the connection is dropped after it has
read nothing for SHARED_STALL_SECONDS, or at MAX_OUTBOX_BYTES. Its requests are aborted then, and the
disconnect message is the last one it receives; the HTTP process reports the error to its clients and
reconnects.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import zmq

from draftproof.engine.step.step_results import LogprobWidth
from draftproof.metrics import RequestStats
from draftproof.serve.ipc.encode import AdmissionFailure
from draftproof.types import LogprobKind, Request

STALL_BYTES = 64 << 20  # buffered frames above which a connection counts as stalled
MAX_OUTBOX_BYTES = 256 << 20  # buffered frames above which a connection is dropped
ONLY_CLIENT_STALL_SECONDS = 60.0  # timeout of a stalled connection while no other one has requests
SHARED_STALL_SECONDS = 5.0  # timeout of a stalled connection otherwise


class FrontendDisconnected(Exception):
    """The HTTP process disconnected."""


class FrontendStalled(Exception):
    """The HTTP process has not read its frames for too long."""


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One request of an HTTP process."""

    connection: FrontendConnection
    handle: int
    request: Request
    stats: RequestStats
    kind: LogprobKind
    width: LogprobWidth  # logprobs of each token besides its own


@dataclass(slots=True, eq=False)
class FrontendConnection:
    """One connected HTTP process."""

    identity: bytes
    number: int
    entries: dict[int, RequestEntry] = field(default_factory=dict)  # by handle
    compiling: set[int] = field(default_factory=set)  # first handles of prompts whose grammar is not ready
    failures: list[AdmissionFailure] = field(default_factory=list)  # not sent yet
    sequence: int = 0  # number of the next frame
    outbox: deque[bytes] = field(default_factory=deque)
    outbox_bytes: int = 0
    stalled_since: float | None = None

    @property
    def is_stalled(self) -> bool:
        """Return True while more than STALL_BYTES are buffered."""
        return self.outbox_bytes > STALL_BYTES

    @property
    def is_busy(self) -> bool:
        """Return True while requests or unsent frames are left."""
        return bool(self.entries or self.compiling or self.outbox or self.failures)

    def send(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        """Send a frame, or buffer it. Raises FrontendDisconnected or FrontendStalled."""
        self.sequence += 1
        if self.outbox or not self.try_send(socket, frame):
            self.outbox.append(frame)
            self.outbox_bytes += len(frame)
        if self.is_stalled and self.stalled_since is None:
            self.stalled_since = time.monotonic()
        if self.outbox_bytes > MAX_OUTBOX_BYTES:
            raise FrontendStalled

    def send_message(self, socket: zmq.Socket[bytes], data: bytes) -> None:
        """Send what is not a frame, after the frames that are buffered. Raises FrontendDisconnected."""
        if self.outbox or not self.try_send(socket, data):
            self.outbox.append(data)
            self.outbox_bytes += len(data)

    def flush(self, socket: zmq.Socket[bytes], is_only_active: bool) -> None:
        """Send buffered frames while the queue has room; raises as `send`.

        is_only_active: no other HTTP process has requests.
        """
        while self.outbox and self.try_send(socket, self.outbox[0]):
            self.outbox_bytes -= len(self.outbox.popleft())
            self.stalled_since = time.monotonic() if self.is_stalled else None
        timeout = ONLY_CLIENT_STALL_SECONDS if is_only_active else SHARED_STALL_SECONDS
        if self.stalled_since is not None and time.monotonic() - self.stalled_since > timeout:
            raise FrontendStalled

    def try_send(self, socket: zmq.Socket[bytes], data: bytes) -> bool:
        """Send without blocking; return False if the queue is full. Raises FrontendDisconnected."""
        try:
            socket.send_multipart((self.identity, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise FrontendDisconnected from error
            raise
        return True
