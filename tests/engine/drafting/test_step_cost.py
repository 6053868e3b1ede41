"""Step cost: table, context, corrections by observed steps, host floor, draft seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftproof.engine.drafting.expert_cost import expected_experts, with_expert_cost
from draftproof.engine.drafting.step_cost import MAX_PAUSES, PAUSE_FACTOR, StepCost
from draftproof.models.config import ModelConfig, MoeConfig
from draftproof.ops.contract.types import Routing

TABLE = {1: 1.0, 8: 1.2, 16: 1.5, 32: 2.0}


def test_padded_steps_cost_the_next_size_and_others_are_interpolated() -> None:
    padded, exact = StepCost(TABLE), StepCost(TABLE, interpolate=True)
    assert [padded.row_seconds(n) for n in (1, 2, 8, 9, 40)] == [1.0, 1.2, 1.2, 1.5, 2.0]
    assert exact.row_seconds(12) == pytest.approx(1.35) and exact.size(12) == 12
    assert [padded.size(n) for n in (2, 16, 33)] == [8, 16, 0]


def test_a_larger_step_is_never_cheaper() -> None:
    assert StepCost({1: 1.0, 8: 0.5, 16: 2.0}).row_seconds(8) == 1.0


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_context_and_sizes_are_learned_without_drift(noise: float) -> None:
    draw, cost = np.random.default_rng(1), StepCost(TABLE)
    for i in range(20_000):
        rows, keys = (8, 16)[i // 7 % 2], 1000 + i % 500
        seconds = (1.1 if rows == 16 else 1.0) * TABLE[rows] + 4e-4 * keys
        cost.observe(rows, keys, seconds * (1 + noise * draw.normal()), num_drafts=rows - 8)
    for rows, factor in ((8, 1.0), (16, 1.1)):
        expected = factor * TABLE[rows] + 0.5
        assert cost.row_seconds(rows) + cost.context_seconds(1250, 8) == pytest.approx(expected, rel=0.05)
    assert cost.row_seconds(16) - cost.row_seconds(8) == pytest.approx(0.45, abs=0.15)


def test_first_step_sets_the_context() -> None:
    cost = StepCost(TABLE)
    cost.observe(8, 100, 1.7)
    assert cost.context_seconds(100, 8) == pytest.approx(0.5) and cost.row_seconds(8) == pytest.approx(1.2)


def test_slow_first_step_is_not_kept_as_context() -> None:
    cost = StepCost(TABLE)
    for seconds in (4.0, 1.7):
        cost.observe(8, 100, seconds)
    assert cost.context_seconds(100, 8) == pytest.approx(0.5)


def test_pauses_are_ignored_until_they_are_the_rule() -> None:
    cost = StepCost(TABLE)
    cost.observe(8, 100, 1.2)
    for i in range(MAX_PAUSES - 1):
        cost.observe((8, 16)[i % 2], 100, 2 * PAUSE_FACTOR * 2)
    assert cost.context_seconds(100, 8) == pytest.approx(0.0)
    for i in range(8):
        cost.observe((8, 16)[i % 2], 100, 2 * PAUSE_FACTOR * 2)
    assert cost.context_seconds(100, 8) > 1.0


def test_a_cost_that_does_not_learn_stays() -> None:
    cost = StepCost.unmeasured(64)
    cost.observe(8, 100, 9.0)
    assert cost.row_seconds(64) == 2.0 and cost.context_seconds(100, 8) == 0.0


def test_rows_are_free_up_to_the_host_part() -> None:
    cost = StepCost(TABLE)
    assert cost.host_floor(0.0) == 0.0
    for _ in range(200):
        cost.record_host_seconds(2.0)
    assert cost.host_floor(0.5) == pytest.approx(0.85 * 2.0 - 0.5, rel=0.01)


def test_draft_seconds_are_corrected_by_steps_with_and_without_the_model() -> None:
    cost = StepCost(TABLE, draft_seconds={1: 0.1, 8: 0.2})
    assert [cost.draft_seconds(n) for n in (0, 1, 5, 99)] == [0.0, 0.1, 0.2, 0.2]
    for i in range(2000):
        drafting = 8 * (i // 3 % 2)
        cost.observe(8, 100, 1.2 + 0.1 + (0.4 if drafting else 0.0), drafting)
    assert cost.draft_seconds(8) == pytest.approx(0.4, abs=0.08)


def test_fewer_rounds_cost_their_share_of_those_timed() -> None:
    cost = StepCost(TABLE, draft_seconds={8: 0.4}, draft_rounds=4)
    assert [cost.draft_seconds(8, rounds) for rounds in (0, 1, 2, 4)] == pytest.approx([0.4, 0.1, 0.2, 0.4])
    for i in range(2000):  # two rounds take as long as predicted
        drafting = 8 * (i // 3 % 2)
        cost.observe(8, 100, 1.3 + (0.2 if drafting else 0.0), drafting, rounds=2 if drafting else 0)
    assert cost.draft_seconds(8) == pytest.approx(0.4, abs=0.02)


EXPERTS = ModelConfig(
    "Qwen3MoeForCausalLM", 1000, 64, 2, 4, 2, 16, 64, moe=MoeConfig(Routing(32, 4), intermediate_size=48)
)


def test_expected_experts_are_those_of_random_rows() -> None:
    draw, routing = np.random.default_rng(0), Routing(32, 4)
    for rows in (1, 3, 12):
        found = [
            len({e for _ in range(rows) for e in draw.choice(32, 4, replace=False)}) for _ in range(2000)
        ]
        assert expected_experts(routing, rows) == pytest.approx(np.mean(found), rel=0.02)


@pytest.mark.parametrize("is_timed_on_equal_rows", [True, False])
def test_policy_sees_the_experts_of_sizes_that_were_never_observed(is_timed_on_equal_rows: bool) -> None:
    """Replay steps of 1 and 4 rows of a model whose steps take the time to read their experts."""
    sizes = (1, 2, 4, 8, 16, 32)
    equal = dict.fromkeys(sizes, 1.0)
    truth = with_expert_cost(equal, EXPERTS)
    assert truth[1] == pytest.approx(1.0) and truth[32] > 2.0
    cost = StepCost(truth if not is_timed_on_equal_rows else equal)
    for i in range(300):
        rows = (1, 4)[i % 2]
        cost.observe(rows, 100, truth[rows] + 0.01, num_drafts=rows - 1)
    found = {rows: cost.row_seconds(rows) / truth[rows] for rows in sizes}
    if is_timed_on_equal_rows:  # the control: without the term larger steps seem cheap
        assert found[4] == pytest.approx(1.0, rel=0.05) and found[32] < 0.7
    else:
        assert min(found.values()) > 0.97 and max(found.values()) < 1.03


def test_dense_models_keep_their_timed_seconds() -> None:
    assert with_expert_cost(TABLE, replace(EXPERTS, moe=None)) == TABLE


def test_drafts_cost_more_behind_a_long_context_and_not_behind_a_short_one() -> None:
    base = {1: 7.0, 4: 14.0, 8: 24.0, 16: 46.0}

    def seconds(num_drafts: int, keys: int) -> float:
        truth = StepCost(base, interpolate=True).row_seconds(1 + num_drafts)
        return truth + keys * (0.006 + 0.001 * num_drafts)

    cost = StepCost(base, interpolate=True)
    for i in range(200):
        num_drafts = 0 if i % 16 == 3 else (12, 6, 15)[i % 3]
        cost.observe(1 + num_drafts, 5000, seconds(num_drafts, 5000), num_drafts=num_drafts)
    for keys in (5000, 500):
        table = cost.table_for(1, cost.draft_context_seconds(1, keys))
        for num_drafts in (6, 12, 15):
            found = float(np.interp(1 + num_drafts, *table)) + cost.context_seconds(keys, 1)
            assert found == pytest.approx(seconds(num_drafts, keys), rel=0.1)
    # two requests: each draft reads the keys of its own
    added = cost.table_for(2, cost.draft_context_seconds(2, 5000))[1] - cost.table[1]
    assert added[:2].tolist() == [0, 0] and added[2] == pytest.approx(0.001 * 2500, rel=0.2)


def test_drafts_of_padded_steps_have_no_cost_by_context() -> None:
    cost = StepCost({1: 1.0, 16: 1.5})
    for i in range(40):
        cost.observe(16 if i % 4 else 1, 5000, 3.0 if i % 4 else 1.5, num_drafts=15 if i % 4 else 0)
    assert not cost.draft_context_seconds(1, 5000) and cost.table_for(1, 0.0) is cost.table


def test_a_large_batch_behind_a_small_one_sees_what_its_drafts_cost() -> None:
    """One request pays 0.1 ms besides rows and keys; taken for context, it would hide the rows of 256."""
    base = {1: 0.35, 8: 0.38, 64: 0.5, 256: 0.78, 512: 0.97, 1024: 1.35}  # ms on an H200, SmolLM2-135M
    cost, per_key = StepCost(base), 11e-6

    def run(num_steps: int, requests: int, keys: int) -> float:
        """Observe steps with 3 drafts per request, one in 16 without; return the factor they seem to cost."""
        for i in range(num_steps):
            drafts = 3 * requests if i % 16 else 0
            size = next(size for size in base if size >= requests + drafts)
            cost.observe(requests + drafts, keys + i, base[size] + 0.1 + per_key * keys, num_drafts=drafts)
        context = cost.context_seconds(keys, requests)
        return (cost.row_seconds(4 * requests) + context) / (cost.row_seconds(requests) + context)

    for _ in range(3):
        run(64, 1, 100)
        assert run(64, 256, 85_000) == pytest.approx((1.35 + 0.1 + 0.93) / (0.78 + 0.1 + 0.93), rel=0.07)


def test_each_number_of_requests_has_a_cost_of_context() -> None:
    """Other kernels read the keys of a large batch: 20 ns a key at 64 requests, 11 at 256 (H200)."""
    cost, per_key = StepCost({64: 0.5, 256: 0.8, 1024: 1.3}), {64: 20e-6, 256: 11e-6}
    for requests, keys in ((64, 26_000), (256, 100_000), (64, 26_000)):
        for i in range(4):
            seconds = cost.row_seconds(requests) + per_key[requests] * (keys + i)
            cost.observe(requests, keys + i, seconds)
        assert cost.context_seconds(keys, requests) == pytest.approx(per_key[requests] * keys, rel=0.01)
    assert cost.context_seconds(1e6, 200) == cost.context_seconds(1e6, 256)  # padded to the same size
    assert cost.context_seconds(1e6, 1000) == cost.context_seconds(1e6, 256)  # nearest that was observed


@pytest.mark.parametrize(("factor", "tolerance"), [(1.3, 0.2), (2.0, 0.3)])
def test_rows_that_were_timed_too_slow_give_no_negative_context(factor: float, tolerance: float) -> None:
    """Start-up was slowed by other processes: corrections take that up, the keys little of it."""
    cost, per_key = StepCost({size: factor * seconds for size, seconds in TABLE.items()}), 4e-4
    for i in range(400):
        keys = 1000 if i // 40 % 2 else 4000
        cost.observe(8, keys, TABLE[8] + per_key * keys)
    for keys in (1000, 4000):
        found, truth = cost.row_seconds(8) + cost.context_seconds(keys, 8), TABLE[8] + per_key * keys
        assert found == pytest.approx(truth, rel=tolerance)


def test_measured_seconds_of_a_draft_model_replace_those_of_start_up() -> None:
    """At start-up rounds run in a loop of their own, faster than behind a step."""
    cost = StepCost({1: 1.0, 8: 1.2}, draft_seconds={1: 0.1})
    for _ in range(100):
        cost.observe_drafting(1, 0.3)
    assert cost.draft_seconds(1) == pytest.approx(0.3, rel=0.01)
    cost.observe_drafting(1, 1000.0)  # a pause
    assert cost.draft_seconds(1) < 0.4
