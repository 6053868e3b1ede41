"""target_match: sample every row as plain decoding would, accept drafts while they equal the sample.

The token at a position is always the target's own sample under that position's noise, so the output is
the plain one, token for token, whatever was drafted.
"""

from __future__ import annotations

from torch import Tensor

from draftproof.types import Windows
from draftproof.verify import Scores, Strategy


class TargetMatch(Strategy):
    lossless = True
    seed_exact = True
    label = "lossless and seed-exact"

    def accepts(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        return windows.draft == scores.sampled[rows[:, :-1]]

    def tokens(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        return scores.sampled[rows]
