"""Draft budgets: beliefs, prices, and probes that cost what they may. What it gains: test_adaptive.py."""

from __future__ import annotations

import random

import numpy as np
import pytest

import proposers
import tiny
from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.budget import REST, SHARE, DraftBudgets
from draftproof.engine.drafting.budget_kernels import RATES, WORTH
from draftproof.engine.drafting.step_cost import RowCosts
from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams

FLAT = {1: 1.0, 8: 1.0, 64: 1.0}  # rows are free: the weights are what takes time
STEEP = {n: float(n) for n in range(1, 129)}  # every row costs as much as the first
STEPS = {4: 1.0, 8: 1.1, 16: 2.0, 32: 4.0}


def budgets(seconds, limits, adaptive=True):
    made = DraftBudgets(len(limits), RowCosts(seconds, learns=False))
    for slot, limit in enumerate(limits):
        made.start(slot, limit, adaptive)
    return made


def ask(made):
    """All slots."""
    return made.take(np.arange(len(made.limit)), made.limit, keys=0)


def run(made, accepts, steps):
    """[steps, slots] the drafts of every window; accepts(step, granted) of them stand."""
    slots, given = np.arange(len(made.limit)), []
    for step in range(steps):
        granted = ask(made)
        made.pay(slots, granted, int(granted.sum()))
        made.record(slots, granted, np.minimum(accepts(step, granted), granted))
        given.append(granted)
    return np.array(given)


def learn(made):
    """What was recorded, as `take` does."""
    made._listen()
    budget_kernels.believe(made._columns, made._minds, np.arange(len(made.limit)), made.limit, 0.0)


def nothing(_, granted):
    return 0 * granted


def everything(_, granted):
    return granted


# --- beliefs --------------------------------------------------------------------------------------------


def test_free_rows_are_used_and_dear_ones_are_not():
    assert ask(budgets(FLAT, [5, 3, 0, 8])).tolist() == [5, 3, 0, 8]
    assert ask(budgets(STEEP, [5, 3, 0, 8])).tolist() == [0, 0, 0, 0]
    assert ask(budgets(STEPS, [5] * 4)).sum() == 4  # the second size is nearly as quick
    assert ask(budgets(STEPS, [5] * 40)).sum() == 0  # more rows than were ever measured


def test_drafts_go_to_those_whose_drafts_stand():
    made = budgets(STEPS, [5] * 4)
    slots = np.arange(4)
    for _ in range(20):
        made.record(slots, np.full(4, 5), np.array([5, 0, 0, 1]))
    given = ask(made).tolist()
    assert given[0] >= 4 - 1 and given[1] == given[2] == 0 and sum(given) == 4


def test_rows_set_aside_for_nothing_count_against_a_request():
    """Its proposer found no drafts: the rows were there all the same."""
    made = budgets(STEPS, [4, 4])
    for _ in range(20):
        made.record(np.arange(2), np.array([4, 4]), np.array([4, 0]))
    first, second = ask(made).tolist()
    assert first > second


def test_windows_without_rows_say_nothing():
    made = budgets(STEPS, [4, 4])
    before = made._belief.copy()
    made.record(np.arange(2), np.array([0, 0]), np.array([0, 0]))
    learn(made)
    assert (made._belief == before).all()


def test_newcomers_begin_with_what_was_learned():
    """Where all drafts fell nobody hopes that the next text is different; and the other way round."""
    hopeful, sober = budgets(STEPS, [5] * 4), budgets(STEPS, [5] * 4)
    run(hopeful, everything, 40)
    run(sober, nothing, 400)
    slots = np.arange(4)
    for made in (hopeful, sober):
        for slot in slots:
            made.start(slot, 5, True)
    assert ask(hopeful).sum() > 4
    sober._purse = 0.0
    assert ask(sober).sum() == 0


def test_a_long_request_is_still_one_request():
    """What newcomers are expected to do is not decided by one that has talked for hours."""
    made = budgets(FLAT, [5, 5])
    run(made, lambda _, granted: np.array([granted[0], 0]), 2000)
    alike = made._newcomer @ RATES
    assert 0.2 < alike < 0.8


def test_a_belief_fades_while_nothing_is_heard():
    made = budgets(STEEP, [5] * 2)
    made.record(np.array([0]), np.array([5]), np.array([0]))
    learn(made)
    low = made._belief[0] @ RATES
    for _ in range(100):
        ask(made)
    assert low < made._belief[0] @ RATES < made._newcomer @ RATES + 0.05


