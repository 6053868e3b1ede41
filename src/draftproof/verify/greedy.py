"""greedy: argmax at every row, temperature ignored; accept drafts while they equal it."""

from __future__ import annotations

from draftproof.types import Choice, Windows
from draftproof.verify import Scores, Strategy


class Greedy(Strategy):
    lossless = False  # at temperature 0 alone
    seed_exact = True
    label = "greedy: temperature is ignored; lossless and seed-exact at temperature 0"

    def lossless_for(self, temperature_zero: bool) -> bool:
        return temperature_zero

    def decide(self, windows: Windows, scores: Scores) -> Choice:
        return Choice(self.ops.argmax(scores.base))
