"""rejection: accept a draft with probability target/draft, else sample what the draft left over.

Lossless in distribution for drafts sampled from `draft_probs`; a proposer that is certain counts as
one that gives its draft probability 1. Each of the three draws (the draft itself, keep or not, the
replacement) has its own noise stream: sharing one would bias the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops import STREAM_ACCEPT, STREAM_RESIDUAL
from draftproof.types import Choice, Windows
from draftproof.verify import Scores, Strategy


class Rejection(Strategy):
    lossless = True
    seed_exact = False
    needs_draft_probs = True
    needs_processed = True
    label = "lossless in distribution"

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        slot = windows.slot.clamp(min=0)
        seeds = windows.columns.seed[slot]
        drafts = windows.draft.clamp(min=0)[:, None]
        target = self._target_probs(windows, scores)  # [L, V]
        guessed = self._draft_probs(windows, drafts, target)
        draw = self.ops.uniform(seeds, windows.position, STREAM_ACCEPT)
        likely, certain = (law.gather(1, drafts)[:, 0].double() for law in (target, guessed))
        residual = (target - guessed).clamp(min=0)
        # no mass is left where both laws agree to the last bit; then any draw of the target's is right
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
        recovered = self.ops.gumbel_argmax(residual.log(), seeds, windows.position, STREAM_RESIDUAL)
        return Choice(scores.sampled, draw * certain < likely, recovered)

    def _target_probs(self, windows: Windows, scores: Scores) -> Tensor:
        """[L, V]; certain of its argmax where the temperature is 0."""
        probs = torch.exp(scores.processed - self.ops.logsumexp(scores.processed)[:, None])
        greedy = windows.columns.temperature[windows.slot.clamp(min=0)] == 0
        best = torch.zeros_like(probs).scatter_(1, scores.sampled[:, None], 1.0)
        return torch.where(greedy[:, None], best, probs)

    def _draft_probs(self, windows: Windows, drafts: Tensor, target: Tensor) -> Tensor:
        """[L, V]: the law that each row's draft was drawn from; drafts [L, 1]."""
        if windows.draft_probs is None:
            return torch.zeros_like(target).scatter_(1, drafts, 1.0)
        k = windows.draft_probs.shape[1]
        return windows.draft_probs[windows.slot.clamp(min=0), windows.depth.clamp(max=k - 1)]
