"""Acceptance policies for measurements: they replace a strategy's acceptance, never its tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops import STREAM_SYNTHETIC, Ops
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Choice, Windows
from draftproof.verify.base import Scores


def apply_policy(
    choice: Choice, ops: Ops, windows: Windows, scores: Scores, config: SpeculativeConfig | None
) -> Choice:
    """Replace which drafts are accepted by `config.accept_policy`; forbidden ones (-inf) never are."""
    policy = config.accept_policy if config else "normal"
    if policy == "normal":
        return choice
    if policy == "synthetic":
        assert config and config.synthetic_acceptance_rates
        accepted = _synthetic(ops, windows, config.synthetic_acceptance_rates)
    else:
        accepted = torch.full_like(windows.draft, policy == "accept_all", dtype=torch.bool)
    possible = scores.base.gather(1, windows.draft.clamp(min=0)[:, None])[:, 0] > -math.inf
    return Choice(choice.token, accepted & possible)


def _synthetic(ops: Ops, windows: Windows, rates: tuple[float, ...]) -> Tensor:
    """Draw acceptance [L] at the given rates, by seed and position, whatever the drafts are."""
    seeds = windows.columns.seed[windows.slot.clamp(min=0)]
    draws = ops.sampling.uniform(seeds, windows.position, STREAM_SYNTHETIC)
    rate = torch.tensor([*rates, 0.0], dtype=torch.float64).to(draws.device)
    return draws < rate[windows.depth.clamp(max=len(rates))]
