"""Linear layers with quantised weights in torch, with the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops.reference.quantized import (
    ACTIVATION_BLOCK,
    E2M1_VALUES,
    E4M3_MAX,
    FP8_CHUNK,
    INT4_ZERO,
    INT8_MAX,
    MXFP4_BIAS,
    MXFP4_GROUP,
    QuantizedLinear,
)


def linear(x: Tensor, packed: QuantizedLinear, out_dtype: torch.dtype) -> Tensor:
    """Multiply x [R, K] by a quantised weight: [R, N]."""
    return PRODUCTS[packed.format](x, packed).to(out_dtype)


def w8a8(x: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return x [R, K] times int8 weights in fp32 [R, N]; integer sums are exact in double in any order."""
    values = x.float()
    largest = values.abs().amax(1, keepdim=True)  # [R, 1]
    limit = torch.full_like(largest, INT8_MAX)  # a tensor: torch divides by a number with two roundings
    inverse = torch.where(largest > 0, limit / largest, largest)
    sums = (values * inverse).round().double() @ packed.data.double().T
    found = sums.float() * packed.scales * (largest / limit)
    return found if packed.bias is None else found + packed.bias


def blocks(x: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return x [R, K] times weights in blocks in fp32 [R, N], group by group."""
    group = x.shape[1] // packed.scales.shape[1]
    values = x.float().view(len(x), x.shape[1] // ACTIVATION_BLOCK, ACTIVATION_BLOCK)  # [R, K / 32, 32]
    largest = values.abs().amax(2, keepdim=True)
    limit = torch.full_like(largest, INT8_MAX)
    integers = (values * torch.where(largest > 0, limit / largest, largest)).round().double().flatten(1)
    row_scales = (largest / limit).flatten(1)  # [R, K / 32]
    total = torch.zeros((len(x), len(packed.data)), device=x.device)
    for start in range(0, x.shape[1], group):
        own, row_scale = integers[:, start : start + group], row_scales[:, start // ACTIVATION_BLOCK, None]
        sums = (own @ packed.data[:, start : start + group].double().T).float()
        scale, minimum = packed.scales[:, start // group].unbind(1)
        row_sum = own.sum(1, keepdim=True).float() * row_scale
        total = total + sums * scale * row_scale + minimum * row_sum
    return total if packed.bias is None else total + packed.bias


def fp8(x: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return x [R, K] times e4m3 weights with a scale per channel in fp32 [R, N]."""
    values, row_scales = e4m3_values(x.float())
    total = torch.zeros((len(x), len(packed.data)), device=x.device)
    for start in range(0, x.shape[1], FP8_CHUNK):
        total = total + chunk_sums(values, packed.data, start)
    found = total * packed.scales * row_scales
    return found if packed.bias is None else found + packed.bias


def fp8_block(x: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return x [R, K] times e4m3 weights in blocks in fp32 [R, N], chunk by chunk."""
    scales = packed.scales
    if len(scales) != len(packed.data):
        scales = scales.repeat_interleave(FP8_CHUNK, 0)[: len(packed.data)]  # [N, K / 128]
    total = torch.zeros((len(x), len(packed.data)), device=x.device)
    for start in range(0, x.shape[1], FP8_CHUNK):
        values, row_scales = e4m3_values(x[:, start : start + FP8_CHUNK].float())
        sums = chunk_sums(values, packed.data[:, start : start + FP8_CHUNK], 0)
        total = total + sums * scales[:, start // FP8_CHUNK] * row_scales
    return total if packed.bias is None else total + packed.bias


def e4m3_values(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [R, K] rounded to e4m3, in fp32, and their scales [R, 1]."""
    largest = values.abs().amax(1, keepdim=True)
    limit = torch.full_like(largest, E4M3_MAX)
    inverse = torch.where(largest > 0, limit / largest, largest)
    return (values * inverse).to(torch.float8_e4m3fn).float(), largest / limit


def chunk_sums(values: Tensor, weight: Tensor, start: int) -> Tensor:
    """Return the sums [R, N] over the chunk of K from `start` on, exact in double, in fp32."""
    chunk = slice(start, start + FP8_CHUNK)
    return (values[:, chunk].double() @ weight[:, chunk].double().T).float()


def w4a16(x: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return x [R, K] times 4-bit integers, dequantised to bf16, in fp32 [R, N]."""
    group = x.shape[1] // packed.scales.shape[1]
    integers = codes_of(packed.data).float()
    zeros = INT4_ZERO if packed.zeros is None else packed.zeros.float().repeat_interleave(group, 1)
    weight = ((integers - zeros) * packed.scales.float().repeat_interleave(group, 1)).to(torch.bfloat16)
    return sums_by_row(x, weight.double(), packed.bias)


def mxfp4(x: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return x [R, K] times e2m1 weights with an exponent per 32 elements of K, in fp32 [R, N]."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64, device=x.device)
    factors = torch.exp2(packed.scales.double() - MXFP4_BIAS)  # [N, K / 32]
    weight = values[codes_of(packed.data).long()] * factors.repeat_interleave(MXFP4_GROUP, 1)
    return sums_by_row(x, weight, packed.bias)


def codes_of(data: Tensor) -> Tensor:
    """Return the 4-bit codes [N, K] uint8 of bytes [N, K / 2]."""
    return torch.stack([data & 15, data >> 4], 2).flatten(1)


def sums_by_row(x: Tensor, wide: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [R, K] times a weight [N, K] in double, plus the bias, in fp32 [R, N]; one row at a time."""
    rows = [(row.double() * wide).sum(1) for row in x]
    found = torch.stack(rows).float() if rows else x.new_zeros((0, len(wide)), dtype=torch.float32)
    return found if bias is None else found + bias


PRODUCTS: dict[str, Callable[[Tensor, QuantizedLinear], Tensor]] = {
    "w8a8": w8a8,
    "blocks": blocks,
    "fp8": fp8,
    "fp8_block": fp8_block,
    "w4a16": w4a16,
    "mxfp4": mxfp4,
}
