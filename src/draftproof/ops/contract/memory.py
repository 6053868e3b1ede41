"""Memory of tensors that is released and restored at the same addresses, which captured graphs hold."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MADV_DONTNEED = 4  # of Linux: the pages are freed and read as zeros, or as the mapped file, afterwards


class TensorMemory:
    """Memory of tensors on the host: pages are returned to the system, addresses stay.

    Content that is kept stays where it is, since the host is where other devices would copy it to.
    """

    def __init__(self, tensors: Iterable[Tensor], has_content: bool) -> None:
        """Take the tensors; without `has_content` their values are not needed any more."""
        self._tensors = unique_storages(tensors)
        self.has_content = has_content

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def release(self, keep: bool) -> None:
        """Release the memory; with `keep` the content is there again after `restore`."""
        if not keep:
            for tensor in self._tensors:
                _return_pages(tensor)

    def restore(self) -> None:
        """Make the memory usable again; content that was not kept is undefined."""


def unique_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one contiguous tensor for each piece of memory, the largest of those that begin there."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        known = found.get(tensor.data_ptr())
        if tensor.nbytes and tensor.is_contiguous() and (known is None or tensor.nbytes > known.nbytes):
            found[tensor.data_ptr()] = tensor
    return list(found.values())


def _return_pages(tensor: Tensor) -> None:
    """Return the pages that lie within a tensor to the system."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_DONTNEED)


def rebind(tensors: Sequence[Tensor], old: Tensor, memory: Tensor) -> None:
    """Make every tensor that shares the beginning of `old` use `memory`, uint8 [old.nbytes], instead."""
    address = old.data_ptr()
    sharing = [tensor for tensor in tensors if tensor.nbytes and tensor.data_ptr() == address]
    for tensor in sharing:
        moved = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        with torch.inference_mode():
            tensor.set_(moved)  # type: ignore[call-overload]
