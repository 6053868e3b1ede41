"""Strategy `greedy`: argmax at every row, temperature ignored; accept drafts while they equal it."""

from __future__ import annotations

from draftproof.types import Choice, Windows
from draftproof.verify.base import Scores, Strategy


class Greedy(Strategy):
    """Accept drafts that equal the argmax of their row."""

    lossless = False  # at temperature 0 alone
    seed_exact = True
    label = "greedy: temperature is ignored; lossless and seed-exact at temperature 0"

    def lossless_for(self, greedy: bool) -> bool:
        """Return True for requests at temperature 0."""
        return greedy

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Return the argmax of each row."""
        return Choice(self.ops.sampling.argmax(scores.base))
