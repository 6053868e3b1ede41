"""target_match: sample every row as plain decoding would, accept drafts while they equal the sample.

The token at a position is always the target's own sample under that position's noise, so the output is
the plain one, token for token, whatever was drafted.
"""

from __future__ import annotations

from draftproof.types import Choice, Windows
from draftproof.verify import Scores, Strategy


class TargetMatch(Strategy):
    lossless = True
    seed_exact = True
    label = "lossless and seed-exact"

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        return Choice(scores.sampled)
