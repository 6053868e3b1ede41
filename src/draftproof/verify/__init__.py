"""Judging drafts: the strategy contract and the table of strategies.

A strategy is tensor code over the rows of a step. It says which drafts it would accept and which token
it would put at each row; how many drafts stand follows from that in one place, `judge`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftproof.config import SpeculativeConfig
from draftproof.ops import STREAM_SYNTHETIC, Ops
from draftproof.types import Verdict, Windows

STRATEGIES = {
    "target_match": "draftproof.verify.target_match:TargetMatch",
    "greedy": "draftproof.verify.greedy:Greedy",
    "rejection": "draftproof.verify.rejection:Rejection",
    "topp": "draftproof.verify.topp:TopP",
}
PLAIN_STRATEGY = "target_match"  # with no drafts it is plain sampling


@dataclass(frozen=True, slots=True)
class Scores:
    """The processed logits of a step's L rows; see `verify.process`."""

    base: Tensor  # [L, V] after penalties, bias and masks
    processed: Tensor  # [L, V] after temperature and truncation as well; greedy rows: base
    sampled: Tensor  # [L] int64: what plain sampling takes at each row


class Strategy(ABC):
    """One acceptance rule. Class attributes are its label."""

    lossless: ClassVar[bool]  # the output's law is the model's
    seed_exact: ClassVar[bool]  # same seed, same tokens as with no drafts, at any temperature
    label: ClassVar[str]
    needs_draft_probs: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}  # options and their defaults

    def __init__(self, ops: Ops, options: Mapping[str, Any]) -> None:
        self.ops = ops
        self.options = {**self.defaults, **options}

    def lossless_for(self, temperature_zero: bool) -> bool:
        """Is the law of this request's output the model's?"""
        return self.lossless

    @abstractmethod
    def accepts(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        """Would each draft stand, were those before it to stand? rows [B, K + 1] -> [B, K] bool."""

    @abstractmethod
    def tokens(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        """The token at each row when no draft is in its place: [B, K + 1] int64."""

    def recover(self, windows: Windows, scores: Scores, row: Tensor, depth: Tensor) -> Tensor | None:
        """The token in place of the draft that fell at row [B], or None: the one of `tokens`."""
        return None


def judge(
    strategy: Strategy,
    windows: Windows,
    scores: Scores,
    policy: SpeculativeConfig | None,
) -> Verdict:
    """How many drafts stand, and the token after them. One to num_draft + 1 tokens a window."""
    k = windows.draft.shape[1]
    depth = torch.arange(k + 1, device=windows.draft.device)
    rows = windows.first[:, None] + torch.minimum(depth, windows.num_draft[:, None])  # [B, K + 1]
    real = depth[:k] < windows.num_draft[:, None]
    name = policy.accept_policy if policy else "normal"
    if name == "normal":
        stands = strategy.accepts(windows, scores, rows)
    elif name == "synthetic":
        assert policy and policy.synthetic_acceptance_rates
        stands = _synthetic(strategy.ops, windows, policy.synthetic_acceptance_rates)
    else:
        stands = torch.full_like(real, name == "accept_all")
    num_accepted = leading_true(stands & real)
    tokens = strategy.tokens(windows, scores, rows)
    fell = num_accepted < windows.num_draft
    if name == "normal" and bool(fell.any()):
        row = rows.gather(1, num_accepted[:, None])[:, 0]
        recovered = strategy.recover(windows, scores, row, num_accepted)
        if recovered is not None:
            at = num_accepted[:, None]
            kept = tokens.gather(1, at)[:, 0]
            tokens = tokens.scatter(1, at, torch.where(fell, recovered, kept)[:, None])
    drafts = torch.nn.functional.pad(windows.draft, (0, 1))
    tokens = torch.where(depth < num_accepted[:, None], drafts, tokens)
    return Verdict(tokens, num_accepted, num_accepted + 1)


def leading_true(mask: Tensor) -> Tensor:
    """[B, K] bool -> [B]: how many are true before the first false."""
    return mask.long().cumprod(1).sum(1)


def _synthetic(ops: Ops, windows: Windows, rates: tuple[float, ...]) -> Tensor:
    """Acceptance by the given rates, from its own noise: repeatable, and blind to what was drafted."""
    b, k = windows.draft.shape
    columns = windows.columns
    start = windows.length - columns.prompt_len[windows.slots]
    depth = torch.arange(k, device=start.device)
    position = (start[:, None] + depth).reshape(-1)
    seeds = columns.seed[windows.slots].repeat_interleave(k)
    draws = ops.uniform(seeds, position, STREAM_SYNTHETIC).view(b, k)
    return draws < torch.tensor(rates, dtype=torch.float64, device=start.device)
