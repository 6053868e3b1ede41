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
from draftproof.ops.cpu.jit.release_memory import release_start_up_memory
from draftproof.ops.cpu.jit.thread_pool import INSTRUCTION_WORDS, ThreadPool
from draftproof.types import Rows

RELEASE_CALLS = 4  # calls of a pass after which kernels outside it, as for sampling, are compiled too
MAX_VIEWS = 16  # numbers of rows for which views of a pass are kept
SINGLE_THREAD_ELEMENTS = 4096  # elements below which waking the thread pool costs more than it saves


class Executor:
    """Thread pool and recorder shared by the op families of one backend."""

    def __init__(self, threads: int) -> None:
        self.pool = ThreadPool(threads)
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
        table, line = bytearray(8 * INSTRUCTION_WORDS * len(kernels)), struct.Struct(f"={len(words) + 1}q")
        for i, each in enumerate(kernels):
            line.pack_into(table, 8 * INSTRUCTION_WORDS * i, each.address, *words)
        return partial(self.pool.run, table, len(kernels), rows, scratch, small)


class PassViews(NamedTuple):
    """Views of a recorded pass for a number of rows."""

    targets: list[Tensor]  # where a call copies its inputs
    results: tuple[Tensor, ...]  # [rows, ...] each


class Recorded:
    """Ops that are recorded at the first call, on static tensors of `max_rows` rows, and replayed later.

    Results are valid until the next call.
    """

    def __init__(self, run: Executor, function: Callable[..., tuple[Tensor, ...]], max_rows: int) -> None:
        self._run, self._function, self._max_rows = run, function, max_rows
        self._inputs: list[Tensor] = []  # [max_rows, ...]: arguments of a call
        self._program: Program | None = None
        self._views: dict[int, PassViews] = {}  # by the number of rows
        self._calls = 0

    def _record(self, inputs: Sequence[Tensor]) -> Program:
        """Record the ops."""
        self._inputs = [part.new_zeros((self._max_rows, *part.shape[1:])) for part in inputs]
        recorder = Recorder(self._max_rows, self._inputs)
        self._run.recorder = recorder
        try:
            results = self._function(*self._inputs)
        finally:
            self._run.recorder = None
        program = recorder.finish(results, self._run.later)
        release_start_up_memory()  # nearly all kernels are loaded
        return program

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = inputs[0].shape[0]
        if count > self._max_rows:
            raise ValueError(f"{count} rows, but the pass was captured for {self._max_rows}")
        program = self._program
        if program is None:
            program = self._program = self._record(inputs)
        views = self._views.get(count)
        if views is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            targets = [target[:count] for target in self._inputs]
            views = PassViews(targets, tuple(result[:count] for result in program.results))
            self._views[count] = views
        self._calls += 1
        if self._calls == RELEASE_CALLS:
            release_start_up_memory()
        if count:
            for target, part in zip(views.targets, inputs, strict=True):
                target.copy_(part)
            self._run.pool.run(program.table, len(program.table), count, program.scratch)
        return views.results


class Captured:
    """Forward pass that is recorded at its first call with a page table and replayed from then on."""

    def __init__(self, run: Executor, forward: Forward, max_rows: int) -> None:
        self._run, self._forward, self._max_rows = run, forward, max_rows
        self._table: Tensor | None = None  # page table of the recorded pass
        self._recorded: Recorded | None = None

    def __call__(self, rows: Rows, *inputs: Tensor) -> tuple[Tensor, ...]:
        table, known = rows.page_table, self._table
        if known is None or (known.data_ptr(), known.shape) != (table.data_ptr(), table.shape):
            self._table, self._recorded = table, Recorded(self._run, self._pass_of(table), self._max_rows)
        assert self._recorded is not None
        return self._recorded(rows.tokens, rows.positions, rows.slots, rows.kv_index, *inputs)

    def _pass_of(self, page_table: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        """Return the pass on the columns of rows with this page table."""

        def run(
            tokens: Tensor, positions: Tensor, slots: Tensor, kv_index: Tensor, *inputs: Tensor
        ) -> tuple[Tensor, ...]:
            return self._forward(Rows(tokens, positions, slots, kv_index, page_table), *inputs)

        return run