def test_a_slot_begins_anew_with_each_request():
    made = budgets(FLAT, [8, 8])
    run(made, nothing, 60)
    made.start(1, 6, True)
    assert (made._belief[1] == made._newcomer).all()
    assert ask(made)[1] <= 6


def test_windows_are_put_together_and_say_what_they_say_one_by_one():
    several, each = (budgets(FLAT, [8] * 3) for _ in range(2))
    draw = np.random.default_rng(1)
    for _ in range(40):
        granted = draw.integers(0, 5, 3)
        accepted = np.minimum(draw.integers(0, 5, 3), granted)
        for made in (several, each):
            made.record(np.arange(3), granted, accepted)
        learn(each)
    learn(several)
    assert several._belief == pytest.approx(each._belief)
    assert (several._windows == each._windows).all()
    assert several._newcomer == pytest.approx(each._newcomer, abs=0.1)  # of newcomers the latest counts


def test_what_is_heard_of_a_predecessor_says_nothing_of_whoever_sits_there_now():
    made = budgets(FLAT, [8, 8])
    made.record(np.arange(2), np.array([8, 8]), np.array([0, 0]))
    made.start(1, 8, True)
    made.record(np.arange(2), np.array([0, 2]), np.array([0, 2]))
    learn(made)
    low, high = made._belief @ RATES
    assert low < 0.3 and high > 0.6 and made._windows.tolist() == [1, 1]


def test_what_was_decided_holds_for_some_steps_whoever_comes():
    made, slots, others = budgets(FLAT, [5, 5, 5]), np.arange(2), np.array([0, 2])
    assert made.take(slots, made.limit[slots], 0).tolist() == [5, 5]
    assert made.again(slots) is made.again(slots)
    assert made.again(others) is None  # the host has time to look at them
    for _ in range(99):
        made.costs.hosted(5.0)  # now it has none
    made.take(slots, made.limit[slots], 0)
    made.start(2, 3, True)  # with as many as somebody of whom nothing is known had
    assert made.again(others).tolist() == [5, 3]
    for _ in range(REST - 1):
        assert made.again(others) is not None
    assert made.again(others) is None
    made = budgets(STEEP, [5, 5])
    made._purse = 0.0
    assert not ask(made).any() and made._rest
    made.start(1, 5, False)  # nobody had any: it is time to look again
    assert made.again(np.arange(2)) is None and ask(made).tolist() == [0, 5]


def test_a_fixed_budget_stays_whatever_happens_and_whatever_it_costs():
    made = budgets(STEEP, [5, 3], adaptive=False)
    assert (run(made, nothing, 50) == [5, 3]).all()
    made.start(1, 3, True)  # beside one that adapts
    given = run(made, nothing, 50)
    assert (given[:, 0] == 5).all() and given[:, 1].sum() < 10


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_of_drafts_is_quicker(seed):
    """Of all sizes of a step: committed tokens a second, with the likeliest drafts first."""
    chance = random.Random(seed)
    limits = [chance.randint(0, 6) for _ in range(chance.randint(1, 6))]
    seconds = {n: 1 + chance.random() * n / 9 for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)}
    made = budgets(seconds, limits)
    slots = np.arange(len(limits))
    for _ in range(4):
        made.record(slots, np.full(len(limits), 4), np.array([chance.randint(0, 4) for _ in limits]))
    made._purse = -1.0  # no probes
    given = ask(made)
    assert (given >= 0).all() and (given <= limits).all()
    chances = [[float(belief @ RATES**n) for n in range(1, 7)] for belief in made._belief]
    gains = sorted((p for ps, most in zip(chances, limits, strict=True) for p in ps[:most]), reverse=True)
    gains = [p for p in gains if p > WORTH]

    def rate(count):
        rows = len(limits) + count
        size = min((n for n in seconds if n >= rows), default=None)
        slowest = max(t for n, t in seconds.items() if n <= size) if size else np.inf
        return (len(limits) + sum(gains[:count])) / slowest

    free = int(given.sum()) - sum(p > WORTH for ps, n in zip(chances, given, strict=True) for p in ps[:n])
    best = max(rate(count) for count in range(len(gains) + 1))
    assert rate(int(given.sum()) - free) == pytest.approx(best)
    kept = sorted((p for ps, n in zip(chances, given, strict=True) for p in ps[:n]), reverse=True)
    assert kept[: len(kept) - free] == pytest.approx(gains[: len(kept) - free])


