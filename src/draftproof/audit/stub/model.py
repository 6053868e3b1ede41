"""A language model whose next token depends on the last two tokens."""

from __future__ import annotations

import enum
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

END_ID = 0
ROWS = 241
# Standard deviations of the logits of a row. The mean of p (1 - p) of the top-1 token is then about 0.11.
ROW_SCALES, ROW_SHARES = (1.5, 4.0, 14.0), (0.15, 0.4, 0.45)
ROUNDING_NATS = 0.02  # of bf16 logits
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


class Tokenizer(enum.StrEnum):
    """Kinds of token texts."""

    SPACES = "spaces"
    SENTENCEPIECE = "sentencepiece"
    NO_SPACES = "no_spaces"
    EQUAL_TEXTS = "equal_texts"  # several tokens are parts of characters


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

    def sample_race(self, noise: float) -> int:
        """Return the id with the first arrival in a race of exponential clocks (Gumbel noise)."""
        clocks = np.random.default_rng(int(noise * 2**53)).exponential(size=len(self.logprobs))
        return int(np.argmin(np.log(clocks) - self.logprobs))


def make_row(logits: list[float]) -> Row:
    """Return the distribution of logits."""
    largest = max(logits)
    total = math.log(sum(math.exp(x - largest) for x in logits)) + largest
    logprobs = [x - total for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    return Row(logprobs, order, list(accumulate(math.exp(x) for x in logprobs)))


def make_words(vocab: int, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of tokens, the end token first."""
    names = [SYLLABLES[i % 60] + ("" if i < 60 else str(i // 60)) for i in range(vocab - 1)]
    match tokenizer:
        case Tokenizer.SENTENCEPIECE:
            return ["</s>", *(f"\u2581{name}" for name in names)]
        case Tokenizer.NO_SPACES:
            return ["<|im_end|>", *names]
        case Tokenizer.EQUAL_TEXTS:
            parts = ["\ufffd"] * (len(names) // 6)
            return ["<|end|>", *(f" {name}" for name in names[len(parts) :]), *parts]
    return ["<|end|>", *(f" {name}" for name in names)]


class StubModel:
    """Model with random logits; the last two tokens select one of its rows."""

    def __init__(
        self, seed: int, vocab: int = 60, sharpness: float = 1.0, tokenizer: Tokenizer = Tokenizer.SPACES
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self.words = make_words(vocab, tokenizer)  # texts of the tokens
        self.pieces = [word.replace("\u2581", " ") for word in self.words]  # what a token adds to an output
        self._ids = {piece.strip(): i for i, piece in enumerate(self.pieces)}
        self._pattern = re.compile(
            "|".join(sorted(map(re.escape, self._ids), key=len, reverse=True)) + r"|\S+"
        )
        scales = sharpness * self._rng.choice(ROW_SCALES, size=(ROWS, 1), p=ROW_SHARES)
        self._logits = self._rng.normal(size=(ROWS, vocab)) * scales
        self._logits[:, END_ID] = self._logits[:, END_ID + 1 :].max(axis=1) - 6
        self.rows = [make_row(row) for row in self._logits.tolist()]

    @cached_property
    def wide_rows(self) -> list[Row]:
        """Return the distributions of a server whose logits depend on the batch."""
        return self._moved(0.3)

    @cached_property
    def inexact_rows(self) -> list[list[Row]]:
        """Return the distributions of several kernels whose logits differ by rounding."""
        return [self.rows, *(self._moved(ROUNDING_NATS) for _ in range(2))]

    def _moved(self, nats: float) -> list[Row]:
        moved = self._logits + nats * self._rng.normal(size=self._logits.shape)
        return [make_row(row) for row in moved.tolist()]

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
            self._ids.get(word, 1 + zlib.crc32(word.encode()) % (self.vocab - 1))
            for word in self._pattern.findall(text)
        ] or [1]
