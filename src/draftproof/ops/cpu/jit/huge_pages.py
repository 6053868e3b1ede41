"""Memory for packed weights: large pages, because a step walks through all of them.

With 4 KiB pages every fourth tile of weights costs a walk through the page tables.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

CHUNK = 64 << 20  # bytes that small tensors share
HUGE = 2 << 20
LINE = 64


class WeightMemory:
    """Hands out tensors from large anonymous mappings; a mapping lives as long as its tensors."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def _map(self, size: int) -> Tensor:
        mapping = mmap.mmap(-1, size + HUGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: only slower
                mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        skip = -whole.data_ptr() % HUGE
        return whole[skip : skip + size]

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in large pages."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return tensor.clone()
        if size > CHUNK // 4:
            room = self._map(-(-size // HUGE) * HUGE)
        else:
            if self._chunk is None or self._used + size > CHUNK:
                self._chunk, self._used = self._map(CHUNK), 0
            room = self._chunk[self._used : self._used + size]
            self._used = -(-(self._used + size) // LINE) * LINE
        held = room[:size].view(tensor.dtype).view(tensor.shape)
        held.copy_(tensor)
        return held
