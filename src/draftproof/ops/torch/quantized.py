"""Linear layers with quantised weights in torch, with the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops.reference.quantized import ACTIVATION_BLOCK, INT8_MAX, QuantizedLinear


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


PRODUCTS: dict[str, Callable[[Tensor, QuantizedLinear], Tensor]] = {"w8a8": w8a8, "blocks": blocks}
