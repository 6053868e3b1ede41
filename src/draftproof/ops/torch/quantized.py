"""Linear layers with quantised weights in torch, with the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops.reference.quantized import INT8_MAX, QuantizedLinear


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


PRODUCTS: dict[str, Callable[[Tensor, QuantizedLinear], Tensor]] = {"w8a8": w8a8}
