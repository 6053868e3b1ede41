"""Quantised rows of activations: int8 or e4m3 with a scale per row, or e4m3 with one per 128 columns.

A row is quantised by its own largest magnitude alone. Each kernel has the bits of the plain op followed by
`quantize`: values are rounded to the dtype of the activations first, and a maximum has no order. The launches
forbid fused multiply-adds, as `ops/reference/quantized.py` rounds every operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.elementwise import inverse_rms, tree_sum_rows
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync

INT8_MAX = tl.constexpr(127.0)
E4M3_MAX = tl.constexpr(448.0)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: added to an fp32 number, its lowest byte is the int8
CHUNK = 128  # columns of x that share a scale beside weights in blocks
MAX_BLOCK = 16384  # columns of x that one program holds at a time
MULTI_ROW_MIN_ROWS = 256  # above it a program takes several rows, to hide the latency of memory
DTYPES = {"w8a8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_block": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of activations in the form that a quantised weight reads."""

    values: Tensor  # [R, K] int8 or e4m3
    scales: Tensor  # [R] fp32, or [R, ceil(K / 128)]
    dtype: torch.dtype  # of the activations before

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        """Return [R, K]."""
        return self.values.shape

    @classmethod
    def empty(cls, weight_format: str, rows: int, depth: int, x: Tensor) -> QuantizedRows:
        """Allocate rows for a weight format beside x."""
        size = (rows, -(-depth // CHUNK)) if weight_format == "fp8_block" else (rows,)
        values = torch.empty((rows, depth), dtype=torch.int8, device=x.device)
        scales = torch.empty(size, dtype=torch.float32, device=x.device)
        return cls(values.view(DTYPES[weight_format]), scales, x.dtype)


@triton.jit
def quantized(value, inverse, dtype: tl.constexpr):
    """Return value times inverse, rounded to int8 or e4m3."""
    scaled = value * inverse
    if dtype == tl.int8:
        return (scaled + ROUNDING).to(tl.int32, bitcast=True).to(dtype)
    return scaled.to(dtype)


@triton.jit
def inverse_scale(largest, LIMIT: tl.constexpr):
    """Return LIMIT / largest, and 0 for 0."""
    return tl.where(largest > 0, tl.math.div_rn(LIMIT, tl.where(largest > 0, largest, 1.0)), 0.0)


@triton.jit
def magnitude(value):
    """Return the bits of the magnitude of fp32 values: integers of the same order, NaN the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_magnitude(bits, axis: tl.constexpr):
    """Return the largest number along an axis of magnitudes, NaN if one is."""
    return tl.max(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def store_quantized(y, out, scales, row, row_ok, column, D: tl.constexpr, CHUNK: tl.constexpr):
    """Quantise y [M, BLOCK] fp32, zero beyond D, and store it with its scales; CHUNK 0: one scale a row."""
    dtype: tl.constexpr = out.dtype.element_ty
    M: tl.constexpr = y.shape[0]
    BLOCK: tl.constexpr = y.shape[1]
    LIMIT: tl.constexpr = INT8_MAX if dtype == tl.int8 else E4M3_MAX
    here = row.to(tl.int64)[:, None] * D + column[None, :]
    ok = row_ok[:, None] & (column < D)[None, :]
    if CHUNK:
        CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
        cells = tl.reshape(y, (M, BLOCK // CHUNK, CHUNK))
        largest = largest_magnitude(magnitude(cells), 2)  # [M, chunks]
        inverse = inverse_scale(largest, LIMIT)
        tl.store(out + here, tl.reshape(quantized(cells, inverse[:, :, None], dtype), (M, BLOCK)), mask=ok)
        chunk = tl.arange(0, BLOCK // CHUNK)
        at = scales + row.to(tl.int64)[:, None] * CHUNKS + chunk[None, :]
        tl.store(at, tl.math.div_rn(largest, LIMIT), mask=row_ok[:, None] & (chunk < CHUNKS)[None, :])
    else:
        largest = largest_magnitude(magnitude(y), 1)  # [M]
        tl.store(out + here, quantized(y, inverse_scale(largest, LIMIT)[:, None], dtype), mask=ok)
        tl.store(scales + row, tl.math.div_rn(largest, LIMIT), mask=row_ok)


@triton.jit
def quantize_rows_kernel(x, out, scales, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Quantise x [R, D] by the largest magnitude of each row -> out [R, D], scales [R]."""
    pdl_sync(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    LIMIT: tl.constexpr = INT8_MAX if dtype == tl.int8 else E4M3_MAX
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    first = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    top = magnitude(first)
    for start in range(BLOCK, D, BLOCK):
        ok = start + column < D
        value = tl.load(x + row * D + start + column, mask=ok, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(value))
    largest = largest_magnitude(top, 0)
    inverse = inverse_scale(largest, LIMIT)
    tl.store(out + row * D + column, quantized(first, inverse, dtype), mask=column < D)
    for start in range(BLOCK, D, BLOCK):
        ok = start + column < D
        value = tl.load(x + row * D + start + column, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row * D + start + column, quantized(value, inverse, dtype), mask=ok)
    tl.store(scales + row, tl.math.div_rn(largest, LIMIT))


@triton.jit
def quantize_chunks_kernel(
    x, out, scales, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Quantise x [R, D] by the largest magnitude of each row and chunk; a program takes BLOCK columns."""
    pdl_sync(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    cells = tl.reshape(value, (BLOCK // CHUNK, CHUNK))
    largest = largest_magnitude(magnitude(cells), 1)
    scaled = quantized(cells, inverse_scale(largest, E4M3_MAX)[:, None], dtype)
    tl.store(out + row * D + column, tl.reshape(scaled, (BLOCK,)), mask=column < D)
    chunk = tl.program_id(1) * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    tl.store(scales + row * CHUNKS + chunk, tl.math.div_rn(largest, E4M3_MAX), mask=chunk < CHUNKS)


@triton.jit(do_not_specialize=["R"])
def norm_quantize_kernel(
    x, residual, weight, out, scales, total, eps, R,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantise the RMS norm of x, or of total = x + residual, which is stored: [R, D] each."""
    pdl_sync(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = row.to(tl.int64)[:, None] * D + column[None, :]
    ok = (row < R)[:, None] & (column < D)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + here, mask=ok, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        summed = (value + tl.load(residual + here, mask=ok, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + here, summed, mask=ok)
        value = summed.to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    scale = inverse_rms(tree_sum_rows(value * value), eps, D)[:, None]
    y = ((value * scale).to(dtype).to(tl.float32) * w[None, :]).to(dtype).to(tl.float32)
    store_quantized(y, out, scales, row, row < R, column, D, CHUNK)


def quantize(x: Tensor, weight_format: str, pdl: bool) -> QuantizedRows:
    """Return the rows of x [R, K] in the form that a weight of `weight_format` reads."""
    rows, depth = x.shape
    made = QuantizedRows.empty(weight_format, rows, depth, x)
    if rows == 0:
        return made
    block = min(MAX_BLOCK, next_power_of_two(depth))
    options = launch_options(pdl, num_warps=max(4, min(16, block // 512)), enable_fp_fusion=False)
    if weight_format == "fp8_block":
        block = min(1024, max(CHUNK, next_power_of_two(depth)))
        quantize_chunks_kernel[(rows, triton.cdiv(depth, block))](
            x, made.values, made.scales, D=depth, BLOCK=block, CHUNK=CHUNK, **{**options, "num_warps": 4}
        )
    else:
        quantize_rows_kernel[(rows,)](x, made.values, made.scales, D=depth, BLOCK=block, **options)
    return made


def prepare_rows(
    x: Tensor | QuantizedRows, packed: PackedLinear, pdl: bool, tile: Tile | None = None
) -> Tensor | QuantizedRows:
    """Return rows in the form that a quantised weight reads.

    `tile`: of a GEMM that can quantise one row in bf16 beside a w8a8 weight. Such a row is returned as it is.
    """
    if isinstance(x, QuantizedRows) or packed.format is None or not packed.quantizes_rows:
        return x
    is_one_row = tile is not None and tile.bm == 1
    if is_one_row and packed.format == "w8a8" and x.dtype == torch.bfloat16:
        return x
    return quantize(x, packed.format, pdl)


def norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_format: str, pdl: bool
) -> tuple[QuantizedRows, Tensor]:
    """Return the quantised RMS norm of x + residual [R, D] and the sum; without a residual of x, and x."""
    count, width = x.shape
    made = QuantizedRows.empty(weight_format, count, width, x)
    total = x if residual is None else torch.empty_like(x)
    block = max(CHUNK, next_power_of_two(width))
    rows = 1 if count <= MULTI_ROW_MIN_ROWS else max(1, min(4, 4096 // block))
    options: dict[str, Any] = {"num_warps": max(1, min(8, block * rows // 256)), "enable_fp_fusion": False}
    if count:
        norm_quantize_kernel[(triton.cdiv(count, rows),)](
            x, x if residual is None else residual, weight, made.values, made.scales, total, eps, count,
            D=width, BLOCK=block, CHUNK=CHUNK if weight_format == "fp8_block" else 0, ROWS=rows,
            HAS_RESIDUAL=residual is not None, **launch_options(pdl, **options),
        )  # fmt: skip
    return made, total
