"""Reference definition of linear layers with quantised weights: one output at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.ops.contract.block_scales import float_scales

INT8_MAX = 127.0
E4M3_MAX = 448.0
FP8_CHUNK = 128  # elements of K whose products are summed before they are added to the total
INT4_ZERO = 8.0  # zero point of a symmetric 4-bit weight
ACTIVATION_BLOCK = 32  # elements of a row that share a scale beside weights in blocks
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of mxfp4; the highest of its 4 bits is the sign
MXFP4_GROUP = 32  # elements of K that share an exponent
MXFP4_BIAS = 127  # subtracted from a stored exponent


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Quantised weight in its stored form."""

    format: str  # a key of `ROW_PRODUCTS`
    data: Tensor  # [N, K] integers or e4m3; [N, K / 2] bytes of two 4-bit integers or e2m1 codes
    scales: Tensor  # by format; see the weight formats of `models`
    bias: Tensor | None  # [N] fp32
    zeros: Tensor | None = None  # [N, K / group], of 4-bit integers


def plain_scales(scales: Tensor) -> Tensor:
    """Return the scales of blocks [N, groups, 1 or 2] in fp32 with a minimum for each group."""
    floats = float_scales(scales)
    return torch.nn.functional.pad(floats, (0, 2 - floats.shape[2]))


def embed(tokens: Tensor, packed: QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Look up rows [R] of a weight in blocks: scale times integer plus minimum in fp32, rounded once."""
    data, scales = packed.data[tokens], packed.scales[tokens]
    scale, minimum = (
        part.repeat_interleave(data.shape[1] // scales.shape[1], 1) for part in scales.unbind(2)
    )
    return (scale * data + minimum).to(dtype)


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


def fp8_row(row: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return the outputs [N] of one row [K] in fp32: e4m3 weights and activations, a scale per channel.

    The row is divided by its largest magnitude, times 448, and rounded to e4m3. Products of FP8_CHUNK
    elements are summed without rounding, rounded to fp32 and added to the total by ascending K. An output is
    the total times the scale of its column, times the scale of the row, plus the bias.
    """
    values, scale = e4m3_values(row)
    total = torch.zeros(len(packed.data))
    for start in range(0, row.shape[0], FP8_CHUNK):
        chunk = slice(start, start + FP8_CHUNK)
        total = total + chunk_sums(values[chunk], packed.data[:, chunk])
    found = total * packed.scales * scale
    return found if packed.bias is None else found + packed.bias


def fp8_block_row(row: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return the outputs [N] of one row [K] in fp32: e4m3 in blocks of 128 with a scale each.

    Each chunk of the row is rounded to e4m3 by its own largest magnitude. The sum of a chunk is multiplied by
    the scale of the weight's block, then by that of the row's chunk, and added to the total by ascending K.
    """
    total = torch.zeros(len(packed.data))
    block_rows = 1 if len(packed.scales) == len(packed.data) else FP8_CHUNK
    for index, start in enumerate(range(0, row.shape[0], FP8_CHUNK)):
        chunk = slice(start, start + FP8_CHUNK)
        values, scale = e4m3_values(row[chunk])
        weight_scales = torch.stack([packed.scales[n // block_rows, index] for n in range(len(packed.data))])
        total = total + chunk_sums(values, packed.data[:, chunk]) * weight_scales * scale
    return total if packed.bias is None else total + packed.bias


def e4m3_values(row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a row [K] rounded to e4m3, in fp32, and the scale of the row."""
    values = row.float()
    largest = values.abs().max()
    limit = torch.full_like(largest, E4M3_MAX)
    inverse = limit / largest if largest > 0 else largest
    return (values * inverse).to(torch.float8_e4m3fn).float(), largest / limit


def chunk_sums(values: Tensor, weight: Tensor) -> Tensor:
    """Return the sums [N] over a chunk of values [C] times weight [N, C], exact in double, in fp32."""
    return torch.stack([(values.double() * line).sum().float() for line in weight.double()])


def w4a16_row(row: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return the outputs [N] of one row [K] in fp32: weights of 4 bits, dequantised to bf16.

    A weight is scale times (integer - zero point), in fp32, rounded to bf16. The sum is that of `linear` with
    such a weight.
    """
    outputs = []
    for n, line in enumerate(packed.data):
        integers = torch.stack([line & 15, line >> 4], 1).view(packed.scales.shape[1], -1).float()
        zeros = torch.tensor(INT4_ZERO) if packed.zeros is None else packed.zeros[n].float()[:, None]
        weight = ((integers - zeros) * packed.scales[n].float()[:, None]).to(torch.bfloat16).flatten()
        outputs.append((row.double() * weight.double()).sum().float())
    found = torch.stack(outputs)
    return found if packed.bias is None else found + packed.bias


def mxfp4_row(row: Tensor, packed: QuantizedLinear) -> Tensor:
    """Return the outputs [N] of one row [K] in fp32: e2m1 weights with an exponent per 32 elements of K.

    A weight is its e2m1 value times 2 ** (exponent - 127), which bf16 holds exactly. The sum is that of
    `linear` with such a weight.
    """
    outputs = []
    for line, exponents in zip(packed.data.tolist(), packed.scales.tolist(), strict=True):
        weight = []
        for k, code in enumerate(code for byte in line for code in (byte & 15, byte >> 4)):
            magnitude = E2M1_VALUES[code & 7] * 2.0 ** (exponents[k // MXFP4_GROUP] - MXFP4_BIAS)
            weight.append(-magnitude if code & 8 else magnitude)
        outputs.append((row.double() * torch.tensor(weight, dtype=torch.float64)).sum().float())
    found = torch.stack(outputs)
    return found if packed.bias is None else found + packed.bias


ROW_PRODUCTS: dict[str, Callable[[Tensor, QuantizedLinear], Tensor]] = {
    "w8a8": w8a8_row,
    "blocks": blocks_row,
    "fp8": fp8_row,
    "fp8_block": fp8_block_row,
    "w4a16": w4a16_row,
    "mxfp4": mxfp4_row,
}
