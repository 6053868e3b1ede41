"""KV that a draft model stores later, because it does not run behind steps without drafts and prompts.

The tokens without KV are counted from above: how many tokens a step commits is not known when the next steps
are planned, so each step counts with all of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from draftproof.engine.drafting.device_proposer import DraftRunner
from draftproof.engine.drafting.policy import DraftDecision
from draftproof.engine.sequence import StepPlan
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
    """Tokens without KV of the draft model, by slot, and the passes that store their KV."""

    def __init__(
        self, graphs: GraphCache, drafting: DraftRunner, plan: PlanColumns, max_rows: int, keeps_pages: bool
    ) -> None:
        """Start without such tokens.

        keeps_pages: the prefix cache keeps pages of finished requests, whose KV must be complete.
        """
        count = len(plan.slots)
        self._graphs, self._drafting, self._plan, self._max_rows = graphs, drafting, plan, max_rows
        self._keeps_pages = keeps_pages
        self._num_tokens = np.zeros(count, np.int64)
        self._turn = 0  # entry that comes first, where not all can catch up
        self._released: set[int] = set()  # slots whose requests ended or were preempted, and lack KV
        self._released_slots = torch.full((count,), -1, dtype=torch.int64, device=plan.slots.device)

    def limit(self, planned: StepPlan, decision: DraftDecision) -> DraftDecision:
        """Return the decision without drafts of requests whose KV has to wait for a later step.

        At least one request that lacks KV keeps its drafts; requests come first in turn.
        """
        if not self._drafting.defers_kv or not decision.rounds:
            return decision
        is_late = (decision.drafts > 0) & (planned.chunk == 0)
        missing = np.where(is_late, self._num_tokens[planned.slots], 0)
        if missing.sum() <= MAX_CATCH_UP_ROWS:
            return decision
        turn = self._turn % len(missing)
        in_turn = np.roll(missing, -turn)
        waits = np.roll((in_turn > 0) & (in_turn.cumsum() - in_turn >= MAX_CATCH_UP_ROWS), turn)
        self._turn = turn + int(np.count_nonzero(~waits))
        return decision._replace(drafts=np.where(waits, 0, decision.drafts))

    def advance(self, planned: StepPlan, decision: DraftDecision) -> DraftWork:
        """Return the work behind a step and count its tokens.

        A model runs behind steps with prompts or drafts. It then stores the KV of requests that lack none,
        and before it that of requests that get drafts.
        """
        if not self._drafting.defers_kv:
            return DraftWork()
        slots, added = planned.slots, 1 + planned.drafts
        if not decision.rounds and not planned.has_prompts:
            self._num_tokens[slots] += added
            return DraftWork(stores_kv=False)
        missing = np.where(planned.chunk > 0, 0, self._num_tokens[slots])
        gets_drafts = decision.drafts > 0 if decision.rounds else np.zeros(len(slots), np.bool_)
        rows = int(missing[gets_drafts].sum())
        self._num_tokens[slots] = np.where(gets_drafts | (missing == 0), 0, missing + added)
        return DraftWork(catch_up_rows=rows)

    def release(self, slot: int) -> None:
        """Note that the request in `slot` has ended or was preempted."""
        if self._keeps_pages and self._num_tokens[slot]:
            self._released.add(slot)
        else:
            self._num_tokens[slot] = 0

    def store_released(self) -> None:
        """Store the KV that released slots lack. Called before the slots are filled again."""
        if not self._released:
            return
        slots, padded = sorted(self._released), np.full(len(self._num_tokens), -1, np.int64)
        padded[: len(slots)] = slots
        rows = int(self._num_tokens[slots].sum())
        self._num_tokens[slots] = 0
        self._released.clear()
        self._drafting.slots.ops.runtime.send(torch.from_numpy(padded), self._released_slots)
        self.catch_up(rows, released=True)()

    def catch_up(self, rows: int, released: bool = False) -> Callable[[], None]:
        """Return the call that stores KV of at most `rows` tokens."""
        num_rows = self.size_of(rows)
        store = self._graphs.get_repeated(self.task(num_rows, released))

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

    def task(self, num_rows: int, released: bool) -> GraphTask[None]:
        """Return a pass for the requests of the plan that get drafts, or for released slots."""
        key = GraphKey("catch up", num_rows, int(not released))
        return GraphTask(key, partial(self._store, num_rows, released), GraphPool.DRAFT)

    def _store(self, num_rows: int, released: bool) -> None:
        plan, slots = self._plan, self._released_slots
        if not released:
            slots = torch.where((plan.budget > 0) & (plan.chunk == 0), plan.slots, -1)
        self._drafting.catch_up(slots, num_rows)
