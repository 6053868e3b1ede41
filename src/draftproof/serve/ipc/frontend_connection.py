"""A server process as the worker sees it: what it asked for, and what is still to be sent to it.

Nothing that was decoded for a server that reads is ever thrown away, nobody's memory grows without bound,
and nobody waits for another's server. A frame goes into the socket's queue; when that is full (the server
does not read), it is kept here. Beyond OUTBOX bytes the server is stuck. While nobody else has requests the
engine waits for it, STUCK_SECONDS at most; otherwise the engine goes on, and the server is given up when it
has read nothing for OTHERS_SECONDS or when MOST bytes are kept for it. Its requests are then aborted, and
should it wake up, that is the last thing it is told: then it says so to its clients and begins anew.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import zmq

from draftproof.metrics import RequestStats
from draftproof.serve.ipc.encode import Refusal
from draftproof.types import LogprobKind, Request

OUTBOX = 64 << 20  # bytes kept for a server that does not read before it counts as stuck
MOST = 256 << 20  # and before it is given up
STUCK_SECONDS = 60.0  # that a stuck server is waited for,
OTHERS_SECONDS = 5.0  # and where the engine goes on for others


class Gone(Exception):
    """The server at the other end is."""


class Stuck(Exception):
    """It has not read for too long."""


@dataclass(slots=True, eq=False)
class Entry:
    """One of its requests."""

    client: Client
    handle: int
    request: Request
    stats: RequestStats
    wants: LogprobKind
    top: int  # of the best, with each logprob


@dataclass(slots=True, eq=False)
class Client:
    identity: bytes
    number: int
    entries: dict[int, Entry] = field(default_factory=dict)  # by handle
    compiling: set[int] = field(default_factory=set)  # first handles of jobs whose grammar is not ready
    refusals: list[Refusal] = field(default_factory=list)
    sequence: int = 0  # of the next frame
    outbox: deque[bytes] = field(default_factory=deque)
    size: int = 0  # bytes in the outbox
    stuck_since: float | None = None

    def send(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        """Now, or when there is room. Raises Gone, or Stuck."""
        self.sequence += 1
        if self.outbox or not self.put(socket, frame):
            self.outbox.append(frame)
            self.size += len(frame)
        if self.stuck and self.stuck_since is None:
            self.stuck_since = time.monotonic()
        if self.size > MOST:
            raise Stuck

    def flush(self, socket: zmq.Socket[bytes], alone: bool) -> None:
        """Send what is here as far as there is room. Raises Gone, or Stuck."""
        while self.outbox and self.put(socket, self.outbox[0]):
            self.size -= len(self.outbox.popleft())
            self.stuck_since = time.monotonic() if self.stuck else None
        patience = STUCK_SECONDS if alone else OTHERS_SECONDS
        if self.stuck_since is not None and time.monotonic() - self.stuck_since > patience:
            raise Stuck

    def put(self, socket: zmq.Socket[bytes], data: bytes) -> bool:
        """False: there is no room at the moment."""
        try:
            socket.send_multipart((self.identity, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Gone from error
            raise
        return True

    @property
    def stuck(self) -> bool:
        return self.size > OUTBOX
