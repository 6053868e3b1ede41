"""For how many rounds a hybrid's model is asked, where a search goes on behind its last draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftproof.engine.drafting.draft_gate import GOES_ON, HOPES, Asking
from draftproof.engine.drafting.draft_gate_kernels import CHAIN, heard, worth_it
from draftproof.engine.drafting.step_cost import RowCosts

MODEL, SEARCH = 0, 1


def left(stands: float, goes_on: float, most: int, price: float, rounds: int) -> float:
    """Of what so many rounds bring, by the definition: what is reached and stands, less their price."""
    chances = [stands] * rounds + [goes_on] * (most - rounds)
    return float(np.cumprod(chances).sum()) - rounds * price


def test_as_many_as_leave_most() -> None:
    draw = np.random.default_rng(7)
    found = set()
    for _ in range(400):
        (stands, goes_on), most = draw.uniform(0.05, 0.98, 2), int(draw.integers(1, 9))
        price = float(draw.uniform(0, 0.5))
        rounds = worth_it(np.array([stands, goes_on]), most, price)
        least = (most + 1) // 2
        best = max(left(stands, goes_on, most, price, n) for n in range(least, most + 1))
        assert least <= rounds <= most
        assert left(stands, goes_on, most, price, rounds) == pytest.approx(best, abs=1e-12)
        found.add((rounds > least, rounds < most))
    assert len(found) == 4


def test_of_equals_more_and_of_nothing_nothing() -> None:
    assert worth_it(np.array([0.5, 0.5]), 4, 0.0) == 4
    assert worth_it(np.array([0.5, 0.5]), 0, 0.1) == 0


# --- what is learned -----------------------------------------------------------------------------------


def windows(
    chain: Any, made: int, stood: int, source: int = MODEL, here: bool = True, found: int = 4, count: int = 1
) -> None:
    """Windows of four rows, `found` of them with drafts: `made` by whoever began it, then the search's."""
    table = np.array([[1 + stood, found, stood]] * count)
    sources = np.full((count, 4), SEARCH, np.int8)
    sources[:, :made] = source
    slots, brings, copies = np.arange(count), np.zeros(count), np.zeros(count, np.bool_)
    limit, granted = np.full(count, 4), np.full(count, 4)
    present = np.full(count, here)
    heard(table, sources, slots, present, limit, MODEL, True, 0.0, brings, copies, granted, chain)


def test_a_window_says_what_was_reached() -> None:
    """Of the model's drafts: those up to the first that fell; of the search's: if all before stood."""
    for made, stood, found, told in (
        (2, 4, 4, ((2, 2), (2, 2))),
        (2, 3, 4, ((2, 2), (1, 2))),
        (2, 2, 2, ((2, 2), (0, 1))),  # the search had none
        (2, 1, 4, ((1, 2), (0, 0))),
        (4, 3, 4, ((3, 4), (0, 0))),
        (4, 4, 4, ((4, 4), (0, 0))),
    ):
        chain = np.array([0.5, 0.25])
        windows(chain, made, stood, found=found)
        expected = [
            rate + CHAIN * (up - reached * rate)
            for rate, (up, reached) in zip((0.5, 0.25), told, strict=True)
        ]
        assert chain.tolist() == pytest.approx(expected)


def test_windows_of_others_say_nothing() -> None:
    chain = np.array([0.5, 0.25])
    windows(chain, 4, 4, source=SEARCH)
    windows(chain, 2, 4, here=False)
    windows(chain, 0, 0, found=0)
    assert chain.tolist() == [0.5, 0.25]


def test_rates_are_found() -> None:
    draw, chain = np.random.default_rng(1), np.array([0.5, 0.9])
    means = []
    for step in range(6000):
        stands = [*(draw.random(2) < 0.8), *(draw.random(2) < 0.3), False]
        windows(chain, 2, stands.index(False))
        means += [chain.copy()] * (step > 1500)
    assert np.mean(means, axis=0).tolist() == pytest.approx([0.8, 0.3], abs=0.03)


def test_of_many_windows_each_says_less() -> None:
    """Else those at the end of a large batch would be all that is known."""
    one, many = np.array([0.5, 0.5]), np.array([0.5, 0.5])
    windows(one, 2, 4)
    windows(many, 2, 4, count=256)
    assert 0.5 < one[0] < 0.52 and 0.57 < many[0] < 0.65


# --- and decided ---------------------------------------------------------------------------------------


