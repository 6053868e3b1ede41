"""The line to the worker: a socket that is made anew when the worker goes, and a bell that ends a wait."""

from __future__ import annotations

import contextlib
from enum import Enum

import zmq

from draftproof.serve.ipc.messages import Hello, encode
from draftproof.serve.ipc.waker import Bell

QUEUED = 32  # frames under way on either side before the worker keeps them itself
RETRY = 50, 500  # milliseconds between two tries to connect, growing


class News(Enum):
    WOKEN = 0
    LOST = 1  # the worker's end is gone; another line is open, and nobody may be there yet


class Line:
    """For one thread at a time, but for `wake`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._calls = 0
        self._bell = Bell()
        self.wake = self._bell.ring  # from any thread, also after `close`
        self._open()

    def _open(self) -> None:
        made = self._socket = self._context.socket(zmq.DEALER)
        made.linger = 0
        made.sndhwm = 0  # as many requests as the server lets in: sending never waits
        made.rcvhwm = QUEUED
        made.reconnect_ivl, made.reconnect_ivl_max = RETRY
        # by a name of its own: the usual one is that of a file descriptor, which may have been another's
        self._calls += 1
        name = f"inproc://line-{self._calls}"
        made.monitor(name, zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.connect(name)
        self._poller = zmq.Poller()
        for each in (made, self._monitor, self._bell):
            self._poller.register(each, zmq.POLLIN)
        made.connect(self._address)
        self.send(encode(Hello()))

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def receive(self, seconds: float | None = None) -> bytes | News | None:
        """What comes next; None if nothing does in so many seconds. What has come goes before a loss."""
        while True:
            with contextlib.suppress(zmq.Again):
                return self._socket.recv(zmq.NOBLOCK)
            ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1000)))
            if self._socket in ready:
                continue
            if self._monitor in ready:
                # what came between the look at the one and the look at the other was there before the end
                with contextlib.suppress(zmq.Again):
                    return self._socket.recv(zmq.NOBLOCK)
                self.renew()
                return News.LOST
            if self._bell.fileno() in ready:
                self._bell.hush()
                return News.WOKEN
            return None

    def renew(self) -> None:
        """Hang up and call again: what was sent and not read is nobody's, on both sides."""
        self._hang_up()
        self._open()

    def _hang_up(self) -> None:
        self._socket.monitor(None, 0)
        self._monitor.close(0)
        self._socket.close(0)

    def close(self) -> None:
        self._hang_up()
        self._context.term()
        self._bell.close()
