"""Types of packed weights on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.ops.cpu.jit.compile import Kernel
from draftproof.ops.cpu.jit.program import Argument


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Instructions of this machine that weight formats and attention depend on."""

    amx: bool  # bf16 tiles
    amx_int8: bool  # int8 tiles


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Packed weight [columns, depth] with its bias."""

    format: str  # a key of FORMATS
    weight: Tensor
    bias: Tensor | None
    columns: int
    depth: int
    dtype: torch.dtype | None  # of the activations; None: a quantised weight takes every dtype
    extra: tuple[Argument, ...] = ()  # further arguments of the kernels
    layout: Any = None  # of a quantised weight: what its format needs to select kernels


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Packing of a weight and the kernels that multiply by it."""

    supports: Callable[[torch.dtype, CpuFeatures], bool]  # whether weights of this dtype can be packed here
    pack: Callable[[Tensor, CpuFeatures], tuple[Tensor, tuple[Argument, ...]]]  # the rest: kernel arguments
    kernel: Callable[[torch.dtype, bool], Kernel]  # for activations of this dtype, and bf16 or fp32 output
    draft_only: bool = False  # lower precision, for draft models


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Packed data of a quantised weight."""

    weight: Tensor
    depth: int
    extra: tuple[Argument, ...] = ()  # further arguments of the kernels
    layout: Any = None


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """Packing of a weight that is multiplied by quantised rows, and the kernels for that.

    The form of packed data depends on the dtypes and shapes of the stored tensors, never on their values.
    """

    # stored data, scales, zero points -> packed
    pack: Callable[[Tensor, Tensor, Tensor | None], PackedWeight]
    quantize_rows: Callable[[PackedLinear, torch.dtype], Kernel]  # for x of this dtype
    row_bytes: Callable[[PackedLinear], int]  # bytes of a quantised row
    row_floats: Callable[[PackedLinear], int]  # scales of a quantised row
    kernel: Callable[[PackedLinear, bool], Kernel]  # for bf16 or fp32 output
    layout: Callable[..., Any] = dict  # builds the layout from its values by name
    embed: Callable[[PackedLinear, torch.dtype], Kernel] | None = None  # looks up rows in this dtype
