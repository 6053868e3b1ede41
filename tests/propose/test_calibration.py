"""Chains of drafts that end where the model is not sure: output and its law stay, drafts get fewer."""

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
from distribution import COUNT, GUESS, PARAMS, TARGET, K, biased, p_values
from draftproof.engine.drafting.policy import DraftPolicy
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

# --- what is known of drafts ---


def columns_of(*said: list[int], seed: int = 7) -> Any:
    tokens = torch.zeros((len(said), 12), dtype=torch.int64)
    for line, ids in zip(tokens, said, strict=True):
        line[: len(ids)] = torch.tensor(ids)
    length = torch.tensor([len(ids) for ids in said])
    return SimpleNamespace(tokens=tokens, length=length, seed=torch.full((len(said),), seed))


def heard(known: Calibration, said: list[int], drafts: list[int], seed: int = 7) -> None:
    """A request in slot 1 had said 5, 6 when these were drafted, each with 0.55, and goes on so."""
    ranges = [known.acceptance(0.55, False)[1]] * len(drafts)
    known.record(columns_of([9], [5, 6]), [-1, 1], [[3], drafts], [[0], ranges])
    known.learn(columns_of([9], [5, 6, *said], seed=seed), [-1, 1])


def counts(known: Calibration) -> tuple[float, float]:
    return sum(known._accepted), sum(known._rejected)


@pytest.mark.parametrize(
    ("said", "drafts", "stood", "fell"),
    [
        ([1, 2, 3], [1, 2], 2, 0),
        ([1, 2], [1, 2], 2, 0),
        ([1], [1, 2], 1, 0),  # nobody knows of the second
        ([1, 9], [1, 2, 3], 1, 1),
        ([9, 2, 3], [1, 2, 3], 0, 1),  # what is right behind one that fell is not its own
        ([1, 2, 3], [], 0, 0),
    ],
)
def test_committed_tokens_tell_what_stood(said: list[int], drafts: list[int], stood: int, fell: int) -> None:
    known = Calibration(2)
    heard(known, said, drafts)
    assert counts(known) == (stood, fell)
    known.learn(columns_of([9], [5, 6, *said, 1]), [1])
    assert counts(known) == (stood, fell)  # once
    heard(known, said, drafts, seed=8)  # another request sits there
    assert counts(known) == (stood, fell)


def test_what_a_head_says_is_believed_until_drafts_tell_otherwise() -> None:
    known = Calibration(2)
    assert known.acceptance(0.55, is_sampled=False)[0] == pytest.approx(0.55)
    assert known.acceptance(0.0, is_sampled=True)[0] == pytest.approx(SHARED_NOISE_ACCEPTANCE)
    before = known.next_acceptance()
    for _ in range(2 * MAX_DRAFTS):
        heard(known, [9], [1])
    assert known.acceptance(0.55, is_sampled=False)[0] < 0.55 * 2 * PRIOR_DRAFTS / MAX_DRAFTS
    assert known.acceptance(0.75, is_sampled=False)[0] == pytest.approx(0.75)  # of others nothing was heard
    assert known.acceptance(0.55, is_sampled=True)[0] > 0.55
    assert known.next_acceptance() < before and max(counts(known)) <= MAX_DRAFTS
    for _ in range(MAX_DRAFTS):
        heard(known, [1], [1])
    assert known.acceptance(0.55, is_sampled=False)[0] > 0.4
    for _ in range(2 * NUM_BINS * MAX_DRAFTS):
        heard(known, [1], [1])
    assert sum(known._total) <= NUM_BINS * MAX_DRAFTS and known.next_acceptance() > 0.9


def test_numbers_that_are_none() -> None:
    found = [Calibration(1).acceptance(said, is_sampled=False) for said in (math.nan, -1.0, 1.0, 2.0)]
    assert found == [(0, 0), (0, 0), (1, NUM_BINS - 1), (1, NUM_BINS - 1)]


# --- round by round ---


def chains(
    columns: SlotColumns, live: Tensor, price: float, verify: float, k: int, known: Calibration | None = None
) -> Draft:
    """Drafts of a Markov chain, by the rounds that a head has."""
    traits = DraftSpec(k, needs_probs=True)
    batch = DeviceBatch(columns, live, torch.full_like(live, k), spec=traits, costs=DraftCosts(price, verify))
    known = known or Calibration(len(columns.length))
    rounds = DraftRounds(OPS, batch, False, torch.zeros_like(live), 0, PAGE, known)
    last = rounds.draft_rows.last_token
    for j in range(k):
        rounds.sample(j, GUESS[last])
        last = rounds.draft_rows.tokens[j]
        if not rounds.should_continue(j):
            break
    return rounds.draft()


def two(temperature: float = 0.0) -> SlotColumns:
    params = SamplingParams(max_tokens=20, temperature=temperature)
    requests = [Request(id=f"{i}", prompt_token_ids=[i], params=params, seed=i) for i in range(2)]
    return filled_slots(requests, 4, len(GUESS)).columns


