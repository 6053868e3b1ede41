"""Linear layers in bf16 on AMX tiles, for any number of rows.

Weights [N, K] are packed as [N / 32, K / 32, 2, 16, 16, 2]: pairs of 1 KiB tiles in the order in which
they are multiplied, so a thread streams its weights from memory in one line. An output is one chain of
tdpbf16ps over ascending K; the rows of a tile are independent, so neither the number of rows nor a
row's index affects its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.cpu.gemm.fma import ROW_CHUNK, finish
from draftproof.ops.cpu.gemm.weight_format import WeightFormat
from draftproof.ops.cpu.jit import amx
from draftproof.ops.cpu.jit.compile import Kernel, copy_bytes, kernel, load_i64, share, store_i64

WIDTH = 32  # columns per block: two tiles
DEPTH = 32  # K per step
STEP_BYTES = 2 * WIDTH * DEPTH


def pack_tiles(weight: Tensor) -> Tensor:
    """Pack [N, K] bf16 to [N / 32, K / 32, 2, 16 pairs of k, 16 n, 2], padded with zeros."""
    columns, depth = weight.shape
    blocks, steps = -(-columns // WIDTH), -(-depth // DEPTH)
    padded = torch.zeros(blocks * WIDTH, steps * DEPTH, dtype=weight.dtype)
    padded[:columns, :depth] = weight
    return padded.view(blocks, 2, 16, steps, 16, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


def _linear(out_bf16: bool) -> Kernel:
    @kernel
    def linear_amx(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, x, weight, bias, columns, depth."""
        out, x, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        bias, columns, depth = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        config, c = scratch, scratch + 64  # c [32, 32] fp32
        rest = c + 4 * 32 * WIDTH  # [32, 32] bf16: the end of x's rows if K is no multiple of 32
        blocks = (columns + WIDTH - 1) // WIDTH
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        steps, tail = depth // DEPTH, depth % DEPTH
        block_bytes = (steps + (1 if tail else 0)) * STEP_BYTES
        begin, end = share(blocks * chunks, thread, threads)
        configured = 0
        for unit in range(begin, end):
            block = unit // chunks
            first = (unit - block * chunks) * ROW_CHUNK
            last = min(first + ROW_CHUNK, rows)
            w = weight + block * block_bytes
            for row in range(first, last, 32):
                count = min(32, last - row)
                if count != configured:
                    amx.configure_rows(config, count)
                    configured = count
                amx.tiles_zero()
                a = x + row * depth * 2
                if count <= 16:
                    if row == 0:
                        amx.run_1_stream(a, depth * 2, w, steps)
                    else:
                        amx.run_1(a, depth * 2, w, steps)
                elif row == 0:
                    amx.run_2_stream(a, depth * 2, w, steps)
                else:
                    amx.run_2(a, depth * 2, w, steps)
                if tail:
                    for i in range(count):
                        at = rest + 64 * i
                        for word in range(8):
                            store_i64(at + 8 * word, 0)
                        copy_bytes(at, a + (i * depth + steps * DEPTH) * 2, 2 * tail)
                    if count <= 16:
                        amx.run_1(rest, 64, w + steps * STEP_BYTES, 1)
                    else:
                        amx.run_2(rest, 64, w + steps * STEP_BYTES, 1)
                amx.tiles_store(c, 1 if count <= 16 else 2)
                for i in range(count):
                    line, column = c + i * 4 * WIDTH, block * WIDTH
                    finish(line, out, bias, row + i, column, columns, WIDTH, True, out_bf16)
        if configured:
            amx.tiles_release()

    return linear_amx


LINEAR_AMX = [_linear(False), _linear(True)]  # by output dtype: [fp32, bf16]


FORMAT = WeightFormat(
    supports=lambda dtype, features: features.amx and dtype == torch.bfloat16,
    pack=lambda weight, features: (pack_tiles(weight), ()),
    kernel=lambda dtype, out_bf16: LINEAR_AMX[out_bf16],
)
