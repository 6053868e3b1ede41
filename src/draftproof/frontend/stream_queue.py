"""Letter-boxes between the engine's thread and readers in event loops, and the bell that wakes a loop.

The thread never waits for a reader: what is not read stays in the box.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from draftproof.types import RequestOutput, TokenEvent


class Bell:
    """One event loop's: what is due there is brought by one wake-up, however much it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: deque[Callable[[], object]] = deque()
        self._rung = False

    def add(self, call: Callable[[], object]) -> None:
        self._due.append(call)

    def ring(self) -> bool:
        """From any thread. False: the loop is closed and nobody is there any more."""
        if self._rung and not self.loop.is_closed():
            return True
        self._rung = True
        try:
            self.loop.call_soon_threadsafe(self._bring)
        except RuntimeError:
            self._due.clear()
            return False
        return True

    def _bring(self) -> None:
        # in this order: what is added from here on rings again, or is brought now
        self._rung = False
        while self._due:
            self._due.popleft()()


class Box:
    """What came for one request and was not read yet. The engine's thread puts in, its reader takes out."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.parts: deque[Sequence[TokenEvent]] = deque()
        self.output: RequestOutput | None = None  # there from the end on, unless it was refused
        self.error: Exception | None = None  # why it was refused
        self.ended = False  # after which nothing is put in
        self.left = False  # nobody will read
        self.due = False  # its bell has been told already
        self._waiter: asyncio.Future[None] | None = None

    def put(self, events: Sequence[TokenEvent]) -> None:
        if not self.left:
            self.parts.append(events)

    def end(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        self.output, self.error = output, error
        self.ended = True

    async def wait(self) -> None:
        """Until something is here or it ended. Raises why it was refused."""
        while not self.parts and not self.ended:
            if self._waiter is not None:
                raise RuntimeError("somebody else is reading this stream already")
            # what is put in from here on rings the bell, and that is heard after this await has begun
            self._waiter = self.bell.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None and not self.parts:
            raise self.error

    def wake(self) -> None:
        self.due = False  # before anything is looked at: what is put in from here on is told again
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
