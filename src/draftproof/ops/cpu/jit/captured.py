"""Forward pass that is recorded once and replayed in one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.ops.contract.runtime import Forward
from draftproof.ops.cpu.jit.program import Program, Recorder
from draftproof.ops.cpu.jit.thread_pool import aligned_bytes
from draftproof.types import Rows

if TYPE_CHECKING:
    from draftproof.ops.cpu.executor import Executor


class Captured:
    """Forward pass that is recorded at its first call and replayed from then on."""

    def __init__(self, run: Executor, forward: Forward, max_rows: int) -> None:
        self._run, self._forward, self._max_rows = run, forward, max_rows
        self._ints = torch.from_numpy(aligned_bytes(max_rows * 32)).view(torch.int64)
        self._ints = self._ints.view(4, max_rows)  # tokens, positions, slots, kv_index
        self._inputs: list[Tensor] = []  # [max_rows, ...]: arguments of a call besides the rows
        self._table: Tensor | None = None
        self._program: Program | None = None

    def _record(self, page_table: Tensor) -> Program:
        """Record the pass on static tensors."""
        tokens, positions, slots, kv_index = self._ints.unbind()
        recorder = Recorder(self._max_rows, [tokens, positions, slots, kv_index, *self._inputs])
        self._run.recorder = recorder
        try:
            results = self._forward(Rows(tokens, positions, slots, kv_index, page_table), *self._inputs)
        finally:
            self._run.recorder = None
        return recorder.finish(results)

    def __call__(self, rows: Rows, *inputs: Tensor) -> tuple[Tensor, ...]:
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
            self._inputs = [part.new_zeros((self._max_rows, *part.shape[1:])) for part in inputs]
            self._program = self._record(table)
            self._table = table
        if count:
            parts = (rows.tokens, rows.positions, rows.slots, rows.kv_index, *inputs)
            for target, part in zip((*self._ints, *self._inputs), parts, strict=True):
                target[:count].copy_(part)
            self._run.team.run(self._program.table, count, self._program.scratch)
        return tuple(result[:count] for result in self._program.results)
