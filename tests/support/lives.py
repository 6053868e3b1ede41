"""Random lives of many requests in a scheduler, with a device that is a step or two behind in telling.

No model: the device here knows true lengths, drafts and ends, takes whatever acceptance chance says, and
remembers what lies on every page, so that a row which reads what nobody stored is seen. Every plan is made
while the steps before it are still unread, and must be right whatever they did. Pages are so few that
requests are put aside again and again; prefixes are shared, under two salts.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import tiny
from draftproof.engine.drafting.policy import DraftPolicy, DraftRun, StepObservation
from draftproof.engine.drafting.run_ahead import StepTimes
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.engine.page_pool import Pages
from draftproof.engine.scheduler import Busy, Scheduler
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.slots import Slots
from draftproof.sampling_params import SamplingParams
from page_configs import STEADY
from scripted import OPS

K, SEATS, PAGE = 4, 5, 8
Chance = random.Random


@dataclass
class Truth:
    """A slot as the device knows it."""

    length: int
    computed: int = 0
    drafts: int = 0
    ended: bool = False
    ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Life:
    """A scheduler, a device that never tells at once, and requests that come and go."""

    def __init__(self, chance: Chance, overlap: bool = True, depth: int = 2) -> None:
        """`depth`: steps that are under way at most."""
        self.chance = chance
        self.overlap, self.depth = overlap, depth
        self.max_rows = self.chance.choice([SEATS, 8, 16, 40])
        slots = Slots(SEATS, 64, K, 8, 16, OPS)
        before_plan = not overlap and self.chance.random() < 0.5
        policy = DraftPolicy(SEATS, StepCost.unmeasured(self.max_rows), drafts_before_plan=before_plan)
        pages = Pages(1 + self.chance.choice([8, 10, 5 * SEATS]))
        self.scheduler = Scheduler(
            *(slots, pages, PAGE, self.max_rows, policy),
            prefix_caching=self.chance.random() < 0.8,
            lookahead=self.chance.choice([0, K]),
            drafts_before_plan=before_plan,
        )
        slots.read = lambda slot, length: self.truth[slot].ids[:length]
        self.stored: dict[tuple[int, int], tuple[object, ...]] = {}  # (page, place) -> what was said up to it
        self.patience: dict[str, int] = {}
        self.truth: dict[int, Truth] = {}  # by slot
        self.flights: list[tuple[StepPlan, np.ndarray]] = []
        self.todo = [self.request(i) for i in range(14)]
        self.done: dict[str, str] = {}
        self.told: dict[str, int] = {}  # committed tokens that were read
        self.steps = self.num_aside = 0
        self.rush = self.chance.choice([0.3, 0.9])
        self.shaken, self.whole_short = False, self.scheduler._missing_pages
        self.scheduler._missing_pages = self.short_of

    def request(self, index: int) -> Sequence:
        length = self.chance.choice([1, 2, 5, 7, 13, 30])
        tokens = self.chance.choice([1, 2, 9, 20, 33])
        params = SamplingParams(
            max_tokens=tokens,
            priority=self.chance.choice([0, 0, 1]),
            cache_salt=self.chance.choice([None, "a"]),
        )
        ids = [3] * length if self.chance.random() < 0.7 else [4] * length
        asked = tiny.request(index, params, prompt_token_ids=ids)
        limit, adaptive = self.chance.choice([0, 1, K]), self.chance.random() < 0.5
        return Sequence(asked, length + tokens, draft_limit=limit, adaptive=adaptive)

    def short_of(self, *arguments) -> np.ndarray:
        """Now and then it is as if pages had run out, for all but the first."""
        short = self.whole_short(*arguments)
        return short + 10**6 if self.shaken and len(self.scheduler.running) > 1 else short

    # --- the device -----------------------------------------------------------------------------------

    def run(self, planned: StepPlan, budget: np.ndarray) -> np.ndarray:
        """[B, 4]: committed, drafts verified, accepted, ended."""
        for slot, place, page in planned.new_pages:
            assert len(self.truth[slot].pages) == place, "a page in the wrong place"
            self.truth[slot].pages.append(page)
        for s in planned.admitted:
            self.truth[s.slot] = Truth(len(s.ids), s.num_cached, ids=list(s.ids), pages=list(s.pages))
        self.read_stored(planned)
        out = np.zeros((len(planned.slots), 4), np.int64)
        rows = 0
        for b, slot in enumerate(planned.slots.tolist()):
            truth, chunk = self.truth[slot], int(planned.chunk[b])
            if truth.ended:
                continue
            fresh = chunk or truth.length - truth.computed
            assert fresh >= 1 and truth.computed + fresh <= truth.length, "rows past the newest token"
            before = truth.computed
            self.store(planned.sequences[b], truth, before, fresh)
            if truth.computed + fresh < truth.length:
                assert not planned.samples[b]
                truth.computed += fresh
                rows += fresh
                continue
            assert planned.samples[b] and (chunk or fresh == 1)
            drafts = 0 if chunk else min(int(planned.drafts[b]), truth.drafts)
            rows += fresh + drafts
            assert truth.length + drafts <= len(truth.pages) * PAGE, "rows without a page"
            out[b] = self.commit(planned.sequences[b], truth, drafts)
            self.store(planned.sequences[b], truth, before + fresh, truth.computed - before - fresh)
            truth.drafts = 0 if truth.ended else self.guesses(planned.sequences[b], truth, int(budget[b]))
            if self.scheduler.lookahead:
                assert truth.length + truth.drafts - 1 <= len(truth.pages) * PAGE, "drafts without a page"
        assert rows <= planned.num_rows <= self.max_rows, "more rows than there are"
        return out

    def said(self, sequence: Sequence, truth: Truth, length: int) -> tuple[object, ...]:
        return sequence.request.params.cache_salt, *truth.ids[:length]

    def store(self, sequence: Sequence, truth: Truth, first: int, rows: int) -> None:
        for at in range(first, first + rows):
            place = truth.pages[at // PAGE], at % PAGE
            self.stored[place] = self.said(sequence, truth, at + 1)

    def read_stored(self, planned: StepPlan) -> None:
        """All that the rows of a step attend to was stored by steps before it, by whoever said the same."""
        for b, slot in enumerate(planned.slots.tolist()):
            truth = self.truth[slot]
            for at in range(0 if truth.ended else truth.computed):
                have = self.stored.get((truth.pages[at // PAGE], at % PAGE))
                assert have == self.said(planned.sequences[b], truth, at + 1), "KV of another text"

    def commit(self, sequence: Sequence, truth: Truth, drafts: int) -> tuple[int, int, int, int]:
        room = sequence.max_length - truth.length
        assert room > 0 and drafts <= room - 1
        accepted = self.chance.choice([0, drafts, self.chance.randint(0, drafts)])
        count = accepted + 1
        stops = self.chance.random() < 0.02
        if stops:
            count = self.chance.randint(1, count)
        truth.length += count
        truth.ids += [5 + self.chance.randint(0, 1) for _ in range(count)]
        truth.computed = truth.length - 1
        truth.ended = stops or count == room
        return count, drafts, min(accepted, count), int(truth.ended)

    def guesses(self, sequence: Sequence, truth: Truth, budget: int) -> int:
        most = min(budget, sequence.max_length - truth.length - 1)
        return self.chance.choice([0, most, self.chance.randint(0, max(most, 0))])

    # --- the host -------------------------------------------------------------------------------------

    def check_plan(self, planned: StepPlan) -> None:
        assert planned.num_rows <= self.max_rows, "the row budget is exceeded"
        for sequence in planned.admitted:
            assert all(sequence.rank < s.rank for s in self.scheduler.waiting), "seated before its turn"
        assert len(set(planned.slots.tolist())) == len(planned.slots)
        for b, sequence in enumerate(planned.sequences):
            slot = sequence.slot
            assert slot == planned.slots[b] >= 0, "a request that is not seated"
            if not planned.chunk[b]:
                assert sequence not in planned.admitted, "seated without a row"
                assert self.least(sequence) < sequence.max_length, "planned once it has surely ended"
            assert 0 <= planned.drafts[b] <= sequence.draft_limit

    def least(self, sequence: Sequence) -> int:
        """How long it is at least, by what was read and by what is under way."""
        sure = len(sequence.request.prompt_token_ids) + self.told.get(sequence.request.id, 0)
        for planned, _ in self.flights:
            sure += sum(bool(planned.samples[b]) for b, s in enumerate(planned.sequences) if s is sequence)
        return sure

    def check_bounds(self) -> None:
        host = self.scheduler.mirror
        written: set[int] = set()
        for sequence in self.scheduler.running:
            slot = sequence.slot
            truth = self.truth[slot]
            assert truth.pages == sequence.pages
            own = sequence.pages[truth.computed // PAGE :]
            assert not written & set(own), "two write to one page"
            written |= set(own)
            assert host.max_committed[slot] >= truth.length
            assert host.num_draft[slot] >= truth.drafts, "more drafts than the host counts on"
            if not truth.ended:
                assert host.length[slot] + host.in_flight[slot] <= truth.length
                assert host.prompt_left[slot] == 0 or truth.length == host.length[slot]
        self.scheduler.pages.check()

    def settle(self) -> None:
        planned, table = self.flights.pop(0)
        here = self.scheduler.settle(planned, table[:, 0])
        times = StepTimes(0.0, 0.0, 1.0, is_queued_behind=True, was_ready=False)
        observed = StepObservation(planned, table, None, here, 1, times, DraftRun())
        self.scheduler.policy.observe(observed)
        for b, sequence in enumerate(planned.sequences):
            assert here[b] == (sequence.slot == planned.slots[b] and sequence.request.id not in self.done)
            name = sequence.request.id
            self.told[name] = self.told.get(name, 0) + int(table[b, 0])
            if here[b] and table[b, 3]:
                self.leave(sequence, "ended")

    def leave(self, sequence: Sequence, why: str) -> None:
        assert sequence.request.id not in self.done
        self.done[sequence.request.id] = why
        if why == "aborted" or self.chance.random() < 0.3:
            self.scheduler.remove(sequence)
        else:  # as the loop does it with what a follow-up may ask for
            ids = self.truth[sequence.slot].ids
            self.scheduler.finish_keep_pages(sequence)
            self.scheduler.release_pages(sequence, ids)

    def check_patience(self) -> None:
        """The bounds of the scheduler's docstring, in plans."""
        scheduler = self.scheduler
        first = min(scheduler.running, key=lambda s: s.rank, default=None)
        for behind in scheduler.waiting[1:]:  # it was the first, and better ranks have come since
            self.patience.pop(f"{behind.request.id} waits", None)
        for who, limit in (
            (first, self.plans_of(first) if first else 0),
            (scheduler.waiting[0] if scheduler.waiting else None, self.bound()),
        ):
            if who is None:
                continue
            key = f"{who.request.id} {'runs' if who is first else 'waits'}"
            left = self.patience.get(key, limit)
            self.patience[key] = min(left, limit) - 1
            assert left > 0, f"{key} for too long"

    def bound(self) -> int:
        return sum(map(self.plans_of, self.scheduler.running)) + 1

    def plans_of(self, sequence: Sequence) -> int:
        return sequence.max_length + self.depth - 1

    def step(self) -> None:
        scheduler = self.scheduler
        self.steps += 1
        while self.todo and self.chance.random() < self.rush:
            scheduler.add(self.todo.pop())
        here = [*scheduler.running, *scheduler.waiting]
        if here and self.chance.random() < 0.06 and list(self.done.values()).count("aborted") < 4:
            self.leave(self.chance.choice(here), "aborted")
        self.shaken |= self.chance.random() < 0.04
        self.tick()

    def tick(self) -> None:
        """A step as the loop makes it."""
        scheduler = self.scheduler
        first = min(scheduler.running, key=lambda s: s.rank, default=None)
        try:
            planned = scheduler.plan(idle=not self.flights)
        except Busy:
            assert self.flights
            self.settle()
            return
        assert first is None or first.slot >= 0, "the first was put aside"
        self.shaken = False
        self.num_aside += len(scheduler.preempted)
        self.check_patience()
        if planned is not None:
            best = min(scheduler.running, key=lambda s: s.rank)
            part = best in planned.sequences or self.least(best) >= best.max_length
            assert part, "the first has no row"
            self.check_plan(planned)
            keys = int(scheduler.mirror.length[planned.slots].sum())
            budget = scheduler.policy.decide(planned.slots, scheduler.draft_room(planned), keys).drafts
            table = self.run(planned, budget)
            scheduler.mirror.num_draft[planned.slots] = budget
            self.flights.append((planned, table))
            self.check_bounds()
            if self.overlap and len(self.flights) < self.depth:
                return
        if self.flights:
            self.settle()

    def live(self) -> None:
        while self.todo or self.scheduler.running or self.scheduler.waiting or self.flights:
            self.step()
            assert self.steps < 3000, "somebody is forgotten"
        assert len(self.done) == 14
        self.check_empty()

    def check_empty(self) -> None:
        pages, slots = self.scheduler.pages, self.scheduler.slots
        assert pages.num_free == pages.capacity and slots.num_free == SEATS


