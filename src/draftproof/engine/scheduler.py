"""Scheduler: which requests run in the next step, with how many rows and drafts, on which pages.

Decoding requests come first with one row each, then their drafts, which get at most half of the other rows
while a prompt waits. All rows that are left go to prompts by rank: priority, then arrival. No request is
admitted before a waiting one of better rank. Pages are allocated as a request grows. When they run out,
drafts are dropped first. Then the running request of the worst rank is preempted: it releases its pages,
waits at its old place in the queue, and resumes from its committed tokens, with the same bits.

No request starves. The running request of the best rank is never preempted and has a row in every plan, so
it finishes after at most `max_length` plans and one more for each step queued behind its last one
(`run_ahead`). No other request is admitted while the first one in the queue waits, so that one is admitted
after at most the sum of these bounds over the running requests. A request waits for better ranks only.

A step may be planned while earlier ones are in flight. Bounds are enough for decoding requests: each step
commits at least one token, and at most one more for every draft. A preemption needs exact lengths, so all
steps in flight are read first.
"""

from __future__ import annotations

import time

import numpy as np

from draftproof.array_types import Bools, Ints
from draftproof.engine.drafting.policy import DraftPolicy
from draftproof.engine.page_pool import Pages
from draftproof.engine.request_queue import EXTRA_PAGES, RequestQueue
from draftproof.engine.sequence import Sequence, SlotMirror, StepPlan
from draftproof.engine.slots import Slots

LOW_ROOM_PAGES = 4  # a request with less room grows whenever another one does


class StepsInFlightError(Exception):
    """Error: the next step cannot be planned before all steps in flight are read."""


