"""Result buffer: all results of a step in one byte tensor, copied to the host with a single transfer.

The buffer is allocated once and never moves. A step writes its results directly into parts of it, so no
packing pass is needed. The next step overwrites the parts, so the copy is queued before that step.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftproof.engine.step.step_results import LogprobColumns
from draftproof.ops import NamedLogprobs, TokenLogprobs
from draftproof.types import LogprobKind

NUMPY_DTYPES = {
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.int8: np.dtype(np.int8),
}
PART_ALIGN_BYTES = 256  # start of every part; enough for any kernel's vector loads


class BufferPart(NamedTuple):
    """Position and type of one tensor in the buffer."""

    shape: tuple[int, ...]
    dtype: Any  # numpy dtype
    offset: int  # bytes

    def view(self, row: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the part as an array that shares memory with `row`."""
        return np.ndarray(self.shape, self.dtype, row, self.offset)


class HostResults(NamedTuple):
    """Results of a step as numpy arrays on the host."""

    table: NDArray[np.int64]  # [B, TOKENS + K + 1], see `types.Outcome`
    logprobs: dict[LogprobKind, LogprobColumns]  # of the committed tokens
    draft_targets: dict[LogprobKind, LogprobColumns]  # of the drafts by the target, by logits row
    draft_tokens: NDArray[np.int64] | None  # [L] by logits row
    draft_logprobs: NDArray[np.float32] | None  # [S, K] by the drafter
    draft_sources: NDArray[np.int8] | None  # [S, K]
    draft_ranks: NDArray[np.int64] | None  # [S, K] by the drafter; 0: none
    draft_top_ids: NDArray[np.int64] | None  # [S, K, top] likeliest tokens of the drafter
    draft_top_logprobs: NDArray[np.float32] | None  # [S, K, top]


COPY_NAMES = HostResults._fields[HostResults._fields.index("draft_tokens") :]
NO_COPIES = (None,) * len(COPY_NAMES)


class PackedResults:
    """Results of one step: parts of the buffer, one behind the other."""

    def __init__(self, row: Tensor) -> None:
        """Start without parts; `row`: [bytes] uint8."""
        self._row = row
        self._end = 0
        self.data = row[:0]  # [bytes] used, once the step is complete
        self._table = BufferPart((0, 0), np.int64, 0)
        self._logprobs: dict[LogprobKind, tuple[BufferPart, ...]] = {}  # fields of LogprobColumns
        self._draft_targets: dict[LogprobKind, tuple[BufferPart, ...]] = {}
        self._copies: dict[str, BufferPart] = {}  # by the field of HostResults

    def add_table(self, entries: int, width: int) -> Tensor:
        """Return the outcome table [entries, width] int64, to be written."""
        tensor, self._table = self._add((entries, width), torch.int64)
        return tensor

    def add_logprobs(self, kind: LogprobKind, count: int, top: int, num_named: int = 0) -> TokenLogprobs:
        """Return tensors for logprobs of `count` tokens, `top` alternatives and named ids, to be written."""
        found, parts = self._add_rows(count, top)
        if num_named:
            values, values_part = self._add((count, num_named), torch.float32)
            ranks, ranks_part = self._add((count, num_named), torch.int64)
            found, parts = (
                replace(found, named=NamedLogprobs(values, ranks)),
                (*parts, values_part, ranks_part),
            )
        self._logprobs[kind] = parts
        return found

    def add_draft_targets(self, kind: LogprobKind, count: int) -> TokenLogprobs:
        """Return tensors for the target's logprobs of the drafts at `count` logits rows, to be written."""
        found, self._draft_targets[kind] = self._add_rows(count, 0)
        return found

    def add_copy(self, name: str, column: Tensor) -> None:
        """Copy `column` into the buffer, as the field `name` of `HostResults`."""
        tensor, self._copies[name] = self._add(tuple(column.shape), column.dtype)
        tensor.copy_(column)

    def complete(self) -> PackedResults:
        """Set `data` to everything written."""
        self.data = self._row[: self._end]
        return self

    def unpack(self, data: Tensor, has_drafts: bool) -> HostResults:
        """Return the arrays in the host copy of `data`. Without `has_drafts`, fields of drafts are None."""
        row, copies = data.numpy(), self._copies
        logprobs = _logprob_columns(self._logprobs, row) if self._logprobs else {}
        if not has_drafts or not (copies or self._draft_targets):
            return HostResults(self._table.view(row), logprobs, {}, *NO_COPIES)
        targets = _logprob_columns(self._draft_targets, row)
        columns = [copies[name].view(row) if name in copies else None for name in COPY_NAMES]
        return HostResults(self._table.view(row), logprobs, targets, *columns)

    def _add_rows(self, count: int, top: int) -> tuple[TokenLogprobs, tuple[BufferPart, ...]]:
        ids, ids_part = self._add((count, top), torch.int64)
        ranks, ranks_part = self._add((count,), torch.int64)
        values, values_part = self._add((count, 1 + top), torch.float32)
        return TokenLogprobs(values, ids, ranks), (values_part, ids_part, ranks_part)

    def _add(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, BufferPart]:
        start, size = self._end, prod(shape) * dtype.itemsize
        if start + size > self._row.shape[0]:
            raise AssertionError(
                f"a part {list(shape)} does not fit into a row of {self._row.shape[0]} bytes"
            )
        self._end = start + _padded(size)
        part = BufferPart(shape, NUMPY_DTYPES[dtype], start)
        return self._row[start : start + size].view(dtype).view(shape), part


def _logprob_columns(
    parts_of: dict[LogprobKind, tuple[BufferPart, ...]], row: NDArray[np.uint8]
) -> dict[LogprobKind, LogprobColumns]:
    """Return the arrays of logprobs, whose parts are the fields of `LogprobColumns`."""
    return {
        kind: LogprobColumns(*[np.ndarray(shape, dtype, row, at) for shape, dtype, at in parts])
        for kind, parts in parts_of.items()
    }


def buffer_bytes(entries: int, width: int, k: int, rows: int, top: int, num_named: int) -> int:
    """Return the bytes of a table, logprobs of both kinds, and what is known of drafts."""
    logprobs = _padded(8 * rows * top) + _padded(8 * rows) + _padded(4 * rows * (1 + top))
    named = _padded(8 * rows * num_named) + _padded(4 * rows * num_named)
    targets = PART_ALIGN_BYTES + _padded(8 * rows) + _padded(4 * rows)
    drafts = _padded(8 * rows) + _padded(4 * entries * k) + _padded(entries * k)
    drafts += _padded(8 * entries * k) + _padded(8 * entries * k * top) + _padded(4 * entries * k * top)
    return _padded(8 * entries * width) + 2 * (logprobs + named + targets) + drafts


def _padded(size: int) -> int:
    return -(-size // PART_ALIGN_BYTES) * PART_ALIGN_BYTES
