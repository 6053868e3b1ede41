"""How many steps are queued before one is read, and what that says of their price: by the clock alone.

What more steps under way mean for requests is in test_deep_queue.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftproof.engine.drafting import run_ahead
from draftproof.engine.drafting.run_ahead import FOLLOW, OFTEN, SPARE, Pacing
from draftproof.metrics import Timings

ROWS, KEYS, STEP, HOST = 4, 70, 1.0, 0.25


class Costs:
    """Takes down what it is told."""

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self.told: list[tuple[int, int, float, int, int]] = []
        self.host: list[float] = []

    def observe(self, rows: int, keys: int, seconds: float, asked: int = 0, fewer: int = 0) -> None:
        self.told.append((rows, keys, round(seconds, 6), asked, fewer))

    def hosted(self, seconds: float) -> None:
        self.host.append(round(seconds, 6))


class Queue:
    """A device whose steps take STEP each, one behind the other, and a host that reads them in turn."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, asynchronous: bool = True, learns: bool = True
    ) -> None:
        self.now = self.free = 100.0
        self.waited = 0.0  # the device, for something to do
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(run_ahead, "time", clock)
        self.costs, self.timings = Costs(learns), Timings()
        host = SimpleNamespace(length=np.array([30, 40]), generation=np.array([1, 1]))
        self.scheduler = SimpleNamespace(
            timings=self.timings, budgets=SimpleNamespace(costs=self.costs), host=host, version=1
        )
        self.pacing = Pacing(self.scheduler, asynchronous)  # type: ignore[arg-type]
        self.under_way: list[Any] = []

    def queue(self, takes: float = STEP, prompts: bool = False, asked: int = 0, fewer: int = 0) -> None:
        planned = SimpleNamespace(
            slots=np.array([0, 1]),
            generations=np.array([1, 1]),
            version=1,
            has_prompts=prompts,
            num_rows=ROWS,
        )
        follows, started = bool(self.under_way), self.now
        self.waited += max(0.0, self.now - self.free) * bool(self.under_way)
        self.free = max(self.free, self.now) + takes
        step = SimpleNamespace(
            planned=planned, follows=follows, started=started, asked=asked, fewer=fewer, ready=self.free
        )
        self.under_way.append(step)

    def read(self, weighed: float = 0.0) -> bool:
        """The oldest; had it come?"""
        step, asked = self.under_way.pop(0), self.now
        self.now = max(asked, step.ready)
        self.pacing.read(step, asked, step.ready <= asked, weighed)
        return bool(step.ready <= asked)

    def go(self, *host: float, depth: int = 2, takes: float = STEP, asked: int = 0) -> list[bool]:
        """As the loop does it, with a host that takes so long before it queues a step; which were late."""
        late = []
        for seconds in host:
            self.now += seconds
            while len(self.under_way) < depth:
                self.queue(takes, asked=asked)
            late.append(self.read())
        return late


def test_a_host_that_is_often_late_has_one_more_queued(monkeypatch):
    queue = Queue(monkeypatch)
    assert not any(queue.go(*[HOST] * 50)) and queue.pacing.depth == queue.pacing.shallow == 2
    late = queue.go(1.5, 1.5, 1.5)  # 3 of 64 are more than OFTEN
    assert late == [True] * 3 and 3 * FOLLOW > OFTEN > 2 * FOLLOW
    assert queue.pacing.depth == queue.pacing.deep == 3
    steps = 0
    while queue.pacing.depth == 3:
        queue.go(HOST, depth=3)
        steps += 1
    assert 5 < steps < 64  # soon, and not at once


def test_how_often_the_host_would_be_late_without_drafts(monkeypatch):
    """Steps of one that nobody was asked behind, of three that somebody was, and a host that takes two: it is
    late for none of the latter, and that does not say that it would not be for the former."""
    queue = Queue(monkeypatch)
    for _ in range(60):
        queue.go(*[2 * STEP] * 2)
        queue.go(*[2 * STEP] * 6, takes=3 * STEP, asked=2)
    assert queue.pacing.lateness < 0.4 and queue.pacing.spare > 0.6
    queue.go(*[2 * STEP] * 2000, takes=3 * STEP, asked=2)
    assert queue.pacing.lateness < 0.01 and queue.pacing.spare < 0.05  # it may have changed since
    queue.go(*[2 * STEP] * 200)
    assert queue.pacing.lateness > 0.9 and queue.pacing.spare > 0.9


def test_a_host_that_is_late_in_one_of_many_has_not(monkeypatch):
    queue = Queue(monkeypatch)
    for _ in range(20):
        assert sum(queue.go(*[HOST] * 39, 1.5)) == 1
        assert queue.pacing.depth == 2