class Scheduler(RequestQueue):
    """Plans of steps over the waiting and running requests."""

    def __init__(
        self,
        slots: Slots,
        pages: Pages,
        page_size: int,
        max_rows: int,
        policy: DraftPolicy,
        prefix_caching: bool = True,
        lookahead: int = 0,
    ) -> None:
        """Start without requests; `max_rows`: rows of a step. Other arguments: see `RequestQueue`."""
        super().__init__(slots, pages, page_size, policy, prefix_caching, lookahead)
        self.max_rows = max_rows
        self.drafts_before_plan = policy.drafts_before_plan
        self._fast_path = FastPath(self.mirror, policy, page_size, max_rows, lookahead)

    def plan(self, is_idle: bool = True, has_exact_drafts: bool = False) -> StepPlan | None:
        """Return the plan of the next step; None if no request has a row to compute.

        is_idle: no step is in flight; StepsInFlightError is raised where that is needed.
        has_exact_drafts: the mirror has exact numbers of drafts. They may depend on sampled tokens, so no
        draft is dropped by their number.
        """
        self.preempted.clear()
        if not self._selects_drafts() and not (self.waiting and self.slots.num_free):
            planned = self._fast_path.plan(self.running, self._running_slots, self.version)
            if planned is not None:
                return planned
        while True:
            decodes, drafts = self._decoding()
            short = self._missing_pages(decodes, drafts, self.lookahead)
            if short.sum() > self.pages.num_free:
                newest = min(self.lookahead, 1)  # a draft model stores the newest token as well
                drafts = np.minimum(drafts, np.maximum(self._room() - newest, 0))
                short = self._missing_pages(decodes, drafts, newest)
            if short.sum() <= self.pages.num_free:
                break
            if not is_idle:
                raise StepsInFlightError
            self._preempt(max(self.running, key=lambda s: s.rank))
        new_pages = self._grow(short)
        rows = self.max_rows - int(decodes.sum() + drafts.sum())
        admitted = [] if self.preempted else self._admit_all(rows)
        if admitted:
            none = np.zeros(len(admitted), np.int64)
            decodes, drafts = np.append(decodes, none > 0), np.append(drafts, none)
        chunk = self._chunks(rows)
        if drafts.any() and chunk.any() and not (self.drafts_before_plan or has_exact_drafts):
            drafts = self.policy.refit(self._running_slots, drafts, int(decodes.sum() + chunk.sum()))
        is_scheduled = decodes | (chunk > 0)
        if not is_scheduled.any():
            return None
        planned = self._planned(is_scheduled, chunk, drafts, admitted, new_pages)
        self._fast_path.record_plan(planned if is_scheduled.all() and not planned.has_prompts else None)
        return planned

    @property
    def may_have_drafts(self) -> bool:
        """Return whether a running request may have drafts, by the upper bounds of their numbers."""
        return bool(self.mirror.num_draft[self._running_slots].any())

    def _selects_drafts(self) -> bool:
        """Return whether drafts exist from which the plan chooses."""
        if not self.drafts_before_plan:
            return False
        if self.may_have_drafts:
            return True
        self.policy.pass_step()
        return False

    def _decoding(self) -> tuple[Bools, Ints]:
        """Return which running requests decode, and the drafts of each."""
        slots, host = self._running_slots, self.mirror
        left = host.prompt_left[slots]
        # Steps in flight may leave a request short of its end. A stop token in them is not known yet.
        decodes: Bools = (left == 0) & (host.length[slots] + host.in_flight[slots] < host.max_length[slots])
        rows = self.max_rows - int(decodes.sum())
        has_prompts = bool(left.any()) or bool(self.waiting and self.slots.num_free)
        room = rows // 2 if has_prompts else rows
        drafts: Ints = np.where(decodes, host.num_draft[slots], 0)
        if self.drafts_before_plan:
            keys = int(host.length[slots].sum())
            matched = host.matched[slots[decodes]]
            drafts[decodes] = self.policy.select(slots[decodes], drafts[decodes], keys, matched)
        if drafts.sum() > room:
            drafts = np.diff(np.minimum(np.cumsum(drafts), room), prepend=0)
        return decodes, drafts

    def _chunks(self, rows: int) -> Ints:
        """Return the prompt rows of each running request: all that the best rank needs, then the next."""
        left = self.mirror.prompt_left[self._running_slots]
        chunk = np.zeros_like(left)
        for i in sorted(left.nonzero()[0].tolist(), key=lambda i: self.running[i].rank):
            chunk[i] = min(int(left[i]), rows)
            rows -= int(chunk[i])
        return chunk

    def _room(self) -> Ints:
        """Return how many tokens fit on the pages of each request behind its newest one."""
        slots, host = self._running_slots, self.mirror
        room: Ints = np.maximum(host.num_pages[slots] * self.page_size - host.max_committed[slots], 0)
        return room

    def _missing_pages(self, decodes: Bools, drafts: Ints, lookahead: int = 0) -> Ints:
        """Return the pages that each request lacks for this step if all drafts in flight are accepted."""
        slots, host = self._running_slots, self.mirror
        rows = np.minimum(host.max_committed[slots] + drafts + lookahead, host.max_length[slots])
        need = -(-rows // self.page_size) - host.num_pages[slots]
        short: Ints = np.where(decodes, np.maximum(need, 0), 0)
        return short

    def _grow(self, short: Ints) -> list[tuple[int, int, int]]:
        """Allocate missing pages; while many are free, more than needed, as each growth costs a copy."""
        if not short.any():
            return []
        new_pages, grows = [], short > 0
        if self.pages.num_free // 2 // len(self.running) >= EXTRA_PAGES:
            grows |= self._room() < LOW_ROOM_PAGES * self.page_size
        for i in grows.nonzero()[0].tolist():
            sequence, slot = self.running[i], int(self._running_slots[i])
            limit = self.pages_for(sequence.max_length) - len(sequence.pages)
            share = self.pages.num_free // 2 // len(self.running)
            count = min(limit, max(int(short[i]), min(EXTRA_PAGES, share)))
            count = max(int(short[i]), min(count, self.pages.num_free - int(short[i + 1 :].sum())))
            for page in self.pages.take(count):
                new_pages.append((slot, len(sequence.pages), page))
                sequence.pages.append(page)
            self.mirror.num_pages[slot] = len(sequence.pages)
        return new_pages

    def _planned(
        self,
        is_scheduled: Bools,
        chunk: Ints,
        drafts: Ints,
        admitted: list[Sequence],
        new_pages: list[tuple[int, int, int]],
    ) -> StepPlan:
        """Return the plan of these requests and update the mirror."""
        host = self.mirror
        if is_scheduled.all():
            slots, sequences = self._running_slots, list(self.running)
        else:
            at = is_scheduled.nonzero()[0]
            slots, chunk, drafts = self._running_slots[at], chunk[at], drafts[at]
            sequences = [self.running[i] for i in at.tolist()]
        host.prompt_left[slots] -= chunk
        is_sampled = host.prompt_left[slots] == 0
        host.in_flight[slots] += is_sampled
        host.max_committed[slots] += np.where(is_sampled, 1 + drafts, 0)
        host.num_draft[slots] = 0
        num_drafts = int(drafts.sum())
        published: list[int] = []
        for i in chunk.nonzero()[0].tolist():
            computed = len(sequences[i].ids) - int(host.prompt_left[slots[i]])
            published += self.prefix_cache.publish_pages(sequences[i], computed)
        return StepPlan(
            sequences,
            [s.request for s in sequences],
            slots=slots,
            chunk=chunk,
            drafts=drafts,
            is_sampled=is_sampled,
            generations=host.generation[slots],
            version=self.version,
            num_rows=int(np.maximum(chunk, 1).sum()) + num_drafts,
            num_drafts=num_drafts,
            has_prompts=bool(chunk.any()),
            zeros=np.zeros_like(slots),
            admitted=admitted,
            new_pages=new_pages,
            published=published,
        )

    def draft_room(self, slots: Ints, is_sampled: Bools) -> Ints | None:
        """Return how many drafts [B] fit before the last token and on the pages; None: enough for all."""
        mirror = self.mirror
        if self._fast_path.is_far_from_end(slots) and not self.drafts_before_plan:
            return None
        min_committed = mirror.length[slots] + mirror.in_flight[slots]
        room = np.maximum(mirror.max_length[slots] - min_committed - 1, 0)
        if self.lookahead:  # all drafts but the last are stored before they are verified
            stored = mirror.num_pages[slots] * self.page_size - mirror.max_committed[slots]
            room = np.minimum(room, np.maximum(stored + 1, 0))
        return np.where(is_sampled, room, 0)

    def settle(self, planned: StepPlan, num_out: Ints) -> Bools:
        """Record the committed tokens [B] of a step; return [B] whether each request is still there."""
        host, slots, is_sampled, drafts = self.mirror, planned.slots, planned.is_sampled, planned.drafts
        is_current: Bools = host.generation[slots] == planned.generations
        if planned.has_prompts:
            self._record_first_tokens(planned, is_current & is_sampled & (num_out > 0))
        if planned.version != self.version:
            slots, num_out = slots[is_current], num_out[is_current]
            is_sampled, drafts = is_sampled[is_current], drafts[is_current]
        host.length[slots] += num_out
        host.in_flight[slots] -= is_sampled
        rejected = 1 + drafts - num_out
        host.max_committed[slots] -= np.where(is_sampled, rejected, 0) if planned.has_prompts else rejected
        return is_current

    def _record_first_tokens(self, planned: StepPlan, has_output: Bools) -> None:
        """Record the times of the first tokens of a step, for requests [B] with output after their prompt."""
        for b in (has_output & (planned.chunk > 0)).nonzero()[0].tolist():
            stats = planned.sequences[b].stats
            if stats.first_token_at is None:  # else it was preempted since
                stats.first_token_at = time.monotonic()
                self.timings.first_token.observe(stats.first_token_at - stats.arrived_at)


class FastPath:
    """Plans of steps without prompts and admissions, made without a look at single requests.

    Most steps are like that, and host time limits small models. The room of all requests is computed once;
    until it is used up the last plan is repeated, with new drafts. In a large batch some request finishes in
    every other step: then all are planned at once, if each of them has room on its pages.
    """

    def __init__(
        self, host: SlotMirror, policy: DraftPolicy, page_size: int, max_rows: int, lookahead: int
    ) -> None:
        """Start without a plan to repeat."""
        self.mirror, self.policy, self.page_size = host, policy, page_size
        self.max_rows, self.lookahead = max_rows, lookahead
        self._plan: StepPlan | None = None  # plan to repeat, without drafts
        self._room = 0  # tokens that fit behind the upper bound of every request's committed tokens
        self._max_drafts = 0  # of any request

    def plan(self, running: list[Sequence], slots: Ints, version: int) -> StepPlan | None:
        """Return the next plan of the running requests, in `slots`; None: use the full planner."""
        last = self._plan
        planned = self._repeat(last) if last is not None and last.version == version else None
        return planned or self._plan_decoding(running, slots, version)

    def record_plan(self, planned: StepPlan | None) -> None:
        """Record a plan in which every running request decodes; None: the last plan was another."""
        self._plan = None
        if planned is None:
            return
        host, slots = self.mirror, planned.slots
        self._plan = planned.with_drafts(planned.zeros, 0)
        room = np.minimum(host.num_pages[slots] * self.page_size, host.max_length[slots])
        self._room = int((room - host.max_committed[slots]).min())
        self._max_drafts = int(self.policy.limit[slots].max())

    def is_far_from_end(self, slots: Ints) -> bool:
        """Return whether no request in these slots can reach its maximum length in the next step."""
        return self._plan is not None and self._plan.slots is slots and self._room > self._max_drafts

    def _repeat(self, planned: StepPlan) -> StepPlan | None:
        """Return the last plan with the present drafts; None if a request may lack room."""
        host, count, widest = self.mirror, 0, 0
        slots = planned.slots
        if self._max_drafts:
            drafts = host.num_draft[slots]
            each = drafts.tolist()
            count, widest = sum(each), max(each)
        if self._room < max(1, widest + self.lookahead) or len(slots) + count > self.max_rows:
            return None
        self._room -= 1 + widest
        host.max_committed[slots] += 1
        host.in_flight[slots] += 1
        if count:
            planned = planned.with_drafts(drafts, count)
            host.max_committed[slots] += drafts
            host.num_draft[slots] = 0
        return planned

    def _plan_decoding(self, running: list[Sequence], slots: Ints, version: int) -> StepPlan | None:
        """Return a plan of the requests short of their end; None with prompts or too few pages or rows."""
        host, sequences = self.mirror, list(running)
        if np.count_nonzero(host.prompt_left[slots]):
            return None
        ends, most = host.max_length[slots], host.max_committed[slots]
        decodes = host.length[slots] + host.in_flight[slots] < ends
        all_decode = np.count_nonzero(decodes) == len(slots)
        if not all_decode:
            at = decodes.nonzero()[0]
            slots, ends, most = slots[at], ends[at], most[at]
            sequences = [sequences[i] for i in at.tolist()]
        drafts = host.num_draft[slots]
        count, pages = int(np.add.reduce(drafts)), host.num_pages[slots] * self.page_size
        most += drafts
        short = np.count_nonzero(np.minimum(most + self.lookahead, ends) > pages)
        if not sequences or short or len(slots) + count > self.max_rows:
            return None
        host.max_committed[slots], host.num_draft[slots] = most + 1, 0
        host.in_flight[slots] += 1
        zeros = np.zeros_like(slots)
        planned = StepPlan(
            sequences,
            [s.request for s in sequences],
            slots=slots,
            chunk=zeros,
            drafts=drafts,
            is_sampled=np.ones(len(slots), np.bool_),
            generations=host.generation[slots],
            version=version,
            num_rows=len(slots) + count,
            num_drafts=count,
            has_prompts=False,
            zeros=zeros,
        )
        self.record_plan(planned if all_decode else None)
        return planned
