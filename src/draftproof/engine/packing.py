"""A step's results as one row of bytes: one copy brings them to the host, and a copy is what costs there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = {torch.int64: np.int64, torch.float32: np.float32}


@dataclass(frozen=True, slots=True)
class Packed:
    data: Tensor  # [bytes] uint8
    forms: tuple[tuple[tuple[int, ...], Any], ...]  # shape and numpy's type of each tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Packed:
        rows = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        return cls(torch.cat(rows), tuple((tuple(t.shape), KINDS[t.dtype]) for t in tensors))

    def open(self, data: Tensor) -> list[NDArray[Any]]:
        """The tensors again, from the bytes as they came to the host."""
        row, at, out = data.numpy(), 0, []
        for shape, kind in self.forms:
            size = math.prod(shape) * np.dtype(kind).itemsize
            out.append(row[at : at + size].view(kind).reshape(shape))
            at += size
        return out
