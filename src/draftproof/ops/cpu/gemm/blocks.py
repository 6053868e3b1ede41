"""Linear layers with weights in blocks (GGUF and other group-quantised weights) and int8 activations.

A weight is scale times integer plus minimum, with a scale and a minimum per column and group of 16 or 32 of
K. Each row of x is rounded to int8 in blocks of 32. The sum of a group is an integer; groups are added in
fp32 by ascending K, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.contract.block_scales import split_scales
from draftproof.ops.cpu.gemm.block_dot import BLOCK, SUPER_BLOCKS, BlockLayout, strip_blocks
from draftproof.ops.cpu.gemm.block_rows import embed_blocks
from draftproof.ops.cpu.gemm.byte_dot import TILE_ROWS, UNIT_COLUMNS, Dot, select_dot, tile_index
from draftproof.ops.cpu.gemm.fma import ROW_CHUNK, finish, unit_rows
from draftproof.ops.cpu.gemm.weight_format import PackedWeight, QuantizedFormat
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import Kernel, kernel, load_i64, share, store_f32

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


@cache
def quantize_blocks(layout_floats: int, bf16: bool) -> Kernel:
    """Return the kernel that rounds rows to int8 in blocks, for activation blocks of so many floats."""
    size, groups = 2 if bf16 else 4, layout_floats - 1

    @kernel
    def quantize_blocks(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Round blocks by their largest magnitude; args: out, floats, x, depth."""
        out, floats, x, depth = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        blocks = depth // BLOCK
        begin, end = share(rows * blocks, thread, threads)
        for unit in range(begin, end):
            row = unit // blocks
            line, block = x + unit * BLOCK * size, tile_index(row, rows, unit - row * blocks, blocks)
            to = out + block * BLOCK
            first, second = v.tload(line, 0, 16, bf16), v.tload(line, 16, 16, bf16)
            zero = v.splat(_ZERO)
            top = v.maximum(v.maximum(first, v.sub(zero, first)), v.maximum(second, v.sub(zero, second)))
            largest = v.max_lane(top)
            inverse = np.float32(INT8_MAX) / largest if largest > _ZERO else _ZERO
            scale = np.float32(largest / np.float32(INT8_MAX))
            first = v.rint(v.mul(first, v.splat(inverse)))
            second = v.rint(v.mul(second, v.splat(inverse)))
            v.istore_bytes(to, v.to_int(first))
            v.istore_bytes(to + 16, v.to_int(second))
            at = floats + block * 4 * layout_floats
            store_f32(at, scale)
            if groups == 1:  # sums of small integers are exact in fp32
                store_f32(at + 4, scale * v.sum_lanes(v.add(first, second)))
            else:
                store_f32(at + 4, scale * v.sum_lanes(first))
                store_f32(at + 8, scale * v.sum_lanes(second))

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


def select_kernel(layout: BlockLayout, out_bf16: bool) -> Kernel:
    """Return the kernel of a layout and an output dtype on this machine."""
    return make_linear(layout, out_bf16, select_dot(has_signed_weights=not layout.is_4bit))


FORMAT = QuantizedFormat(
    pack=lambda data, scales, _: pack_blocks(data, scales),
    quantize_rows=lambda packed, dtype: quantize_blocks(packed.layout.row_floats, dtype == torch.bfloat16),
    row_bytes=lambda packed: packed.depth,
    row_floats=lambda packed: packed.depth // BLOCK * packed.layout.row_floats,
    kernel=lambda packed, out_bf16: select_kernel(packed.layout, out_bf16),
    layout=BlockLayout,
    embed=lambda packed, dtype: embed_blocks(packed.layout, dtype == torch.bfloat16),
)
