"""Linear layers with int8 weights and int8 activations (W8A8).

A weight has one scale per output column. Each row of x is rounded to int8 with a scale of its own. The
products are summed in int32, which is exact, so neither the other rows nor the instructions affect the bits.
Weights [N, K] are packed as panels [N / 32, K / 4, 32, 4].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.cpu.gemm.byte_dot import COLUMNS, GROUP, MAX_ROWS, STEP_BYTES, has_dot_product, make_panel
from draftproof.ops.cpu.gemm.fma import ROW_CHUNK, finish, unit_rows
from draftproof.ops.cpu.gemm.weight_format import PackedWeight, QuantizedFormat
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, kernel, load_f32, load_i64, share, store_f32

INT8_MAX = 127
DEPTH_PADDING = 16  # int8 rows of x are padded with zeros to a whole vector
_ZERO = np.float32(0.0)


def pack_panels(data: Tensor) -> Tensor:
    """Pack int8 [N, K] to [ceil(N / 32), ceil(K / 4), 32, 4], zero-padded."""
    columns, depth = data.shape
    panels, steps = -(-columns // COLUMNS), -(-depth // GROUP)
    padded = torch.zeros(panels * COLUMNS, steps * GROUP, dtype=torch.int8)
    padded[:columns, :depth] = data
    return padded.view(panels, COLUMNS, steps, GROUP).transpose(1, 2).contiguous()


def padded_depth(depth: int) -> int:
    """Return the bytes of one int8 row of x."""
    return -(-depth // DEPTH_PADDING) * DEPTH_PADDING


def _quantize_rows(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def quantize_rows(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Round rows to int8 by their largest magnitude; args: out, scales, x, depth."""
        out, scales, x, depth = (load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24))
        padded = (depth + DEPTH_PADDING - 1) // DEPTH_PADDING * DEPTH_PADDING
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            line, to = x + row * depth * size, out + row * padded
            top = v.splat(_ZERO)
            for i in range(0, depth, 16):
                value = v.tload(line, i, depth - i, bf16)
                top = v.maximum(v.maximum(value, v.sub(v.splat(_ZERO), value)), top)
            largest = v.max_lane(top)
            inverse = np.float32(INT8_MAX) / largest if largest > _ZERO else _ZERO
            for i in range(0, depth, 16):
                scaled = v.mul(v.tload(line, i, depth - i, bf16), v.splat(inverse))
                v.istore_bytes(to + i, v.to_int(v.rint(scaled)))
            store_f32(scales + 4 * row, np.float32(largest / np.float32(INT8_MAX)))

    return quantize_rows


def make_linear(out_bf16: bool, dot_product: bool) -> Kernel:
    """Return the kernel of one output dtype; `dot_product`: with the NEON instruction."""
    panel_dot = make_panel(dot_product)

    @kernel
    def linear_w8a8(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, int8 rows, row scales, weight, bias, columns, depth, column scales."""
        out, x, row_scales = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        weight, bias, columns = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        depth, scales = load_i64(args + 48), load_i64(args + 56)
        padded = (depth + DEPTH_PADDING - 1) // DEPTH_PADDING * DEPTH_PADDING
        steps = (depth + GROUP - 1) // GROUP
        panels = (columns + COLUMNS - 1) // COLUMNS
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        begin, end = share(panels * chunks, thread, threads)
        for unit in range(begin, end):
            panel, first, last = unit_rows(unit, chunks, rows)
            w = weight + panel * steps * STEP_BYTES
            for row in range(first, last, MAX_ROWS):
                count = min(MAX_ROWS, last - row)
                panel_dot(count, x + row * padded, padded, w, scratch, 4 * COLUMNS, steps)
                for i in range(count):
                    scale = v.splat(load_f32(row_scales + 4 * (row + i)))
                    line, column = scratch + 4 * i * COLUMNS, panel * COLUMNS
                    for j in range(0, min(COLUMNS, columns - column), 16):
                        column_scales = v.tload(scales, column + j, columns - column - j, False)
                        y = v.mul(v.to_float(v.iload(line + 4 * j)), column_scales)
                        v.store(line + 4 * j, v.mul(y, scale))
                    finish(line, out, bias, row + i, column, columns, COLUMNS, False, out_bf16)

    return linear_w8a8


_DOT_PRODUCT = has_dot_product()
QUANTIZE_ROWS = [_quantize_rows(False), _quantize_rows(True)]  # by the dtype of x: [fp32, bf16]
LINEAR = [make_linear(False, _DOT_PRODUCT), make_linear(True, _DOT_PRODUCT)]  # by output dtype


FORMAT = QuantizedFormat(
    pack=lambda data, scales: PackedWeight(pack_panels(data), data.shape[1], (scales.clone().contiguous(),)),
    quantize_rows=lambda packed, dtype: QUANTIZE_ROWS[dtype == torch.bfloat16],
    row_bytes=lambda packed: padded_depth(packed.depth),
    row_floats=lambda packed: 1,
    kernel=lambda packed, out_bf16: LINEAR[out_bf16],
)
