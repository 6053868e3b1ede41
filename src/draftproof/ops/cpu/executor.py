"""Execution of CPU kernels on the thread pool, or their recording into a program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.cpu.jit.compile import Kernel
from draftproof.ops.cpu.jit.program import Argument, Recorder, as_word
from draftproof.ops.cpu.jit.thread_pool import WIDTH, Team

SINGLE_THREAD_ELEMENTS = 4096  # elements below which waking the thread pool costs more than it saves


class Executor:
    """Thread pool and recorder shared by the op families of one backend."""

    def __init__(self, threads: int) -> None:
        self.team = Team(threads)
        self.recorder: Recorder | None = None

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
                self.recorder.call(each.address, outputs, inputs, constants, scratch)
            return
        if rows == 0:
            return
        words = [as_word(value) for value in (*outputs, *inputs, *constants)]
        table = np.zeros((len(several), WIDTH), dtype=np.int64)
        for line, each in zip(table, several, strict=True):
            line[0] = each.address
            line[1 : len(words) + 1] = words
        self.team.run(table, rows, scratch, alone=small)
