"""Strategy `target_match`: sample every row as plain decoding does, accept drafts that equal the sample.

The token at a position is always the target's own sample under that position's noise. The output therefore
equals plain decoding token for token, whatever was drafted.
"""

from __future__ import annotations

from draftproof.types import Choice, Windows
from draftproof.verify.base import Scores, Strategy


class TargetMatch(Strategy):
    """Accept drafts that equal the target's sample."""

    lossless = True
    seed_exact = True
    label = "lossless and seed-exact"

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Return the plain sample of each row."""
        return Choice(scores.sampled)
