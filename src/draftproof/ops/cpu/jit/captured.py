"""A pass that was recorded once and is run in one native call from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.ops import Forward, Rows
from draftproof.ops.cpu.jit.program import Program, Recorder
from draftproof.ops.cpu.jit.thread_pool import aligned_bytes

if TYPE_CHECKING:
    from draftproof.ops.cpu.backend import CpuOps


class Captured:
    """A forward pass that is recorded at its first call and replayed from then on."""

    def __init__(self, ops: CpuOps, forward: Forward, max_rows: int) -> None:
        self._ops, self._forward, self._max_rows = ops, forward, max_rows
        self._ints = torch.from_numpy(aligned_bytes(max_rows * 32)).view(torch.int64)
        self._ints = self._ints.view(4, max_rows)  # tokens, positions, slots, kv_index
        self._given: list[Tensor] = []  # [max_rows, …]: what it is called with beside the rows
        self._table: Tensor | None = None
        self._program: Program | None = None

    def _record(self, page_table: Tensor) -> Program:
        tokens, positions, slots, kv_index = self._ints.unbind()
        recorder = Recorder(self._max_rows, [tokens, positions, slots, kv_index, *self._given])
        self._ops.recorder = recorder
        try:
            results = self._forward(Rows(tokens, positions, slots, kv_index, page_table), *self._given)
        finally:
            self._ops.recorder = None
        return recorder.finish(results)

    def __call__(self, rows: Rows, *given: Tensor) -> tuple[Tensor, ...]:
        count = rows.tokens.shape[0]
        if count > self._max_rows:
            raise ValueError(f"{count} rows, but the pass was captured for {self._max_rows}")
        table = rows.page_table
        known = self._table
        if (
            self._program is None
            or known is None
            or known.data_ptr() != table.data_ptr()
            or known.shape != table.shape
        ):
            self._given = [part.new_zeros((self._max_rows, *part.shape[1:])) for part in given]
            self._program = self._record(table)
            self._table = table
        if count:
            parts = (rows.tokens, rows.positions, rows.slots, rows.kv_index, *given)
            for target, part in zip((*self._ints, *self._given), parts, strict=True):
                target[:count].copy_(part)
            self._ops.team.run(self._program.table, count, self._program.scratch)
        return tuple(result[:count] for result in self._program.results)
