"""Matrices that stay in a GGUF file until they are used: rows are read and decoded in chunks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.gguf.blocks import DECODERS, read_blocks
from draftproof.models.gguf.file import TYPES, GGUFFile, TensorInfo, num_bytes
from draftproof.models.weight_formats import INT4_GROUP, BlockWeight, WeightTensor
from draftproof.ops.contract.block_scales import pack_scales

CHUNK_ELEMENTS = 1 << 20  # decoded at once; their temporaries stay in the cache of the CPU
CHUNK_ROWS = 256  # a chunk is a multiple of so many rows, which every packed layout divides
BLOCK_BYTES = {name: size for name, _, size in TYPES.values()}
BLOCK_ELEMENTS = {name: block for name, block, _ in TYPES.values()}


class GGUFMapping:
    """Mapped bytes of a GGUF file, whose pages can be released after use."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        with file.path.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def tensor(self, info: TensorInfo) -> Tensor:
        """Return the bytes of a tensor, [rows, bytes of a row] uint8."""
        data = self._bytes[info.offset : info.offset + num_bytes(info)]
        return torch.from_numpy(data.reshape(info.shape[0], -1))

    def release(self) -> None:
        """Remove the pages that were read from the resident memory of this process."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class GGUFWeight(WeightTensor):
    """Matrix in the blocks of a GGUF file. `data` [N, bytes of a row] uint8 is mapped from the file."""

    kind: str = ""  # GGML type, a key of `DECODERS`
    name: str = ""  # of the tensor in the file
    mapping: GGUFMapping | None = None
    order: Tensor | None = None  # [N] int64: stored row of each row; None: as stored

    @property
    def format(self) -> str:
        """Return "blocks"."""
        return "blocks"

    @property
    def stored_as(self) -> str:
        """Return the GGML type."""
        return self.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        return len(self.data), self.data.shape[1] // BLOCK_BYTES[self.kind] * BLOCK_ELEMENTS[self.kind]

    @property
    def source(self) -> Path | None:
        """Return the path of the file."""
        return None if self.mapping is None else self.mapping.path

    def release(self) -> None:
        """Remove the pages of the file from the resident memory of this process."""
        if self.mapping is not None:
            self.mapping.release()

    def rows(self, ids: Tensor) -> GGUFWeight:
        """Return the output rows `ids` [n]."""
        at = ids.cpu() if self.order is None else self.order[ids.cpu()]
        return replace(self, data=self.data[at], order=None)

    @property
    def column_unit(self) -> int:
        """Return the columns of a block of activations; no group of a decoded weight is longer."""
        return INT4_GROUP

    def columns(self, begin: int, end: int) -> WeightTensor:
        """Return the columns begin..end: still in the file where these are whole blocks, else decoded."""
        size, elements = BLOCK_BYTES[self.kind], BLOCK_ELEMENTS[self.kind]
        if begin % elements or end % elements:
            return self.decode().columns(begin, end)
        return replace(self, data=self.data[:, begin // elements * size : end // elements * size])

    def decode(self, begin: int = 0, end: int | None = None) -> BlockWeight:
        """Return the rows begin..end as integers and scales; LoadError for scales that are not finite."""
        stored = self.data[begin:end] if self.order is None else self.data[self.order[begin:end]]
        found = read_blocks(stored.numpy(), self.kind, BLOCK_BYTES[self.kind])
        if not np.isfinite(found.scales if found.bases is None else found.bases).all():
            raise LoadError(
                f"{self.source}: tensor {self.name!r} holds scales that are not finite: the file is damaged"
            )
        scales = torch.from_numpy(found.scales)  # [N, groups, F]
        if found.bases is not None:
            bases = torch.from_numpy(found.bases)  # [N, super-blocks, F]
            factors = scales.view(len(scales), bases.shape[1], -1, bases.shape[2])
            scales = pack_scales(bases, factors)
        return BlockWeight(torch.from_numpy(found.integers), scales)

    def to(self, device: torch.device) -> WeightTensor:
        """Return the decoded weight on `device`."""
        return self.decode().to(device)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, computed in fp32 and rounded once, by default to bf16."""
        return self.decode().dequantize(dtype)


def has_blocks(info: TensorInfo) -> bool:
    """Return whether a tensor is a matrix in blocks that weights are computed from."""
    return len(info.shape) == 2 and info.type_id in TYPES and TYPES[info.type_id][0] in DECODERS


def chunk_ranges(weights: Sequence[GGUFWeight]) -> list[tuple[int, int]]:
    """Return the row ranges of the chunks of weights that are concatenated along their output rows.

    Weights of different types are one chunk: the integers and scales of all have the widest type.
    """
    depth, total = weights[0].shape[1], sum(len(weight.data) for weight in weights)
    step = max(1, CHUNK_ELEMENTS // (depth * CHUNK_ROWS)) * CHUNK_ROWS
    if len({weight.kind for weight in weights}) > 1:
        step = total
    return [(begin, min(begin + step, total)) for begin in range(0, total, step)]


def decode_range(weights: Sequence[GGUFWeight], begin: int, end: int) -> BlockWeight:
    """Decode the rows begin..end of weights that are concatenated along their output rows."""
    first, parts = 0, []
    for weight in weights:
        last = first + len(weight.data)
        if first < end and begin < last:
            parts.append(weight.decode(max(begin - first, 0), min(end, last) - first))
        first = last
    return BlockWeight.cat(parts)
