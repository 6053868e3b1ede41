"""A step's results as one row of bytes: one copy brings them to the host, and a copy is what costs there.

The row never moves, and a step writes its results into parts of it, so that nothing has to put them together.
What a step left there is gone with the next one: it is fetched before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftproof.ops import TokenLogprobs

KINDS = {torch.int64: np.int64, torch.float32: np.float32, torch.int8: np.int8}
ALIGN = 256  # bytes: any kernel likes to find a tensor there


@dataclass(frozen=True, slots=True)
class PackedResults:
    data: Tensor  # [bytes] uint8
    forms: tuple[tuple[str, tuple[int, ...], Any, int], ...]  # name, shape, numpy's type, first byte

    def open(self, data: Tensor) -> dict[str, NDArray[Any]]:
        """The tensors again, from the bytes as they came to the host."""
        row = data.numpy()
        return {name: np.ndarray(shape, kind, row, at) for name, shape, kind, at in self.forms}


class ResultWriter:
    """What one step leaves in the row, one part behind the other."""

    def __init__(self, row: Tensor) -> None:
        """row: [bytes] uint8."""
        self._row = row
        self._forms: list[tuple[str, tuple[int, ...], Any, int]] = []
        self._end = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part, to be written."""
        at, size = self._end, prod(shape) * dtype.itemsize
        if at + size > len(self._row):
            raise AssertionError(f"{name} {list(shape)} does not fit into a row of {len(self._row)} bytes")
        self._forms.append((name, shape, np.dtype(KINDS[dtype]), at))
        self._end = at + padded(size)
        return self._row[at : at + size].view(dtype).view(shape)

    def logprobs(self, name: str, count: int, top: int) -> TokenLogprobs:
        ids = self.add(f"{name} ids", (count, top), torch.int64)
        ranks = self.add(f"{name} ranks", (count,), torch.int64)
        return TokenLogprobs(self.add(name, (count, 1 + top), torch.float32), ids, ranks)

    def packed(self) -> PackedResults:
        return PackedResults(self._row[: self._end], tuple(self._forms))


def padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def room_for(entries: int, width: int, k: int, rows: int, top: int) -> int:
    """Bytes: a table, logprobs of both kinds, and of the drafts their logprobs and sources."""
    logprobs = padded(8 * rows * top) + padded(8 * rows) + padded(4 * rows * (1 + top))
    return padded(8 * entries * width) + 2 * logprobs + padded(4 * entries * k) + padded(entries * k)
