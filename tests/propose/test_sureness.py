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
from draftproof.engine.drafting.draft_gate import Asking
from draftproof.propose.calibration import FIRM, MANY, RANGES, SHARED, Sureness
from draftproof.propose.draft_rounds import Rounds
from draftproof.sampling_params import SamplingParams
from draftproof.types import DeviceBatch, Draft, DraftSpec, Request, SlotColumns
from exact import Ask, Company, Where
from scripted import OPS, PAGE, seated, simulate, strategy

# --- what is known of drafts ----------------------------------------------------------------------------


def columns_of(*said: list[int], seed: int = 7) -> Any:
    tokens = torch.zeros((len(said), 12), dtype=torch.int64)
    for line, ids in zip(tokens, said, strict=True):
        line[: len(ids)] = torch.tensor(ids)
    length = torch.tensor([len(ids) for ids in said])
    return SimpleNamespace(tokens=tokens, length=length, seed=torch.full((len(said),), seed))


def heard(known: Sureness, said: list[int], drafts: list[int], seed: int = 7) -> None:
    """A request in slot 1 had said 5, 6 when these were drafted, each with 0.55, and goes on so."""
    ranges = [known.chance(0.55, False)[1]] * len(drafts)
    known.note(columns_of([9], [5, 6]), [-1, 1], [[3], drafts], [[0], ranges])
    known.learn(columns_of([9], [5, 6, *said], seed=seed), [-1, 1])


def counts(known: Sureness) -> tuple[float, float]:
    return sum(known._stood), sum(known._fell)


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
    known = Sureness(2)
    heard(known, said, drafts)
    assert counts(known) == (stood, fell)
    known.learn(columns_of([9], [5, 6, *said, 1]), [1])
    assert counts(known) == (stood, fell)  # once
    heard(known, said, drafts, seed=8)  # another request sits there
    assert counts(known) == (stood, fell)


def test_what_a_head_says_is_believed_until_drafts_tell_otherwise() -> None:
    known = Sureness(2)
    assert known.chance(0.55, hot=False)[0] == pytest.approx(0.55)
    assert known.chance(0.0, hot=True)[0] == pytest.approx(SHARED)
    before = known.further()
    for _ in range(2 * MANY):
        heard(known, [9], [1])
    assert known.chance(0.55, hot=False)[0] < 0.55 * 2 * FIRM / MANY
    assert known.chance(0.75, hot=False)[0] == pytest.approx(0.75)  # of others nothing was heard
    assert known.chance(0.55, hot=True)[0] > 0.55
    assert known.further() < before and max(counts(known)) <= MANY
    for _ in range(MANY):
        heard(known, [1], [1])
    assert known.chance(0.55, hot=False)[0] > 0.4
    for _ in range(2 * RANGES * MANY):
        heard(known, [1], [1])
    assert sum(known._total) <= RANGES * MANY and known.further() > 0.9


def test_numbers_that_are_none() -> None:
    found = [Sureness(1).chance(said, hot=False) for said in (math.nan, -1.0, 1.0, 2.0)]
    assert found == [(0, 0), (0, 0), (1, RANGES - 1), (1, RANGES - 1)]


# --- round by round -------------------------------------------------------------------------------------


def chains(
    columns: SlotColumns, live: Tensor, price: float, verify: float, k: int, known: Sureness | None = None
) -> Draft:
    """Drafts of a Markov chain, by the rounds that a head has."""
    traits = DraftSpec(k, needs_probs=True)
    batch = DeviceBatch(columns, live, torch.full_like(live, k), spec=traits, price=price, verify=verify)
    known = known or Sureness(len(columns.length))
    rounds = Rounds(OPS, batch, False, torch.zeros_like(live), 0, PAGE, known)
    last = rounds.ahead.last_token
    for j in range(k):
        rounds.take(j, GUESS[last])
        last = rounds.ahead.tokens[j]
        if not rounds.goes_on(j):
            break
    return rounds.draft()


def two(temperature: float = 0.0) -> SlotColumns:
    params = SamplingParams(max_tokens=20, temperature=temperature)
    requests = [Request(id=f"{i}", prompt_token_ids=[i], params=params, seed=i) for i in range(2)]
    return seated(requests, 4, len(GUESS)).columns


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
    known = Sureness(COUNT)

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


# --- in an engine ---------------------------------------------------------------------------------------


def served(spec: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """With prices that come and go: the promise holds. The rounds that there were."""
    turns, rounds = cycle([(0.0, 0.0), (0.3, 0.0), (1e9, 0.0), (1e-9, 0.3), (1e-9, 1e9)]), set()

    def weigh(self: Asking, planned: Any, budget: Any, late: float) -> None:
        rounds.add(self.drafting.rounds)
        self.drafting.price, self.drafting.verify = next(turns)

    monkeypatch.setattr(Asking, "weigh", weigh)
    asks = [Ask(i, option, heat, length=14 + 9 * i, prompt=False) for i, (option, heat) in enumerate(ASKS)]
    sizes = {"page_size": 8, "enable_prefix_caching": False}
    company = Company(
        asks,
        Where(),
        {"num_speculative_tokens": 4, "adaptive": False, **spec},
        arrivals=[0, 0, 2],
        overlap=overlap,
        sizes=sizes,
    )
    assert company.differences() == []
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


def test_a_head_alone_is_told_what_its_rounds_cost() -> None:
    def engine(**spec: Any) -> Any:
        head = {"method": "mtp", **heads.options("mtp", "llama", "float32")}
        return tiny.engine(
            speculative={**head, "num_speculative_tokens": 4, **spec}, warm_up=True, max_num_seqs=2
        )

    made = engine()
    asking, drafting = made.loop.asking, made.loop.device.drafting
    assert asking.priced and not made.loop.scheduler.drafts_before_plan
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    tiny.run(made, [tiny.request(i, params) for i in range(2)])
    assert asking._round > 0 and drafting.price > 0 and sum(counts(drafting.proposer.sureness)) > 0
    fixed = engine(adaptive=False)
    tiny.run(fixed, [tiny.request(0, params)])
    assert not fixed.loop.asking.priced and fixed.loop.device.drafting.price == 0