def test_a_chain_ends_where_another_round_costs_more_than_it_brings() -> None:
    columns, both = two(), torch.arange(2)

    def made(price: float, verify: float = 0.0) -> list[int]:
        return chains(columns, both, price, verify, 4).count.tolist()

    assert made(0.0) == made(1e-9) == [4, 4]  # no price: nobody looks
    assert made(3.0) == [1, 1]  # what was drawn is proposed
    steps = [made(price) for price in np.linspace(1e-9, 1.4, 15)]
    assert steps == sorted(steps, reverse=True) and len({tuple(step) for step in steps}) > 2
    assert all(a == b for a, b in steps)  # one round is for both


def test_each_ends_where_its_own_row_costs_more_than_it_brings() -> None:
    columns, both = two(), torch.arange(2)
    alone = [chains(columns, both[i : i + 1], 1e-9, 0.45, 4).count.item() for i in range(2)]
    together = chains(columns, both, 1e-9, 0.45, 4)
    assert together.count.tolist() == alone and alone[0] != alone[1]
    every = chains(columns, both, 0.0, 0.0, 4)
    for i, count in enumerate(alone):  # they are those that it would have had
        assert together.tokens[i, :count].tolist() == every.tokens[i, :count].tolist()


def drawn(short: int) -> Tensor:
    known = Calibration(COUNT)

    def draft(columns: SlotColumns, live: Tensor) -> Draft:
        made = chains(columns, live, 1e-9, 0.45, K, known)
        ended = (made.count == 1) & (columns.max_length[live] - columns.length[live] > K)
        assert len(live) < COUNT or 0.1 < float(ended.float().mean()) < 0.9
        return replace(made, count=torch.where(ended, made.count - short, made.count))

    params = PARAMS["hot"]
    return simulate(TARGET, params, strategy("rejection"), None, count=COUNT, k=K, chains=draft)


def test_ending_behind_a_draft_that_is_not_likely_leaves_the_law_alone() -> None:
    values = p_values(drawn(0), PARAMS["hot"])
    assert not biased(values), values


def test_control_leaving_out_the_draft_itself_is_caught() -> None:
    """Then the target draws there, with the very noise that made the draft an unlikely one."""
    assert biased(p_values(drawn(1), PARAMS["hot"]))


# --- in an engine ---


def served(spec: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """With prices that come and go: the promise holds. The rounds that there were."""
    turns, rounds = cycle([(0.0, 0.0), (0.3, 0.0), (1e9, 0.0), (1e-9, 0.3), (1e-9, 1e9)]), set()

    decide, observe = DraftPolicy.decide, DraftPolicy.observe

    def with_costs(self: DraftPolicy, *given: Any, **more: Any) -> Any:
        return decide(self, *given, **more)._replace(costs=DraftCosts(*next(turns)))

    def seen(self: DraftPolicy, step: Any) -> Any:
        rounds.add(step.draft_run.rounds)
        return observe(self, step)

    monkeypatch.setattr(DraftPolicy, "decide", with_costs)
    monkeypatch.setattr(DraftPolicy, "observe", seen)
    cases = [Case(i, option, heat, length=14 + 9 * i, prompt=False) for i, (option, heat) in enumerate(ASKS)]
    sizes = {"page_size": 8, "enable_prefix_caching": False}
    batch = Batch(
        cases,
        Setup(),
        {"num_speculative_tokens": 4, "adaptive": False, **spec},
        arrivals=[0, 0, 2],
        overlap=overlap,
        sizes=sizes,
    )
    assert batch.differences() == []
    return rounds


ASKS = (("none", 0.7), ("top_k", 1.3), ("draft_logprobs", 0.0))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_head_that_ends_its_chains_keeps_up(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Audited.rows_checked
    head = {"method": "test_heads:AuditedEagle3", "model": heads.head("eagle3", "llama", "float32")}
    head |= {"weights": "llama/float32", "cached": False}
    assert {1, 4} <= served(head, overlap, monkeypatch)
    assert Audited.rows_checked > before + 100


def test_so_does_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"method": "draft_model", "model": heads.itself("llama", "float32")}
    assert {1, 4} <= served(spec, False, monkeypatch)


def test_a_head_alone_gets_the_costs_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**spec: Any) -> Any:
        head = {"method": "mtp", **heads.options("mtp", "llama", "float32")}
        return tiny.engine(
            speculative={**head, "num_speculative_tokens": 4, **spec}, warm_up=True, max_num_seqs=2
        )

    made = engine()
    policy, drafting = made.loop.policy, made.loop.device.drafting
    costs, decide = [], DraftPolicy.decide

    def spied(self: DraftPolicy, *given: Any, **more: Any) -> Any:
        decision = decide(self, *given, **more)
        costs.append(decision.costs)
        return decision

    monkeypatch.setattr(DraftPolicy, "decide", spied)
    assert not made.loop.scheduler.drafts_before_plan
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    tiny.run(made, [tiny.request(i, params) for i in range(2)])
    assert policy._round_costs._round_seconds > 0 and max(cost.round for cost in costs) > 0
    costs.clear()
    assert sum(counts(drafting.proposer.calibration)) > 0
    fixed = engine(adaptive=False)
    tiny.run(fixed, [tiny.request(0, params)])
    assert costs and not any(cost.round for cost in costs)
