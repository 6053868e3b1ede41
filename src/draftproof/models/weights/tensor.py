"""Base class of the weight formats, and weights stored as floats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

FLOAT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class WeightTensor(ABC):
    """One weight of a checkpoint in its stored format."""

    data: Tensor  # [N, K]; vectors and other shapes in the float format alone
    scales: Tensor | None = None
    zeros: Tensor | None = None  # zero points, in the shape of `scales`

    is_requantized: ClassVar[bool] = False  # the option quantization may make another format of it
    suffixes: ClassVar[Mapping[str, str]] = {}  # field -> what follows the weight's name in a file

    @property
    def stored_as(self) -> str:
        """Name of the format for messages."""
        return self.format

    @property
    @abstractmethod
    def format(self) -> str:
        """Return the name of the format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Return the stored bytes, scales and zero points included."""
        return sum(part.nbytes for part in (self.data, self.scales, self.zeros) if part is not None)

    def rows(self, ids: Tensor) -> Self:
        """Return the output rows `ids` [n], on the device of the weight."""
        at = ids.to(self.data.device)
        parts = (None if part is None else part[at] for part in (self.scales, self.zeros))
        return type(self)(self.data[at], *parts)

    @property
    def column_unit(self) -> int:
        """Return the columns that cannot be separated; `columns` cuts at multiples of it."""
        return 1

    def columns(self, begin: int, end: int) -> WeightTensor:
        """Return the columns begin..end of a matrix with one scale per output row, or none."""
        return type(self)(self.data[:, begin:end], self.scales, self.zeros)

    @classmethod
    def cat(cls, weights: Sequence[Self]) -> Self:
        """Concatenate weights of one format along their output rows."""
        if len(weights) == 1:
            return weights[0]
        scales = [weight.scales for weight in weights if weight.scales is not None]
        return cls(torch.cat([weight.data for weight in weights]), torch.cat(scales) if scales else None)

    def to(self, device: torch.device) -> WeightTensor:
        """Return the weight on `device`, contiguous and decoded."""
        parts = (None if p is None else p.to(device).contiguous() for p in (self.scales, self.zeros))
        return type(self)(self.data.to(device).contiguous(), *parts)

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of `dtype`; None: the float type of the format."""

    @classmethod
    def from_parts(cls, name: str, data: Tensor, parts: Mapping[str, Tensor]) -> Self:
        """Build the weight `name` from its stored tensors; LoadError if `parts` do not belong to it."""
        return cls(data)


@dataclass(frozen=True, slots=True)
class FloatWeight(WeightTensor):
    """Weight in a float type, stored as it is; index tensors are kept in this form too."""

    @property
    def format(self) -> str:
        """Return "fp32", "bf16", "fp16" or torch's name of the type."""
        return FLOAT_NAMES.get(self.data.dtype, str(self.data.dtype).removeprefix("torch."))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor itself, converted if it is a float tensor."""
        if dtype is None or not self.data.is_floating_point():
            return self.data
        return self.data.to(dtype)
