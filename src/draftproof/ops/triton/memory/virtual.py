"""Device memory in reserved addresses: physical memory is unmapped on release and mapped again on restore.

Graphs hold addresses, so they stay valid. The driver's functions are called directly, since torch's allocator
has no such memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import DraftproofError
from draftproof.ops.contract.memory import TensorMemory, rebind, unique_storages

CHUNK_BYTES = 256 << 20  # physical memory is mapped in such pieces
ALIGNMENT_BYTES = 512  # of a tensor
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3  # values of the driver's enumerations


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_handle", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Device memory that torch can wrap."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _call(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise DraftproofError(f"{name} of the GPU's driver failed with error {status}")


class VirtualMemory(TensorMemory):
    """Memory of tensors in a range of reserved addresses."""

    def __init__(self, tensors: Iterable[Tensor], has_content: bool, device: torch.device) -> None:
        """Move the tensors into reserved addresses, one by one, so that one at a time is held twice."""
        every = list({id(tensor): tensor for tensor in tensors}.values())
        kept = unique_storages(every)
        super().__init__(kept, has_content)
        self._device, self._handles = device, list[tuple[int, int, Any]]()  # offset, bytes, handle
        self._backup: Tensor | None = None
        self._location = _Location(ON_DEVICE, device.index or 0)
        self._properties = _Properties(type=PINNED, location=self._location)
        offsets, size = [], 0
        for tensor in kept:
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        chunk = CHUNK_BYTES
        self._size = -(-max(size, 1) // chunk) * chunk
        address = ctypes.c_uint64()
        _call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self._size),
            *[ctypes.c_uint64(0)] * 3,
        )
        self._address = int(address.value)
        self._used = size
        self._fill(every, kept, offsets)

    def _fill(self, every: list[Tensor], kept: list[Tensor], offsets: list[int]) -> None:
        if not self.has_content:  # the memory of all is needed again before it is mapped
            shapes = [(tensor.dtype, tensor.shape) for tensor in kept]
            for tensor in kept:
                tensor.untyped_storage().resize_(0)
            torch.cuda.empty_cache()
            self._map_up_to(self._used)
            memory = self._memory()
            memory.zero_()
            with torch.inference_mode():
                for tensor, (dtype, shape), offset in zip(kept, shapes, offsets, strict=True):
                    size = shape.numel() * dtype.itemsize
                    tensor.set_(memory[offset : offset + size].view(dtype).view(shape))  # type: ignore[call-overload]
            return
        for tensor, offset in zip(kept, offsets, strict=True):
            self._map_up_to(offset + tensor.nbytes)
            place = self._memory()[offset : offset + tensor.nbytes]
            place.copy_(tensor.view(-1).view(torch.uint8))
            rebind(every, tensor, place)
            torch.cuda.empty_cache()

    def _memory(self) -> Tensor:
        mapped = sum(size for _, size, _ in self._handles)
        return torch.as_tensor(_Bytes(self._address, mapped), device=self._device)

    def _map_up_to(self, end: int) -> None:
        """Map physical memory, chunk by chunk, until `end` bytes have some."""
        mapped = sum(size for _, size, _ in self._handles)
        while mapped < end:
            handle, size = ctypes.c_uint64(), ctypes.c_size_t(CHUNK_BYTES)
            place = ctypes.c_uint64(self._address + mapped)
            _call(
                "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0)
            )
            _call("cuMemMap", place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            access = _Access(self._location, READ_WRITE)
            _call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
            self._handles.append((mapped, CHUNK_BYTES, handle))
            mapped += CHUNK_BYTES

    def release(self, keep: bool) -> None:
        """Copy the content to pinned host memory with `keep`, and unmap the physical memory."""
        torch.cuda.synchronize(self._device)
        if keep and self._used:  # a proposer may have no weights
            self._backup = torch.empty(self._used, dtype=torch.uint8, pin_memory=True)
            self._backup.copy_(self._memory()[: self._used])
        for offset, size, handle in self._handles:
            _call("cuMemUnmap", ctypes.c_uint64(self._address + offset), ctypes.c_size_t(size))
            _call("cuMemRelease", handle)
        self._handles.clear()
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Map physical memory at the same addresses and copy kept content back."""
        self._map_up_to(self._used)
        if self._backup is not None:
            self._memory()[: self._used].copy_(self._backup)
            self._backup = None
        elif self._used:
            self._memory().zero_()
        torch.cuda.synchronize(self._device)
