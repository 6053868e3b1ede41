"""Strategy `rejection`: accept a draft with probability target/draft, else sample from the residual.

The output distribution is the model's for drafts sampled from `draft_probs`. A proposer that reports no
probabilities counts as one that gives its draft probability 1. Each of the three draws (the draft, its
acceptance, the replacement) has its own noise stream, because a shared one would bias the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops import STREAM_ACCEPT, STREAM_RESIDUAL
from draftproof.types import Choice, Windows
from draftproof.verify.base import Scores, Strategy


class Rejection(Strategy):
    """Accept drafts by rejection sampling."""

    lossless = True
    seed_exact = False
    needs_draft_probs = True
    needs_processed = True
    label = "lossless in distribution"

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Return acceptance, the plain sample and the sample of the residual distribution for each row."""
        slot = windows.slot.clamp(min=0)
        seeds = windows.columns.seed[slot]
        drafts = windows.draft.clamp(min=0)[:, None]
        target_probs = self._target_probs(windows, scores)  # [L, V]
        draft_probs = self._draft_probs(windows, drafts, target_probs)
        draw = self.ops.sampling.uniform(seeds, windows.position, STREAM_ACCEPT)
        of_target, of_draft = (p.gather(1, drafts)[:, 0].double() for p in (target_probs, draft_probs))
        residual = (target_probs - draft_probs).clamp(min=0)
        # the residual is empty where both distributions are equal: any sample of the target is right there
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)
        recovered = self.ops.sampling.gumbel_argmax(residual.log(), seeds, windows.position, STREAM_RESIDUAL)
        return Choice(scores.sampled, draw * of_draft < of_target, recovered)

    def _target_probs(self, windows: Windows, scores: Scores) -> Tensor:
        """Return the target's probabilities [L, V]; one-hot at the argmax where the temperature is 0."""
        probs = torch.exp(scores.processed - self.ops.sampling.logsumexp(scores.processed)[:, None])
        greedy = windows.columns.temperature[windows.slot.clamp(min=0)] == 0
        best = torch.zeros_like(probs).scatter_(1, scores.sampled[:, None], 1.0)
        return torch.where(greedy[:, None], best, probs)

    def _draft_probs(self, windows: Windows, drafts: Tensor, target_probs: Tensor) -> Tensor:
        """Return the distribution [L, V] that each row's draft was sampled from; drafts [L, 1]."""
        if windows.draft_probs is None:
            return torch.zeros_like(target_probs).scatter_(1, drafts, 1.0)
        k = windows.draft_probs.shape[1]
        return windows.draft_probs[windows.slot.clamp(min=0), windows.depth.clamp(max=k - 1)]
