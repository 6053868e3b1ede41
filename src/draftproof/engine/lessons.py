"""What requests have said, on its way to a proposer that learns from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from draftproof.engine.faults import FAULTS
from draftproof.engine.slots import Slots
from draftproof.propose import Proposer
from draftproof.types import Request


class Lessons:
    """Copies are queued when a request leaves its slot, and read when they have come."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._heard: deque[tuple[Request, Callable[[], Tensor]]] = deque()

    def hear(
        self, proposer: Proposer | None, slot: int, length: int, read: Callable[[], Tensor] | None = None
    ) -> None:
        """The one in `slot` leaves, with so many tokens; `read`: a copy of them that is under way."""
        request = self.slots.requests[slot]
        if proposer is None or not proposer.learns or request is None:
            return
        with suppress(*FAULTS):  # a device that is gone shows in the next step
            tokens = self.slots.columns.tokens[slot, :length]
            self._heard.append((request, read or self.slots.ops.fetch(tokens)))

    def teach(self, proposer: Proposer) -> None:
        while self._heard:
            request, read = self._heard.popleft()
            ids = None
            with suppress(*FAULTS):
                ids = read().numpy()
            if ids is not None:
                proposer.learn(request, ids)

    def forget(self) -> None:
        self._heard.clear()
