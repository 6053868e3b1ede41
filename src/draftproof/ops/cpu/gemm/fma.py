"""Linear layers by fused multiply-add: for fp32, and for bf16 on machines without AMX.

Weights [N, K] are packed once as panels [N / 64, K, 64]: a thread streams its panels from memory in
order, and 64 outputs grow side by side. Each is a sum of chains over `DEPTH_BLOCK` of K: one long chain
would lose precision.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.cpu.gemm.microkernel import COLUMNS, MAX_ROWS, panel_bf16, panel_f32
from draftproof.ops.cpu.gemm.weight_format import WeightFormat
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, device, kernel, load_i64, share

_ZERO = np.float32(0.0)
DEPTH_BLOCK = 128
ROW_CHUNK = 128  # rows per unit of work: prefill on many threads splits rows as well as columns


def pack_panels(weight: Tensor) -> Tensor:
    """Pack [N, K] to [ceil(N / 64), K, 64], zero-padded."""
    columns, depth = weight.shape
    panels = -(-columns // COLUMNS)
    padded = torch.zeros(panels * COLUMNS, depth, dtype=weight.dtype)
    padded[:columns] = weight
    return padded.view(panels, COLUMNS, depth).transpose(1, 2).contiguous()


@device
def unit_rows(unit: int, chunks: int, rows: int) -> tuple[int, int, int]:
    """Return the panel of a unit of work, and its rows [first, last)."""
    panel = unit // chunks
    first = (unit - panel * chunks) * ROW_CHUNK
    return panel, first, min(first + ROW_CHUNK, rows)


@device
def finish(
    c: int, out: int, bias: int, row: int, column: int, columns: int, width: int, bf16: bool, out_bf16: bool
) -> None:
    """Round c [width] (fp32) plus bias to `out` [rows, columns] at (row, column)."""
    for i in range(0, width, 16):
        n = columns - column - i
        if n > 0:
            x = v.load(c + 4 * i)
            if bias != 0:
                x = v.add(x, v.tload(bias, column + i, n, bf16))
            v.tstore(out, row * columns + column + i, x, n, out_bf16)


@device
def sum_panel(count: int, a: int, a_stride: int, b: int, depth: int, scratch: int, bf16: bool) -> int:
    """Multiply `count` rows (up to 4) of A by a panel; return the address of the sums [count, 64]."""
    size = 2 if bf16 else 4
    total = scratch + count * COLUMNS * 4
    for i in range(0, count * COLUMNS, 16):
        v.store(total + 4 * i, v.splat(_ZERO))
    for k in range(0, depth, DEPTH_BLOCK):
        length = min(DEPTH_BLOCK, depth - k)
        for i in range(0, count * COLUMNS, 16):
            v.store(scratch + 4 * i, v.splat(_ZERO))
        at = b + k * COLUMNS * size
        if bf16:
            panel_bf16(count, a + k * size, a_stride, at, 2 * COLUMNS, scratch, 4 * COLUMNS, length)
        else:
            panel_f32(count, a + k * size, a_stride, at, 4 * COLUMNS, scratch, 4 * COLUMNS, length)
        for i in range(0, count * COLUMNS, 16):
            v.store(total + 4 * i, v.add(v.load(total + 4 * i), v.load(scratch + 4 * i)))
    return total


def _linear(bf16: bool, out_bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def linear(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, x, weight, bias, columns, depth."""
        out, x, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        bias, columns, depth = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        panels = (columns + COLUMNS - 1) // COLUMNS
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        begin, end = share(panels * chunks, thread, threads)
        for unit in range(begin, end):
            panel, first, last = unit_rows(unit, chunks, rows)
            w = weight + panel * depth * COLUMNS * size
            for row in range(first, last, MAX_ROWS):
                count = min(MAX_ROWS, last - row)
                total = sum_panel(count, x + row * depth * size, depth * size, w, depth, scratch, bf16)
                for i in range(count):
                    line, column = total + i * 4 * COLUMNS, panel * COLUMNS
                    finish(line, out, bias, row + i, column, columns, COLUMNS, bf16, out_bf16)

    return linear


# by dtype of weights and x, then by output dtype: [fp32, bf16]
LINEAR_FMA = [[_linear(False, False), _linear(False, True)], [_linear(True, False), _linear(True, True)]]


FORMAT = WeightFormat(
    supports=lambda dtype, features: dtype in (torch.float32, torch.bfloat16),
    pack=lambda weight, features: (pack_panels(weight), ()),
    kernel=lambda dtype, out_bf16: LINEAR_FMA[dtype == torch.bfloat16][out_bf16],
)
