"""rejection: accept a draft with probability target/draft, else sample what the draft left over.

Lossless in distribution for drafts sampled from `draft_probs`; a proposer that is certain counts as
one that gives its draft probability 1. Each of the three draws (the draft itself, keep or not, the
replacement) has its own noise stream: sharing one would bias the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops import STREAM_ACCEPT, STREAM_RESIDUAL
from draftproof.types import Windows
from draftproof.verify import Scores, Strategy


class Rejection(Strategy):
    lossless = True
    seed_exact = False
    needs_draft_probs = True
    label = "lossless in distribution"

    def accepts(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        b, k = windows.draft.shape
        at = rows[:, :-1].reshape(-1)
        vocab = scores.processed.shape[1]
        drafts = windows.draft.clamp(0, vocab - 1)  # beyond num_draft anything may stand
        target = self._target_probs(windows, scores, at).gather(1, drafts.view(-1, 1))
        draw = self.ops.uniform(
            windows.columns.seed[windows.slots].repeat_interleave(k),
            windows.position[at],
            STREAM_ACCEPT,
        ).view(b, k)
        certain = torch.ones_like(draw)
        if windows.draft_probs is not None:
            certain = windows.draft_probs.gather(2, drafts[..., None])[..., 0].double()
        return draw * certain < target.view(b, k).double()

    def tokens(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        return scores.sampled[rows]

    def recover(self, windows: Windows, scores: Scores, row: Tensor, depth: Tensor) -> Tensor:
        target = self._target_probs(windows, scores, row)  # [B, V]
        last = depth.clamp(max=windows.draft.shape[1] - 1)
        if windows.draft_probs is not None:
            guessed = windows.draft_probs[torch.arange(len(last), device=last.device), last]
        else:
            draft = windows.draft.gather(1, last[:, None])
            guessed = torch.zeros_like(target).scatter_(1, draft.clamp(0, target.shape[1] - 1), 1.0)
        residual = (target - guessed).clamp(min=0)
        # no mass is left where both laws agree to the last bit; then any draw of the target's is right
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
        seeds = windows.columns.seed[windows.slots]
        return self.ops.gumbel_argmax(residual.log(), seeds, windows.position[row], STREAM_RESIDUAL)

    def _target_probs(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        """[n] -> [n, V]; certain of its argmax where the temperature is 0."""
        processed = scores.processed[rows]
        probs = torch.exp(processed - self.ops.logsumexp(processed)[:, None])
        greedy = windows.columns.temperature[windows.slots][windows.owner[rows]] == 0
        if bool(greedy.any()):
            best = torch.zeros_like(probs).scatter_(1, scores.sampled[rows][:, None], 1.0)
            probs = torch.where(greedy[:, None], best, probs)
        return probs
