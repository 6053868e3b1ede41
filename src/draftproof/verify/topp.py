"""topp: accept any draft inside the nucleus. Lossy, and says so.

The nucleus of a row is the smallest set of best tokens whose mass reaches top_p, at most
`max_candidate_len` of them; it always holds the best one. A draft outside it stands all the same if it
is the second best and the next `verify_window` drafts are each the best of their row.
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
from draftproof.verify import Scores, Strategy


class TopP(Strategy):
    lossless = False
    seed_exact = False
    needs_processed = True
    label = "LOSSY: accepts any draft in the nucleus"
    defaults = {"max_candidate_len": 5, "verify_window": 2}

    def __init__(self, ops: Ops, options: Mapping[str, Any]) -> None:
        super().__init__(ops, options)
        for name, least in (("max_candidate_len", 1), ("verify_window", 0)):
            value = self.options[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        slot = windows.slot.clamp(min=0)
        nucleus = self._nucleus(windows, scores)  # [L, V]
        drafts, real = windows.draft.clamp(min=0), windows.draft >= 0
        inside = torch.isfinite(nucleus.gather(1, drafts[:, None]))[:, 0]
        # of the row before truncation: in a nucleus of one the second best would be the lowest -inf
        values, ids = self.ops.top(scores.base, min(2, nucleus.shape[1]))
        best = (drafts == ids[:, 0]) & real
        second = (drafts == ids[:, -1]) & torch.isfinite(values[:, -1])
        window = self.options["verify_window"]
        if window:
            inside = inside | (second & _followed(best, window))
        drawn = self.ops.gumbel_argmax(nucleus, windows.columns.seed[slot], windows.position, STREAM_SAMPLE)
        greedy = windows.columns.temperature[slot] == 0
        return Choice(torch.where(greedy, scores.sampled, drawn), inside)

    def _nucleus(self, windows: Windows, scores: Scores) -> Tensor:
        """[L, V] processed logits, -inf outside the nucleus.

        Sampling by argmax over what is kept renormalises by itself.
        """
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        few = torch.full_like(slot, self.options["max_candidate_len"])
        none, all_of_it = torch.zeros_like(columns.min_p[slot]), torch.ones_like(columns.top_p[slot])
        kept = self.ops.truncate(scores.processed, few, all_of_it, none)
        # sampled rows are cut to top_p already; greedy ones are not cut at all
        greedy = columns.temperature[slot] == 0
        top_p = torch.where(greedy, columns.top_p[slot], 1.0)
        within = self.ops.truncate(scores.processed, torch.zeros_like(slot), top_p, none)
        return kept.masked_fill(torch.isinf(within), -math.inf)


def _followed(best: Tensor, window: int) -> Tensor:
    """[L]: are the drafts of the next `window` rows the best of theirs? A window's last row has none."""
    follow = torch.ones_like(best)
    for step in range(1, window + 1):
        follow = follow & torch.nn.functional.pad(best[step:], (0, min(step, len(best))))
    return follow
