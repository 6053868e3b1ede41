"""Logprobs of an output, converted to mappings when they are read.

A batch of outputs with 20 logprobs a token has more than a million entries, of which most readers use few.
They stay columns until they are indexed or iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from draftproof.outputs import Logprob, LogprobRow, logprob_map, no_text
from draftproof.text.bulk.lazy_list import LazyList
from draftproof.text.bulk.logprob_rows import Rows, unpack_rows
from draftproof.text.tokenizer import Tokenizer


class LogprobTable(Sequence[LogprobRow]):
    """Sequence of LogprobRow over packed rows of n tokens."""

    def __init__(self, parts: list[Rows], named_ids: Sequence[int] = ()) -> None:
        """Take at least one part; parts are concatenated at the first read.

        With named ids the rows hold their logprobs and ranks in place of the best tokens.
        """
        self._parts, self.named_ids = parts, list(named_ids)

    @property
    def rows(self) -> Rows:
        """Packed rows of all tokens."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Tokens, values, ids of the best (or ranks of the named ids), ranks."""
        return unpack_rows(self.rows)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, index: int) -> LogprobRow: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobTable: ...
    def __getitem__(self, index: int | slice) -> LogprobRow | LogprobTable:
        if isinstance(index, slice):
            return LogprobTable([self.rows[index]], self.named_ids)
        return self._row(*(column[index].tolist() for column in self.columns))

    def __iter__(self) -> Iterator[LogprobRow]:
        return map(self._row, *(column.tolist() for column in self.columns))

    def _row(self, token: int, values: list[float], others: list[int], rank: int) -> LogprobRow:
        """Return one row; others: ids of the best, or ranks of the named ids."""
        if self.named_ids:
            return LogprobRow([token, *self.named_ids], values, [rank, *others])
        return LogprobRow([token, *others], values, [rank, *range(1, len(others) + 1)])


class LogprobMaps(LazyList):
    """Read-only list of mappings token id -> Logprob, one a position: the token itself, then the best.

    An entry is None where no logprob exists: at the first token of a prompt.
    """

    __slots__ = ("_rows", "_text")
    __hash__ = None  # like a list

    def __init__(self, rows: Sequence[LogprobRow | None], tokenizer: Tokenizer | None) -> None:
        self._rows = rows
        self._text: Callable[[int], str] = tokenizer.token_text if tokenizer else no_text

    @property
    def rows(self) -> Sequence[LogprobRow | None]:
        """Rows that the mappings are built from."""
        return self._rows

    @property
    def token_text(self) -> Callable[[int], str]:
        """Function from a token id to its text."""
        return self._text

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # a slice is of this class as well
        if isinstance(index, slice):
            part = object.__new__(LogprobMaps)
            part._rows, part._text = self._rows[index], self._text
            return part
        row = self._rows[index]
        return None if row is None else logprob_map(row, self._text)

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (None if row is None else logprob_map(row, self._text) for row in self._rows)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobMaps) and self._has_equal_columns(other):
            return True
        return super().__eq__(other)

    def _has_equal_columns(self, other: LogprobMaps) -> bool:
        # bound methods are equal if they belong to one tokenizer
        return self._text == other._text and _has_equal_columns(self._rows, other._rows)


def _has_equal_columns(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether both are tables with equal columns; other sequences may still have equal rows."""
    if not isinstance(left, LogprobTable) or not isinstance(right, LogprobTable):
        return False
    if left.named_ids != right.named_ids:
        return False
    return all(np.array_equal(a, b) for a, b in zip(left.columns, right.columns, strict=True))
