"""Delivery of stream events from the engine thread to readers in event loops.

The engine thread never waits for a reader: unread events stay in the queue of their request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from draftproof.outputs import RequestOutput, TokenEvent


class LoopWaker:
    """Calls due in one event loop, run by a single wake-up however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: deque[Callable[[], object]] = deque()
        self._is_scheduled = False

    def add(self, call: Callable[[], object]) -> None:
        """Queue a call for the next wake-up."""
        self._due.append(call)

    def wake(self) -> bool:
        """Schedule the wake-up, from any thread; False if the loop is closed."""
        if self._is_scheduled and not self.loop.is_closed():
            return True
        self._is_scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            self._due.clear()
            return False
        return True

    def _run(self) -> None:
        # in this order: a call that is added from here on schedules a wake-up, or runs now
        self._is_scheduled = False
        while self._due:
            self._due.popleft()()


class StreamQueue:
    """Unread events of one request. The engine thread puts, one reader gets."""

    def __init__(self, waker: LoopWaker) -> None:
        self.waker = waker
        self.parts: deque[Sequence[TokenEvent]] = deque()
        self.output: RequestOutput | None = None  # set when the request has ended, unless it was rejected
        self.error: Exception | None = None  # why it was rejected
        self.is_ended = False  # nothing is put afterwards
        self.is_abandoned = False  # the reader has left
        self._wake_pending = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, events: Sequence[TokenEvent]) -> None:
        """Append the events of a step."""
        if not self.is_abandoned:
            self.parts.append(events)

    def end(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """Mark the request as ended."""
        self.output, self.error = output, error
        self.is_ended = True

    def abandon(self) -> None:
        """Discard what is unread and what comes later."""
        self.is_abandoned = True
        self.parts.clear()

    async def wait(self) -> None:
        """Wait for events or the end; raise the error of a rejected request."""
        while not self.parts and not self.is_ended:
            if self._waiter is not None:
                raise RuntimeError("another task is reading this stream already")
            # events that are put from here on schedule a wake-up, which runs after this await has begun
            self._waiter = self.waker.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None and not self.parts:
            raise self.error

    def request_wake(self) -> bool:
        """Queue a wake-up of the reader; False if one is queued already."""
        if self._wake_pending:
            return False
        self._wake_pending = True
        self.waker.add(self._wake)
        return True

    def _wake(self) -> None:
        self._wake_pending = False  # first: events that are put from here on queue another wake-up
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EventDelivery:
    """Events of a step in progress, and the loops to wake when the step is complete."""

    def __init__(self) -> None:
        self._wakers: WeakValueDictionary[asyncio.AbstractEventLoop, LoopWaker] = WeakValueDictionary()
        self._pending: list[tuple[StreamQueue, Sequence[TokenEvent]]] = []
        self._due: set[LoopWaker] = set()

    def current_waker(self) -> LoopWaker:
        """Return the waker of the running event loop."""
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            waker = self._wakers[loop] = LoopWaker(loop)
        return waker

    def buffer(self, queue: StreamQueue, events: Sequence[TokenEvent]) -> None:
        """Hold events until the step is complete."""
        self._pending.append((queue, events))

    def end(self, queue: StreamQueue, output: RequestOutput | None, error: Exception | None = None) -> None:
        """End a queue after the events that are held for it."""
        self.flush()
        queue.end(output, error)
        self._request_wake(queue)

    def flush(self) -> None:
        """Put the held events into their queues."""
        pending, self._pending = self._pending, []
        for queue, events in pending:
            queue.put(events)
            self._request_wake(queue)

    def wake_loops(self) -> set[LoopWaker]:
        """Wake every loop with new events; return the wakers of closed loops."""
        closed = set()
        with suppress(KeyError):  # empty; after the thread has ended, several callers may run this at once
            while True:
                waker = self._due.pop()
                if not waker.wake():
                    closed.add(waker)
        return closed

    def _request_wake(self, queue: StreamQueue) -> None:
        if queue.request_wake():
            self._due.add(queue.waker)
