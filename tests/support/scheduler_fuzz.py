"""Random requests in a scheduler whose device is a step or two ahead of what the host has read.

There is no model: the simulated device holds true lengths, drafts and finishes, accepts random numbers of
drafts and records the content of every page, so that a row which reads unstored KV is detected. Every plan
is made while earlier steps are unread. Few pages cause preemptions; prefixes are shared under two salts.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, Phase, settings
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
from draftproof.engine.drafting.run_ahead_depth import StepTimes
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.engine.page_pool import Pages
from draftproof.engine.scheduler import Scheduler, StepsInFlightError
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.slots import Slots
from draftproof.sampling_params import SamplingParams
from scripted import OPS

K, NUM_SLOTS, PAGE = 4, 5, 8
Chance = random.Random
HYPOTHESIS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # failures are not minimised
    suppress_health_check=list(HealthCheck),
)


@dataclass
class DeviceSlot:
    """State of a slot on the device."""

    length: int
    computed: int = 0
    drafts: int = 0
    ended: bool = False
    ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class FuzzRun:
    """A scheduler, a simulated device, and requests that arrive and finish."""

    def __init__(self, chance: Chance, overlap: bool = True, depth: int = 2) -> None:
        self.chance = chance
        self.overlap, self.depth = overlap, depth
        self.max_rows = self.chance.choice([NUM_SLOTS, 8, 16, 40])
        slots = Slots(NUM_SLOTS, 64, K, 8, 16, OPS)
        before_plan = not overlap and self.chance.random() < 0.5
        policy = DraftPolicy(NUM_SLOTS, StepCost.unmeasured(self.max_rows), drafts_before_plan=before_plan)
        pages = Pages(1 + self.chance.choice([8, 10, 5 * NUM_SLOTS]))
        self.scheduler = Scheduler(
            *(slots, pages, PAGE, self.max_rows, policy),
            prefix_caching=self.chance.random() < 0.8,
            lookahead=self.chance.choice([0, K]),
        )
        slots.read = lambda slot, length: self.state[slot].ids[:length]
        self.stored: dict[tuple[int, int], tuple[object, ...]] = {}  # (page, place) -> the text up to it
        self.plans_left: dict[str, int] = {}
        self.state: dict[int, DeviceSlot] = {}  # by slot
        self.flights: list[tuple[StepPlan, np.ndarray]] = []
        self.todo = [self.request(i) for i in range(14)]
        self.done: dict[str, str] = {}
        self.num_read: dict[str, int] = {}  # committed tokens that the host has read
        self.num_steps = self.num_preempted = 0
        self.arrival_rate = self.chance.choice([0.3, 0.9])
        self.lacks_pages, self.real_missing_pages = False, self.scheduler._missing_pages
        self.scheduler._missing_pages = self.missing_pages

    def request(self, index: int) -> Sequence:
        length = self.chance.choice([1, 2, 5, 7, 13, 30])
        tokens = self.chance.choice([1, 2, 9, 20, 33])
        params = SamplingParams(
            max_tokens=tokens,
            priority=self.chance.choice([0, 0, 1]),
            cache_salt=self.chance.choice([None, "a"]),
        )
        ids = [3] * length if self.chance.random() < 0.7 else [4] * length
        made = tiny.request(index, params, prompt_token_ids=ids)
        limit, adaptive = self.chance.choice([0, 1, K]), self.chance.random() < 0.5
        return Sequence(made, length + tokens, draft_limit=limit, adaptive=adaptive)

    def missing_pages(self, *arguments) -> np.ndarray:
        """Add a lack of pages now and then, for all requests but the first."""
        short = self.real_missing_pages(*arguments)
        return short + 10**6 if self.lacks_pages and len(self.scheduler.running) > 1 else short

    # --- the device -----------------------------------------------------------------------------------

    def run(self, planned: StepPlan, budget: np.ndarray) -> np.ndarray:
        """Run a step on the device: [B, 4] committed, drafts verified, accepted, ended."""
        for slot, place, page in planned.new_pages:
            assert len(self.state[slot].pages) == place, "a page in the wrong place"
            self.state[slot].pages.append(page)
        for s in planned.admitted:
            self.state[s.slot] = DeviceSlot(len(s.ids), s.num_cached, ids=list(s.ids), pages=list(s.pages))
        self.read_stored(planned)
        out = np.zeros((len(planned.slots), 4), np.int64)
        rows = 0
        for b, slot in enumerate(planned.slots.tolist()):
            state, chunk = self.state[slot], int(planned.chunk[b])
            if state.ended:
                continue
            fresh = chunk or state.length - state.computed
            assert fresh >= 1 and state.computed + fresh <= state.length, "rows past the newest token"
            before = state.computed
            self.store(planned.sequences[b], state, before, fresh)
            if state.computed + fresh < state.length:
                assert not planned.is_sampled[b]
                state.computed += fresh
                rows += fresh
                continue
            assert planned.is_sampled[b] and (chunk or fresh == 1)
            drafts = 0 if chunk else min(int(planned.drafts[b]), state.drafts)
            rows += fresh + drafts
            assert state.length + drafts <= len(state.pages) * PAGE, "rows without a page"
            out[b] = self.commit(planned.sequences[b], state, drafts)
            self.store(planned.sequences[b], state, before + fresh, state.computed - before - fresh)
            state.drafts = 0 if state.ended else self.num_drafts(planned.sequences[b], state, int(budget[b]))
            if self.scheduler.lookahead:
                assert state.length + state.drafts - 1 <= len(state.pages) * PAGE, "drafts without a page"
        assert rows <= planned.num_rows <= self.max_rows, "more rows than there are"
        return out

    def text_of(self, sequence: Sequence, state: DeviceSlot, length: int) -> tuple[object, ...]:
        return sequence.request.params.cache_salt, *state.ids[:length]

    def store(self, sequence: Sequence, state: DeviceSlot, first: int, rows: int) -> None:
        for at in range(first, first + rows):
            place = state.pages[at // PAGE], at % PAGE
            self.stored[place] = self.text_of(sequence, state, at + 1)

    def read_stored(self, planned: StepPlan) -> None:
        """Check that earlier steps stored all KV that the rows of a step attend to, for the same text."""
        for b, slot in enumerate(planned.slots.tolist()):
            state = self.state[slot]
            for at in range(0 if state.ended else state.computed):
                have = self.stored.get((state.pages[at // PAGE], at % PAGE))
                assert have == self.text_of(planned.sequences[b], state, at + 1), "KV of another text"

    def commit(self, sequence: Sequence, state: DeviceSlot, drafts: int) -> tuple[int, int, int, int]:
        room = sequence.max_length - state.length
        assert room > 0 and drafts <= room - 1
        accepted = self.chance.choice([0, drafts, self.chance.randint(0, drafts)])
        count = accepted + 1
        stops = self.chance.random() < 0.02
        if stops:
            count = self.chance.randint(1, count)
        state.length += count
        state.ids += [5 + self.chance.randint(0, 1) for _ in range(count)]
        state.computed = state.length - 1
        state.ended = stops or count == room
        return count, drafts, min(accepted, count), int(state.ended)

    def num_drafts(self, sequence: Sequence, state: DeviceSlot, budget: int) -> int:
        most = min(budget, sequence.max_length - state.length - 1)
        return self.chance.choice([0, most, self.chance.randint(0, max(most, 0))])

    # --- the host -------------------------------------------------------------------------------------

    def check_plan(self, planned: StepPlan) -> None:
        assert planned.num_rows <= self.max_rows, "the row budget is exceeded"
        for sequence in planned.admitted:
            assert all(sequence.rank < s.rank for s in self.scheduler.waiting), "admitted before its turn"
        assert len(set(planned.slots.tolist())) == len(planned.slots)
        for b, sequence in enumerate(planned.sequences):
            slot = sequence.slot
            assert slot == planned.slots[b] >= 0, "a request without a slot"
            if not planned.chunk[b]:
                assert sequence not in planned.admitted, "admitted without a row"
                assert self.least(sequence) < sequence.max_length, "planned once it has surely ended"
            assert 0 <= planned.drafts[b] <= sequence.draft_limit

    def least(self, sequence: Sequence) -> int:
        """Return the smallest length that the request can have, from reads and steps in flight."""
        sure = len(sequence.request.prompt_token_ids) + self.num_read.get(sequence.request.id, 0)
        for planned, _ in self.flights:
            sure += sum(bool(planned.is_sampled[b]) for b, s in enumerate(planned.sequences) if s is sequence)
        return sure

    def check_bounds(self) -> None:
        host = self.scheduler.mirror
        written: set[int] = set()
        for sequence in self.scheduler.running:
            slot = sequence.slot
            state = self.state[slot]
            assert state.pages == sequence.pages
            own = sequence.pages[state.computed // PAGE :]
            assert not written & set(own), "two write to one page"
            written |= set(own)
            assert host.max_committed[slot] >= state.length
            assert host.num_draft[slot] >= state.drafts, "more drafts than the host counts on"
            if not state.ended:
                assert host.length[slot] + host.in_flight[slot] <= state.length
                assert host.prompt_left[slot] == 0 or state.length == host.length[slot]
        self.scheduler.pages.check()

    def settle(self) -> None:
        planned, table = self.flights.pop(0)
        current = self.scheduler.settle(planned, table[:, 0])
        times = StepTimes(0.0, 0.0, 1.0, is_queued_behind=True, was_ready=False)
        observed = StepObservation(planned, table, None, current, 1, times, DraftRun())
        self.scheduler.policy.observe(observed)
        for b, sequence in enumerate(planned.sequences):
            assert current[b] == (sequence.slot == planned.slots[b] and sequence.request.id not in self.done)
            name = sequence.request.id
            self.num_read[name] = self.num_read.get(name, 0) + int(table[b, 0])
            if current[b] and table[b, 3]:
                self.finish(sequence, "ended")

    def finish(self, sequence: Sequence, why: str) -> None:
        assert sequence.request.id not in self.done
        self.done[sequence.request.id] = why
        if why == "aborted" or self.chance.random() < 0.3:
            self.scheduler.remove(sequence)
        else:  # keep pages for the prefix cache, as the loop does
            ids = self.state[sequence.slot].ids
            self.scheduler.remove_running([sequence], [sequence])
            self.scheduler.release_pages(sequence, ids)

    def check_waiting_times(self) -> None:
        """Check the bounds of the scheduler's docstring, in plans."""
        scheduler = self.scheduler
        first = min(scheduler.running, key=lambda s: s.rank, default=None)
        for behind in scheduler.waiting[1:]:  # better ranks arrived since
            self.plans_left.pop(f"{behind.request.id} waits", None)
        for who, limit in (
            (first, self.plans_of(first) if first else 0),
            (scheduler.waiting[0] if scheduler.waiting else None, self.bound()),
        ):
            if who is None:
                continue
            key = f"{who.request.id} {'runs' if who is first else 'waits'}"
            left = self.plans_left.get(key, limit)
            self.plans_left[key] = min(left, limit) - 1
            assert left > 0, f"{key} for too long"

    def bound(self) -> int:
        return sum(map(self.plans_of, self.scheduler.running)) + 1

    def plans_of(self, sequence: Sequence) -> int:
        return sequence.max_length + self.depth - 1

    def step(self) -> None:
        scheduler = self.scheduler
        self.num_steps += 1
        while self.todo and self.chance.random() < self.arrival_rate:
            scheduler.add(self.todo.pop())
        current = [*scheduler.running, *scheduler.waiting]
        if current and self.chance.random() < 0.06 and list(self.done.values()).count("aborted") < 4:
            self.finish(self.chance.choice(current), "aborted")
        self.lacks_pages |= self.chance.random() < 0.04
        self.run_step()

    def run_step(self) -> None:
        """Plan, run and read as the loop does."""
        scheduler = self.scheduler
        first = min(scheduler.running, key=lambda s: s.rank, default=None)
        try:
            planned = scheduler.plan(is_idle=not self.flights)
        except StepsInFlightError:
            assert self.flights
            self.settle()
            return
        assert first is None or first.slot >= 0, "the first was preempted"
        self.lacks_pages = False
        self.num_preempted += len(scheduler.preempted)
        self.check_waiting_times()
        if planned is not None:
            best = min(scheduler.running, key=lambda s: s.rank)
            part = best in planned.sequences or self.least(best) >= best.max_length
            assert part, "the first has no row"
            self.check_plan(planned)
            keys = int(scheduler.mirror.length[planned.slots].sum())
            budget = scheduler.policy.decide(
                planned.slots, scheduler.draft_room(planned.slots, planned.is_sampled), keys
            ).drafts
            table = self.run(planned, budget)
            scheduler.mirror.num_draft[planned.slots] = budget
            self.flights.append((planned, table))
            self.check_bounds()
            if self.overlap and len(self.flights) < self.depth:
                return
        if self.flights:
            self.settle()

    def serve_all(self) -> None:
        while self.todo or self.scheduler.running or self.scheduler.waiting or self.flights:
            self.step()
            assert self.num_steps < 3000, "a request never finishes"
        assert len(self.done) == 14
        self.check_empty()

    def check_empty(self) -> None:
        pages, slots = self.scheduler.pages, self.scheduler.slots
        assert pages.num_free == pages.capacity and slots.num_free == NUM_SLOTS


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler fuzz with events drawn by hypothesis."""

    @initialize(seed=st.integers(0, 999), overlap=st.booleans(), depth=st.integers(2, 3))
    def build(self, seed: int, overlap: bool, depth: int) -> None:
        self.fuzz = FuzzRun(random.Random(seed), overlap, depth)
        self.fuzz.todo.clear()
        self.count = 0

    @rule(several=st.integers(1, 4))
    def arrive(self, several: int) -> None:
        for _ in range(several):
            self.fuzz.scheduler.add(self.fuzz.request(self.count))
            self.count += 1

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.fuzz.run_step()

    @rule()
    def lack_pages(self) -> None:
        self.fuzz.lacks_pages = True
        self.fuzz.run_step()

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        current = [*self.fuzz.scheduler.running, *self.fuzz.scheduler.waiting]
        if current:
            self.fuzz.finish(current[which % len(current)], "aborted")

    @invariant()
    def pages_are_right(self) -> None:
        if not hasattr(self, "life"):
            return
        pages = self.fuzz.scheduler.pages
        pages.check()
        held = Counter(page for s in self.fuzz.scheduler.running for page in s.pages)
        assert held == pages._ref_counts, "users miscounted"
        for page in (page for page, users in held.items() if users > 1):
            assert page in pages._digest_of_page, "a page is shared that is not full"

    def teardown(self) -> None:
        fuzz = getattr(self, "life", None)
        while fuzz and (fuzz.scheduler.running or fuzz.scheduler.waiting or fuzz.flights):
            fuzz.run_step()
            fuzz.num_steps += 1
            assert fuzz.num_steps < 3000, "a request never finishes"
        if fuzz:
            assert len(fuzz.done) == self.count
            fuzz.check_empty()


def run_state_machine(max_examples: int = HYPOTHESIS.max_examples) -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(HYPOTHESIS, max_examples=max_examples))


def run_fuzz() -> None:
    for seed in range(60):
        FuzzRun(random.Random(seed)).serve_all()
