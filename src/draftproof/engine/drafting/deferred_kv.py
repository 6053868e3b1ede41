"""KV that a draft model stores later, because it does not run behind steps with neither drafts nor prompts.

KV of a prompt without speculation is stored later too, by the first request with speculation that shares its
pages.

The number of tokens without KV is an upper bound: how many tokens a step commits is not known when the next
steps are planned, so each step counts with all of its rows. Pages that a request leaves in the prefix cache
may lack KV. A later request that shares such a page stores the KV from there on before its first drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from draftproof.array_types import Bools, Ints
from draftproof.engine.drafting.device_proposer import DraftRunner
from draftproof.engine.drafting.policy import DraftDecision
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.step.graph_cache import GraphCache, GraphKey, GraphTask
from draftproof.ops import GraphPool

# Numbers of rows of a pass that are captured; the largest is also the limit of a step.
CATCH_UP_ROWS = (16, 64, 256, 1024)


class DeferredKV:
    """Tokens without KV of the draft model, by slot and by page, and the passes that store their KV."""

    def __init__(self, graphs: GraphCache, drafting: DraftRunner, max_rows: int, page_size: int) -> None:
        """Start without such tokens; `max_rows`: of a pass of the model."""
        count, device = len(drafting.slots.requests), drafting.slots.device
        self._graphs, self._drafting, self._page_size = graphs, drafting, page_size
        self.sizes = sorted({min(rows, max_rows) for rows in CATCH_UP_ROWS})  # rows of a pass
        self._num_tokens = np.zeros(count, np.int64)
        self._defers_prompt = np.zeros(count, np.bool_)  # rows of the prompt are not stored before `catch_up`
        self._first_missing = np.full(count, -1, np.int64)  # position, until that KV is stored
        self._pages: dict[int, list[int]] = {}  # of the request in a slot
        self._incomplete: set[int] = set()  # pages that lack KV
        self._first_slot = 0  # slot that is served first where not all can catch up
        self._late_slots = torch.full((count,), -1, dtype=torch.int64, device=device)  # of the next pass

    def admit(self, sequence: Sequence) -> None:
        """Record an admitted request with its pages; the first of them come from the prefix cache.

        Its prompt is stored with its steps if it may get drafts and no cached page lacks KV.
        """
        if not self._drafting.defers_kv:
            return
        slot, pages, num_cached = sequence.slot, sequence.pages, sequence.num_cached // self._page_size
        found = (i for i, page in enumerate(pages[:num_cached]) if page in self._incomplete)
        first = next(found, num_cached)
        defers = first < num_cached or not sequence.draft_limit
        if defers:
            self._incomplete.update(pages[first:])
        else:
            self._incomplete.difference_update(pages[first:])
        if defers or self._defers_prompt[slot]:
            self._drafting.set_stored(slot, first * self._page_size if defers else None)
        self._defers_prompt[slot], self._pages[slot] = defers, pages
        self._first_missing[slot] = first * self._page_size if defers else -1
        self._num_tokens[slot] = (num_cached - first) * self._page_size

    def invalidate(self, slot: int) -> None:
        """Record that KV of the request in `slot` may be missing anywhere: a step with it has failed."""
        self._first_missing[slot] = 0

    def release(self, slot: int, length: int) -> None:
        """Record that the request in `slot` has ended or was preempted, with `length` tokens."""
        if not self._drafting.defers_kv:
            return
        pages, missing = self._pages.pop(slot, ()), int(self._num_tokens[slot])
        first = int(self._first_missing[slot])
        if first < 0:
            first = max(0, length - missing) if missing else len(pages) * self._page_size
        num_complete = first // self._page_size
        self._incomplete.difference_update(pages[:num_complete])
        self._incomplete.update(pages[num_complete:])
        self._num_tokens[slot] = 0

    def plan(self, planned: StepPlan, decision: DraftDecision) -> DraftDecision:
        """Count the tokens of a step, and return the drafts and the other work that are possible behind it.

        The model runs over the rows of a step with drafts, or with prompts that are not deferred, and stores
        the KV of requests that lack none. Before it, KV of requests that get drafts is stored, of a limited
        number of tokens. Other requests that lack KV get no drafts, unless a search makes drafts too.
        """
        if not self._drafting.defers_kv:
            return decision
        slots = planned.slots
        if not decision.rounds and not planned.has_prompts:
            self._num_tokens[slots] += 1 + planned.drafts
            return decision._replace(runs_model=False)
        is_prompt, added = planned.chunk > 0, planned.chunk + 1 + planned.drafts
        is_stored: Bools = is_prompt & ~self._defers_prompt[slots]
        is_deferred: Bools = is_prompt & self._defers_prompt[slots]
        missing: Ints = np.where(is_stored, 0, self._num_tokens[slots])
        is_late: Bools = (decision.drafts > 0) & ((missing > 0) | is_deferred)
        needed = np.where(is_late & ~is_prompt & (decision.rounds > 0), missing + planned.drafts, 0)
        stored = self._share(slots, needed)
        catches_up: Bools = (needed > 0) & (stored == needed)
        if not self._drafting.is_hybrid_member:
            drafts = np.where(is_late & ~catches_up, 0, decision.drafts)
            rounds = decision.rounds if np.count_nonzero(drafts) else 0
            decision = decision._replace(drafts=drafts, rounds=rounds)
        runs_model = decision.rounds > 0 or bool(is_stored.any())
        is_complete = catches_up | ((missing == 0) & ~is_deferred & runs_model)
        self._num_tokens[slots] = np.where(is_complete, 0, missing + added - stored)
        self._first_missing[slots[catches_up]] = -1
        return decision._replace(runs_model=runs_model, catch_up_rows=int(stored.sum()))

    def _share(self, slots: Ints, needed: Ints) -> Ints:
        """Return how many of the `needed` rows [B] each request gets, and send their slots to the device.

        The request that is served first changes from step to step, so that each one is.
        """
        if not np.count_nonzero(needed):
            return needed
        order = np.argsort((slots - self._first_slot) % len(self._num_tokens))
        order = order[needed[order] > 0]
        rows = needed[order]
        given = np.clip(self.sizes[-1] - (rows.cumsum() - rows), 0, rows)
        stored = np.zeros_like(needed)
        stored[order] = given
        unserved = order[given < rows]
        self._first_slot = int(slots[unserved[0]]) if len(unserved) else 0
        padded = np.full(len(self._num_tokens), -1, np.int64)
        padded[: len(order)] = slots[order]
        self._drafting.slots.ops.runtime.send(torch.from_numpy(padded), self._late_slots)
        return stored

    def catch_up(self, rows: int) -> Callable[[], None]:
        """Return the call that stores the KV of `rows` tokens of earlier steps."""
        if self._drafting.slots.ops.runtime.asynchronous:
            rows = next(size for size in self.sizes if rows <= size)
        return self._graphs.get(self.task(rows))

    def task(self, num_rows: int) -> GraphTask[None]:
        """Return a pass over at most `num_rows` tokens."""
        function = partial(self._drafting.catch_up, self._late_slots, num_rows)
        return GraphTask(GraphKey("catch up", num_rows), function, GraphPool.DRAFT)