# --- beside prompts -------------------------------------------------------------------------------------


def believing(limits, stood):
    made = budgets({8: 1.0, 16: 1.1, 32: 4.0}, limits)
    slots = np.arange(len(limits))
    for _ in range(20):
        made.record(slots, np.full(len(limits), 4), np.array(stood))
    return made, slots


def test_drafts_give_way_where_prompts_would_make_a_step_too_large():
    """16 rows are quick, 32 are not: with five rows of prompts three of eight drafts have room."""
    made, slots = believing([4] * 4, [4, 4, 0, 0])
    asked = np.array([4, 4, 0, 0])
    assert made.fit(slots, asked, 8).tolist() == asked.tolist()  # just so
    less = made.fit(slots, asked, 8 + 5)
    assert less.sum() == 3 and (less <= asked).all()
    assert made.fit(slots, asked, 40).tolist() == asked.tolist()  # of such steps nothing is known


def test_fixed_drafts_give_way_to_nobody_and_probes_take_what_is_left():
    made, slots = believing([4] * 4, [4, 4, 0, 0])
    made._fixed[0] = True
    assert made.fit(slots, np.array([4, 4, 0, 0]), 10).tolist() == [4, 2, 0, 0]
    ask(made)
    made._probed[3], made._last[3] = True, 2 * WORTH
    assert made.fit(slots, np.array([4, 1, 0, 1]), 10).tolist() == [4, 1, 0, 1]
    assert made.fit(slots, np.array([4, 1, 0, 1]), 11).tolist() == [4, 1, 0, 0]


def test_a_few_drafts_that_must_go_are_those_that_will_fall():
    made, slots = believing([4] * 4, [4, 2, 1, 0])
    asked = ask(made)
    assert asked.sum() == 12  # 16 rows are full
    one, three = (made.fit(slots, asked, 4 + prompts) for prompts in (1, 3))
    assert (one.sum(), three.sum()) == (11, 9) and one[0] == three[0] == 4
    whole = made._cut
    made._cut = lambda slots, drafts, rows, over: drafts
    assert made.fit(slots, asked, 5).sum() == 12  # and then it is the larger size
    made._cut = whole
    made.costs = RowCosts({8: 1.0, 16: 1.1, 32: 1.101}, learns=False)
    assert made.fit(slots, asked, 5) is asked  # which is as well where it costs no more


# --- probes ---------------------------------------------------------------------------------------------

PRICES = {
    "steep": STEEP,
    "steps": {16: 1.0, 32: 1.4, 48: 1.7, 64: 2.0, 128: 3.0},
    "a cliff": {16: 1.0, 24: 2.0, 32: 2.1, 64: 2.2},
    "fine": {n: 1 + n / 50 for n in range(1, 200)},
}


@pytest.mark.parametrize("name", PRICES)
def test_probes_cost_what_they_may_and_everybody_has_a_turn(name):
    seconds = PRICES[name]
    made = budgets(seconds, [8] * 16)
    run(made, nothing, 200)  # until nobody expects anything any more
    given = run(made, nothing, 4000)
    costs = RowCosts(seconds)
    plain, spent = costs.of(16), sum(costs.of(16 + int(n.sum())) for n in given)
    assert given.max() <= 1
    assert 0.5 * SHARE < spent / (4000 * plain) - 1 <= 1.2 * SHARE
    turns = given.sum(0)
    assert turns.min() > 0 and turns.max() - turns.min() <= 1  # in turn


def test_without_a_purse_probes_cost_more_than_they_may(monkeypatch):
    """Control: the test above sees it."""
    monkeypatch.setattr(DraftBudgets, "pay", lambda self, *_: setattr(self, "_purse", 10.0))
    with pytest.raises(AssertionError):
        test_probes_cost_what_they_may_and_everybody_has_a_turn("steps")


def test_probes_that_find_no_drafts_cost_nothing():
    """Their rows were not planned: the purse keeps its money."""
    made = budgets(PRICES["steps"], [8] * 16)
    run(made, nothing, 200)
    slots, asked = np.arange(16), 0
    for _ in range(300):
        asked += int(ask(made).sum() > 0)
        made.pay(slots, np.zeros(16, np.int64), 0)
    assert asked > 200


