"""Weights of which a rank has a part; see `models/weights/sharding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.models.weights.tensor import WeightTensor
from draftproof.ops import QuantizedTable
from draftproof.ops.parallel.forward import (
    HEAD_PARALLEL,
    ROW_PARALLEL,
    VOCAB_PARALLEL,
    HeadParallelNorm,
    RowParallelLinear,
    VocabParallel,
)

Pack = Callable[[WeightTensor], Any]  # packs a weight for `Ops.linear`


@dataclass(frozen=True, slots=True)
class ShardedWeight(WeightTensor):
    """Parts of one weight; `data` is that of the first part."""

    parts: tuple[WeightTensor | None, ...] = ()  # None: a part without columns

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts if part is not None)

    @property
    def stored_as(self) -> str:
        """Return the format of a part for messages."""
        return next(part.stored_as for part in self.parts if part is not None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Refuse: a rank has no whole matrix."""
        raise TypeError("a weight that is cut between ranks has no whole matrix")

    def _on(self, device: torch.device) -> tuple[WeightTensor | None, ...]:
        return tuple(None if part is None else part.to(device) for part in self.parts)


@dataclass(frozen=True, slots=True)
class HeadNormWeight(ShardedWeight):
    """Weight of a norm over all heads, whole on every rank, and where the columns of the ranks are."""

    width: int = 0  # see `HeadParallelNorm`
    places: Tensor | None = None
    own: Tensor | None = None

    @property
    def format(self) -> str:
        """Return "head_parallel"."""
        return HEAD_PARALLEL

    def to(self, device: torch.device) -> WeightTensor:
        """Return the weight on `device`."""
        (part,) = self._on(device)
        assert part is not None
        return replace(self, data=part.data, parts=(part,))

    def pack(self, on_device: Callable[[WeightTensor], Tensor]) -> HeadParallelNorm:
        """Return the norm on the device."""
        (part,) = self.parts
        assert part is not None and self.places is not None and self.own is not None
        weight = on_device(part)
        return HeadParallelNorm(weight, self.width, self.places.to(weight.device), self.own.to(weight.device))


@dataclass(frozen=True, slots=True)
class RowParallelWeight(ShardedWeight):
    """Columns of a matrix, cut into parts whose products are added pairwise."""

    @property
    def format(self) -> str:
        """Return "row_parallel"."""
        return ROW_PARALLEL

    @classmethod
    def join(cls, parts: Sequence[WeightTensor | None]) -> RowParallelWeight:
        """Build the weight from its parts."""
        first = next(part for part in parts if part is not None)
        return cls(first.data, parts=tuple(parts))

    def to(self, device: torch.device) -> WeightTensor:
        """Return the parts on `device`."""
        return RowParallelWeight.join(self._on(device))

    def pack(self, pack: Pack, bias: Tensor | None) -> RowParallelLinear:
        """Pack every part."""
        widths = tuple(0 if part is None else part.shape[1] for part in self.parts)
        packed = tuple(None if part is None else pack(part) for part in self.parts)
        return RowParallelLinear(packed, widths, None if bias is None else bias.float())


@dataclass(frozen=True, slots=True)
class VocabParallelWeight(ShardedWeight):
    """Rows of an LM head, an embedding table, or of one matrix that is both."""

    vocab_size: int = 0
    dtype: torch.dtype = field(default=torch.float32)  # of the rows of a table
    is_table: bool = False
    is_head: bool = False

    @property
    def format(self) -> str:
        """Return "vocab_parallel"."""
        return VOCAB_PARALLEL

    def to(self, device: torch.device) -> WeightTensor:
        """Return the rows on `device`."""
        (part,) = self._on(device)
        assert part is not None
        return VocabParallelWeight(
            part.data,
            parts=(part,),
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            is_table=self.is_table,
            is_head=self.is_head,
        )

    def pack(self, pack: Pack, bias: Tensor | None, table_formats: frozenset[str]) -> VocabParallel:
        """Pack the rows for the uses of the matrix."""
        (part,) = self.parts
        assert part is not None and bias is None
        num_rows, columns = part.shape
        head = pack(part) if self.is_head else None
        table: Tensor | QuantizedTable | None = None
        if self.is_table and part.format in table_formats:
            packed = pack(part) if head is None else head
            lm_head_dtype = self.dtype if self.is_head else None
            table = QuantizedTable(packed, (num_rows, columns), self.dtype, lm_head_dtype)
        elif self.is_table:
            table = part.dequantize(self.dtype).contiguous()
        return VocabParallel(self.vocab_size, num_rows, head, table)
