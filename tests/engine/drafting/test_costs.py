"""What a step costs: rows by a table, keys and the table's shape learned from real steps, noise and all."""

from __future__ import annotations

import numpy as np
import pytest

from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.step_cost import RowCosts
from draftproof.engine.drafting.step_cost_filter import ASKED, DEAR, Clocked

TABLE = {n: 10 + n / 2 for n in range(1, 129)}  # an empty step

H200 = {1: 0.346, 8: 0.379, 16: 0.391, 32: 0.446, 64: 0.496, 80: 0.555, 96: 0.655, 128: 0.746, 160: 0.749}
H200 |= {192: 0.754, 256: 0.789, 320: 0.825, 512: 1.0}  # milliseconds, padded


def feed(costs, true, steps=300, noise=lambda step: 1.0, keys=8000):
    """Steps of 32 requests, with 0 to 40 drafts."""
    for step in range(steps):
        rows = 32 + step * 7 % 41
        costs.observe(rows, keys + step, true(rows, keys + step) * noise(step))


def shape(costs, true, keys=8000):
    """[2] what 72 rows cost over what 32 rows do: as is thought, and in truth."""
    thought = (costs.of(72) + costs.still(keys)) / (costs.of(32) + costs.still(keys))
    return thought, true(72, keys) / true(32, keys)


