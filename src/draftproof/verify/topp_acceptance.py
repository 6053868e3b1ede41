"""Strategy `topp`: accept any draft inside the nucleus. Lossy, and labelled as such.

The nucleus of a row is the smallest set of best tokens whose probabilities sum to top_p, at most
`max_candidate_len` of them; it always holds the best token. A draft outside the nucleus is accepted as well
if it is the second best and the next `verify_window` drafts are each the best of their row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import STREAM_SAMPLE, Ops
from draftproof.types import Choice, Windows
from draftproof.verify.base import Scores, Strategy


class TopP(Strategy):
    """Accept drafts inside the nucleus of their row."""

    lossless = False
    seed_exact = False
    needs_processed = True
    label = "LOSSY: accepts any draft in the nucleus"
    defaults = {"max_candidate_len": 5, "verify_window": 2}

    def __init__(self, ops: Ops, options: Mapping[str, Any]) -> None:
        super().__init__(ops, options)
        for name, minimum in (("max_candidate_len", 1), ("verify_window", 0)):
            value = self.options[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Return whether each draft is in the nucleus, and a sample from the nucleus."""
        slot = windows.slot.clamp(min=0)
        nucleus = self._nucleus(windows, scores)  # [L, V]
        drafts, real = windows.draft.clamp(min=0), windows.draft >= 0
        inside = torch.isfinite(nucleus.gather(1, drafts[:, None]))[:, 0]
        # from the row before truncation: in a nucleus of one token the second best would be a token at -inf
        values, ids = self.ops.sampling.top(scores.base, min(2, nucleus.shape[1]))
        best = (drafts == ids[:, 0]) & real
        second = (drafts == ids[:, -1]) & torch.isfinite(values[:, -1])
        window = self.options["verify_window"]
        if window:
            inside = inside | (second & _is_followed_by_best(best, window))
        drawn = self.ops.sampling.gumbel_argmax(
            nucleus, windows.columns.seed[slot], windows.position, STREAM_SAMPLE
        )
        greedy = windows.columns.temperature[slot] == 0
        return Choice(torch.where(greedy, scores.sampled, drawn), inside)

    def _nucleus(self, windows: Windows, scores: Scores) -> Tensor:
        """Return the processed logits [L, V] with -inf outside the nucleus, not renormalised."""
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        max_candidates = torch.full_like(slot, self.options["max_candidate_len"])
        no_min_p, no_top_p = torch.zeros_like(columns.min_p[slot]), torch.ones_like(columns.top_p[slot])
        kept = self.ops.sampling.truncate(scores.processed, max_candidates, no_top_p, no_min_p)
        # sampled rows are already truncated to top_p; greedy rows are not truncated at all
        greedy = columns.temperature[slot] == 0
        top_p = torch.where(greedy, columns.top_p[slot], 1.0)
        within = self.ops.sampling.truncate(scores.processed, torch.zeros_like(slot), top_p, no_min_p)
        return kept.masked_fill(torch.isinf(within), -math.inf)


def _is_followed_by_best(best: Tensor, window: int) -> Tensor:
    """Return [L] whether the next `window` rows all have the best token as their draft."""
    follow = torch.ones_like(best)
    for step in range(1, window + 1):
        follow = follow & torch.nn.functional.pad(best[step:], (0, min(step, len(best))))
    return follow
