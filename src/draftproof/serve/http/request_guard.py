"""Who is being served: limits on how many, no id twice, and an end for what takes too long or is not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal

from starlette.types import Receive

from draftproof.serve.http.errors import Problem
from draftproof.serve.http.request_log import Ticket
from draftproof.serve.http.shared_limits import Seats
from draftproof.serve.settings import Settings

SWEEP_SECONDS = 1.0


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Caller:
    """Whoever waits for one answer: the task that makes it is cancelled when the client leaves."""

    def __init__(self, receive: Receive, desk: Desk) -> None:
        self._receive, self._desk = receive, desk
        self._cut: Literal["gone", "slow", "late"] | None = None
        self.done = False  # the last byte was given to the socket: a disconnect means nothing now
        self.deadline = time.monotonic() + desk.settings.request_seconds
        self.sending_since: float | None = None

    async def __aenter__(self) -> Caller:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._listen())
        self._desk.watch(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        self._desk.unwatch(self)
        if self._cut is None or kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        self._task.uncancel()
        if self._cut == "late":
            raise TimeoutError from None
        raise ClientGone(self._cut) from None

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cut("gone")

    def cut(self, why: Literal["gone", "slow", "late"]) -> None:
        if self._cut is None and not self.done:
            self._cut = why
            self._task.cancel()

    def look(self, now: float) -> None:
        if self.sending_since is not None and now - self.sending_since > self._desk.settings.stall_seconds:
            self.cut("slow")
        elif now > self.deadline:
            self.cut("late" if self.sending_since is None else "slow")


class Desk:
    """Lets requests in."""

    def __init__(self, settings: Settings, seats: Seats | None = None) -> None:
        """`seats`: shared with other processes."""
        self.settings = settings
        self.draining = False
        self._ids: set[str] = set()
        self._seats = seats or Seats(settings)
        self._callers: set[Caller] = set()
        self._sweeps = False

    @property
    def num_open(self) -> int:
        return len(self._ids)

    @contextmanager
    def seat(self, ticket: Ticket) -> Iterator[None]:
        """For as long as it is served; Problem if it cannot be."""
        if self.draining:
            raise Problem(503, "the server is shutting down", code="draining")
        if ticket.id in self._ids:
            raise Problem(400, f"a request with id {ticket.id!r} is already running", "request_id")
        total, mine = self._seats.take(ticket.key)
        try:
            if total > self.settings.max_concurrent:
                text = f"{total - 1} requests are open already: try again later"
                raise Problem(503, text, code="too_many")
            most = self.settings.max_concurrent_per_key
            if most is not None and mine > most:
                text = f"this key has {most} requests open already: try again later"
                raise Problem(429, text, code="too_many_of_key")
            self._ids.add(ticket.id)
            yield
        finally:
            self._ids.discard(ticket.id)
            self._seats.give(ticket.key)

    # --- what takes too long ------------------------------------------------------------------------

    def watch(self, caller: Caller) -> None:
        self._callers.add(caller)
        if not self._sweeps:
            self._sweeps = True
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def unwatch(self, caller: Caller) -> None:
        self._callers.discard(caller)

    def _sweep(self) -> None:
        self._sweeps = bool(self._callers)
        now = time.monotonic()
        for caller in list(self._callers):
            caller.look(now)
        if self._sweeps:
            asyncio.get_running_loop().call_later(
                min(SWEEP_SECONDS, self.settings.stall_seconds), self._sweep
            )
