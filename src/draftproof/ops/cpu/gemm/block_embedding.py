"""Lookup of rows in a weight that is packed in blocks: an embedding table, or one tied to the LM head."""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir

from draftproof.ops.contract.block_scales import BASE_BYTES
from draftproof.ops.cpu.gemm.block_dot import BLOCK, SUPER_BLOCKS, BlockLayout
from draftproof.ops.cpu.gemm.byte_dot import GROUP
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import (
    F32,
    I8,
    I64,
    Kernel,
    f32,
    i64,
    kernel,
    load_f32,
    load_i64,
    op,
    pointer,
    share,
    store_f32,
)

load_f16 = op(f32, [i64], lambda b, a: b.fpext(b.load(pointer(b, a[0]), typ=ir.HalfType()), F32))
load_i8 = op(i64, [i64], lambda b, a: b.sext(b.load(pointer(b, a[0]), typ=I8), I64))


@cache
def embed_blocks(layout: BlockLayout, bf16: bool) -> Kernel:
    """Return the kernel that looks up rows: scale times integer plus minimum in fp32, rounded once."""
    size, columns = 2 if bf16 else 4, layout.columns
    is_4bit, has_min = layout.is_4bit, layout.has_min
    is_fp16, has_bases, base_bytes = layout.scales == "fp16", layout.has_bases, layout.base_bytes
    group, groups, scale_bytes = layout.group, layout.num_groups, layout.scale_bytes
    scale_size, block_bytes, integers_at = scale_bytes // columns, layout.block_bytes, layout.integers_at
    half = BLOCK // 2

    @kernel
    def embed_blocks(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Look up rows; args: out, tokens, weight, vocabulary, depth."""
        out, tokens, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        vocab, depth = load_i64(args + 24), load_i64(args + 32)
        blocks = depth // BLOCK
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            # an id out of range reads a valid row instead of foreign memory
            token = min(max(load_i64(tokens + 8 * row), 0), vocab - 1)
            strip, column = token // columns, token % columns
            begin_of_strip = weight + strip * (blocks * block_bytes + blocks // SUPER_BLOCKS * base_bytes)
            for block in range(blocks):
                at = begin_of_strip + block * block_bytes
                base_at = begin_of_strip
                if has_bases:
                    base_at += block // SUPER_BLOCKS * (SUPER_BLOCKS * block_bytes + base_bytes)
                    at += (block // SUPER_BLOCKS + 1) * base_bytes
                base_at += column * BASE_BYTES
                for k in range(BLOCK):
                    scale_at = at + (k // group) * scale_bytes + column * scale_size
                    if has_bases:
                        scale = load_f16(base_at) * np.float32(load_i8(scale_at))
                    else:
                        scale = load_f16(scale_at) if is_fp16 else load_f32(scale_at)
                    step = k % half if is_4bit else k
                    integer = load_i8(
                        at + integers_at + (step // GROUP * columns + column) * GROUP + step % GROUP
                    )
                    if is_4bit:
                        integer = (integer >> 4 if k >= half else integer) & 15
                    value = np.float32(scale * np.float32(integer))
                    if has_min:
                        least_at = scale_at + groups * scale_bytes
                        if has_bases:
                            least = load_f16(base_at + columns * BASE_BYTES) * np.float32(load_i8(least_at))
                        else:
                            least = load_f16(least_at) if is_fp16 else load_f32(least_at)
                        value = np.float32(value + least)
                    store_f32(scratch + 4 * k, value)
                to = out + (row * depth + block * BLOCK) * size
                v.tstore(to, 0, v.load(scratch), BLOCK, bf16)
                v.tstore(to, 16, v.load(scratch + 64), BLOCK - 16, bf16)

    return embed_blocks
