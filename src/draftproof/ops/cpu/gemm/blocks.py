"""Linear layers with weights in blocks (GGUF and other group-quantised weights) and int8 activations.

A weight is scale times integer plus minimum, with a scale and a minimum per column and group of 16 or 32 of
K. Each row of x is rounded to int8 in blocks of 32. The sum of a group is an integer; groups are added in
fp32 by ascending K, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.contract.block_scales import split_scales
from draftproof.ops.cpu.gemm.block_dot import BLOCK, SUPER_BLOCKS, BlockLayout, strip_blocks
from draftproof.ops.cpu.gemm.block_embedding import embed_blocks
from draftproof.ops.cpu.gemm.byte_dot import TILE_ROWS, UNIT_COLUMNS, Dot, select_dot, tile_index
from draftproof.ops.cpu.gemm.fma import ROW_CHUNK, finish, unit_rows
from draftproof.ops.cpu.gemm.weight_format import PackedWeight, QuantizedFormat
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, inlined, kernel, load_f32, load_i64, share, store_f32

INT8_MAX = 127
SCALE_TYPES = {torch.float16: "fp16", torch.float32: "fp32", torch.int8: "int8"}
_ZERO = np.float32(0.0)


def pack_blocks(data: Tensor, scales: Tensor) -> PackedWeight:
    """Pack integers [N, K] with scales [N, K / group, 1 or 2] (scale, minimum) into strips of columns.

    Scales in two levels are uint8, see `block_scales`.
    """
    (columns, depth), width = data.shape, select_dot(has_signed_weights=False).width
    bases = None
    if scales.dtype == torch.uint8:
        bases, levels = split_scales(scales)
        scales = levels.flatten(1, 2)
    layout = BlockLayout(
        is_4bit=data.dtype == torch.uint8,
        group=depth // scales.shape[1],
        has_min=scales.shape[2] == 2,
        scales=SCALE_TYPES[scales.dtype],
        columns=width,
    )
    padded, blocks = -(-columns // UNIT_COLUMNS) * UNIT_COLUMNS, depth // BLOCK
    integers = torch.zeros(padded, depth, dtype=torch.uint8)
    integers[:columns] = data.view(torch.uint8)
    # [strips, blocks, steps, columns, 4]
    integers = integers.view(-1, width, blocks, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
    if layout.is_4bit:
        low, high = integers.chunk(2, 2)
        integers = low | (high << 4)
    factors = torch.zeros(padded, *scales.shape[1:], dtype=scales.dtype)
    factors[:columns] = scales
    # [strips, blocks, scale or minimum, groups of a block, columns]
    factors = factors.view(-1, width, blocks, layout.num_groups, scales.shape[2]).permute(0, 2, 4, 3, 1)
    packed = torch.cat([factors.contiguous().view(torch.uint8).flatten(2), integers.flatten(2)], 2)
    if bases is not None:
        above = torch.zeros(padded, *bases.shape[1:], dtype=bases.dtype)
        above[:columns] = bases
        # [strips, super-blocks, scale or minimum, columns]
        above = above.view(-1, width, *bases.shape[1:]).permute(0, 2, 3, 1).contiguous()
        packed = packed.view(*above.shape[:2], -1)
        packed = torch.cat([above.view(torch.uint8).flatten(2), packed], 2)
    return PackedWeight(packed.contiguous(), depth, layout=layout)


@inlined
def _magnitude(first: Any, second: Any) -> Any:
    zero = v.splat(_ZERO)
    return v.maximum(v.maximum(first, v.sub(zero, first)), v.maximum(second, v.sub(zero, second)))


@cache
def quantize_blocks(layout_floats: int, row_offset: int, bf16: bool) -> Kernel:
    """Return the kernel that rounds rows to int8 in blocks, for activation blocks of so many floats.

    row_offset: added to each integer, see `Dot`.
    """
    size, groups = 2 if bf16 else 4, layout_floats - 1

    @inlined
    def rounded(x: int, inverse: Any) -> Any:
        return v.rint(v.mul(v.tload(x, 0, 16, bf16), inverse))

    @inlined
    def store(to: int, first: Any, second: Any) -> None:
        v.istore_bytes(to, v.iadd(v.to_int(first), v.isplat(row_offset)))
        v.istore_bytes(to + 16, v.iadd(v.to_int(second), v.isplat(row_offset)))

    @kernel
    def quantize_blocks(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Round blocks by their largest magnitude; args: out, floats, x, depth.

        Four blocks of a row are rounded side by side; at its end, blocks are repeated.
        """
        out, floats, x, depth = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        blocks, half = depth // BLOCK, 16 * size
        parts = (blocks + 3) // 4
        begin, end = share(rows * parts, thread, threads)
        row = begin // parts
        part = begin - row * parts
        for _ in range(begin, end):
            b0 = 4 * part
            b1, b2, b3 = min(b0 + 1, blocks - 1), min(b0 + 2, blocks - 1), min(b0 + 3, blocks - 1)
            line = x + row * depth * size
            x0, x1 = line + b0 * BLOCK * size, line + b1 * BLOCK * size
            x2, x3 = line + b2 * BLOCK * size, line + b3 * BLOCK * size
            largest = v.maximums_of_four(
                _magnitude(v.tload(x0, 0, 16, bf16), v.tload(x0 + half, 0, 16, bf16)),
                _magnitude(v.tload(x1, 0, 16, bf16), v.tload(x1 + half, 0, 16, bf16)),
                _magnitude(v.tload(x2, 0, 16, bf16), v.tload(x2 + half, 0, 16, bf16)),
                _magnitude(v.tload(x3, 0, 16, bf16), v.tload(x3 + half, 0, 16, bf16)),
            )
            zero, top = v.splat(_ZERO), v.splat(np.float32(INT8_MAX))
            inverse = v.select(v.gt(largest, zero), v.div(top, largest), zero)
            scale = v.div(largest, top)
            i0, i1 = v.splat_first(inverse), v.splat_second(inverse)
            i2, i3 = v.splat_third(inverse), v.splat_fourth(inverse)
            f0, f1, f2, f3 = rounded(x0, i0), rounded(x1, i1), rounded(x2, i2), rounded(x3, i3)
            s0, s1 = rounded(x0 + half, i0), rounded(x1 + half, i1)
            s2, s3 = rounded(x2 + half, i2), rounded(x3 + half, i3)
            t0, t1 = tile_index(row, rows, b0, blocks), tile_index(row, rows, b1, blocks)
            t2, t3 = tile_index(row, rows, b2, blocks), tile_index(row, rows, b3, blocks)
            store(out + t0 * BLOCK, f0, s0)
            store(out + t1 * BLOCK, f1, s1)
            store(out + t2 * BLOCK, f2, s2)
            store(out + t3 * BLOCK, f3, s3)
            v.store(scratch, scale)
            if groups == 1:  # sums of small integers are exact in fp32
                sums = v.sums_of_four(v.add(f0, s0), v.add(f1, s1), v.add(f2, s2), v.add(f3, s3))
                v.store(scratch + 64, v.mul(scale, sums))
            else:
                v.store(scratch + 64, v.mul(scale, v.sums_of_four(f0, f1, f2, f3)))
                v.store(scratch + 128, v.mul(scale, v.sums_of_four(s0, s1, s2, s3)))
            for i in range(layout_floats):
                store_f32(floats + (t0 * layout_floats + i) * 4, load_f32(scratch + 64 * i))
                store_f32(floats + (t1 * layout_floats + i) * 4, load_f32(scratch + 64 * i + 16))
                store_f32(floats + (t2 * layout_floats + i) * 4, load_f32(scratch + 64 * i + 32))
                store_f32(floats + (t3 * layout_floats + i) * 4, load_f32(scratch + 64 * i + 48))
            part += 1
            if part == parts:
                row, part = row + 1, 0

    return quantize_blocks


