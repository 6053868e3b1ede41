"""Planning ahead: random lives of many requests, with a device that is one step behind in telling.

No model: the device here knows true lengths, drafts and ends, and takes whatever acceptance chance says.
Every plan is made while the step before it is still unread, and must be right whatever that step did.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

import tiny
from draftproof.engine.budget import DraftBudgets
from draftproof.engine.pages import Pages
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Planned, Sequence
from draftproof.engine.slots import Slots
from draftproof.sampling_params import SamplingParams
from scripted import OPS

K, SEATS, PAGE = 4, 5, 8


@dataclass
class Truth:
    """A slot as the device knows it."""

    length: int
    computed: int = 0
    drafts: int = 0
    ended: bool = False


class Life:
    """A scheduler, a device that never tells at once, and requests that come and go."""

    def __init__(self, seed: int, overlap: bool = True) -> None:
        self.chance = random.Random(seed)
        self.overlap = overlap
        self.max_rows = self.chance.choice([SEATS, 8, 16, 40])
        slots = Slots(SEATS, 64, K, 8, 16, OPS)
        budgets = DraftBudgets(SEATS, adaptive=self.chance.random() < 0.5)
        self.scheduler = Scheduler(slots, Pages(1 + 5 * SEATS), PAGE, self.max_rows, budgets)
        self.truth: dict[int, Truth] = {}  # by slot
        self.flights: list[tuple[Planned, np.ndarray]] = []
        self.todo = [self.request(i) for i in range(14)]
        self.done: dict[str, str] = {}
        self.told: dict[str, int] = {}  # committed tokens that were read
        self.steps = 0

    def request(self, index: int) -> Sequence:
        length = self.chance.choice([1, 2, 5, 13, 30])
        tokens = self.chance.choice([1, 2, 3, 9, 20])
        asked = tiny.request(index, SamplingParams(max_tokens=tokens), length, prompt_token_ids=[3] * length)
        return Sequence(asked, length + tokens, draft_limit=self.chance.choice([0, 1, K]))

    # --- the device -----------------------------------------------------------------------------------

    def run(self, planned: Planned, budget: np.ndarray) -> np.ndarray:
        """[B, 4]: committed, drafts verified, accepted, ended."""
        for sequence in planned.newcomers:
            self.truth[sequence.slot] = Truth(len(sequence.request.prompt_token_ids))
        out = np.zeros((len(planned.slots), 4), np.int64)
        rows = 0
        for b, slot in enumerate(planned.slots.tolist()):
            truth, chunk = self.truth[slot], int(planned.chunk[b])
            if truth.ended:
                continue
            fresh = chunk or truth.length - truth.computed
            assert fresh >= 1 and truth.computed + fresh <= truth.length, "rows past the newest token"
            if truth.computed + fresh < truth.length:
                assert not planned.samples[b]
                truth.computed += fresh
                rows += fresh
                continue
            assert planned.samples[b] and (chunk or fresh == 1)
            drafts = 0 if chunk else min(int(planned.drafts[b]), truth.drafts)
            rows += fresh + drafts
            out[b] = self.commit(planned.sequences[b], truth, drafts)
            truth.drafts = 0 if truth.ended else self.guesses(planned.sequences[b], truth, int(budget[b]))
        assert rows <= planned.num_rows <= self.max_rows, "more rows than there are"
        return out

    def commit(self, sequence: Sequence, truth: Truth, drafts: int) -> tuple[int, int, int, int]:
        room = sequence.max_length - truth.length
        assert room > 0 and drafts <= room - 1
        accepted = self.chance.choice([0, drafts, self.chance.randint(0, drafts)])
        count = accepted + 1
        stops = self.chance.random() < 0.04
        if stops:
            count = self.chance.randint(1, count)
        truth.length += count
        truth.computed = truth.length - 1
        truth.ended = stops or count == room
        return count, drafts, min(accepted, count), int(truth.ended)

    def guesses(self, sequence: Sequence, truth: Truth, budget: int) -> int:
        most = min(budget, sequence.max_length - truth.length - 1)
        return self.chance.choice([0, most, self.chance.randint(0, max(most, 0))])

    # --- the host -------------------------------------------------------------------------------------

    def check_plan(self, planned: Planned) -> None:
        assert planned.num_rows <= self.max_rows, "the row budget is exceeded"
        assert len(set(planned.slots.tolist())) == len(planned.slots)
        for b, sequence in enumerate(planned.sequences):
            slot = sequence.slot
            assert slot == planned.slots[b] >= 0, "a request that is not seated"
            if not planned.chunk[b]:
                assert self.least(sequence) < sequence.max_length, "planned once it has surely ended"
            assert 0 <= planned.drafts[b] <= sequence.draft_limit

    def least(self, sequence: Sequence) -> int:
        """How long it is at least, by what was read and by what is under way."""
        sure = len(sequence.request.prompt_token_ids) + self.told.get(sequence.request.id, 0)
        for planned, _ in self.flights:
            sure += sum(bool(planned.samples[b]) for b, s in enumerate(planned.sequences) if s is sequence)
        return sure

    def check_bounds(self) -> None:
        host = self.scheduler.host
        for sequence in self.scheduler.running:
            slot = sequence.slot
            truth = self.truth[slot]
            assert host.num_draft[slot] >= truth.drafts, "more drafts than the host counts on"
            if not truth.ended:
                assert host.length[slot] + host.under_way[slot] <= truth.length
                assert host.prompt_left[slot] == 0 or truth.length == host.length[slot]
        self.scheduler.pages.check()

    def settle(self) -> None:
        planned, table = self.flights.pop(0)
        here = self.scheduler.settle(planned, table[:, 0], table[:, 1], table[:, 2])
        for b, sequence in enumerate(planned.sequences):
            assert here[b] == (sequence.slot == planned.slots[b] and sequence.request.id not in self.done)
            name = sequence.request.id
            self.told[name] = self.told.get(name, 0) + int(table[b, 0])
            if here[b] and table[b, 3]:
                self.leave(sequence, "ended")

    def leave(self, sequence: Sequence, why: str) -> None:
        assert sequence.request.id not in self.done
        self.done[sequence.request.id] = why
        self.scheduler.remove(sequence)

    def step(self) -> None:
        scheduler = self.scheduler
        self.steps += 1
        while self.todo and self.chance.random() < 0.3:
            scheduler.add(self.todo.pop())
        here = [*scheduler.running, *scheduler.waiting]
        if here and self.chance.random() < 0.06 and list(self.done.values()).count("aborted") < 4:
            self.leave(self.chance.choice(here), "aborted")
        planned = scheduler.plan()
        if planned is not None:
            self.check_plan(planned)
            budget = scheduler.budget(planned)
            table = self.run(planned, budget)
            scheduler.host.num_draft[planned.slots] = budget
            self.flights.append((planned, table))
            self.check_bounds()
            if self.overlap and len(self.flights) == 1:
                return
        if self.flights:
            self.settle()

    def live(self) -> None:
        while self.todo or self.scheduler.running or self.scheduler.waiting or self.flights:
            self.step()
            assert self.steps < 3000, "somebody is forgotten"
        assert len(self.done) == 14
        pages, slots = self.scheduler.pages, self.scheduler.slots
        assert pages.num_free == pages.capacity and slots.num_free == SEATS


@pytest.mark.parametrize("overlap", [False, True])
def test_random_lives(overlap):
    ends = set()
    for seed in range(60):
        life = Life(seed, overlap)
        life.live()
        ends |= set(life.done.values())
    assert ends == {"ended", "aborted"}


# --- controls -----------------------------------------------------------------------------------------


def lives() -> None:
    for seed in range(60):
        Life(seed).live()


def test_control_steps_under_way_that_are_forgotten(monkeypatch):
    whole = Scheduler._planned

    def broken(self, *arguments):
        planned = whole(self, *arguments)
        self.host.under_way[planned.slots] -= planned.samples
        return planned

    monkeypatch.setattr(Scheduler, "_planned", broken)
    with pytest.raises(AssertionError, match="surely ended"):
        lives()


def test_control_a_plan_that_goes_on_past_the_end(monkeypatch):
    """Of a request whose last token is under way another step is planned."""
    whole = Scheduler.plan

    def broken(self):
        lines = self._lines.copy()
        self.host.max_length[lines] += 1
        planned = whole(self)
        self.host.max_length[lines] -= 1
        return planned

    monkeypatch.setattr(Scheduler, "plan", broken)
    with pytest.raises(AssertionError, match="surely ended"):
        lives()


def test_control_drafts_that_are_not_counted(monkeypatch):
    """The host sets fewer rows aside than the device may have drafts."""
    whole = Life.run

    def broken(self, planned, budget):
        table = whole(self, planned, budget)
        budget[:] = np.maximum(budget - 1, 0)
        return table

    monkeypatch.setattr(Life, "run", broken)
    with pytest.raises(AssertionError, match="more drafts than the host counts on"):
        lives()


def test_control_rows_beyond_the_budget(monkeypatch):
    whole = Scheduler._planned

    def broken(self, takes_part, chunk, drafts, newcomers):
        return whole(self, takes_part, chunk, np.where(drafts > 0, drafts + 1, 0), newcomers)

    monkeypatch.setattr(Scheduler, "_planned", broken)
    with pytest.raises(AssertionError):
        lives()


def test_control_a_tenant_that_is_not_asked_for(monkeypatch):
    whole = Scheduler.settle

    def broken(self, planned, *columns):
        return whole(self, replace(planned, tenants=self.host.tenant[planned.slots]), *columns)

    monkeypatch.setattr(Scheduler, "settle", broken)
    with pytest.raises(AssertionError):
        lives()
