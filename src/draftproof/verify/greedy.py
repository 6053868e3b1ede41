"""greedy: argmax at every row, temperature ignored; accept drafts while they equal it."""

from __future__ import annotations

from torch import Tensor

from draftproof.types import Windows
from draftproof.verify import Scores, Strategy


class Greedy(Strategy):
    lossless = False  # at temperature 0 alone
    seed_exact = True
    label = "greedy: temperature is ignored; lossless and seed-exact at temperature 0"

    def lossless_for(self, temperature_zero: bool) -> bool:
        return temperature_zero

    def accepts(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        return windows.draft == self.tokens(windows, scores, rows)[:, :-1]

    def tokens(self, windows: Windows, scores: Scores, rows: Tensor) -> Tensor:
        return self.ops.argmax(scores.base)[rows]
