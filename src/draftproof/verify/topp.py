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
from draftproof.types import Windows
from draftproof.verify import Scores, Strategy


class TopP(Strategy):
    lossless = False
    seed_exact = False
    label = "LOSSY: accepts any draft in the nucleus"
    defaults = {"max_candidate_len": 5, "verify_window": 2}

    def __init__(self, ops: Ops, options: Mapping[str, Any]) -> None:
        super().__init__(ops, options)
        for name, least in (("max_candidate_len", 1), ("verify_window", 0)):
            value = self.options[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")

    def accepts(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        k = windows.draft.shape[1]
        at = rows[:, :-1].reshape(-1)
        nucleus = self._nucleus(windows, scores, at)  # [B * K, V]
        drafts = windows.draft.clamp(0, nucleus.shape[1] - 1)  # beyond num_draft anything may stand
        inside = torch.isfinite(nucleus.gather(1, drafts.view(-1, 1))).view(-1, k)
        # of the row before truncation: in a nucleus of one the second best would be the lowest -inf
        values, ids = self.ops.top(scores.base[at], min(2, nucleus.shape[1]))
        real = torch.arange(k, device=at.device) < windows.num_draft[:, None]
        best = (drafts == ids[:, 0].view(-1, k)) & real
        second = (drafts == ids[:, -1].view(-1, k)) & torch.isfinite(values[:, -1]).view(-1, k)
        window = self.options["verify_window"]
        follow = torch.ones_like(best)
        for step in range(1, window + 1):  # drafts beyond the window's end do not exist
            follow &= torch.nn.functional.pad(best[:, step:], (0, min(step, k)))[:, :k]
        return inside | (second & follow) if window else inside

    def tokens(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        every = torch.arange(len(windows.owner), device=rows.device)
        nucleus = self._nucleus(windows, scores, every)
        seeds = windows.columns.seed[windows.slots][windows.owner]
        drawn = self.ops.gumbel_argmax(nucleus, seeds, windows.position, STREAM_SAMPLE)
        greedy = windows.columns.temperature[windows.slots][windows.owner] == 0
        return torch.where(greedy, scores.sampled, drawn)[rows]

    def _nucleus(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        """[n] -> [n, V] processed logits, -inf outside the nucleus.

        Sampling by argmax over what is kept renormalises by itself.
        """
        slots = windows.slots[windows.owner[rows]]
        columns = windows.columns
        # sampled rows are cut to top_p already; greedy ones are not cut at all
        greedy = columns.temperature[slots] == 0
        return self.ops.truncate(
            scores.processed[rows],
            torch.full_like(columns.top_k[slots], self.options["max_candidate_len"]),
            torch.ones_like(columns.top_p[slots]),
            torch.zeros_like(columns.min_p[slots]),
        ).masked_fill(self._outside(scores, rows, columns.top_p[slots], greedy), -math.inf)

    def _outside(self, scores: Scores, rows: Tensor, top_p: Tensor, greedy: Tensor) -> Tensor:
        """[n, V] bool: beyond top_p of the whole row, for the rows not cut to it yet."""
        outside = torch.zeros_like(scores.processed[rows], dtype=torch.bool)
        if bool((greedy & (top_p < 1)).any()):
            at = (greedy & (top_p < 1)).nonzero()[:, 0]
            none = torch.zeros_like(top_p[at])
            kept = self.ops.truncate(scores.processed[rows[at]], none.long(), top_p[at], none)
            outside[at] = torch.isinf(kept)
        return outside
