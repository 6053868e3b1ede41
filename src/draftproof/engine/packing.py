"""A step's results as one row of bytes: one copy brings them to the host, and a copy is what costs there."""

from __future__ import annotations

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
    forms: tuple[tuple[str, tuple[int, ...], Any, int], ...]  # name, shape, numpy's type, first byte

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Packed:
        rows = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values() if t.numel()]
        forms, at = [], 0
        for name, t in tensors.items():
            forms.append((name, tuple(t.shape), np.dtype(KINDS[t.dtype]), at))
            at += t.numel() * t.element_size()
        return cls(torch.cat(rows), tuple(forms))

    def open(self, data: Tensor) -> dict[str, NDArray[Any]]:
        """The tensors again, from the bytes as they came to the host."""
        row = data.numpy()
        return {name: np.ndarray(shape, kind, row, at) for name, shape, kind, at in self.forms}