class Served(RuleBasedStateMachine):
    """The same, with hypothesis in the place of chance for all that comes from outside."""

    @initialize(seed=st.integers(0, 999), overlap=st.booleans(), depth=st.integers(2, 3))
    def build(self, seed: int, overlap: bool, depth: int) -> None:
        self.life = Life(random.Random(seed), overlap, depth)
        self.life.todo.clear()
        self.count = 0

    @rule(several=st.integers(1, 4))
    def come(self, several: int) -> None:
        for _ in range(several):
            self.life.scheduler.add(self.life.request(self.count))
            self.count += 1

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.life.tick()

    @rule()
    def shake(self) -> None:
        self.life.shaken = True
        self.life.tick()

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        here = [*self.life.scheduler.running, *self.life.scheduler.waiting]
        if here:
            self.life.leave(here[which % len(here)], "aborted")

    @invariant()
    def pages_are_right(self) -> None:
        if not hasattr(self, "life"):
            return
        pages = self.life.scheduler.pages
        pages.check()
        held = Counter(page for s in self.life.scheduler.running for page in s.pages)
        assert held == pages._users, "users miscounted"
        for page in (page for page, users in held.items() if users > 1):
            assert page in pages._content, "a page is shared that is not full"

    def teardown(self) -> None:
        life = getattr(self, "life", None)
        while life and (life.scheduler.running or life.scheduler.waiting or life.flights):
            life.tick()
            life.steps += 1
            assert life.steps < 3000, "somebody is forgotten"
        if life:
            assert len(life.done) == self.count
            life.check_empty()


def machine() -> None:
    run_state_machine_as_test(Served, settings=STEADY)


def lives() -> None:
    for seed in range(60):
        Life(random.Random(seed)).live()
