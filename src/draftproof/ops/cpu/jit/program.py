"""Forward pass as a table of kernel calls: recorded once, then run in one native call.

While recording, an op appends its call and returns an unwritten tensor of `max_rows` rows. Afterwards every
such tensor is placed in one arena; two tensors share memory only if the last call that reads the first comes
before the call that writes the second.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import DraftproofError
from draftproof.ops.cpu.jit.compile import Kernel
from draftproof.ops.cpu.jit.parallel_compile import compile_kernels
from draftproof.ops.cpu.jit.thread_pool import INSTRUCTION_WORDS, aligned_bytes

CACHE_LINE_BYTES = 64  # bytes; arena buffers start on a cache line

Argument = int | float | Tensor | None


def as_word(value: Argument) -> int:
    """Return an argument as the int64 that a kernel reads."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return value or 0


@dataclass(slots=True)
class Buffer:
    """Activation of the recorded pass: provisional memory and lifetime in calls."""

    tensor: Tensor
    first_use: int
    last_use: int


@dataclass(slots=True)
class Recorder:
    """Recorder that the ops of one pass append to."""

    max_rows: int
    inputs: Sequence[Tensor]  # static tensors that calls read in place
    scratch: int = 0
    calls: list[list[int]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)  # of each call
    buffers: list[Buffer] = field(default_factory=list)
    held: list[object] = field(default_factory=list)  # weights and caches, kept alive
    _starts: list[int] = field(default_factory=list)  # provisional addresses, ascending
    _owner: dict[int, int] = field(default_factory=dict)  # provisional address -> buffer
    _uses: list[tuple[int, int, int, int]] = field(default_factory=list)  # call, word, buffer, offset

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor for a call to write."""
        if shape[0] != self.max_rows:
            raise DraftproofError(f"recorded op with {shape[0]} rows instead of {self.max_rows}")
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() == 0:
            raise DraftproofError(f"cannot record an empty tensor {shape}")
        start = tensor.data_ptr()
        self._owner[start] = len(self.buffers)
        self._starts.insert(bisect_right(self._starts, start), start)
        self.buffers.append(Buffer(tensor, len(self.calls), len(self.calls)))
        return tensor

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (buffer, offset in bytes) of a recorded tensor or a view of one."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        buffer = self._owner[self._starts[at]]
        offset = address - self._starts[at]
        whole = self.buffers[buffer].tensor
        return (buffer, offset) if offset < whole.numel() * whole.element_size() else None

    def call(
        self,
        kernel: Kernel,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        constants: Sequence[Argument],
        scratch: int,
    ) -> None:
        """Append a kernel call; its words are the outputs, the inputs, then the constants."""
        line = [0]  # the address of the kernel, once all kernels are known
        self.kernels.append(kernel)
        for tensor in (*outputs, *inputs):
            found = self.find(tensor)
            if found is not None:
                self._uses.append((len(self.calls), len(line), *found))
                self.buffers[found[0]].last_use = len(self.calls)
            elif not any(tensor.data_ptr() == known.data_ptr() for known in self.inputs):
                # a torch operation between two ops would be missing from the recorded pass
                raise DraftproofError("a captured pass may use the backend's ops only")
            line.append(as_word(tensor))
        self.held.extend(value for value in constants if isinstance(value, Tensor))
        line.extend(as_word(value) for value in constants)
        self.calls.append(line + [0] * (INSTRUCTION_WORDS - len(line)))
        self.scratch = max(self.scratch, scratch)

    def finish(self, results: Sequence[Tensor], later: Iterable[Kernel] = ()) -> Program:
        """Return the program, with every buffer at its final address.

        Kernels that are needed `later` are compiled at the same time.
        """
        ends: list[tuple[int, int]] = []
        for result in results:
            found = self.find(result)
            if found is None or not result.is_contiguous():
                raise DraftproofError("a captured pass must return what its ops returned")
            self.buffers[found[0]].last_use = len(self.calls)
            ends.append(found)
        places, size = place(
            [(b.tensor.numel() * b.tensor.element_size(), b.first_use, b.last_use) for b in self.buffers]
        )
        arena = aligned_bytes(size)
        compile_kernels([*self.kernels, *later])
        for line, kernel in zip(self.calls, self.kernels, strict=True):
            line[0] = kernel.address
        for call, word, buffer, offset in self._uses:
            self.calls[call][word] = arena.ctypes.data + places[buffer] + offset
        views = []
        for result, (buffer, offset) in zip(results, ends, strict=True):
            begin = places[buffer] + offset
            raw = torch.from_numpy(arena[begin : begin + result.numel() * result.element_size()])
            views.append(raw.view(result.dtype).view(result.shape))
        table = (
            aligned_bytes(len(self.calls) * INSTRUCTION_WORDS * 8)
            .view(np.int64)
            .reshape(-1, INSTRUCTION_WORDS)
        )
        table[:] = self.calls
        return Program(table, tuple(views), arena, self.scratch, [*self.held, *self.inputs])


@dataclass(frozen=True, slots=True)
class Program:
    """Recorded pass, ready to run."""

    table: np.ndarray  # [calls, INSTRUCTION_WORDS] int64
    results: tuple[Tensor, ...]  # [max_rows, ...] each, in the arena
    arena: np.ndarray
    scratch: int  # bytes per thread
    held: list[object]


def place(buffers: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Return offsets for (bytes, first use, last use), in order of first use, first fit, and the total."""
    offsets: list[int] = []
    live: list[tuple[int, int, int]] = []  # offset, end, last use; by offset
    total = CACHE_LINE_BYTES
    for size, first_use, last_use in buffers:
        size = -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        live = [entry for entry in live if entry[2] >= first_use]
        offset = 0
        for begin, end, _ in live:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        live.append((offset, offset + size, last_use))
        live.sort()
        offsets.append(offset)
        total = max(total, offset + size)
    return offsets, total
