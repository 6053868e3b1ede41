"""Packed weights of the GEMM kernels and their storage formats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.triton.kernel_utils import FLOATS, matrix, vector


class WeightKind(Enum):
    """Storage format of a packed weight; `gemm/select.py` decides which kernels read which format."""

    BF16 = "bf16"
    FP32 = "fp32"
    QUANTIZED = "quantized"  # `PackedLinear.format` names the format


KIND_BY_DTYPE = {torch.bfloat16: WeightKind.BF16, torch.float32: WeightKind.FP32}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weight in the layout of the kernels."""

    weight: Tensor  # [N, K] contiguous
    bias: Tensor | None  # [N] fp32
    kind: WeightKind | None = None  # None: by the dtype of `weight`
    format: str | None = None  # of a quantised weight: a key of `QUANTIZED_GEMMS`
    scales: Tensor | None = None  # [N] fp32, of a quantised weight

    def __post_init__(self) -> None:
        """Derive the kind of an unquantised weight from its dtype."""
        if self.kind is None:
            object.__setattr__(self, "kind", KIND_BY_DTYPE.get(self.weight.dtype))


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Return the packed form of a weight [N, K] and a bias [N]."""
    weight = matrix("weight", weight.detach())
    if bias is not None:
        bias = vector("bias", bias.detach().float().contiguous(), len(weight), (torch.float32,))
    return PackedLinear(weight, bias)


def pack_quantized(name: str, data: Tensor, scales: Tensor, bias: Tensor | None) -> PackedLinear:
    """Return the packed form of a quantised weight [N, K] with scales [N] and a bias [N]."""
    bias = None if bias is None else bias.detach().float().contiguous()
    scales = scales.detach().float().contiguous()
    return PackedLinear(data.detach().contiguous(), bias, WeightKind.QUANTIZED, name, scales)


def check_input(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    """Return x ready for a kernel, and the dtype of the result."""
    dtypes = FLOATS if packed.kind is WeightKind.QUANTIZED else (packed.weight.dtype,)
    x = matrix("x", x, packed.weight.shape[1], dtypes)
    out_dtype = out_dtype or x.dtype
    if out_dtype not in FLOATS:
        raise ConfigError(f"linear returns fp32 or bf16, not {out_dtype}")
    return x, out_dtype
