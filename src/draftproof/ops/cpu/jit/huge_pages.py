"""Memory for packed weights in huge pages, because every step reads all of them.

With 4 KiB pages every fourth tile of weights costs a page table walk.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

MAPPING_BYTES = 64 << 20  # bytes per mapping shared by small tensors
HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64


class WeightMemory:
    """Allocator of tensors in large anonymous mappings; a mapping lives as long as its tensors."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def _map(self, size: int) -> Tensor:
        mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # without huge pages it is only slower
                mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        skip = -whole.data_ptr() % HUGE_PAGE_BYTES
        return whole[skip : skip + size]

    def hold(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to huge pages."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return tensor.clone()
        if size > MAPPING_BYTES // 4:
            room = self._map(-(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        else:
            if self._chunk is None or self._used + size > MAPPING_BYTES:
                self._chunk, self._used = self._map(MAPPING_BYTES), 0
            room = self._chunk[self._used : self._used + size]
            self._used = -(-(self._used + size) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        held = room[:size].view(tensor.dtype).view(tensor.shape)
        held.copy_(tensor)
        return held
