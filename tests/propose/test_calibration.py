"""Draft chains that stop early: same output and distribution, fewer drafts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import heads
import tiny
from audited_head import Audited
from distribution import COUNT, DRAFT_LOGITS, PARAMS, TARGET, K, biased, p_values
from draftproof.engine.drafting.policy import DraftPolicy, DraftRun, RoundCosts
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.propose.calibration import (
    MAX_DRAFTS,
    NUM_BINS,
    PRIOR_DRAFTS,
    SHARED_NOISE_ACCEPTANCE,
    Calibration,
)
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.sampling_params import SamplingParams
from draftproof.types import DeviceBatch, Draft, DraftCosts, DraftSpec, Request, SlotColumns
from exact import Batch, Case, Setup
from scripted import OPS, PAGE, filled_slots, simulate, strategy

# --- calibration ---


def columns_of(*committed: list[int], seed: int = 7) -> Any:
    tokens = torch.zeros((len(committed), 12), dtype=torch.int64)
    for line, ids in zip(tokens, committed, strict=True):
        line[: len(ids)] = torch.tensor(ids)
    length = torch.tensor([len(ids) for ids in committed])
    return SimpleNamespace(tokens=tokens, length=length, seed=torch.full((len(committed),), seed))


def observe(calibration: Calibration, committed: list[int], drafts: list[int], seed: int = 7) -> None:
    """Record drafts of probability 0.55 after tokens 5, 6 in slot 1, then learn from the committed tokens."""
    ranges = [calibration.acceptance(0.55, False)[1]] * len(drafts)
    calibration.record(columns_of([9], [5, 6]), [-1, 1], [[3], drafts], [[0], ranges])
    calibration.learn(columns_of([9], [5, 6, *committed], seed=seed), [-1, 1])


def counts(calibration: Calibration) -> tuple[float, float]:
    return sum(calibration._accepted), sum(calibration._rejected)


@pytest.mark.parametrize(
    ("committed", "drafts", "num_accepted", "num_rejected"),
    [
        ([1, 2, 3], [1, 2], 2, 0),
        ([1, 2], [1, 2], 2, 0),
        ([1], [1, 2], 1, 0),  # the second is undecided
        ([1, 9], [1, 2, 3], 1, 1),
        ([9, 2, 3], [1, 2, 3], 0, 1),  # drafts after a rejected one do not count
        ([1, 2, 3], [], 0, 0),
    ],
)
def test_committed_tokens_count_results_of_drafts(
    committed: list[int], drafts: list[int], num_accepted: int, num_rejected: int
) -> None:
    calibration = Calibration(2)
    observe(calibration, committed, drafts)
    assert counts(calibration) == (num_accepted, num_rejected)
    calibration.learn(columns_of([9], [5, 6, *committed, 1]), [1])
    assert counts(calibration) == (num_accepted, num_rejected)  # counted once
    observe(calibration, committed, drafts, seed=8)  # another request in the slot
    assert counts(calibration) == (num_accepted, num_rejected)


def test_reported_probability_is_corrected_by_results() -> None:
    calibration = Calibration(2)
    assert calibration.acceptance(0.55, is_sampled=False)[0] == pytest.approx(0.55)
    assert calibration.acceptance(0.0, is_sampled=True)[0] == pytest.approx(SHARED_NOISE_ACCEPTANCE)
    before = calibration.next_acceptance()
    for _ in range(2 * MAX_DRAFTS):
        observe(calibration, [9], [1])
    assert calibration.acceptance(0.55, is_sampled=False)[0] < 0.55 * 2 * PRIOR_DRAFTS / MAX_DRAFTS
    assert calibration.acceptance(0.75, is_sampled=False)[0] == pytest.approx(0.75)  # another bin
    assert calibration.acceptance(0.55, is_sampled=True)[0] > 0.55
    assert calibration.next_acceptance() < before and max(counts(calibration)) <= MAX_DRAFTS
    for _ in range(MAX_DRAFTS):
        observe(calibration, [1], [1])
    assert calibration.acceptance(0.55, is_sampled=False)[0] > 0.4
    for _ in range(2 * NUM_BINS * MAX_DRAFTS):
        observe(calibration, [1], [1])
    assert sum(calibration._total) <= NUM_BINS * MAX_DRAFTS and calibration.next_acceptance() > 0.9


def test_invalid_probabilities_are_clamped() -> None:
    found = [Calibration(1).acceptance(p, is_sampled=False) for p in (math.nan, -1.0, 1.0, 2.0)]
    assert found == [(0, 0), (0, 0), (1, NUM_BINS - 1), (1, NUM_BINS - 1)]


# --- round by round ---


def chains(columns: SlotColumns, live: Tensor, costs: DraftCosts, k: int, known: Any = None) -> Draft:
    """Return drafts of a Markov chain by the rounds of a head."""
    traits = DraftSpec(k, needs_probs=True)
    batch = DeviceBatch(columns, live, torch.full_like(live, k), spec=traits, costs=costs)
    calibration = known or Calibration(len(columns.length))
    rounds = DraftRounds(OPS, batch, False, torch.zeros_like(live), 0, PAGE, calibration)
    last = rounds.draft_rows.last_token
    for j in range(k):
        rounds.sample(j, DRAFT_LOGITS[last])
        last = rounds.draft_rows.tokens[j]
        if not rounds.should_continue(j):
            break
    return rounds.draft()


def two_requests(temperature: float = 0.0) -> SlotColumns:
    params = SamplingParams(max_tokens=20, temperature=temperature)
    requests = [Request(id=f"{i}", prompt_token_ids=[i], params=params, seed=i) for i in range(2)]
    return filled_slots(requests, 4, len(DRAFT_LOGITS)).columns


def test_chain_ends_where_a_round_costs_more_than_it_gains() -> None:
    columns, both = two_requests(), torch.arange(2)

    def made(round_cost: float, row_cost: float = 0.0) -> list[int]:
        return chains(columns, both, DraftCosts(round_cost, row_cost), 4).count.tolist()

    assert made(0.0) == made(1e-9) == [4, 4]  # no cost
    assert made(3.0) == [1, 1]  # the sampled draft is proposed
    steps = [made(round_cost) for round_cost in np.linspace(1e-9, 1.4, 15)]
    assert steps == sorted(steps, reverse=True) and len({tuple(step) for step in steps}) > 2
    assert all(a == b for a, b in steps)  # a round is for both


def test_each_chain_ends_where_its_row_costs_more_than_it_gains() -> None:
    columns, both = two_requests(), torch.arange(2)
    alone = [chains(columns, both[i : i + 1], DraftCosts(1e-9, 0.45), 4).count.item() for i in range(2)]
    together = chains(columns, both, DraftCosts(1e-9, 0.45), 4)
    assert together.count.tolist() == alone and alone[0] != alone[1]
    every = chains(columns, both, DraftCosts(0.0, 0.0), 4)
    for i, count in enumerate(alone):  # a prefix of all drafts
        assert together.tokens[i, :count].tolist() == every.tokens[i, :count].tolist()


def sample_with_early_stop(dropped: int) -> Tensor:
    calibration = Calibration(COUNT)

    def draft(columns: SlotColumns, live: Tensor) -> Draft:
        made = chains(columns, live, DraftCosts(1e-9, 0.45), K, calibration)
        ended = (made.count == 1) & (columns.max_length[live] - columns.length[live] > K)
        assert len(live) < COUNT or 0.1 < float(ended.float().mean()) < 0.9
        return replace(made, count=torch.where(ended, made.count - dropped, made.count))

    params = PARAMS["hot"]
    return simulate(TARGET, params, strategy("rejection"), None, count=COUNT, k=K, chains=draft)


@pytest.mark.slow
def test_early_stop_after_an_unlikely_draft_keeps_the_distribution() -> None:
    values = p_values(sample_with_early_stop(0), PARAMS["hot"])
    assert not biased(values), values


@pytest.mark.slow
def test_control_dropping_the_unlikely_draft_is_detected() -> None:
    """The target then samples with the noise that made the draft unlikely."""
    assert biased(p_values(sample_with_early_stop(1), PARAMS["hot"]))


# --- in an engine ---


def serve_with_costs(spec: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Serve with changing costs, check that outputs are exact, and return the numbers of rounds."""
    turns, rounds = cycle([(0.0, 0.0), (0.3, 0.0), (1e9, 0.0), (1e-9, 0.3), (1e-9, 1e9)]), set()

    decide, observe = DraftPolicy.decide, DraftPolicy.observe

    def with_costs(self: DraftPolicy, *given: Any, **more: Any) -> Any:
        return decide(self, *given, **more)._replace(costs=DraftCosts(*next(turns)))

    def record_rounds(self: DraftPolicy, step: Any) -> Any:
        rounds.add(step.draft_run.rounds)
        return observe(self, step)

    monkeypatch.setattr(DraftPolicy, "decide", with_costs)
    monkeypatch.setattr(DraftPolicy, "observe", record_rounds)
    cases = [Case(i, option, t, length=14 + 9 * i, prompt=False) for i, (option, t) in enumerate(REQUESTS)]
    sizes = {"page_size": 8, "enable_prefix_caching": False}
    spec = {"num_speculative_tokens": 4, "adaptive": False, **spec}
    batch = Batch(cases, Setup(), spec, arrivals=[0, 0, 2], overlap=overlap, sizes=sizes)
    assert batch.differences() == []
    return rounds


