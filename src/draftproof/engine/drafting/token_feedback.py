"""What requests have said, on its way to a proposer that learns from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from draftproof.engine.fault_recovery import FAULTS
from draftproof.engine.slots import Slots
from draftproof.propose import Proposer
from draftproof.types import Request


class Lessons:
    """Copies are queued when a request leaves its slot, and read when they have come."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._heard: deque[tuple[Request, Callable[[], Tensor], int]] = deque()

    def hear(
        self,
        proposer: Proposer | None,
        slot: int,
        length: int,
        behind: int,
        read: Callable[[], Tensor] | None = None,
    ) -> None:
        """The one in `slot` leaves, with so many tokens, which come behind the step of this number; `read`: a
        copy of them that is under way."""
        request = self.slots.requests[slot]
        if proposer is None or not proposer.learns or request is None:
            return
        with suppress(*FAULTS):  # a device that is gone shows in the next step
            tokens = self.slots.columns.tokens[slot, :length]
            self._heard.append((request, read or self.slots.ops.runtime.fetch(tokens), behind))

    def teach(self, proposer: Proposer, number: float) -> None:
        """What has come behind steps up to this number."""
        while self._heard and self._heard[0][2] <= number:
            request, read, _ = self._heard.popleft()
            ids = None
            with suppress(*FAULTS):
                ids = read().numpy()
            if ids is not None:
                proposer.learn(request, ids)

    def forget(self) -> None:
        self._heard.clear()