class Steps:
    """Eight requests whose steps are queued ahead, half of a step for four rounds of a model."""

    def __init__(self, rounds: float = 0.11, asking: float = 0.5, searches: bool = True) -> None:
        self.drafting: Any = SimpleNamespace(
            slots=SimpleNamespace(requests=[None] * 8, ops=SimpleNamespace(asynchronous=True)),
            asks=True, price=0.0, verify=0.0, rounds=0, took=0.0, k=4, most=4,
            fewer=lambda count, wanted, prompts: 4 - wanted,
        )  # fmt: skip
        costs = RowCosts({8: 1.0, 40: 1.1}, asking={8: asking}, rounds={8: rounds})
        scheduler: Any = SimpleNamespace(
            budgets=SimpleNamespace(costs=costs, limit=np.full(8, 4)),
            host=SimpleNamespace(length=np.full(8, 100)),
        )
        self.asking = Asking(scheduler, self.drafting, MODEL, searches)
        self.asking.priced = True
        self.planned: Any = SimpleNamespace(
            slots=np.arange(8), admitted=(), sequences=[SimpleNamespace(adaptive=True)] * 8, num_rows=40,
            has_prompts=False, drafts=np.full(8, 4), nothing=np.zeros(8, np.int64),
        )  # fmt: skip
        self.draw = np.random.default_rng(3)

    def step(
        self, stands: float, goes_on: float, budget: int = 4, late: float = 0.0, waited: bool = False
    ) -> int:
        """How many rounds are wanted after windows in which so many stand."""
        rounds = self.drafting.most
        table, sources = np.zeros((8, 8), np.int64), np.full((8, 4), SEARCH, np.int8)
        sources[:, :rounds] = MODEL
        chances = [stands] * rounds + [goes_on] * (4 - rounds) + [0.0]
        for line in table:
            stood = [*(self.draw.random(5) < chances)].index(False)
            line[:3] = 1 + stood, 4, stood
        self.asking.hear(self.planned, table, sources, np.ones(8, np.bool_), 8, 4 - rounds, waited)
        self.asking.weigh(self.planned, np.full(8, budget), late)
        return int(self.drafting.most)

    def usual(self, stands: float, goes_on: float, steps: int = 300) -> float:
        return float(np.mean([self.step(stands, goes_on) for _ in range(steps)][steps // 2 :]))


@pytest.mark.parametrize(
    ("stands", "goes_on", "rounds"), [(0.6, 0.6, (2.0, 2.1)), (0.9, 0.1, (3.9, 4.0)), (0.3, 0.1, (2.0, 2.1))]
)
def test_a_search_that_goes_on_saves_rounds(
    stands: float, goes_on: float, rounds: tuple[float, float]
) -> None:
    least, most = rounds
    assert least <= Steps().usual(stands, goes_on) <= most


def test_rounds_without_a_price_are_all_wanted() -> None:
    """As in an engine whose rounds were not timed one by one."""
    assert Steps(rounds=0.0).usual(0.6, 0.6) == 4


def test_what_a_search_cannot_do_it_is_trusted_with_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all rounds nothing is heard of it. Control: nothing is hoped for."""
    for hopes in (HOPES, 0.0):
        monkeypatch.setattr("draftproof.engine.drafting.draft_gate.HOPES", hopes)
        steps = Steps()
        steps.asking._chain[:] = 0.8, 0.01
        found = [steps.step(0.8, 0.8) for _ in range(1200)]
        assert found[0] == 4 and (min(found) == 2) is (hopes > 0)
        assert bool(steps.asking._chain[1] > GOES_ON / 2) is (hopes > 0)


def test_hope_is_for_what_is_not_heard() -> None:
    """Where fewer are wanted than anybody may have, and it is heard how the search goes on, it is believed;
    whoever may have two has all with two."""
    steps = Steps()
    steps.asking._chain[:] = 0.3, 0.01
    for _ in range(200):
        assert steps.step(0.3, 0.0) == 2
    assert steps.asking._chain[1] < 0.01
    steps.planned.drafts, steps.asking._chain[0] = np.full(8, 2), 0.9
    for _ in range(200):
        assert steps.step(0.9, 0.0, budget=2) == 2
    assert steps.asking._chain[1] > 0.1


def test_without_a_search_nothing_goes_on() -> None:
    steps = Steps(searches=False)
    assert {steps.step(0.9, 0.0) for _ in range(300)} <= {3, 4} and steps.asking._chain[1] == 0


def test_a_step_that_was_waited_for_does_not_say_how_often_a_search_finds_nothing() -> None:
    """It was planned with the drafts that there were."""
    for waited in (True, False):
        steps = Steps()
        steps.asking._chain[:] = 0.6, 0.5
        for _ in range(100):
            steps.step(0.6, 0.0, waited=waited)
        stands, goes_on = steps.asking._chain
        assert abs(stands - 0.6) < 0.15 and bool(goes_on == 0.5) is waited


def test_rounds_cost_less_where_the_host_is_late() -> None:
    wanted = {}
    for late in (0.0, 1.0):
        steps = Steps()
        for _ in range(50):
            steps.step(0.7, 0.3, late=late)
        steps.asking._chain[:] = 0.7, 0.3
        wanted[late] = steps.step(0.7, 0.3, late=late)
    assert wanted[1.0] > wanted[0.0]


def test_beside_prompts_there_may_be_more_rounds_than_wanted() -> None:
    steps, prices = Steps(), []
    steps.drafting.fewer = lambda count, wanted, prompts: 0 if prompts else 4 - wanted
    for _ in range(20):
        steps.step(0.5, 0.5)
    for prompts in (False, True):
        steps.planned.has_prompts = prompts
        steps.asking.weigh(steps.planned, np.full(8, 4))
        prices.append(steps.asking._price)
    assert prices[1] > 1.5 * prices[0] > 0


def test_what_a_step_took_is_reckoned_with_its_rounds() -> None:
    dear = [Steps(rounds, asking=2.0) for rounds in (0.45, 0.0)]
    for steps in dear:
        for _ in range(20):
            steps.drafting.most = 2
            steps.step(0.8, 0.8)
    assert dear[0].asking._spent < dear[1].asking._spent - 0.5


@pytest.mark.parametrize("rounds", [0.45, 0.0])
def test_what_it_takes_to_ask_depends_on_the_rounds(rounds: float) -> None:
    """All of them would be too dear, half of them are not. Control: fewer are no cheaper."""
    steps = Steps(rounds, asking=2.0)
    found = []
    for _ in range(100):
        steps.step(0.8, 0.8)
        found.append(steps.drafting.asks)
    assert all(found[20:]) is (rounds > 0)


def test_no_more_than_anybody_may_have() -> None:
    steps = Steps()
    steps.asking._chain[:] = 0.9, 0.1
    steps.step(0.9, 0.1)
    assert steps.step(0.9, 0.1) == 4 and steps.step(0.9, 0.1, budget=2) == 2
    steps.planned.sequences[3] = SimpleNamespace(adaptive=False)
    assert steps.step(0.5, 0.9, budget=2) == 4  # somebody is to have all there can be
