"""Release of finished and aborted requests: slots at once, pages once their tokens have been read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from draftproof.engine.drafting.token_feedback import TokenFeedback
from draftproof.engine.fault_recovery import FAULTS
from draftproof.engine.pending import PendingSteps, last_number
from draftproof.engine.proposer_hooks import ProposerHooks
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Sequence
from draftproof.engine.slots import Slots


class RequestRelease:
    """Removes requests from the engine and publishes their pages."""

    def __init__(
        self, scheduler: Scheduler, slots: Slots, hooks: ProposerHooks, pending: PendingSteps
    ) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._hooks = hooks
        self._pending = pending
        # finished requests, the copy of their tokens, and the step after which the copy is complete
        self.unread: deque[tuple[Sequence, Callable[[], Tensor], int]] = deque()
        self.feedback = TokenFeedback(slots)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request, finished or not. Results of it that are in flight are dropped."""
        if sequence.slot >= 0:
            length = int(self._scheduler.mirror.length[sequence.slot])
            number = last_number(self._pending)
            self.feedback.queue(self._hooks.proposer, sequence.slot, length, number)
            self._hooks.stop(sequence.slot)
        self._scheduler.remove(sequence)
        self.release_if_idle()

    def abort(self, sequence: Sequence) -> None:
        """Finish a request that a stop string or the caller ends, at any time between steps."""
        if sequence.slot >= 0 and self._scheduler.mirror.prompt_left[sequence.slot] == 0:
            self.finish_keep_pages(sequence)
            self.release_if_idle()
        else:
            self.remove(sequence)

    def finish_keep_pages(self, sequence: Sequence) -> None:
        """Finish a request; its pages are published and released once its tokens are read."""
        scheduler = self._scheduler
        length = int(scheduler.mirror.length[sequence.slot])
        tokens = self._slots.columns.tokens[sequence.slot, :length]
        has_new_pages = length // scheduler.page_size > sequence.num_published_pages
        if not scheduler.prefix_cache.enabled or not has_new_pages:
            self.remove(sequence)
            return
        try:
            read = self._slots.ops.runtime.fetch(tokens)
        except FAULTS:
            self.remove(sequence)
            return
        number = last_number(self._pending)
        self.unread.append((sequence, read, number))
        self.feedback.queue(self._hooks.proposer, sequence.slot, length, number, read)
        self._hooks.stop(sequence.slot)
        scheduler.finish_keep_pages(sequence)

    def release_if_idle(self) -> None:
        """Release all finished requests if no step is in flight or no request is left."""
        if not self._pending or not (self._scheduler.running or self._scheduler.waiting):
            self.release_finished()

    def release_finished(self, number: float = math.inf) -> None:
        """Release the pages of finished requests whose tokens are complete after step `number`."""
        while self.unread and self.unread[0][2] <= number:
            sequence, read, _ = self.unread.popleft()
            ids: list[int] | None = None
            with suppress(*FAULTS):  # not published then; a dead device is noticed in the next step
                ids = read().tolist()
            self._scheduler.release_pages(sequence, ids)
        if self._hooks.proposer is not None:
            self._hooks.call(self.feedback.deliver, self._hooks.proposer, number)

    def drop_unread(self) -> None:
        """Release all finished requests without publishing: their last step may be lost."""
        for sequence, *_ in self.unread:
            self._scheduler.release_pages(sequence, None)
        self.unread.clear()
        self.feedback.clear()
