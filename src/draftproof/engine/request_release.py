"""Release of finished and aborted requests: slots at once, pages once their tokens have been read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from torch import Tensor

from draftproof.array_types import Bools, Ints
from draftproof.engine.drafting.proposer_hooks import ProposerHooks
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Sequence
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import PendingStep
from draftproof.engine.step.grammar_masks import errors_by_row
from draftproof.engine.step.step_results import Finish, finish_of
from draftproof.errors import DEVICE_ERRORS
from draftproof.types import FINISH_STATUS, FinishStatus


class UnreadTokens(NamedTuple):
    """Tokens of a finished request that are being copied from the device."""

    sequence: Sequence
    read: Callable[[], Tensor]
    step: int  # number of the step behind which the copy was queued
    keeps_pages: bool  # the pages of the request are published and released when its tokens are read
    learns: bool  # the proposer learns from the tokens


class RequestRelease:
    """Removes requests from the engine, publishes their pages, and gives their tokens to the proposer."""

    def __init__(
        self, scheduler: Scheduler, slots: Slots, hooks: ProposerHooks, pending: deque[PendingStep]
    ) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._hooks = hooks
        self._pending = pending
        self._lengths = scheduler.mirror.length
        self.unread: deque[UnreadTokens] = deque()

    def finish_ended(self, step: PendingStep, table: Ints, is_current: Bools) -> dict[int, Finish]:
        """Remove the requests that a step finished; return how each finished, by entry."""
        if not np.count_nonzero(table[:, FINISH_STATUS]):
            return {}
        sampled, finishes, completed = step.tensors.sampled, {}, []
        errors = sampled.errors if sampled else {}
        ended = np.flatnonzero(is_current & (table[:, FINISH_STATUS] > 0))
        for b, line in zip(ended.tolist(), table[ended].tolist(), strict=True):
            sequence = step.planned.sequences[b]
            own_errors = errors_by_row(line, errors, step.grammar_errors.get(b))
            finish = finishes[b] = finish_of(sequence.request, line, own_errors)
            if finish.reason != "error":
                completed.append(sequence)
                continue
            if line[FINISH_STATUS] == FinishStatus.NOT_FINITE:  # its KV must not be reused
                self._scheduler.pages.unpublish(sequence.pages)
            self.remove(sequence)
        self._finish(completed)
        return finishes

    def remove(self, sequence: Sequence) -> None:
        """Remove a request, finished or not. Results of it that are in flight are dropped."""
        if sequence.slot >= 0:
            self._queue_copies([sequence], [False])
            self._hooks.stop(sequence.slot)
        self._scheduler.remove(sequence)
        self.release_if_idle()

    def abort(self, sequence: Sequence) -> None:
        """Finish a request that a stop string or the caller ends, at any time between steps."""
        if sequence.slot >= 0 and self._scheduler.mirror.prompt_left[sequence.slot] == 0:
            self._finish([sequence])
        else:
            self.remove(sequence)

    def _finish(self, sequences: Many[Sequence]) -> None:
        """Finish requests; new full pages are published and released once the tokens are read."""
        scheduler = self._scheduler
        keeps_pages = [self._has_new_pages(sequence) for sequence in sequences]
        is_copied = self._queue_copies(sequences, keeps_pages)
        for sequence in sequences:
            self._hooks.stop(sequence.slot)
        keeping_pages = [sequence for sequence, keeps in zip(sequences, keeps_pages, strict=True) if keeps]
        scheduler.remove_running(sequences, keeping_pages if is_copied else ())
        self.release_if_idle()

    def _has_new_pages(self, sequence: Sequence) -> bool:
        """Return whether the request has full pages that are not published yet."""
        cache, page_size = self._scheduler.prefix_cache, self._scheduler.page_size
        num_full_pages = int(self._scheduler.mirror.length[sequence.slot]) // page_size
        return cache.enabled and num_full_pages > sequence.num_published_pages

    def _queue_copies(self, sequences: Many[Sequence], keeps_pages: Many[bool]) -> bool:
        """Queue copies of the tokens of requests that have a use for them; return whether that succeeded."""
        proposer = self._hooks.proposer
        learns = proposer is not None and proposer.learns
        wanted = [pair for pair in zip(sequences, keeps_pages, strict=True) if pair[1] or learns]
        try:
            reads = self._slots.fetch_tokens([sequence.slot for sequence, _ in wanted], self._lengths)
        except DEVICE_ERRORS:  # a dead device is noticed in the next step
            return False
        number = self._pending[-1].number if self._pending else 0
        for (sequence, keeps), read in zip(wanted, reads, strict=True):
            self.unread.append(UnreadTokens(sequence, read, number, keeps, learns))
        return True

    def release_if_idle(self) -> None:
        """Release all finished requests if no step is in flight or no request is left."""
        if not self._pending or not (self._scheduler.running or self._scheduler.waiting):
            self.release_finished()

    def release_finished(self, number: float = math.inf) -> None:
        """Read the tokens whose copies are complete after step `number`, and release their requests."""
        while self.unread and self.unread[0].step <= number:
            sequence, read, _, keeps_pages, learns = self.unread.popleft()
            tokens = None
            with suppress(*DEVICE_ERRORS):  # not published then
                tokens = read()
            if keeps_pages:
                self._scheduler.release_pages(sequence, None if tokens is None else tokens.tolist())
            proposer = self._hooks.proposer
            if learns and proposer is not None and tokens is not None:
                self._hooks.call(proposer.learn, sequence.request, tokens.numpy().copy())

    def drop_unread(self) -> None:
        """Release all finished requests without publishing: their last step may be lost."""
        for entry in self.unread:
            if entry.keeps_pages:
                self._scheduler.release_pages(entry.sequence, None)
        self.unread.clear()
