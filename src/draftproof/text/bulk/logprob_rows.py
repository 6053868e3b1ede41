"""Logprobs of tokens as rows of 32-bit numbers: token, rank, its logprob and those of the best, their ids.

One row a token, because answers take theirs away when they end, mostly many at once, and one copy of rows
costs less than four of columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]  # [n, 3 + 2 * top]
Column = NDArray[Any]
FIRST = 2  # column of the token's own logprob; those of the best, then their ids, are behind it


def rows_of(tokens: Column, values: Column, ids: Column, ranks: Column, top: int) -> Rows:
    """tokens [n], values [n, 1 + …], ids [n, …], ranks [n]; where there are fewer than `top`: zeros."""
    have = min(top, ids.shape[1])
    shape = len(tokens), 3 + 2 * top
    rows = np.empty(shape, np.int32) if have == top else np.zeros(shape, np.int32)
    rows[:, 0], rows[:, 1] = tokens, ranks
    rows.view(np.float32)[:, FIRST : FIRST + 1 + have] = values[:, : 1 + have]
    rows[:, 3 + top : 3 + top + have] = ids[:, :have]
    return rows


def columns_of(rows: Rows) -> tuple[Column, Column, Column, Column]:
    """tokens [n], values [n, 1 + top], ids [n, top], ranks [n]."""
    top = (rows.shape[1] - 3) // 2
    return rows[:, 0], rows.view(np.float32)[:, FIRST : 3 + top], rows[:, 3 + top :], rows[:, 1]


class LogprobPage:
    """Room for so many tokens, with as many of the best as anybody has asked for."""

    def __init__(self) -> None:
        self.rows: Rows = np.zeros((0, 3), np.int32)
        self.top = 0

    def lengthen(self, size: int) -> None:
        longer = np.zeros((size, self.rows.shape[1]), np.int32)
        longer[: len(self.rows)] = self.rows
        self.rows = longer

    def widen(self, top: int) -> None:
        self.rows, self.top = rows_of(*columns_of(self.rows), top), top

    @property
    def own(self) -> Column:
        """The tokens' own logprobs."""
        return self.rows.view(np.float32)[:, FIRST]

    def take(self, first: int, end: int, top: int) -> Rows:
        """A copy of these rows, with `top` of the best."""
        rows = self.rows[first:end]
        return rows.copy() if top == self.top else rows_of(*columns_of(rows), top)