REQUESTS = (("none", 0.7), ("top_k", 1.3), ("draft_logprobs", 0.0))


@pytest.mark.parametrize("overlap", [False, True])
def test_head_that_stops_early_stores_all_kv(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Audited.rows_checked
    head = {"method": "test_heads:AuditedEagle3", "model": heads.head("eagle3", "llama", "float32")}
    head |= {"weights": "llama/float32", "cached": False}
    assert {1, 4} <= serve_with_costs(head, overlap, monkeypatch)
    assert Audited.rows_checked > before + 100


def test_draft_model_that_stops_early_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"method": "draft_model", "model": heads.target_copy("llama", "float32")}
    assert {1, 4} <= serve_with_costs(spec, False, monkeypatch)


def test_a_head_alone_gets_the_costs_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**spec: Any) -> Any:
        head = {"method": "mtp", **heads.options("mtp", "llama", "float32")}
        return tiny.engine(
            speculative={**head, "num_speculative_tokens": 4, **spec}, warm_up=True, max_num_seqs=2
        )

    made = engine()
    policy, drafting = made.loop.policy, made.loop.device.drafting
    costs, decide = [], DraftPolicy.decide

    def record_costs(self: DraftPolicy, *given: Any, **more: Any) -> Any:
        decision = decide(self, *given, **more)
        costs.append(decision.costs)
        return decision

    # Measured costs vary with the load of the machine. With these a row is nearly free.
    policy.set_cost(StepCost({1: 1.0, 16: 1.001}, learns=False), adaptive=True)
    observe = RoundCosts.observe

    def observe_fixed_seconds(self: RoundCosts, tokens: float, run: DraftRun, has_prompts: bool) -> float:
        return observe(self, tokens, run._replace(seconds=1e-3 * (1 + run.rounds)), has_prompts)

    monkeypatch.setattr(RoundCosts, "observe", observe_fixed_seconds)
    monkeypatch.setattr(DraftPolicy, "decide", record_costs)
    assert not made.loop.scheduler.drafts_before_plan
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    tiny.run(made, [tiny.request(i, params) for i in range(2)])
    assert policy._round_costs._round_seconds > 0 and max(cost.round for cost in costs) > 0
    costs.clear()
    assert sum(counts(drafting.proposer.calibration)) > 0
    fixed = engine(adaptive=False)
    tiny.run(fixed, [tiny.request(0, params)])
    assert costs and not any(cost.round for cost in costs)
