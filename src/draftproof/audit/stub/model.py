"""A language model whose next token depends on the last two tokens."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

END_ID = 0
ROWS = 241
# Standard deviations of the logits of a row. The mean of p (1 - p) of the top-1 token is then about 0.11.
ROW_SCALES, ROW_SHARES = (1.5, 4.0, 14.0), (0.15, 0.4, 0.45)
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


@dataclass
class Row:
    """Distribution after one token."""

    logprobs: list[float]  # [V]
    order: list[int]  # [V] ids, most likely first
    sums: list[float]  # [V] cumulative probabilities in the order of ids

    def sample(self, noise: float) -> int:
        """Return the id at a number in [0, 1) of the cumulative distribution."""
        return min(bisect_right(self.sums, noise * self.sums[-1]), len(self.sums) - 1)

    def sample_sorted(self, noise: float) -> int:
        """Return the id at a number in [0, 1) of the distribution with the most likely token first."""
        mass = 0.0
        for token in self.order:
            mass += math.exp(self.logprobs[token])
            if noise < mass:
                return token
        return self.order[-1]


def make_row(logits: list[float]) -> Row:
    """Return the distribution of logits."""
    largest = max(logits)
    total = math.log(sum(math.exp(x - largest) for x in logits)) + largest
    logprobs = [x - total for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    return Row(logprobs, order, list(accumulate(math.exp(x) for x in logprobs)))


class StubModel:
    """Model with random logits; the last two tokens select one of its rows."""

    def __init__(self, seed: int, vocab: int = 60, sharpness: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        names = (SYLLABLES[i % 60] + ("" if i < 60 else str(i // 60)) for i in range(vocab - 1))
        self.words = ["<|end|>", *(f" {name}" for name in names)]
        self._ids = {word: i for i, word in enumerate(self.words)}
        scales = sharpness * rng.choice(ROW_SCALES, size=(ROWS, 1), p=ROW_SHARES)
        logits = rng.normal(size=(ROWS, vocab)) * scales
        logits[:, END_ID] = logits[:, END_ID + 1 :].max(axis=1) - 6
        self.rows = [make_row(row) for row in logits.tolist()]
        wide = logits + 0.3 * rng.normal(size=logits.shape)
        self.wide_rows = [make_row(row) for row in wide.tolist()]

    def row_index(self, history: Sequence[int]) -> int:
        """Return the row of the distribution after these tokens."""
        before = history[-2] if len(history) > 1 else 0
        return (31 * before + 7 * history[-1]) % ROWS

    @property
    def vocab(self) -> int:
        """Return the number of tokens."""
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Return token ids; unknown words are hashed to one."""
        return [
            self._ids.get(f" {word}", 1 + zlib.crc32(word.encode()) % (self.vocab - 1))
            for word in text.split()
        ] or [1]
