"""Strategy `greedy`: argmax at every row, temperature ignored; accept drafts while they equal it."""

from __future__ import annotations

from draftproof.types import Choice, Windows
from draftproof.verify.base import Scores, Strategy


class Greedy(Strategy):
    """Accept drafts that equal the argmax of their row."""

    lossless = False
    lossless_greedy = True
    seed_exact = True
    label = "greedy: temperature is ignored; lossless and seed-exact at temperature 0"

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Return the argmax of each row."""
        return Choice(self.ops.sampling.argmax(scores.base))
