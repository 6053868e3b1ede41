"""Linear layers with int8 weights and int8 activations (W8A8).

A weight has one scale per output column. Each row of x is rounded to int8 with a scale of its own. The
products are summed in int32, which is exact, so neither the other rows nor the instructions affect the bits.
Weights [N, K] are packed as strips of columns.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.cpu.gemm.byte_dot import (
    CHUNK,
    GROUP,
    TILE_ROWS,
    UNIT_COLUMNS,
    Dot,
    select_dot,
    strip_bytes,
    tile_index,
)
from draftproof.ops.cpu.gemm.fma import ROW_CHUNK, finish, unit_rows
from draftproof.ops.cpu.gemm.weight_format import PackedWeight, QuantizedFormat
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, kernel, load_f32, load_i64, share, store_f32

INT8_MAX = 127
_ZERO = np.float32(0.0)


def pack_strips(data: Tensor, width: int) -> Tensor:
    """Pack int8 [N, K] to [strips of `width` columns, K / 4, width, 4], zero-padded to whole units."""
    columns, depth = data.shape
    padded = torch.zeros(-(-columns // UNIT_COLUMNS) * UNIT_COLUMNS, padded_depth(depth), dtype=torch.int8)
    padded[:columns, :depth] = data
    return padded.view(-1, width, padded.shape[1] // GROUP, GROUP).transpose(1, 2).contiguous()


def padded_depth(depth: int) -> int:
    """Return the bytes of one int8 row of x."""
    return -(-depth // CHUNK) * CHUNK


@cache
def quantize_rows(row_offset: int, bf16: bool) -> Kernel:
    """Return the kernel that rounds rows to int8; row_offset: added to each integer, see `Dot`."""
    size = 2 if bf16 else 4

    @kernel
    def quantize_rows(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Round rows to int8 by their largest magnitude; args: out, scales, x, depth."""
        out, scales, x, depth = (load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24))
        chunks = (depth + CHUNK - 1) // CHUNK
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            line = x + row * depth * size
            top = v.splat(_ZERO)
            for i in range(0, depth, 16):
                value = v.tload(line, i, depth - i, bf16)
                top = v.maximum(v.maximum(value, v.sub(v.splat(_ZERO), value)), top)
            largest = v.max_lane(top)
            inverse = np.float32(INT8_MAX) / largest if largest > _ZERO else _ZERO
            for chunk in range(chunks):
                i = chunk * CHUNK
                scaled = v.mul(v.tload(line, i, depth - i, bf16), v.splat(inverse))
                integers = v.iadd(v.to_int(v.rint(scaled)), v.isplat(row_offset))
                v.istore_bytes(out + tile_index(row, rows, chunk, chunks) * CHUNK, integers)
            store_f32(scales + 4 * row, np.float32(largest / np.float32(INT8_MAX)))

    return quantize_rows


@cache
def make_linear(out_bf16: bool, dot: Dot) -> Kernel:
    """Return the kernel of one output dtype."""
    multiply, width = strip_bytes(dot), dot.width

    @kernel
    def linear_w8a8(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, int8 rows, row scales, weight, bias, columns, depth, column scales."""
        out, x, row_scales = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        weight, bias, columns = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        depth, scales = load_i64(args + 48), load_i64(args + 56)
        steps = (depth + CHUNK - 1) // CHUNK
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        begin, end = share((columns + UNIT_COLUMNS - 1) // UNIT_COLUMNS * chunks, thread, threads)
        for unit in range(begin, end):
            panel, first, last = unit_rows(unit, chunks, rows)
            column = panel * UNIT_COLUMNS
            column_scales = v.tload(scales, column, columns - column, False)
            for row in range(first, last, TILE_ROWS):
                count = min(TILE_ROWS, last - row)
                for j in range(0, UNIT_COLUMNS, width):
                    w = weight + (column + j) * steps * CHUNK
                    multiply(count, x + row * steps * CHUNK, w, scratch + 4 * j, steps)
                for i in range(count):
                    line, scale = scratch + 4 * i * UNIT_COLUMNS, load_f32(row_scales + 4 * (row + i))
                    y = v.mul(v.to_float(v.iload(line)), column_scales)
                    v.store(line, v.mul(y, v.splat(scale)))
                    finish(line, out, bias, row + i, column, columns, UNIT_COLUMNS, False, out_bf16)

    return linear_w8a8


def pack(data: Tensor, scales: Tensor) -> PackedWeight:
    """Pack int8 [N, K] with scales [N]."""
    strips = pack_strips(data, select_dot(has_signed_weights=True).width)
    return PackedWeight(strips, data.shape[1], (scales.float().clone().contiguous(),))


FORMAT = QuantizedFormat(
    pack=lambda data, scales, _: pack(data, scales),
    quantize_rows=lambda packed, dtype: quantize_rows(
        select_dot(has_signed_weights=True).row_offset, dtype == torch.bfloat16
    ),
    row_bytes=lambda packed: padded_depth(packed.depth),
    row_floats=lambda packed: 1,
    kernel=lambda packed, out_bf16: make_linear(out_bf16, select_dot(has_signed_weights=True)),
)
