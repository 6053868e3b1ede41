"""Packed weights of the GEMM kernels and their storage formats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.triton.kernel_utils import FLOATS, matrix, vector

FP8_BLOCK = 128  # rows, and columns, of a weight block that share a scale
ONE_GROUP = 1 << 30  # group size of a 4-bit weight with one scale a row
FOUR_BITS = frozenset({"w4a16", "mxfp4"})  # formats of two elements a byte, whose rows are not quantised
REPACKED_BYTES = 64 << 20  # of a 4-bit weight at a time: unpacked it needs several times as much


class WeightKind(Enum):
    """Storage format of a packed weight; `gemm/select.py` decides which kernels read which format."""

    BF16 = "bf16"
    FP32 = "fp32"
    QUANTIZED = "quantized"  # `PackedLinear.format` names the format


KIND_BY_DTYPE = {torch.bfloat16: WeightKind.BF16, torch.float32: WeightKind.FP32}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weight in the layout of the kernels."""

    weight: Tensor  # [N, K] contiguous; [N, bytes] of a 4-bit weight
    bias: Tensor | None  # [N] fp32
    kind: WeightKind | None = None  # None: by the dtype of `weight`
    format: str | None = None  # of a quantised weight
    scales: Tensor | None = None  # [N] or [K / 128, N / block_rows] fp32; [K / group, N], of mxfp4 uint8
    zeros: Tensor | None = None  # [K / group, N] uint8, of a 4-bit weight with zero points
    depth: int = 0  # K; 0: the columns of `weight`
    block_rows: int = 0  # of an fp8 block weight: output rows that share a scale
    half: int = 0  # of a 4-bit weight: byte j of a piece of `half` bytes holds elements j and half + j
    group: int = 1  # of a 4-bit weight: elements of K that share a scale

    def __post_init__(self) -> None:
        """Derive the kind of an unquantised weight from its dtype, and the depth."""
        if self.kind is None:
            object.__setattr__(self, "kind", KIND_BY_DTYPE.get(self.weight.dtype))
        if not self.depth:
            object.__setattr__(self, "depth", self.weight.shape[1])

    @property
    def columns(self) -> int:
        """Return N, the columns of the product."""
        return self.weight.shape[0]

    @property
    def kind_name(self) -> str:
        """Return the name of the format, by which tiles are selected."""
        assert self.kind is not None
        return self.format or self.kind.value

    @property
    def quantizes_rows(self) -> bool:
        """Return whether the rows that it multiplies are quantised."""
        return self.format is not None and self.format not in FOUR_BITS


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Return the packed form of a weight [N, K] and a bias [N]."""
    weight = matrix("weight", weight.detach())
    if bias is not None:
        bias = vector("bias", bias.detach().float().contiguous(), len(weight), (torch.float32,))
    return PackedLinear(weight, bias)


def pack_quantized(
    name: str, data: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None
) -> PackedLinear:
    """Return the packed form of a quantised weight; see the weight formats of `models`."""
    bias = None if bias is None else bias.detach().float().contiguous()
    kind, data, scales = WeightKind.QUANTIZED, data.detach(), scales.detach()
    if name in FOUR_BITS:
        return _pack_4bit(name, data, scales, bias, zeros)
    if name != "fp8_block":
        return PackedLinear(data.contiguous(), bias, kind, name, scales.float().contiguous())
    block_rows = 1 if len(scales) == len(data) else FP8_BLOCK
    by_chunk = scales.float().t().contiguous()
    return PackedLinear(data.contiguous(), bias, kind, name, by_chunk, block_rows=block_rows)


def _pack_4bit(
    name: str, data: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None
) -> PackedLinear:
    """Repack bytes of neighbours [N, K / 2] to pieces of two halves, and transpose scales and zero points."""
    columns, depth, groups = len(data), 2 * data.shape[1], scales.shape[1]
    group = depth // groups
    half = 128 if depth % 256 == 0 and (groups == 1 or group % 128 == 0) else 64
    pieces = -(-depth // (2 * half))
    packed = torch.empty((columns, pieces, half), dtype=torch.uint8, device=data.device)
    step = max(1, REPACKED_BYTES // (pieces * half))
    for first in range(0, columns, step):
        rows = data[first : first + step]
        codes = rows.new_zeros((len(rows), pieces * 2 * half))
        codes[:, :depth:2] = rows & 15
        codes[:, 1:depth:2] = rows >> 4
        low, high = codes.view(len(rows), pieces, 2, half).unbind(2)
        torch.bitwise_or(low, high << 4, out=packed[first : first + step])
    if groups == 1:
        group = ONE_GROUP
    missing = -(-pieces * 2 * half // group) - groups if groups > 1 else 0

    def by_group(values: Tensor) -> Tensor:
        """Return [K / group, N], with zeros for groups beyond the depth that the last piece covers."""
        return torch.nn.functional.pad(values.t(), (0, 0, 0, missing)).contiguous()

    return PackedLinear(
        packed.flatten(1), bias, WeightKind.QUANTIZED, name, by_group(scales),
        None if zeros is None else by_group(zeros), depth, half=half, group=group,
    )  # fmt: skip


def check_input(x: Any, packed: PackedLinear, out_dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
    """Return x, rows or quantised rows, ready for a kernel, and the dtype of the result."""
    if isinstance(x, Tensor):
        dtypes = FLOATS if packed.kind is WeightKind.QUANTIZED else (packed.weight.dtype,)
        x = matrix("x", x, packed.depth, dtypes)
    out_dtype = out_dtype or x.dtype
    if out_dtype not in FLOATS:
        raise ConfigError(f"linear returns fp32 or bf16, not {out_dtype}")
    return x, out_dtype
