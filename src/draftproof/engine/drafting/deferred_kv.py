"""KV that a draft model stores later, because it does not run behind steps without drafts and prompts.

The tokens without KV are counted from above: how many tokens a step commits is not known when the next steps
are planned, so each step counts with all of its rows. Pages that a request leaves in the prefix cache may
lack KV. A later request that shares such a page stores the KV from there on before its first drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from draftproof.array_types import Bools, Ints
from draftproof.engine.drafting.device_proposer import DraftRunner
from draftproof.engine.drafting.policy import DraftDecision
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.step.graph_cache import GraphCache, GraphKey, GraphTask
from draftproof.ops import GraphPool
from draftproof.types import PlanColumns

CATCH_UP_ROWS = 16  # smallest captured number of tokens
CATCH_UP_FACTOR = 4  # between captured numbers
MAX_CATCH_UP_ROWS = 512  # tokens behind a step; further requests get no drafts then


class DraftWork(NamedTuple):
    """Work of a draft model behind a step, besides its rounds."""

    stores_kv: bool = True  # of the rows of the step
    catch_up_rows: int = 0  # at most: tokens of earlier steps whose KV is stored before


class DeferredKV:
    """Tokens without KV of the draft model, by slot and by page, and the passes that store their KV."""

    def __init__(
        self, graphs: GraphCache, drafting: DraftRunner, plan: PlanColumns, max_rows: int, page_size: int
    ) -> None:
        """Start without such tokens."""
        count = len(plan.slots)
        self._graphs, self._drafting, self._plan, self._max_rows = graphs, drafting, plan, max_rows
        self._page_size = page_size
        self._num_tokens = np.zeros(count, np.int64)
        self._lacks_prefix = np.zeros(count, np.bool_)  # a cached page lacked KV at admission
        self._first_missing = np.full(count, -1, np.int64)  # position, until that KV is stored
        self._pages: dict[int, list[int]] = {}  # of the request in a slot
        self._incomplete: set[int] = set()  # pages that lack KV
        self._turn = 0  # entry that comes first, where not all can catch up

    def admit(self, sequence: Sequence) -> None:
        """Take in an admitted request with its pages; the first of them come from the prefix cache."""
        if not self._drafting.defers_kv:
            return
        slot, pages, num_cached = sequence.slot, sequence.pages, sequence.num_cached // self._page_size
        found = (i for i, page in enumerate(pages[:num_cached]) if page in self._incomplete)
        first = next(found, num_cached)
        lacks_prefix = first < num_cached
        if lacks_prefix:
            self._incomplete.update(pages[first:])
        else:
            self._incomplete.difference_update(pages[first:])
        if lacks_prefix or self._lacks_prefix[slot]:
            self._drafting.set_stored(slot, first * self._page_size if lacks_prefix else None)
        self._lacks_prefix[slot], self._pages[slot] = lacks_prefix, pages
        self._first_missing[slot] = first * self._page_size if lacks_prefix else -1
        self._num_tokens[slot] = (num_cached - first) * self._page_size

    def release(self, slot: int, length: int) -> None:
        """Take in that the request in `slot` has ended or was preempted, with `length` tokens."""
        pages, missing = self._pages.pop(slot, ()), int(self._num_tokens[slot])
        first = int(self._first_missing[slot])
        if first < 0:
            first = max(0, length - missing) if missing else len(pages) * self._page_size
        num_complete = first // self._page_size
        self._incomplete.difference_update(pages[:num_complete])
        self._incomplete.update(pages[num_complete:])
        self._num_tokens[slot] = 0

    def limit(self, planned: StepPlan, decision: DraftDecision) -> DraftDecision:
        """Return the decision without drafts of requests whose KV has to wait for a later step.

        At least one request that lacks KV keeps its drafts; requests come first in turn.
        """
        if not self._drafting.defers_kv or not decision.rounds:
            return decision
        drafts, missing = decision.drafts, self._missing(planned)
        drafts = np.where((planned.chunk > 0) & (missing > 0), 0, drafts)
        missing = np.where(drafts > 0, missing, 0)
        if missing.sum() > MAX_CATCH_UP_ROWS:
            turn = self._turn % len(missing)
            in_turn = np.roll(missing, -turn)
            waits = np.roll((in_turn > 0) & (in_turn.cumsum() - in_turn >= MAX_CATCH_UP_ROWS), turn)
            self._turn = turn + int(np.count_nonzero(~waits))
            drafts = np.where(waits, 0, drafts)
        rounds = decision.rounds if np.count_nonzero(drafts) else 0
        return decision._replace(drafts=drafts, rounds=rounds)

    def _missing(self, planned: StepPlan) -> Ints:
        """Return the tokens [B] without KV that are not of the step; a prompt's chunks are stored in turn."""
        is_stored: Bools = (planned.chunk > 0) & ~self._lacks_prefix[planned.slots]
        missing: Ints = np.where(is_stored, 0, self._num_tokens[planned.slots])
        return missing

    def advance(self, planned: StepPlan, decision: DraftDecision) -> DraftWork:
        """Return the work behind a step and count its tokens.

        A model runs behind steps with prompts or drafts. It then stores the KV of requests that lack none,
        and before it that of requests that get drafts.
        """
        if not self._drafting.defers_kv:
            return DraftWork()
        slots, added = planned.slots, planned.chunk + 1 + planned.drafts
        if not decision.rounds and not planned.has_prompts:
            self._num_tokens[slots] += added
            return DraftWork(stores_kv=False)
        missing = self._missing(planned)
        gets_drafts = decision.drafts > 0 if decision.rounds else np.zeros(len(slots), np.bool_)
        rows = int(missing[gets_drafts].sum())
        self._num_tokens[slots] = np.where(gets_drafts | (missing == 0), 0, missing + added)
        self._first_missing[slots[gets_drafts]] = -1
        return DraftWork(catch_up_rows=rows)

    def catch_up(self, rows: int) -> Callable[[], None]:
        """Return the call that stores KV of at most `rows` tokens of requests that get drafts."""
        num_rows = self.size_of(rows)
        store = self._graphs.get_repeated(self.task(num_rows))

        def run() -> None:
            for _ in range(-(-rows // num_rows)):
                store()

        return run

    def size_of(self, rows: int) -> int:
        """Return how many tokens a pass takes; few sizes are captured."""
        size = rows
        if self._drafting.slots.ops.runtime.asynchronous:
            size = CATCH_UP_ROWS
            while size < rows:
                size *= CATCH_UP_FACTOR
        return min(size, self._max_rows)

    def task(self, num_rows: int) -> GraphTask[None]:
        """Return a pass for the requests of the plan that get drafts."""
        return GraphTask(GraphKey("catch up", num_rows), partial(self._store, num_rows), GraphPool.DRAFT)

    def _store(self, num_rows: int) -> None:
        plan = self._plan
        self._drafting.catch_up(torch.where((plan.budget > 0) & (plan.chunk == 0), plan.slots, -1), num_rows)
