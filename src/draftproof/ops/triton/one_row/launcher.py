"""Launcher of a kernel that runs all layers of a model on one row: what it needs, its scratch, its tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
import triton
from torch import Tensor

from draftproof.ops import Layer, Rows
from draftproof.ops.triton.attention.splitkv import scratch_fits
from draftproof.ops.triton.fused.address_tables import AddressTables
from draftproof.ops.triton.kernel_utils import INTERPRETED, LaunchContext
from draftproof.ops.triton.one_row.grid_barrier import COUNTER_STRIDE, NUM_COUNTERS
from draftproof.ops.triton.one_row.spans import SPAN

PROGRAMS = 128  # programs, at most one per SM
SHARED_BYTES = 227 << 10  # shared memory of a program
OTHER_SHARED_BYTES = 4096  # shared memory besides the ring and rows
REGISTERS = 168  # registers of a thread, on average of the warps that compute and those that copy
COPY_REGISTERS = 104  # registers of a thread that copies

Shape = TypeVar("Shape")  # sizes of a layer that a kernel is compiled for


def are_plain_norms(*norms: tuple[Tensor | None, int]) -> bool:
    """Return whether the norms that exist are bf16 vectors of the given sizes."""
    return all(
        norm is None or (norm.dtype == torch.bfloat16 and norm.shape == (size,)) for norm, size in norms
    )


class OneRowLayers(ABC, Generic[Shape]):
    """Launcher of one kernel; its counters and scratch allow one launch at a time for each backend object."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch
        chip = launch.chip
        self.is_supported = (
            not INTERPRETED
            and chip.capability == (9, 0)
            and chip.num_sms >= PROGRAMS
            and chip.shared_per_program >= SHARED_BYTES
        )
        size = NUM_COUNTERS.value * COUNTER_STRIDE.value
        self._counter = torch.zeros(size, dtype=torch.int32, device=launch.device)
        self._scratch: dict[tuple[Shape, int], list[Tensor]] = {}
        self._tables = AddressTables(launch.device)

    @abstractmethod
    def shape_of(self, layer: Layer) -> Shape | None:
        """Return the shape of a layer if the kernel supports it."""

    @abstractmethod
    def make_scratch(self, shape: Shape, spans: int) -> list[Tensor]:
        """Return the scratch of layers of a shape whose attention has up to `spans` spans."""

    def supports(self, x: Tensor, layers: Sequence[Layer]) -> bool:
        """Return whether the kernel runs these layers: one bf16 row, layers of one supported shape."""
        if not self.is_supported or len(x) != 1 or x.dtype != torch.bfloat16:
            return False
        shapes = {self.shape_of(layer) for layer in layers}
        return len(shapes) == 1 and None not in shapes

    def num_spans(self, layers: Sequence[Layer], rows: Rows, caches: Sequence[Tensor]) -> int:
        """Return the number of spans of a page table; 0: the caches or the table are not supported."""
        spans = triton.cdiv(rows.page_table.shape[1] * caches[0].shape[2], SPAN.value)
        has_one_layout = len({each.shape for each in caches}) == 1
        return spans if has_one_layout and scratch_fits(1, layers[0].attention.heads, spans) else 0

    def scratch(self, shape: Shape, spans: int) -> list[Tensor] | None:
        """Return the scratch; None if it would be allocated in a capture, whose memory other graphs reuse."""
        if (shape, spans) not in self._scratch:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._scratch[shape, spans] = self.make_scratch(shape, spans)
        return self._scratch[shape, spans]
