"""Logprobs of tokens as rows of 32-bit numbers: token, rank, its logprob, the best logprobs, their ids.

One row holds one token. Rows of a request with named ids hold the logprobs and ranks of these in place of the
best logprobs and their ids. Outputs take their rows when they finish, mostly many outputs at once, and one
copy of rows is cheaper than four copies of columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]  # [n, 3 + 2 * top]
Column = NDArray[Any]
VALUES_AT = 2  # column of the token's own logprob; the best logprobs and then their ids follow it


def pack_rows(tokens: Column, values: Column, ids: Column, ranks: Column, top: int) -> Rows:
    """Pack tokens [n], values [n, 1 + …], ids [n, …], ranks [n]; missing top entries are zeros."""
    have = min(top, ids.shape[1])
    shape = len(tokens), 3 + 2 * top
    rows = np.empty(shape, np.int32) if have == top else np.zeros(shape, np.int32)
    rows[:, 0], rows[:, 1] = tokens, ranks
    rows.view(np.float32)[:, VALUES_AT : VALUES_AT + 1 + have] = values[:, : 1 + have]
    rows[:, 3 + top : 3 + top + have] = ids[:, :have]
    return rows


def unpack_rows(rows: Rows) -> tuple[Column, Column, Column, Column]:
    """Return tokens [n], values [n, 1 + top], ids [n, top], ranks [n] as views."""
    top = (rows.shape[1] - 3) // 2
    return rows[:, 0], rows.view(np.float32)[:, VALUES_AT : 3 + top], rows[:, 3 + top :], rows[:, 1]


def longer(column: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return a copy that is extended with zeros to `rows` rows."""
    made = np.zeros((rows, *column.shape[1:]), column.dtype)
    made[: len(column)] = column
    return made


class LogprobBuffer:
    """Rows for a fixed number of tokens, as wide as the largest `top` of any request so far."""

    def __init__(self) -> None:
        self.rows: Rows = np.zeros((0, 3), np.int32)
        self.top = 0

    def resize(self, num_tokens: int) -> None:
        """Grow to `num_tokens` rows."""
        self.rows = longer(self.rows, num_tokens)

    def widen(self, top: int) -> None:
        """Grow to `top` best entries a row."""
        self.rows, self.top = pack_rows(*unpack_rows(self.rows), top), top

    @property
    def token_logprobs(self) -> Column:
        """Logprobs of the tokens themselves [n]."""
        return self.rows.view(np.float32)[:, VALUES_AT]

    def put(self, at: Column, rows: Rows) -> None:
        """Store rows at these places. NumPy copies one record a row faster than several numbers."""
        record = f"V{rows.shape[1] * rows.itemsize}"
        self.rows.view(record)[:, 0][at] = rows.view(record)[:, 0]

    def copy_rows(self, first: int, end: int, top: int) -> Rows:
        """Return a copy of these rows with `top` best entries."""
        rows = self.rows[first:end]
        return rows.copy() if top == self.top else pack_rows(*unpack_rows(rows), top)