@pytest.mark.parametrize(("name", "steps"), [("steps", 60), ("fine", 60), ("a cliff", 120)])
def test_texts_that_turn_into_copies_are_soon_noticed(name, steps):
    """Half of them do, all at once, after all had long been given up."""
    made = budgets(PRICES[name], [8] * 16)
    run(made, nothing, 500)
    copies = np.arange(16) % 2 == 1
    given = run(made, lambda _, granted: np.where(copies, granted, 0), 300)
    late = given[-100:].sum(1).mean()  # what it comes to, once all is known
    assert late > 30
    assert (given.sum(1) >= 0.7 * late)[steps:].mean() > 0.95


def test_a_probe_that_stands_is_followed_by_longer_ones_at_once():
    """Though the purse is too empty for another round of probes, and one of 16 that copies hardly pays."""
    made = budgets(PRICES["steps"], [8] * 16)
    run(made, nothing, 500)
    one = np.arange(16) == 11
    given = run(made, lambda _, granted: np.where(one, granted, 0), 120)[:, 11]
    first = int(np.argmax(given > 0))
    assert given[first : first + 2].tolist() == [1, 2]


# --- in a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_on_the_cpu_knows_what_rows_cost(overlap):
    """Timed at start, corrected by its steps; a fixed draft length needs no table; the output is the same."""
    asks = [tiny.request(i, SamplingParams(max_tokens=24, logprobs=2)) for i in range(3)]
    want = tiny.run(tiny.engine(), asks)
    spec = {"method": "ngram", "num_speculative_tokens": 4}
    target = tiny.engine(speculative=spec, warm_up=True, overlap=overlap)
    costs = target.loop.scheduler.budgets.costs
    assert costs._rows == list(range(1, 8 * 5 + 1))
    got = tiny.run(target, asks)
    assert all(got[name].same() == want[name].same() for name in want)
    assert costs._speed > 0
    fixed = tiny.engine(speculative={**spec, "adaptive": False}, warm_up=True)
    assert not fixed.loop.scheduler.budgets.costs.learns


def test_junk_costs_little_and_a_request_may_ask_for_a_fixed_number():
    """In a real run: far fewer drafts than a fixed length asks for, and the same tokens."""
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 8}
    drafted, tokens = {}, []
    proposers.set_answers({})
    for engine, wish in ((True, None), (False, None), (True, False), (False, True)):
        speculative = {} if wish is None else {"adaptive": wish}
        params = SamplingParams(max_tokens=60, temperature=0.7, ignore_eos=True, speculative=speculative)
        target = tiny.engine(speculative={**spec, "adaptive": engine})
        record = tiny.run(target, [tiny.request(0, params)])["0"]
        drafted[engine, wish] = sum(step.num_draft for step in record.steps)
        tokens.append(record.token_ids)
    assert all(line == tokens[0] for line in tokens)
    assert drafted[True, None] == drafted[False, True] < drafted[False, None] / 3
    assert drafted[False, None] == drafted[True, False]


def test_a_wish_that_is_no_wish_is_refused():
    with pytest.raises(RequestError, match="adaptive must be true or false, not 'yes'"):
        SamplingParams(speculative={"adaptive": "yes"})
    for wish in ({"num_speculative_tokens": 3}, {"adaptive": False}):
        with pytest.raises(RequestError, match=f"{next(iter(wish))} says nothing without drafts"):
            SamplingParams(speculative={"enabled": False, **wish})


def test_drafts_that_gave_way_to_prompts_change_nothing(monkeypatch):
    """In a run with overlap: they were on the device already. The bits are those without drafts."""
    arrivals = [0, 0, 0, 7, 9, 12, 15]
    asks = [tiny.request(i, SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True)) for i in range(7)]
    want = tiny.run(tiny.engine(), asks, arrivals)
    cut, fit = [], DraftBudgets.fit

    def spy(self, slots, drafts, rows):
        less = fit(self, slots, drafts, rows)
        cut.append(int(drafts.sum() - less.sum()))
        return less

    monkeypatch.setattr(DraftBudgets, "fit", spy)
    target = tiny.engine(speculative={"method": "ngram", "num_speculative_tokens": 4}, overlap=True)
    target.loop.scheduler.budgets.costs = RowCosts({8: 1.0, 16: 1.05, 64: 9.0}, learns=False)
    got = tiny.run(target, asks, arrivals)
    assert sum(cut) > 0
    assert all(got[name].same() == want[name].same() for name in want)
