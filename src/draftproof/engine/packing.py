"""A step's results as one row of bytes: one copy brings them to the host, and a copy is what costs there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = {torch.int64: np.int64, torch.float32: np.float32, torch.int8: np.int8}


@dataclass(frozen=True, slots=True)
class Packed:
    data: Tensor  # [bytes] uint8
    forms: tuple[tuple[str, tuple[int, ...], Any], ...]  # name, shape and numpy's type of each tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Packed:
        rows = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values() if t.numel()]
        forms = tuple((name, tuple(t.shape), KINDS[t.dtype]) for name, t in tensors.items())
        return cls(torch.cat(rows), forms)

    def open(self, data: Tensor) -> dict[str, NDArray[Any]]:
        """The tensors again, from the bytes as they came to the host."""
        row, at, out = data.numpy(), 0, {}
        for name, shape, kind in self.forms:
            size = math.prod(shape) * np.dtype(kind).itemsize
            out[name] = row[at : at + size].view(kind).reshape(shape)
            at += size
        return out
