"""Types of packed weights on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.ops.cpu.jit.compile import Kernel
from draftproof.ops.cpu.jit.program import Argument


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Instructions of this machine that weight formats and attention depend on."""

    amx: bool  # bf16 tiles
    amx_int8: bool  # int8 tiles
    rows_per_pass: int  # rows that share one pass over the weights in the FMA kernels


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Packed weight [columns, depth] with its bias."""

    format: str  # a key of FORMATS
    weight: Tensor
    bias: Tensor | None
    columns: int
    depth: int
    dtype: torch.dtype  # of the activations
    extra: tuple[Argument, ...] = ()  # further arguments of the kernels


class WeightFormat(ABC):
    """Packing of a weight and the kernels that multiply by it."""

    draft_only: ClassVar[bool] = False  # lower precision, for draft models

    @abstractmethod
    def supports(self, dtype: torch.dtype, features: CpuFeatures) -> bool:
        """Return whether weights of this dtype can be packed on this machine."""

    @abstractmethod
    def pack(self, weight: Tensor, features: CpuFeatures) -> tuple[Tensor, tuple[Argument, ...]]:
        """Return the packed weight [N, K] and the further arguments of the kernels."""

    @abstractmethod
    def kernel(self, dtype: torch.dtype, out_bf16: bool) -> Kernel:
        """Return the kernel for activations of `dtype` and bf16 or fp32 output."""
