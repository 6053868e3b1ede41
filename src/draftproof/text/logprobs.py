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
from draftproof.text.bulk.logprob_rows import Rows, unpack_rows
from draftproof.text.tokenizer import Tokenizer


class LogprobTable(Sequence[LogprobRow]):
    """Sequence of LogprobRow over packed rows of n tokens."""

    def __init__(self, parts: list[Rows]) -> None:
        """Take at least one part; parts are concatenated at the first read."""
        self._parts = parts

    @property
    def rows(self) -> Rows:
        """Packed rows of all tokens."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Tokens, values, ids of the best, ranks."""
        return unpack_rows(self.rows)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, index: int) -> LogprobRow: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobTable: ...
    def __getitem__(self, index: int | slice) -> LogprobRow | LogprobTable:
        if isinstance(index, slice):
            return LogprobTable([self.rows[index]])
        token, values, best, rank = (column[index].tolist() for column in self.columns)
        return LogprobRow([token, *best], values, [rank, *range(1, len(best) + 1)])

    def __iter__(self) -> Iterator[LogprobRow]:
        columns = self.columns
        tokens, values, all_ids, ranks = (column.tolist() for column in columns)
        top_ranks = list(range(1, columns[2].shape[1] + 1))
        for token, value, ids, rank in zip(tokens, values, all_ids, ranks, strict=True):
            yield LogprobRow([token, *ids], value, [rank, *top_ranks])


class LogprobMaps(Sequence[Any]):
    """Read-only list of mappings token id -> Logprob, one a position: the token itself, then the best.

    An entry is None where no logprob exists: at the first token of a prompt. A pickle or a deep copy is a
    plain list, which compares equal.
    """

    __slots__ = ("_rows", "_text")
    __hash__ = None  # type: ignore[assignment]  # like a list

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
        if isinstance(other, LogprobMaps):
            if len(self) != len(other):
                return False
            # bound methods are equal if they belong to one tokenizer
            if self._text == other._text and _has_equal_columns(self._rows, other._rows):
                return True
        elif not isinstance(other, list):
            return NotImplemented
        return list(self) == list(other)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _has_equal_columns(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether both are tables with equal columns; other sequences may still have equal rows."""
    if not isinstance(left, LogprobTable) or not isinstance(right, LogprobTable):
        return False
    return all(np.array_equal(a, b) for a, b in zip(left.columns, right.columns, strict=True))
