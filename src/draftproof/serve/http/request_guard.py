"""Limits of open requests: how many, no id twice, timeouts, clients that disconnect or do not read."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Literal

from starlette.types import Receive, Send

from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.request_log import NO_KEY, RequestRecord
from draftproof.serve.settings import Settings

SWEEP_SECONDS = 1.0  # between two checks for timeouts
ENTRY_BYTES = 8
CancelReason = Literal["disconnected", "not_reading", "timed_out"]


class ClientDisconnected(Exception):
    """The client disconnected, or does not read its response."""


class ClientMonitor:
    """Watches the client of one request, and cancels the request's task when the client disconnects."""

    def __init__(self, receive: Receive, guard: RequestGuard, admission: Admission) -> None:
        self._receive, self._guard, self._admission = receive, guard, admission
        self._cancel_reason: CancelReason | None = None
        self._is_complete = False  # only the last bytes are still to send: a disconnect is of no concern then
        self.deadline = time.monotonic() + guard.settings.request_seconds
        self.sending_since: float | None = None

    async def __aenter__(self) -> ClientMonitor:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._watch_disconnect())
        self._guard.watch(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watch.cancel()
        self._guard.unwatch(self)
        if self._cancel_reason is None or kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        self._task.uncancel()
        if self._cancel_reason == "timed_out":
            raise TimeoutError from None
        raise ClientDisconnected(self._cancel_reason) from None

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cancel("disconnected")

    def complete(self) -> None:
        """End the count of the request: its last bytes are about to be sent."""
        self._is_complete = True
        self._admission.end()

    async def complete_when_read(self, send: Send) -> None:
        """Wait until the client has read what exceeds the buffers of its socket; then end the count."""
        await self.limit_send(send({"type": "http.response.body", "body": b"", "more_body": True}))
        self.complete()

    async def limit_send(self, sending: Awaitable[None]) -> None:
        """Await `sending` a part of the response; the client has `stall_seconds` to read earlier parts."""
        self.sending_since = time.monotonic()
        await sending
        self.sending_since = None

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the request's task, unless the response is complete."""
        if self._cancel_reason is None and not self._is_complete:
            self._cancel_reason = reason
            self._task.cancel()

    def check_timeout(self, now: float) -> None:
        """Cancel the request if it takes too long, or its client does not read."""
        if self.sending_since is not None and now - self.sending_since > self._guard.settings.stall_seconds:
            self.cancel("not_reading")
        elif now > self.deadline:
            self.cancel("timed_out" if self.sending_since is None else "not_reading")


class OpenRequestCounts:
    """Numbers of open requests by API key, over all HTTP processes of one engine.

    They are integers in shared memory: one row per process, written by that process only, and one column per
    key. A process increments its own entry first and checks the sums afterwards, so two processes never both
    admit a request to the last place (both may be rejected). The process that supervises them clears the row
    of one that ended. Without a file the counts are local to this process.
    """

    def __init__(self, settings: Settings, row: int = 0, num_rows: int = 1, fd: int | None = None) -> None:
        names = dict.fromkeys(["all", NO_KEY, *settings.api_keys.names])
        self._columns = {name: i for i, name in enumerate(names)}
        self._width = len(names)
        size = num_rows * self._width * ENTRY_BYTES
        memory = bytearray(size) if fd is None else mmap.mmap(fd, size)
        self._table = memoryview(memory).cast("q")  # [num_rows, columns], row by row
        self._row_start = row * self._width

    def increment(self, key: str) -> tuple[int, int]:
        """Add one request; return the number of open requests in total and of this key."""
        self._add(key, 1)
        total, of_key = (sum(self._table[self._columns[name] :: self._width]) for name in ("all", key))
        return total, of_key

    def decrement(self, key: str) -> None:
        """Remove one request."""
        self._add(key, -1)

    def _add(self, key: str, number: int) -> None:
        for name in ("all", key):
            self._table[self._row_start + self._columns[name]] += number

    def clear(self, row: int) -> None:
        """Set the row of an ended process to zero."""
        for place in range(row * self._width, (row + 1) * self._width):
            self._table[place] = 0


def create_shared_counts(settings: Settings, num_rows: int) -> tuple[int, OpenRequestCounts]:
    """Create counts for `num_rows` processes; return the file to inherit and the counts."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("draftproof-open-requests")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.write(fd, bytes(num_rows * (2 + len(settings.api_keys.names)) * ENTRY_BYTES))
    return fd, OpenRequestCounts(settings, 0, num_rows, fd)


class Admission:
    """Open request of an id and a key, in the counts until `end`.

    A client that has the last byte of a response may send its next request at once, so the count of a request
    ends before that byte is sent.
    """

    def __init__(self, record: RequestRecord, ids: set[str], counts: OpenRequestCounts) -> None:
        self._id, self._key, self._ids, self._counts = record.id, record.key, ids, counts
        self._is_open = True
        ids.add(record.id)

    def end(self) -> None:
        """Remove the request from the counts, once."""
        if self._is_open:
            self._is_open = False
            self._ids.discard(self._id)
            self._counts.decrement(self._key)


class RequestGuard:
    """Admission of requests and timeouts. `counts`: open requests shared with other processes."""

    def __init__(self, settings: Settings, counts: OpenRequestCounts | None = None) -> None:
        self.settings = settings
        self.draining = False
        self._ids: set[str] = set()
        self._counts = counts or OpenRequestCounts(settings)
        self._clients: set[ClientMonitor] = set()
        self._is_sweeping = False

    @property
    def num_open(self) -> int:
        """Number of open requests of this process."""
        return len(self._ids)

    def start_draining(self) -> None:
        """Reject new requests from now on."""
        self.draining = True

    @contextmanager
    def admit(self, record: RequestRecord) -> Iterator[Admission]:
        """Count a request as open until its admission or the context ends; ApiError if a limit is reached."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        if record.id in self._ids:
            raise ApiError(400, f"a request with id {record.id!r} is already running", "request_id")
        total, of_key = self._counts.increment(record.key)
        admission = Admission(record, self._ids, self._counts)
        try:
            if total > self.settings.max_concurrent:
                text = f"{total - 1} requests are open: try again later"
                raise ApiError(503, text, code="too_many")
            limit = self.settings.max_concurrent_per_key
            if limit is not None and of_key > limit:
                text = f"this key has {limit} open requests: try again later"
                raise ApiError(429, text, code="too_many_of_key")
            yield admission
        finally:
            admission.end()

    def watch(self, client: ClientMonitor) -> None:
        """Check a client for timeouts until `unwatch`."""
        self._clients.add(client)
        if not self._is_sweeping:
            self._is_sweeping = True
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def unwatch(self, client: ClientMonitor) -> None:
        """Stop checking a client."""
        self._clients.discard(client)

    def _sweep(self) -> None:
        self._is_sweeping = bool(self._clients)
        now = time.monotonic()
        for client in list(self._clients):
            client.check_timeout(now)
        if self._is_sweeping:
            seconds = min(SWEEP_SECONDS, self.settings.stall_seconds)
            asyncio.get_running_loop().call_later(seconds, self._sweep)