@cache
def make_linear(layout: BlockLayout, out_bf16: bool, dot: Dot) -> Kernel:
    """Return the kernel of a layout and an output dtype."""
    multiply = strip_blocks(layout, dot)
    floats, width = layout.row_floats, layout.columns
    block_bytes, base_bytes = layout.block_bytes, layout.base_bytes

    @kernel
    def linear_blocks(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply; args: out, int8 rows, their floats, weight, bias, columns, depth."""
        out, x, row_floats = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        weight, bias, columns = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        depth = load_i64(args + 48)
        blocks = depth // BLOCK
        strip_bytes = blocks * block_bytes + blocks // SUPER_BLOCKS * base_bytes
        chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
        begin, end = share((columns + UNIT_COLUMNS - 1) // UNIT_COLUMNS * chunks, thread, threads)
        for unit in range(begin, end):
            panel, first, last = unit_rows(unit, chunks, rows)
            column = panel * UNIT_COLUMNS
            for row in range(first, last, TILE_ROWS):
                count = min(TILE_ROWS, last - row)
                a, f = x + row * depth, row_floats + row * 4 * floats * blocks
                for j in range(0, UNIT_COLUMNS, width):
                    w = weight + (column + j) // width * strip_bytes
                    multiply(count, a, f, w, scratch + 4 * j, blocks)
                for i in range(count):
                    line = scratch + 4 * i * UNIT_COLUMNS
                    finish(line, out, bias, row + i, column, columns, UNIT_COLUMNS, False, out_bf16)

    return linear_blocks


def layout_dot(layout: BlockLayout) -> Dot:
    """Return the dot products of a layout on this machine."""
    return select_dot(has_signed_weights=not layout.is_4bit)


FORMAT = QuantizedFormat(
    pack=lambda data, scales, _: pack_blocks(data, scales),
    quantize_rows=lambda packed, dtype: quantize_blocks(
        packed.layout.row_floats, layout_dot(packed.layout).row_offset, dtype == torch.bfloat16
    ),
    row_bytes=lambda packed: packed.depth,
    row_floats=lambda packed: packed.depth // BLOCK * packed.layout.row_floats,
    kernel=lambda packed, out_bf16: make_linear(packed.layout, out_bf16, layout_dot(packed.layout)),
    layout=BlockLayout,
    embed=lambda packed, dtype: embed_blocks(packed.layout, dtype == torch.bfloat16),
)