def test_the_third_is_there_for_parts_that_take_longer_than_a_step(monkeypatch):
    """The device waits no more, and it stays, though the host is as late as ever for what it reads."""
    lengths, waited = [*[HOST] * 3, 1.6] * 20, {}
    for depth in (2, 3):
        queue = Queue(monkeypatch)
        assert sum(queue.go(*lengths, depth=depth)) == 20
        assert queue.pacing.depth == 3
        waited[depth] = queue.waited
    assert waited[2] == pytest.approx(20 * 0.6) and waited[3] == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_prices_are_told_of_steps_that_the_host_was_in_time_for(depth, monkeypatch):
    queue = Queue(monkeypatch)
    late = queue.go(*([HOST] * 6 + [3.3] + [HOST] * 9) * 4, depth=depth)
    assert 4 <= sum(late) <= 12
    assert {told for told in queue.costs.told} == {(ROWS, KEYS, STEP, 0, 0)}
    untold = [was or before for before, was in zip([False, *late], late, strict=False)]
    assert len(queue.costs.told) == len(late) - sum(untold)
    total = queue.timings.decode_steps
    assert total.count == len(late) and total.total == pytest.approx(
        queue.now - 100.0 - HOST
    )  # all, as they came


@pytest.mark.parametrize("planted", ["the late one", "the one behind it"])
def test_control_a_price_that_hears_of_them_is_wrong(planted, monkeypatch):
    queue = Queue(monkeypatch)
    whole = Pacing.read

    def broken(self: Pacing, step: Any, asked: float, late: bool, weighed: float) -> None:
        if planted == "the one behind it":
            self._late = False
        whole(self, step, asked, late and planted != "the late one", weighed)

    monkeypatch.setattr(Pacing, "read", broken)
    queue.go(*([HOST] * 6 + [1.5]) * 4, HOST, depth=3)
    wrong = {told[2] for told in queue.costs.told} - {STEP}
    assert wrong == ({0.5, 1.5} if planted == "the late one" else {0.5})


def test_the_host_is_clocked_from_one_read_to_the_next_question(monkeypatch):
    queue = Queue(monkeypatch)
    queue.go(HOST, 0.5, 1.5, 0.125)
    assert queue.costs.host == [0.5, 1.5, 0.125]  # the first does not follow


def test_prompts_have_no_price_and_drafts_that_are_weighed_apart_neither(monkeypatch):
    queue = Queue(monkeypatch)
    queue.queue(takes=9.0, prompts=True)
    queue.queue(asked=2)
    queue.read()
    assert queue.costs.told == [] and queue.timings.prompt_steps.total == 9.0
    queue.queue(asked=2, fewer=1)
    queue.read()
    assert queue.costs.told == [(ROWS, KEYS, STEP, 2, 0)]
    queue.read()
    assert queue.costs.told[1:] == [(ROWS, KEYS, STEP, 2, 1)]
    queue.queue(asked=2)
    queue.read(weighed=0.25)
    assert [told[3] for told in queue.costs.told[2:]] == [0]


def test_prices_that_do_not_learn_are_told_nothing(monkeypatch):
    queue = Queue(monkeypatch, learns=False)
    queue.go(HOST, 1.5, 1.5, 1.5, 1.5)
    assert queue.costs.told == queue.costs.host == [] and queue.pacing.depth == 3


def test_where_the_device_is_waited_for_nobody_is_late(monkeypatch):
    queue = Queue(monkeypatch, asynchronous=False)
    assert all(queue.go(*[1.5] * 20)[1:])
    assert queue.pacing.depth == 2 and not queue.costs.host and len(queue.costs.told) == 20


def test_there_is_time_while_the_device_is_busy(monkeypatch):
    queue = Queue(monkeypatch)
    queue.go(HOST, HOST)
    assert queue.pacing.has_time
    queue.now += 0.99 * SPARE * STEP
    assert queue.pacing.has_time
    queue.now += 0.02 * SPARE * STEP
    assert not queue.pacing.has_time


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_of_nobody_that_lay_there_say_nothing(depth, monkeypatch):
    """All ended; somebody comes much later, and reads what was queued behind the last end."""
    queue = Queue(monkeypatch)
    for _ in range(40):
        queue.go(*[HOST] * 8, depth=depth)
        assert len(queue.under_way) == depth - 1
        queue.scheduler.mirror.generation += 1
        queue.scheduler.version += 1
        queue.now += 500.0
        while queue.under_way:
            assert queue.read() and not queue.pacing.has_time
        queue.scheduler.mirror.generation -= 1
        queue.scheduler.version -= 1
    assert queue.pacing.depth == 2 and queue.timings.decode_steps.count == 320
    assert queue.timings.decode_steps.mean == pytest.approx(STEP) and max(queue.costs.host) < STEP
    assert {told[2] for told in queue.costs.told} == {STEP}


def test_a_step_behind_one_of_nobody_has_no_price(monkeypatch):
    """When that came is not known: the time between the two reads is not the step's."""
    queue = Queue(monkeypatch)
    queue.go(HOST, HOST)
    queue.under_way[0].planned.generations = np.array([0, 0])
    queue.under_way[0].planned.version = 0
    queue.now += 0.5
    queue.queue()
    queue.read()
    told = len(queue.costs.told)
    queue.go(HOST)
    assert len(queue.costs.told) == told
    queue.go(HOST)
    assert len(queue.costs.told) == told + 1
