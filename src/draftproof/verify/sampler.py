"""Sampler: logits rows and windows in, a choice for every row out. All tokens are sampled here.

Requests of one step may use different strategies. Each strategy decides over the same scores, and a row
takes the choice of its own request's strategy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.ops import Ops
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Choice, FinishStatus, Request, StepFeatures, Windows
from draftproof.verify.base import Scores, Strategy
from draftproof.verify.logits_processing import apply_request_options
from draftproof.verify.synthetic_acceptance import apply_policy


@dataclass(frozen=True, slots=True)
class Sampled:
    """Choices of a step, before the commit decides how many drafts are accepted."""

    choice: Choice
    bad: Tensor  # [L] int64: a `FinishStatus` where no token could be sampled, else 0
    processed: Tensor  # [L, V]
    errors: dict[int, str]  # by logits row, from the user's code; ignored for rows that are not committed


class Sampler:
    """Compute the scores of every row once and apply the strategies to them."""

    def __init__(
        self, ops: Ops, strategies: Sequence[Strategy], policy: SpeculativeConfig | None = None
    ) -> None:
        self.ops = ops
        self.strategies = strategies  # indexed by the slots' column `strategy`
        self.policy = policy

    def __call__(
        self, logits: Tensor, windows: Windows, features: StepFeatures, host_processed: Mapping[int, Request]
    ) -> Sampled:
        """Sample from logits [L, V] fp32, which are not changed."""
        base, errors = apply_request_options(self.ops, logits, windows, features, host_processed)
        processed = self.ops.sampling.process_logits(base, windows) if features.needs_processed else base
        sampled, bad = self.ops.sampling.sample(processed, windows, scaled=features.needs_processed)
        if features.needs_processed:
            bad = _unsampleable(base)  # truncation hides NaN
        if errors:
            bad[torch.tensor(list(errors), device=bad.device)] = int(FinishStatus.FAILED)
        scores = Scores(base, processed, sampled)
        choices = {}
        for i in features.strategies:
            choice = self.strategies[i].decide(windows, scores)
            choices[i] = apply_policy(choice, self.strategies[i].ops, windows, scores, self.policy)
        return Sampled(_merge(choices, windows), bad, processed, errors)


def _merge(choices: Mapping[int, Choice], windows: Windows) -> Choice:
    """Return, for every row, the choice of its own request's strategy."""
    if len(choices) == 1:
        return next(iter(choices.values()))
    strategy = windows.columns.strategy[windows.slot.clamp(min=0)]  # [L]
    token = torch.zeros_like(windows.draft)
    accept, recovered = torch.zeros_like(token, dtype=torch.bool), token
    for index, choice in choices.items():
        here = strategy == index
        accepted = windows.draft == choice.token if choice.accept is None else choice.accept
        replacement = choice.token if choice.recovered is None else choice.recovered
        accept = torch.where(here, accepted, accept)
        token = torch.where(here, choice.token, token)
        recovered = torch.where(here, replacement, recovered)
    return Choice(token, accept, recovered)


def _unsampleable(base: Tensor) -> Tensor:
    """Return [L] the `FinishStatus` of rows [L, V] that cannot be sampled from, 0 for the others."""
    peak = base.amax(-1)
    bad = torch.where(torch.isfinite(peak), 0, int(FinishStatus.NOT_FINITE))
    return torch.where(peak == -math.inf, int(FinishStatus.NO_ALLOWED_TOKEN), bad)
