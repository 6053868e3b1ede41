"""Reference definition of linear layers with quantised weights: one output at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127.0
ACTIVATION_BLOCK = 32  # elements of a row that share a scale beside weights in blocks


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Quantised weight in its stored form."""

    format: str  # a key of `ROW_PRODUCTS`
    data: Tensor  # [N, K] integers
    scales: Tensor  # fp32: [N], or [N, K / group, 2] of blocks (scale, minimum)
    bias: Tensor | None  # [N] fp32


def linear(x: Tensor, packed: QuantizedLinear, out_dtype: torch.dtype) -> Tensor:
    """Multiply x [R, K] by a quantised weight: [R, N]."""
    rows = [ROW_PRODUCTS[packed.format](row, packed) for row in x]
    return torch.stack(rows).to(out_dtype) if rows else x.new_zeros((0, len(packed.data)), dtype=out_dtype)


def w8a8_row(row: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return the outputs [N] of one row [K] in fp32: int8 weights and activations, summed as integers.

    The row is divided by its largest magnitude and rounded to int8. An output is the integer sum times the
    scale of its column, times the scale of the row, plus the bias: every operation is rounded to fp32.
    """
    values = row.float()
    largest = values.abs().max()
    limit = torch.full_like(largest, INT8_MAX)  # a tensor: torch divides by a number with two roundings
    inverse = limit / largest if largest > 0 else largest
    integers = (values * inverse).round().long()
    outputs = []
    for line, scale in zip(packed.data.long(), packed.scales, strict=True):
        outputs.append((integers * line).sum().float() * scale * (largest / limit))
    found = torch.stack(outputs)
    return found if packed.bias is None else found + packed.bias


def blocks_row(row: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return the outputs [N] of one row [K] in fp32: weights in groups, activations in blocks of 32.

    A weight is scale times integer plus minimum. The integer sum of a group is exact; groups are added in
    fp32 by ascending K.
    """
    group = row.shape[0] // packed.scales.shape[1]
    total = torch.zeros(len(packed.data))
    for start in range(0, row.shape[0], ACTIVATION_BLOCK):
        values = row[start : start + ACTIVATION_BLOCK].float()
        largest = values.abs().max()
        limit = torch.full_like(largest, INT8_MAX)
        inverse = limit / largest if largest > 0 else largest
        integers = (values * inverse).round().long()
        for first in range(start, start + ACTIVATION_BLOCK, group):
            own = integers[first - start : first - start + group]
            sums = (packed.data[:, first : first + group].long() * own).sum(1).float()
            scale, minimum = packed.scales[:, first // group].unbind(1)
            total = (
                total + sums * scale * (largest / limit) + minimum * (own.sum().float() * (largest / limit))
            )
    return total if packed.bias is None else total + packed.bias


ROW_PRODUCTS: dict[str, Callable[[Tensor, QuantizedLinear], Tensor]] = {
    "w8a8": w8a8_row,
    "blocks": blocks_row,
}