@pytest.mark.parametrize("each", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("speed", [0.3, 1.0, 4.0])
def test_real_steps_tell_what_keys_cost(each, speed):
    """Whatever the speed of the machine is now, and was when the table was timed."""
    costs = RowCosts(TABLE)

    def true(rows, keys):
        return speed * (TABLE[rows] + each * keys)

    feed(costs, true)
    thought, truth = shape(costs, true)
    assert thought == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_steps_that_took_no_time_say_nothing(seconds):
    """Drafts have prices of their own, and what they took may be another step's."""
    costs = RowCosts(TABLE)
    for _ in range(3):
        costs.observe(32, 8000, seconds)
    feed(costs, lambda rows, _: TABLE[rows])
    assert shape(costs, lambda rows, _: TABLE[rows])[0] == pytest.approx(TABLE[72] / TABLE[32], rel=0.05)


def test_rows_that_are_dearer_than_empty_ones_are_found_out():
    costs = RowCosts(TABLE)

    def true(rows, _):
        return TABLE[rows] + rows / 2

    feed(costs, true)
    thought, truth = shape(costs, true)
    assert thought == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("between", [False, True])
def test_a_table_of_the_wrong_shape_is_put_right(between):
    """Empty steps of 48 rows and more were too quick: with keys they go another way."""
    sizes = (1, 16, 32, 48, 64, 72, 128)
    costs = RowCosts({n: TABLE[n] for n in sizes}, between)

    def true(rows, keys):
        size = rows if between else min(n for n in sizes if n >= rows)
        return (TABLE[size] + 0.001 * keys) * (1.3 if size >= 48 else 1.0)

    assert shape(costs, true)[0] < 0.9 * shape(costs, true)[1]
    feed(costs, true, 3000)
    thought, truth = shape(costs, true)
    assert thought == pytest.approx(truth, rel=0.08)
    assert costs._empty == sorted(costs._empty)


def slow_minutes(step):
    return 3.0 if step // 50 % 2 else 1.0


def pauses(step):
    return 40.0 if step % 10 == 5 else 1.0


def read_late(step):
    return 1.25 if step % 2 else 0.75  # and the next looks as much too quick


@pytest.mark.parametrize("noise", [slow_minutes, pauses, read_late])
def test_what_disturbs_all_steps_alike_is_not_taken_for_a_price(noise):
    costs = RowCosts(TABLE)

    def true(rows, keys):
        return TABLE[rows] + 0.002 * keys

    feed(costs, true, 600, noise)
    thought, truth = shape(costs, true)
    assert thought == pytest.approx(truth, rel=0.05)


def test_pauses_that_are_believed_spoil_the_prices(monkeypatch):
    """Control: the test above sees it."""
    for name in ("SLOW", "DISTURBED"):
        monkeypatch.setattr(f"draftproof.engine.drafting.step_cost_filter.{name}", 1e9)
    with pytest.raises(AssertionError):
        test_what_disturbs_all_steps_alike_is_not_taken_for_a_price(pauses)


@pytest.mark.parametrize("begins_anew", [True, False])
def test_a_first_step_that_was_far_too_quick_is_forgotten(begins_anew, monkeypatch):
    """Else every step after it looks like a pause, and none of them is believed (the control)."""
    if not begins_anew:
        monkeypatch.setattr("draftproof.engine.drafting.step_cost_filter.PAUSES", 10**9)
    costs = RowCosts(TABLE)
    costs.observe(32, 8000, 0.001 * TABLE[32])

    def true(rows, keys):
        return TABLE[rows] + 0.002 * keys

    feed(costs, true, 600, lambda step: 1.0)
    thought, truth = shape(costs, true)
    assert (thought == pytest.approx(truth, rel=0.05)) is begins_anew
    known = costs._speed
    for _ in range(5):  # some pauses change nothing
        costs.observe(32, 8000, 900.0)
    assert costs._speed == known


def ratio(costs, keys=27000):
    """What 192 rows cost over what 64 do."""
    return (costs.of(192) + costs.still(keys)) / (costs.of(64) + costs.still(keys))


def test_steps_that_are_alike_tell_nothing():
    """They are slower than the table said, and it may be rows or keys: what was thought at first stays."""
    costs = RowCosts(H200)
    costs.observe(64, 27000, 0.95)
    before = ratio(costs)
    for step in range(500):
        costs.observe(64, 27000, 2.4 if step > 250 else 0.95)
    assert ratio(costs) == pytest.approx(before, rel=0.04)


def switching(costs, visits):
    """Steps of two sizes, some of each in turn; with keys the larger one is dearer than when it was empty."""
    for visit in range(visits):
        for _ in range(6):
            rows, seconds = (192, 1.53) if visit % 2 else (64, 0.944)
            costs.observe(rows, 27000, seconds)


def test_a_size_that_is_dearer_than_it_was_empty_is_known_after_a_visit():
    costs = RowCosts(H200)
    switching(costs, 1)
    assert ratio(costs) < 0.85 * 1.53 / 0.944
    switching(costs, 2)
    assert ratio(costs) == pytest.approx(1.53 / 0.944, rel=0.06)
    assert costs.of(256) > 1.05 * H200[256]  # and those near it are thought to be


def test_control_sizes_that_are_not_bent(monkeypatch):
    monkeypatch.setattr("draftproof.engine.drafting.step_cost_filter.BENT", 1e-6)
    with pytest.raises(AssertionError):
        test_a_size_that_is_dearer_than_it_was_empty_is_known_after_a_visit()


def test_a_size_that_was_dear_once_is_not_dear_for_ever():
    """Nobody chose it since, so nobody can have noticed that it was the moment that was bad."""
    costs = RowCosts(H200)
    switching(costs, 2)
    dear = ratio(costs)
    for _ in range(40000):
        costs.observe(64, 27000, 0.944)
    assert ratio(costs) < 0.9 * dear


@pytest.mark.parametrize("first", [12800, 40])
def test_noise_pushes_prices_nowhere(first):
    """Two sizes, as they were timed, the same keys all the time; the first request was short, or was not."""
    costs, draw = RowCosts(H200), np.random.default_rng(3)
    costs.observe(64, first, H200[64] + 2e-5 * first)
    for step in range(20000):
        rows = 96 if step % 4 == 0 else 64
        seconds = H200[rows] + 2e-5 * 12800
        costs.observe(rows, 12800, seconds * np.exp(0.1 * draw.normal() - 0.005))
    assert 0.5 < costs.still(12800) / (2e-5 * 12800) < 1.5


@pytest.mark.parametrize("times", [30, 300, 1000])
def test_a_first_step_that_was_a_pause_is_soon_forgotten(times):
    """It was compiled, or captured, while everybody waited."""
    costs = RowCosts(TABLE)
    costs.observe(32, 8000, times * 36.0)
    feed(costs, lambda rows, keys: TABLE[rows] + 0.001 * keys, 200)
    thought, truth = shape(costs, lambda rows, keys: TABLE[rows] + 0.001 * keys)
    assert thought == pytest.approx(truth, rel=0.1)


def test_after_a_rest_no_less_is_known_of_asking_than_at_first():
    clock = Clocked([32, 40], np.array([26.0, 30.0]))
    for step in range(4000):
        clock.hear([(step % 2, 1.0)], 8000, 10.0 if step < 40 and step % 3 else 0.0, 36.0)
    assert clock._doubt[ASKED, ASKED] ** 0.5 < 1.5 * DEAR * 26.0 * clock.speed


def test_larger_steps_are_never_quicker():
    costs = RowCosts({1: 1.0, 8: 1.2, 16: 1.1})
    assert costs.of(16) == costs.of(8) == 1.2


def best(costs, rows, still, tokens, gains, asking=0.0, least=0.0):
    return budget_kernels.best(costs.table, np.sort(gains), rows, tokens, still, least, asking)[0]


def test_the_more_a_step_costs_without_drafts_the_more_drafts_pay():
    costs, gains = RowCosts(TABLE), np.linspace(0.9, 0.1, 64)
    counts = [best(costs, 32, still, 32.0, gains) for still in (-8.0, 0.0, 20.0, 80.0)]
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[-1]


def test_where_nothing_was_measured_the_clock_is_not_asked():
    costs = RowCosts.guess(24)
    before = costs.of(8)
    costs.observe(8, 100, 100.0)
    assert (
        not costs.learns
        and costs.still(100) == 0
        and costs.of(8) == before
        and costs.of(24) > costs.of(8) > costs.of(1)
    )
    assert costs.of(100) == costs.of(24)


def test_room_beside_the_rows_of_a_step():
    costs = RowCosts({4: 1.0, 8: 1.5, 16: 2.0})
    beyond = {3: 1, 4: 4, 5: 3, 8: 8, 16: 0, 20: 0}
    assert {rows: budget_kernels.beyond(costs.table, rows) for rows in beyond} == beyond
    assert [costs.size(rows) for rows in (1, 4, 5, 16, 17)] == [4, 4, 8, 16, 0]


def test_rows_cost_nothing_until_the_host_is_done():
    """It takes as long as 16 rows: whatever they bring, drafts up to that size are right."""
    table, gains = {8: 1.0, 16: 2.0, 32: 2.2, 64: 4.0}, np.full(56, 0.05)
    costs = RowCosts(table)
    assert best(costs, 8, 0.0, 8.0, gains, least=costs.least(0.0)) == 0
    for _ in range(300):
        costs.hosted(2.7)
    assert best(costs, 8, 0.0, 8.0, gains, least=costs.least(0.0)) == 24
    costs.hosted(1e9)  # a pause of whoever calls
    assert costs.least(0.0) < 3.0 and costs.least(5.0) == 0.0


def test_drafts_that_cost_more_than_they_bring_are_not_asked_for():
    """A model's drafts for 8 requests take as long as half a step: rows for them are nearly free."""
    table, gains = {8: 1.0, 16: 1.05, 64: 1.1}, np.full(8, 0.4)
    assert best(RowCosts(table), 8, 0.0, 8.0, gains) == 8
    costs = RowCosts(table, asking={1: 0.1, 8: 0.5, 16: 0.9})
    assert [costs.asking(n) for n in (0, 1, 2, 8, 9, 99)] == [0, 0.1, 0.5, 0.5, 0.9, 0.9]
    assert best(costs, 8, 0.0, 8.0, gains, costs.asking(8)) == 0
    assert best(costs, 8, 0.0, 8.0, np.full(8, 0.6), costs.asking(8)) == 8


def test_fewer_rounds_cost_less():
    costs = RowCosts(TABLE, asking={1: 8.0, 8: 10.0}, rounds={8: 2.0})
    assert [costs.asking(8, fewer) for fewer in range(4)] == [10, 8, 6, 4] and costs.asking(1, 2) == 8
    assert (costs.round(5), costs.round(1), costs.asking(0, 2), RowCosts(TABLE).round(8)) == (2, 0, 0, 0)


@pytest.mark.parametrize("told", [True, False])
def test_steps_with_fewer_rounds_say_what_all_of_them_cost(told):
    """They cost what was timed. Control: nobody says that there were fewer, and all of them seem cheap."""
    costs = RowCosts(TABLE, asking={32: 20.0}, rounds={32: 4.0})
    for step in range(900):
        asked, rows = 32 * (step % 3 > 0), (32, 72)[step % 2]
        seconds = TABLE[rows] + 0.001 * (8000 + step) + (20.0 - 4.0 * 4 if asked else 0.0)
        costs.observe(rows, 8000 + step, seconds, asked, 4 if told else 0)
    assert (costs.asks(32) == pytest.approx(20.0, rel=0.1)) is told
    assert (costs.asks(32, 4) == pytest.approx(4.0, rel=0.25)) is told


def test_time_for_asking_is_not_mistaken_for_rows_or_keys():
    """Steps with drafts behind them are slower by what was timed, and by that alone."""
    costs, blind = RowCosts(TABLE, asking={32: 20.0}), RowCosts(TABLE)
    for step in range(300):
        asked = 32 * (step % 3 > 0)
        rows = 72 if asked else 32
        seconds = TABLE[rows] + 0.001 * (8000 + step) + (20.0 if asked else 0.0)
        costs.observe(rows, 8000 + step, seconds, asked)
        blind.observe(rows, 8000 + step, seconds)
    thought, truth = shape(costs, lambda rows, keys: TABLE[rows] + 0.001 * keys)
    assert thought == pytest.approx(truth, rel=0.05)
    assert shape(blind, lambda rows, keys: 1.0)[0] > 1.2 * truth
