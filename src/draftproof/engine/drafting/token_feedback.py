"""Tokens of finished requests, on their way to a proposer that learns from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from draftproof.engine.fault_recovery import FAULTS
from draftproof.engine.slots import Slots
from draftproof.propose.base import Proposer
from draftproof.types import Request


class PendingTokens(NamedTuple):
    """Tokens of a finished request that are being copied from the device."""

    request: Request
    read: Callable[[], Tensor]
    step: int  # number of the step behind which the copy was queued


class TokenFeedback:
    """Copies that are queued when a request leaves its slot, and read when they are complete."""

    def __init__(self, slots: Slots) -> None:
        """Start without copies."""
        self.slots = slots
        self._pending: deque[PendingTokens] = deque()

    def queue(
        self,
        proposer: Proposer | None,
        slot: int,
        length: int,
        step: int,
        read: Callable[[], Tensor] | None = None,
    ) -> None:
        """Queue the copy of `length` tokens of the request in `slot`, behind the step of this number.

        read: a copy that is already in flight.
        """
        request = self.slots.requests[slot]
        if proposer is None or not proposer.learns or request is None:
            return
        with suppress(*FAULTS):  # a lost device shows in the next step
            tokens = self.slots.columns.tokens[slot, :length]
            self._pending.append(PendingTokens(request, read or self.slots.ops.runtime.fetch(tokens), step))

    def deliver(self, proposer: Proposer, step: float) -> None:
        """Give the proposer the tokens whose copies were queued behind steps up to this number."""
        while self._pending and self._pending[0].step <= step:
            request, read, _ = self._pending.popleft()
            ids = None
            with suppress(*FAULTS):
                ids = read().numpy()
            if ids is not None:
                proposer.learn(request, ids)

    def clear(self) -> None:
        """Drop all copies."""
        self._pending.clear()
