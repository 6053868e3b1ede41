"""Drafts of an output, converted to records when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from draftproof.array_types import Ints
from draftproof.outputs import DraftColumns, DraftRecord
from draftproof.text.bulk.lazy_list import LazyList

# Columns and indices into them, both shared by several outputs, and which of the indices are of one output.
DraftPart = tuple[DraftColumns, Ints, int, int]


class DraftList(LazyList):
    """Read-only list of the draft records of one output."""

    __slots__ = ("_parts", "_records", "_sources")

    def __init__(self, parts: Sequence[DraftPart], sources: Sequence[str]) -> None:
        """Keep the parts until the first read; sources: names of the draft sources."""
        self._parts, self._sources = parts, sources
        self._records: list[DraftRecord] | None = None

    @property
    def records(self) -> list[DraftRecord]:
        """Records of all drafts, made at the first read."""
        parts = self._parts  # read before `_records`: another thread may be here
        if self._records is None:
            records: list[DraftRecord] = []
            for columns, order, first, end in parts:
                records += columns.select(order[first:end]).records(self._sources)
            self._records, self._parts = records, ()
        return self._records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def __iter__(self) -> Iterator[DraftRecord]:
        return iter(self.records)
