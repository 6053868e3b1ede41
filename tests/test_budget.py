"""Draft budgets: fewer for those whose drafts fall, and no more than pay for their rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

import proposers
import tiny
from draftproof.engine.budget import MAX_PAUSE, PROBE, DraftBudgets, RowCosts
from draftproof.sampling_params import SamplingParams

SLOT = np.array([1])


def budgets(limit, adaptive):
    """Of three slots; the middle one is looked at, its neighbours live differently."""
    made = DraftBudgets(3, adaptive)
    for slot, most in enumerate((64, limit, 0)):
        made.start(slot, most)
    return made


def take(made):
    return int(made.take(SLOT)[0])


def record(made, drafted, accepted):
    granted = np.array([7, drafted, 0])
    made.record(np.arange(3), granted, granted, np.array([7, accepted, 0]))


def taken(made, accepts, steps):
    """The draft lengths of `steps` windows in which `accepts(n)` of n drafts stand."""
    lengths = []
    for _ in range(steps):
        lengths.append(take(made))
        record(made, lengths[-1], accepts(lengths[-1]))
    return lengths


def test_the_budget_backs_off_and_pauses_longer_each_time():
    lengths = taken(budgets(8, True), lambda n: 0, 400)
    assert lengths[:5] == [2, 1, 0, 0, 1]
    assert max(lengths[2:]) == 1
    probes = [i for i, n in enumerate(lengths) if n == 1]
    gaps = [b - a - 1 for a, b in zip(probes, probes[1:], strict=False)]
    assert gaps[:5] == [2, 4, 8, 16, MAX_PAUSE] and set(gaps[5:]) == {MAX_PAUSE}


def test_the_budget_doubles_while_drafts_stand():
    made = budgets(8, True)
    assert taken(made, lambda n: n, 4) == [2, 4, 8, 8]
    taken(made, lambda n: 0, 50)
    lengths = taken(made, lambda n: n, 60)
    begin = lengths.index(1)
    assert lengths[begin:] == [1, 2, 4] + [8] * (60 - begin - 3)
    assert taken(made, lambda n: 0, 7) == [8, 4, 2, 1, 0, 0, 1]  # the pause is short again


def test_the_budget_follows_what_stood():
    made = budgets(8, True)
    record(made, 8, 3)
    assert take(made) == 4
    record(made, 2, 2)  # cut short by the rows of a step: all stood
    assert take(made) == 8


def test_windows_without_drafts_say_nothing_and_a_fixed_budget_stays():
    made = budgets(8, True)
    for _ in range(20):
        record(made, 0, 0)
    assert take(made) == 2
    assert set(taken(budgets(5, False), lambda n: 0, 50)) == {5}
    assert set(taken(budgets(0, True), lambda n: 0, 5)) == {0}


def test_a_slot_begins_anew_with_each_request():
    made = budgets(8, True)
    taken(made, lambda n: 0, 60)
    made.start(1, 6)
    assert taken(made, lambda n: n, 4) == [2, 4, 6, 6]
    made.start(1, 1)
    assert taken(made, lambda n: n, 2) == [1, 1]


def test_budgets_are_each_slots_own():
    """Hundreds of slots in any order and company: each as if it were alone."""
    chance = random.Random(6)
    together, alone = DraftBudgets(40, True), [DraftBudgets(1, True) for _ in range(40)]
    for slot in range(40):
        together.start(slot, 1 + slot % 9)
        alone[slot].start(0, 1 + slot % 9)
    zero = np.array([0])
    for _ in range(60):
        slots = np.array(chance.sample(range(40), chance.randint(1, 40)))
        got = together.take(slots)
        assert got.tolist() == [int(alone[s].take(zero)[0]) for s in slots]
        stood = np.array([chance.choice([0, 0, n, chance.randint(0, n)]) for n in got.tolist()])
        together.record(slots, got, got, stood)
        for s, drafted, accepted in zip(slots, got, stood, strict=True):
            alone[s].record(zero, drafted[None], drafted[None], accepted[None])


# --- where rows have a price ----------------------------------------------------------------------------

FLAT = RowCosts({1: 1.0, 8: 1.0, 64: 1.0})  # rows are free: the weights are what takes time
STEEP = RowCosts({n: float(n) for n in range(1, 129)})  # every row costs as much as the first
STEPS = RowCosts({4: 1.0, 8: 1.1, 16: 2.0, 32: 4.0})


def priced(costs, limits):
    made = DraftBudgets(len(limits), True)
    made.costs = costs
    for slot, limit in enumerate(limits):
        made.start(slot, limit)
    return made


def test_free_rows_are_used_and_dear_ones_are_not():
    slots = np.arange(4)
    assert priced(FLAT, [5, 3, 0, 8]).take(slots).tolist() == [5, 3, 0, 8]
    assert priced(STEEP, [5, 3, 0, 8]).take(slots).tolist() == [0, 0, 0, 0]
    assert priced(STEPS, [5] * 4).take(slots).sum() == 4  # the second size is nearly as quick
    assert priced(STEPS, [5] * 40).take(np.arange(40)).sum() == 0  # more rows than were ever measured


def test_drafts_go_to_those_whose_drafts_stand():
    made = priced(STEPS, [5] * 4)
    slots = np.arange(4)
    for _ in range(20):
        made.record(slots, np.full(4, 5), np.full(4, 5), np.array([5, 0, 0, 1]))
    given = made.take(slots).tolist()
    assert given[0] >= 4 - 1 and given[1] == given[2] == 0 and sum(given) == 4


def test_rows_set_aside_for_nothing_count_against_a_request():
    """Its proposer found no drafts: the rows were there all the same."""
    made = priced(FLAT, [4, 4])
    for _ in range(20):
        made.record(np.arange(2), np.array([4, 4]), np.array([4, 0]), np.array([4, 0]))
    made.costs = STEPS
    assert made.take(np.arange(2)).tolist()[0] > made.take(np.arange(2)).tolist()[1]


def test_those_who_were_given_up_are_tried_again():
    made = priced(RowCosts({2: 1.0, 4: 1.3, 8: 2.5}), [4, 4])
    slots, given = np.arange(2), []
    for _ in range(3 * PROBE):
        given.append(int(made.take(slots).sum()))
        made.record(slots, np.array([2, 2]), np.array([2, 2]), np.array([0, 0]))
    late = given[PROBE:]
    assert 0 < sum(n > 0 for n in late) <= 4


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_of_drafts_is_quicker(seed):
    """Of all sizes of a step: committed tokens a second, with the likeliest drafts first."""
    chance = random.Random(seed)
    limits = [chance.randint(0, 6) for _ in range(chance.randint(1, 6))]
    seconds = {n: 1 + chance.random() * n / 9 for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)}
    costs = RowCosts(seconds)
    made = priced(costs, limits)
    slots = np.arange(len(limits))
    for _ in range(4):
        stood = np.array([chance.randint(0, 4) for _ in limits])
        made.record(slots, np.full(len(limits), 4), np.full(len(limits), 4), stood)
    likely = np.minimum(made._stood / (made._stood + made._fell), 0.98)
    given = made.take(slots)
    assert (given >= 0).all() and (given <= limits).all()
    gains = sorted(
        (likely[i] ** n for i, most in enumerate(limits) for n in range(1, most + 1)), reverse=True
    )

    def rate(count):
        rows = len(limits) + count
        size = min((n for n in seconds if n >= rows), default=None)
        slowest = max(t for n, t in seconds.items() if n <= size) if size else np.inf
        return (len(limits) + sum(gains[:count])) / slowest

    best = max(rate(count) for count in range(len(gains) + 1))
    assert rate(int(given.sum())) == pytest.approx(best)
    kept = sorted((likely[i] ** n for i, most in enumerate(given) for n in range(1, most + 1)), reverse=True)
    assert kept == pytest.approx(gains[: len(kept)])


def test_real_steps_correct_the_table():
    """Empty steps said that 16 rows cost as much as 8; real ones say twice as much; 12 lie between."""
    costs = RowCosts({1: 1.0, 8: 1.0, 12: 1.0, 16: 1.0, 32: 1.0})
    gains = np.full(24, 0.5)
    assert costs.best(8, gains) == 24
    for _ in range(60):
        costs.observe(8, 2.0)
        costs.observe(16, 4.0)
    assert costs._seconds.tolist() == pytest.approx([2.0, 2.0, 3.0, 4.0, 4.0])
    assert costs.best(8, gains[:8]) == 0  # twice the time for one and a half times the tokens
    assert costs.best(8, gains) == 24  # of 32 rows nothing else is known than that 16 took twice as long


def test_a_pause_is_no_cost_and_larger_steps_are_never_quicker():
    costs = RowCosts({1: 1.0, 8: 1.2})
    costs.observe(8, 100.0)
    assert costs._seconds.tolist() == [1.0, 1.2]
    costs.observe(1, 2.0)
    costs.observe(8, 1.0)
    assert costs._seconds.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_on_the_cpu_knows_what_rows_cost(overlap):
    """Timed at start, corrected by its steps; a fixed draft length needs no table; the output is the same."""
    asks = [tiny.request(i, SamplingParams(max_tokens=24, logprobs=2)) for i in range(3)]
    want = tiny.run(tiny.engine(), asks)
    spec = {"method": "ngram", "num_speculative_tokens": 4}
    target = tiny.engine(speculative=spec, warm_up=True, overlap=overlap)
    costs = target.loop.scheduler.budgets.costs
    assert costs is not None and costs._sizes[0] == 1 and costs._sizes[-1] == 8 * 5
    got = tiny.run(target, asks)
    assert all(got[name].same() == want[name].same() for name in want)
    assert not np.isnan(costs._ratio).all()
    fixed = tiny.engine(speculative={**spec, "adaptive": False}, warm_up=True)
    assert fixed.loop.scheduler.budgets.costs is None


def test_a_fixed_budget_has_no_price():
    made = DraftBudgets(2, False)
    made.costs = STEEP
    made.start(0, 5)
    made.start(1, 3)
    assert made.take(np.arange(2)).tolist() == [5, 3]


# --- in a run -------------------------------------------------------------------------------------------


def test_junk_costs_little():
    """Backing off in a real run: far fewer drafts than a fixed length asks for, and the same tokens."""
    params = SamplingParams(max_tokens=60, temperature=0.7, ignore_eos=True)
    drafted, tokens = [], []
    for adaptive in (True, False):
        proposers.set_answers({})
        spec = {"method": "proposers:Flaky", "num_speculative_tokens": 8, "adaptive": adaptive}
        record = tiny.run(tiny.engine(speculative=spec), [tiny.request(0, params)])["0"]
        drafted.append(sum(step.num_draft for step in record.steps))
        tokens.append(record.token_ids)
    assert tokens[0] == tokens[1]
    assert drafted[0] < drafted[1] / 5
