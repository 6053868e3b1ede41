"""Execution of CPU kernels on the thread pool: one by one, or recorded once as a program and replayed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.ops.contract.runtime import Forward
from draftproof.ops.cpu.jit.compile import Kernel
from draftproof.ops.cpu.jit.program import Argument, Program, Recorder, as_word
from draftproof.ops.cpu.jit.resident_memory import release_start_up_memory
from draftproof.ops.cpu.jit.thread_pool import WIDTH, Team, aligned_bytes
from draftproof.types import Rows

RELEASE_CALLS = 4  # calls of a pass after which kernels outside it, as for sampling, are compiled too
MAX_VIEWS = 16  # numbers of rows for which views of a pass are kept
SINGLE_THREAD_ELEMENTS = 4096  # elements below which waking the thread pool costs more than it saves


class Executor:
    """Thread pool and recorder shared by the op families of one backend."""

    def __init__(self, threads: int) -> None:
        self.team = Team(threads)
        self.recorder: Recorder | None = None
        self.later: set[Kernel] = set()  # needed after a pass, and compiled with its kernels

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate the output of a call, in the recorded program while recording."""
        if self.recorder is not None:
            return self.recorder.output(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def call(
        self,
        kernels: Kernel | Sequence[Kernel],
        rows: int,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        constants: Sequence[Argument],
        scratch: int = 0,
        small: bool = False,
    ) -> None:
        """Run or record kernels that take the same words: outputs, inputs, constants."""
        several = [kernels] if isinstance(kernels, Kernel) else kernels
        if self.recorder is not None:
            for each in several:
                self.recorder.call(each, outputs, inputs, constants, scratch)
            return
        if rows:
            self.prepare(several, rows, [*outputs, *inputs, *constants], scratch, small)()

    def prepare(
        self,
        kernels: Sequence[Kernel],
        rows: int,
        arguments: Sequence[Argument],
        scratch: int = 0,
        small: bool = False,
    ) -> Callable[[], None]:
        """Return a call of kernels, to be repeated while its tensors stay where they are."""
        words = [as_word(value) for value in arguments]
        table, line = bytearray(8 * WIDTH * len(kernels)), struct.Struct(f"={len(words) + 1}q")
        for i, each in enumerate(kernels):
            line.pack_into(table, 8 * WIDTH * i, each.address, *words)
        return partial(self.team.run, table, len(kernels), rows, scratch, small)


class PassViews(NamedTuple):
    """Views of a captured pass for a number of rows."""

    targets: list[Tensor]  # where a call copies its rows and inputs
    results: tuple[Tensor, ...]  # [rows, ...] each


class Captured:
    """Forward pass that is recorded at its first call and replayed from then on."""

    def __init__(self, run: Executor, forward: Forward, max_rows: int) -> None:
        self._run, self._forward, self._max_rows = run, forward, max_rows
        ints = torch.from_numpy(aligned_bytes(max_rows * 32)).view(torch.int64)
        self._ints = ints.view(4, max_rows).unbind()  # tokens, positions, slots, kv_index
        self._inputs: list[Tensor] = []  # [max_rows, ...]: arguments of a call besides the rows
        self._table: Tensor | None = None  # page table of the recorded pass
        self._program: Program | None = None
        self._views: dict[int, PassViews] = {}  # by the number of rows
        self._calls = 0

    def _record(self, page_table: Tensor) -> Program:
        """Record the pass on static tensors."""
        tokens, positions, slots, kv_index = self._ints
        recorder = Recorder(self._max_rows, [tokens, positions, slots, kv_index, *self._inputs])
        self._run.recorder = recorder
        try:
            results = self._forward(Rows(tokens, positions, slots, kv_index, page_table), *self._inputs)
        finally:
            self._run.recorder = None
        program = recorder.finish(results, self._run.later)
        release_start_up_memory()  # nearly all kernels are loaded
        return program

    def __call__(self, rows: Rows, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = rows.tokens.shape[0]
        if count > self._max_rows:
            raise ValueError(f"{count} rows, but the pass was captured for {self._max_rows}")
        table, known = rows.page_table, self._table
        if known is None or (known.data_ptr(), known.shape) != (table.data_ptr(), table.shape):
            self._inputs = [part.new_zeros((self._max_rows, *part.shape[1:])) for part in inputs]
            self._program, self._table = self._record(table), table
            self._views.clear()
        views = self._views.get(count)
        if views is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            views = self._views[count] = self._make_views(count)
        self._calls += 1
        if self._calls == RELEASE_CALLS:
            release_start_up_memory()
        if count:
            parts = (rows.tokens, rows.positions, rows.slots, rows.kv_index, *inputs)
            for target, part in zip(views.targets, parts, strict=True):
                target.copy_(part)
            program = self._program
            assert program is not None
            self._run.team.run(program.table, len(program.table), count, program.scratch)
        return views.results

    def _make_views(self, count: int) -> PassViews:
        assert self._program is not None
        targets = [target[:count] for target in (*self._ints, *self._inputs)]
        return PassViews(targets, tuple(result[:count] for result in self._program.results))
