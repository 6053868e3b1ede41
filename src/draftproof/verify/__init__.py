"""Judging drafts: the strategy contract and the table of strategies.

A strategy is tensor code over the rows of a step. It says which drafts it would accept and which token
it would put at each row; how many drafts stand follows from that in one place, `Ops.commit`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.config import SpeculativeConfig
from draftproof.ops import STREAM_SYNTHETIC, Ops
from draftproof.types import Choice, Windows

STRATEGIES = {
    "target_match": "draftproof.verify.target_match:TargetMatch",
    "greedy": "draftproof.verify.greedy:Greedy",
    "rejection": "draftproof.verify.rejection:Rejection",
    "topp": "draftproof.verify.topp:TopP",
}
PLAIN_STRATEGY = "target_match"  # with no drafts it is plain sampling


@dataclass(frozen=True, slots=True)
class Scores:
    """The logits of a step's L rows, as they are sampled from."""

    base: Tensor  # [L, V] after penalties, bias and masks
    processed: Tensor  # [L, V] after temperature and truncation as well; greedy rows: base
    sampled: Tensor  # [L] int64: what plain sampling takes at each row


class Strategy(ABC):
    """One acceptance rule. Class attributes are its label. Its code waits for no device."""

    lossless: ClassVar[bool]  # the output's law is the model's
    seed_exact: ClassVar[bool]  # same seed, same tokens as with no drafts, at any temperature
    label: ClassVar[str]
    needs_draft_probs: ClassVar[bool] = False
    needs_processed: ClassVar[bool] = False  # looks at Scores.processed
    defaults: ClassVar[Mapping[str, Any]] = {}  # options and their defaults

    def __init__(self, ops: Ops, options: Mapping[str, Any]) -> None:
        self.ops = ops
        self.options = {**self.defaults, **options}

    def lossless_for(self, temperature_zero: bool) -> bool:
        """Is the law of this request's output the model's?"""
        return self.lossless

    @abstractmethod
    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Would each row's draft stand, were those before it to stand; and the token if none does."""


def judge(strategy: Strategy, windows: Windows, scores: Scores, policy: SpeculativeConfig | None) -> Choice:
    """The strategy's choice, with acceptance as the policy has it, of drafts that are not forbidden."""
    choice = strategy.decide(windows, scores)
    name = policy.accept_policy if policy else "normal"
    if name == "normal":
        return choice
    if name == "synthetic":
        assert policy and policy.synthetic_acceptance_rates
        stands = _synthetic(strategy.ops, windows, policy.synthetic_acceptance_rates)
    else:
        stands = torch.full_like(windows.draft, name == "accept_all", dtype=torch.bool)
    possible = scores.base.gather(1, windows.draft.clamp(min=0)[:, None])[:, 0] > -math.inf
    return Choice(choice.token, stands & possible)


def one_for_each(choices: Mapping[int, Choice], windows: Windows) -> Choice:
    """Every row the choice of its own request's strategy."""
    if len(choices) == 1:
        return next(iter(choices.values()))
    mine = windows.columns.strategy[windows.slot.clamp(min=0)]
    token = torch.zeros_like(windows.draft)
    accept, recovered = torch.zeros_like(token, dtype=torch.bool), token
    for index, choice in choices.items():
        here = mine == index
        stands = windows.draft == choice.token if choice.accept is None else choice.accept
        other = choice.token if choice.recovered is None else choice.recovered
        accept = torch.where(here, stands, accept)
        token = torch.where(here, choice.token, token)
        recovered = torch.where(here, other, recovered)
    return Choice(token, accept, recovered)


def _synthetic(ops: Ops, windows: Windows, rates: tuple[float, ...]) -> Tensor:
    """Acceptance by the given rates, from its own noise: repeatable, and blind to what was drafted."""
    seeds = windows.columns.seed[windows.slot.clamp(min=0)]
    draws = ops.uniform(seeds, windows.position, STREAM_SYNTHETIC)
    rate = torch.tensor([*rates, 0.0], dtype=torch.float64).to(draws.device)
    return draws < rate[windows.depth.clamp(max=len(rates))]
