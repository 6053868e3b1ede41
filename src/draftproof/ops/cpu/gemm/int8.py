"""Linear layers in int8 on AMX tiles, for draft models: half the bytes of bf16, and memory-bound.

Each column of the weights has a scale, and so has each row of x, which is rounded to int8 on load. The
products are integers, so neither the number of rows nor a row's index affects a row's bits. Weights
[N, K] are packed as [N / 32, K / 64, 2, 16, 16, 4]: pairs of 1 KiB tiles in the order in which they are read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.cpu.gemm.weight_format import WeightFormat
from draftproof.ops.cpu.jit import amx
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, device, kernel, load_f32, load_i64, share, store_f32

WIDTH = 32  # columns per block: two tiles
DEPTH = 64  # K per step
ROWS = 32  # rows per block
STEP_BYTES = WIDTH * DEPTH
INT8_MAX = 127
_ZERO = np.float32(0.0)


def quantize_columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] in int8 and the fp32 scales [N] of its columns."""
    exact = weight.float()
    scales = (exact.abs().amax(1) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (exact / scales[:, None]).round().to(torch.int8), scales


def pack_int8(weight: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Pack [N, K] to int8 [N / 32, K / 64, 2, 16 fours of k, 16 n, 4], zero-padded; (fp32 scales [N],)."""
    columns, depth = weight.shape
    blocks, steps = -(-columns // WIDTH), -(-depth // DEPTH)
    padded = torch.zeros(blocks * WIDTH, steps * DEPTH, dtype=torch.int8)
    padded[:columns, :depth], scales = quantize_columns(weight)
    return padded.view(blocks, 2, 16, steps, 16, 4).permute(0, 3, 1, 4, 2, 5).contiguous(), (scales,)


@device
def _quantize_row(x: int, depth: int, to: int) -> float:
    """Write x [depth] bf16 as int8, zero-padded to a whole step; return its scale."""
    top = v.splat(_ZERO)
    for i in range(0, depth, 16):
        value = v.tload(x, i, depth - i, True)
        top = v.maximum(top, v.maximum(value, v.sub(v.splat(_ZERO), value)))
    largest = v.max_lane(top)
    inverse = np.float32(INT8_MAX) / largest if largest > _ZERO else _ZERO
    for i in range(0, (depth + DEPTH - 1) // DEPTH * DEPTH, 16):
        if i < depth:
            v.istore_bytes(to + i, v.to_int(v.rint(v.mul(v.tload(x, i, depth - i, True), v.splat(inverse)))))
        else:
            v.istore_bytes(to + i, v.isplat(0))
    return np.float32(largest / np.float32(INT8_MAX))


def _linear(out_bf16: bool) -> Kernel:
    @kernel
    def linear_int8(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, x, weight, bias, columns, depth, scales."""
        out, x, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        bias, columns, depth = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        scales = load_i64(args + 48)
        steps = (depth + DEPTH - 1) // DEPTH
        config, own = scratch, scratch + 64  # own [32] fp32: row scales
        c = own + 4 * ROWS  # [32, 32] int32
        bytes_of = c + 4 * ROWS * WIDTH  # [32, steps * 64] int8
        begin, end = share((columns + WIDTH - 1) // WIDTH, thread, threads)
        for row in range(0, rows if begin < end else 0, ROWS):
            count = min(ROWS, rows - row)
            for i in range(count):
                scale = _quantize_row(x + (row + i) * depth * 2, depth, bytes_of + i * steps * DEPTH)
                store_f32(own + 4 * i, scale)
            amx.configure_rows(config, count)
            for block in range(begin, end):
                amx.tiles_zero()
                w = weight + block * steps * STEP_BYTES
                if count <= 16:
                    amx.run_bytes_1(bytes_of, steps * DEPTH, w, steps)
                    amx.tiles_store(c, 1)
                else:
                    amx.run_bytes_2(bytes_of, steps * DEPTH, w, steps)
                    amx.tiles_store(c, 2)
                for i in range(count):
                    scale = v.splat(load_f32(own + 4 * i))
                    for j in range(0, WIDTH, 16):
                        column = block * WIDTH + j
                        n = columns - column
                        if n > 0:
                            y = v.to_float(v.iload(c + 4 * (i * WIDTH + j)))
                            y = v.mul(y, v.tload(scales, column, n, False))
                            y = v.mul(y, scale)
                            if bias != 0:
                                y = v.add(y, v.tload(bias, column, n, True))
                            v.tstore(out, (row + i) * columns + column, y, n, out_bf16)
            amx.tiles_release()

    return linear_int8


LINEAR_INT8 = [_linear(False), _linear(True)]  # by output dtype: [fp32, bf16]


FORMAT = WeightFormat(
    supports=lambda dtype, features: features.amx_int8 and dtype == torch.bfloat16,
    pack=lambda weight, features: pack_int8(weight),
    kernel=lambda dtype, out_bf16: LINEAR_INT8[out_bf16],
    draft_only=True,
)
