"""Connection of an HTTP process to the worker: a socket that is replaced when the worker disconnects."""

from __future__ import annotations

import contextlib
import socket
from enum import Enum

import zmq

from draftproof.serve.ipc.messages import Hello, encode

MAX_QUEUED_FRAMES = 32  # in the socket queue of either side, before the worker buffers frames itself
RECONNECT_MIN_MILLISECONDS, RECONNECT_MAX_MILLISECONDS = 50, 500


class Waker:
    """Pollable wake-up flag. `wake` may be called from any thread, at any time, in __del__ too."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(OSError):  # the buffer is full, so it is readable already; or it is closed
            self._writer.send(b"!")

    def clear(self) -> None:
        """Read everything that was written, so that the next poll blocks."""
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


class ConnectionEvent(Enum):
    """Reason why `receive` returned without a message."""

    WOKEN = 0
    DISCONNECTED = 1  # the worker's end was closed; a new socket is open and may not be connected yet


class WorkerConnection:
    """ZeroMQ connection to the worker. For one thread at a time, except `wake`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._num_sockets = 0
        self._waker = Waker()
        self.wake = self._waker.wake  # from any thread, also after `close`
        self._open()

    def _open(self) -> None:
        made = self._socket = self._context.socket(zmq.DEALER)
        made.linger = 0
        made.sndhwm = 0  # unbounded: the number of requests is limited before, so sending never blocks
        made.rcvhwm = MAX_QUEUED_FRAMES
        made.reconnect_ivl = RECONNECT_MIN_MILLISECONDS
        made.reconnect_ivl_max = RECONNECT_MAX_MILLISECONDS
        # a unique name: the default one contains a file descriptor, which may have been reused
        self._num_sockets += 1
        name = f"inproc://monitor-{self._num_sockets}"
        made.monitor(name, zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.connect(name)
        self._poller = zmq.Poller()
        for each in (made, self._monitor, self._waker):
            self._poller.register(each, zmq.POLLIN)
        made.connect(self._address)
        self.send(encode(Hello()))

    def send(self, *parts: bytes) -> None:
        """Queue a message; never blocks."""
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def receive(self, seconds: float | None = None) -> bytes | ConnectionEvent | None:
        """Return the next message or event; None after `seconds`. Messages come before a disconnect."""
        while True:
            with contextlib.suppress(zmq.Again):
                return self._socket.recv(zmq.NOBLOCK)
            ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1000)))
            if self._socket in ready:
                continue
            if self._monitor in ready:
                # a message may have arrived between the read above and the disconnect
                with contextlib.suppress(zmq.Again):
                    return self._socket.recv(zmq.NOBLOCK)
                self.reconnect()
                return ConnectionEvent.DISCONNECTED
            if self._waker.fileno() in ready:
                self._waker.clear()
                return ConnectionEvent.WOKEN
            return None

    def reconnect(self) -> None:
        """Replace the socket. Messages that were sent and not read are dropped on both sides."""
        self._close_socket()
        self._open()

    def _close_socket(self) -> None:
        self._socket.monitor(None, 0)
        self._monitor.close(0)
        self._socket.close(0)

    def close(self) -> None:
        """Close the connection for good."""
        self._close_socket()
        self._context.term()
        self._waker.close()
