"""Socket of the worker and the HTTP processes connected to it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from draftproof.serve.ipc.connection import MAX_QUEUED_FRAMES, Waker
from draftproof.serve.ipc.messages import DISCONNECTED, Disconnected, encode
from draftproof.serve.worker.frontend_connection import (
    FrontendConnection,
    FrontendDisconnected,
    FrontendStalled,
)

LINGER_SECONDS = 10.0  # at the end, for the last frames to be read
CLOSE_POLL_SECONDS = 0.005  # between two checks for closed connections at the end

log = logging.getLogger("draftproof")


class Frontends:
    """Router socket with one connection per HTTP process. `release` aborts the requests of a connection."""

    def __init__(self, address: str, release: Callable[[FrontendConnection], None]) -> None:
        self.connections: dict[bytes, FrontendConnection] = {}
        self._release = release
        self._num_accepted = 0
        self._rejected: list[FrontendConnection] = []  # dropped connections without a disconnect message yet
        self._waker = Waker()
        self.wake = self._waker.wake  # ends `wait`, from any thread or a signal handler
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.router_mandatory = True
        self.socket.sndhwm = MAX_QUEUED_FRAMES
        self.socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)

    def receive(self, limit: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the messages that have arrived, at most `limit`: (identity of the sender, parts)."""
        for _ in range(limit):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield identity, parts

    def wait(self, seconds: float) -> bool:
        """Wait for a message or `wake`; return False after `seconds`."""
        ready = dict(self._poller.poll(int(1000 * seconds)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        return bool(ready)

    def send_all(self, data: bytes) -> None:
        """Send `data` to every HTTP process without buffered frames; dropped where the queue is full."""
        self.for_each(lambda each: each.outbox or each.try_send(self.socket, data))

    def flush(self) -> None:
        """Send buffered frames and disconnect messages as far as the queues have room."""
        if self._rejected:
            reason = "this HTTP process did not read its frames"
            self._rejected = [each for each in self._rejected if not self._send_disconnected(each, reason)]
        if self.has_buffered:
            num_with_requests = sum(bool(each.entries) for each in self.connections.values())
            for each in list(self.connections.values()):
                if each.outbox:
                    is_only_active = num_with_requests == bool(each.entries)
                    self.guard(each, each.flush, self.socket, is_only_active)

    @property
    def has_buffered(self) -> bool:
        """Return True if a connection has buffered frames."""
        return any(each.outbox for each in self.connections.values())

    def accept(self, identity: bytes) -> FrontendConnection:
        """Add a connection; one with the same identity is dropped first."""
        if identity in self.connections:
            self.drop(self.connections[identity])
        self._num_accepted += 1
        made = self.connections[identity] = FrontendConnection(identity, self._num_accepted)
        return made

    def reject(self, identity: bytes) -> None:
        """Send the disconnect message to a process that is not connected, so that it connects anew."""
        self._send_disconnected(FrontendConnection(identity, 0), "this HTTP process is not connected")

    def for_each(self, call: Callable[[FrontendConnection], object]) -> None:
        """Call `call` with every connection, and drop those that fail."""
        for each in list(self.connections.values()):
            self.guard(each, call, each)

    def guard(self, connection: FrontendConnection, call: Callable[..., object], *arguments: Any) -> None:
        """Call `call(*arguments)`; drop `connection` if it is disconnected or stalled."""
        try:
            call(*arguments)
        except FrontendDisconnected:
            if connection.entries or connection.compiling:
                log.warning("an HTTP process disconnected: aborting %d requests", len(connection.entries))
            self.drop(connection)
        except FrontendStalled:
            log.error("an HTTP process does not read: aborting %d requests", len(connection.entries))
            self.drop(connection)
            self._rejected.append(connection)

    def drop(self, connection: FrontendConnection) -> None:
        """Remove a connection and abort its requests."""
        self.connections.pop(connection.identity, None)
        self._release(connection)

    def _send_disconnected(self, connection: FrontendConnection, reason: str) -> bool:
        """Send the disconnect message; return False if the queue is full."""
        try:
            return connection.try_send(self.socket, DISCONNECTED + encode(Disconnected(reason)))
        except FrontendDisconnected:
            return True

    def close(self, reason: str) -> None:
        """Send what is left and the disconnect message, wait for the HTTP processes to disconnect, and close.

        A ZeroMQ reader whose queue is full loses what is in the kernel's buffer when the sender closes first.
        An HTTP process disconnects once it has read the disconnect message, so the worker waits for that, for
        LINGER_SECONDS at most.
        """
        until = time.monotonic() + LINGER_SECONDS
        message = DISCONNECTED + encode(Disconnected(reason))
        waiting = list(self.connections.values())
        for connection in waiting:
            with contextlib.suppress(Exception):  # a failed engine may not be able to abort requests
                self.drop(connection)
        while waiting := [each for each in waiting if self._is_open(each, message)]:
            if time.monotonic() > until:
                log.warning("%d HTTP processes did not read their last frames", len(waiting))
                break
            time.sleep(CLOSE_POLL_SECONDS)
        self.socket.close(int(1000 * max(until - time.monotonic(), 0)))
        self._context.term()
        self._waker.close()

    def _is_open(self, connection: FrontendConnection, message: bytes) -> bool:
        """Send what is left, then the disconnect message; return False once the process has disconnected.

        The router reports a disconnect only when it sends, so the disconnect message is sent repeatedly.
        """
        try:
            while connection.outbox and connection.try_send(self.socket, connection.outbox[0]):
                connection.outbox.popleft()
            if not connection.outbox:
                connection.try_send(self.socket, message)
        except FrontendDisconnected:
            return False
        return True
