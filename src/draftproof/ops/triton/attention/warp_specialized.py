"""Attention on Hopper by warpgroups of two kinds: one loads keys and values, the others compute.

A tile of 128 rows is divided between two computing warpgroups of 64. No barrier joins the three, so one
warpgroup computes a softmax while the tensor core works for the other. Decode rows have one computing
warpgroup. See `kv_rings.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention.kv_rings import (
    attend_span,
    load_spans,
    make_ones,
    make_rings,
    merge,
    thread_barrier,
    to_rows,
)
from draftproof.ops.triton.attention.online_softmax import KEYS, LOG2_E, SPAN
from draftproof.ops.triton.attention.pipelined_spans import attend_full_spans

HALF_ROWS = 64  # rows times heads of a computing warpgroup
EVEN_ROWS = HALF_ROWS  # rows times heads of a tile of decode rows
COMPUTE_REGISTERS = 208  # of a thread that computes, with one computing warpgroup
# With two: a thread that loads has the 72 that remain of 504, which is three times the average of 168.
TALL_COMPUTE_REGISTERS = 216
ONES_COLUMNS = 8  # of the matrix of ones: the minimum of the instruction
# The kernels were faster at 16,384 tokens of context. A shorter page table has no such contexts: with few
# spans the rings are hardly used, and decode rows need a launch more.
LONG_TABLE_TOKENS = 16384
# Rows of a call with tiles of prompts: 8,192 were measured, and few rows may be short prompts.
MIN_TALL_ROWS = 2048


@gluon.jit
def synchronise_launches(LAUNCH_NEXT: gl.constexpr, WAIT: gl.constexpr):
    """Allow the next kernel to start and wait for the previous one, before the warpgroups are divided.

    The barrier that starts the other warpgroups comes after it, so no global memory is used before.
    """
    if LAUNCH_NEXT:
        cuda.gdc_launch_dependents()
    if WAIT:
        cuda.gdc_wait()


@gluon.jit
def tile_bounds(slots, positions, row, slot, R, GROUP: gl.constexpr, BM: gl.constexpr):
    """Return the last and the first position of the rows of a tile."""
    rows_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r = row + gl.arange(0, BM, layout=rows_layout) // GROUP
    ok = r < R
    ok = ok & (gl.load(slots + r, mask=ok, other=-1) == slot)
    pos = gl.load(positions + r, mask=ok, other=-1).to(gl.int32)
    last = gl.max(pos, axis=0)
    return last, gl.min(gl.where(ok, pos, last), axis=0)


@gluon.jit
def load_tiles(
    slots, positions, page_table, cache, tiles, ks, vs, k_full, k_empty, v_full, v_empty,
    R, max_pages, plane,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, HALF_ROWS: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of the spans of all tiles into the rings."""
    # Consecutive tokens of a thread share a page id and most of their addresses: 161 instructions a span, not
    # 369. Not measured for decode rows.
    TOKENS: gl.constexpr = 8 if BM > HALF_ROWS and PAGE % 8 == 0 else 1
    layout: gl.constexpr = gl.BlockedLayout([TOKENS, 8], [2, 16], [4, 1], [1, 0])
    keys = cache + gl.program_id(0) * D + gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    values = keys + plane
    count = gl.load(tiles)
    index = 0  # of the span in the ring
    for tile in range(gl.program_id(1), count, gl.num_programs(1)):
        row = gl.load(tiles + count - tile)
        slot = gl.load(slots + row)
        last, _ = tile_bounds(slots, positions, row, slot, R, GROUP, BM)
        pages = page_table + slot * max_pages
        index = load_spans(
            pages, keys, values, ks, vs, k_full, k_empty, v_full, v_empty, index, 0, last // SPAN + 1, 1,
            (last + 1) // SPAN, last, NUM_KV, D, PAGE, KEYS, SPAN, STAGES, layout, False,
        )  # fmt: skip


@gluon.jit
def compute_tiles(
    q, slots, positions, out, tiles, q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty, R, scale,
    PART: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr,
    KEYS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, HALF_ROWS: gl.constexpr,
    ONES: gl.constexpr,
):  # fmt: skip
    """Compute rows PART * HALF_ROWS.. of all tiles."""
    HEADS: gl.constexpr = NUM_KV * GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, SCORES)
    head = gl.program_id(0)
    count = gl.load(tiles)
    first = 0  # index of the first span of the tile in the rings
    for tile in range(gl.program_id(1), count, gl.num_programs(1)):
        row = gl.load(tiles + count - tile)
        slot = gl.load(slots + row)
        last, first_position = tile_bounds(slots, positions, row, slot, R, GROUP, BM)
        i = PART * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, q_layout))
        r = row + i // GROUP
        ok = r < R
        ok = ok & (gl.load(slots + r, mask=ok, other=-1) == slot)
        d = gl.arange(0, D, layout=gl.SliceLayout(0, q_layout))
        row_head = r.to(gl.int64) * HEADS + head * GROUP + i % GROUP
        query = gl.load(q + row_head[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        thread_barrier()
        q_shared.store(query)
        fence_async_shared()
        thread_barrier()
        i = PART * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=rows_layout)
        r = row + i // GROUP
        ok = r < R
        ok = ok & (gl.load(slots + r, mask=ok, other=-1) == slot)
        pos = gl.load(positions + r, mask=ok, other=-1).to(gl.int32)
        m = gl.full([HALF_ROWS], float("-inf"), gl.float32, rows_layout)
        total = gl.zeros([HALF_ROWS], gl.float32, rows_layout)
        acc = gl.zeros([HALF_ROWS, D], gl.float32, VALUES)
        num_spans = last // SPAN + 1
        num_full = gl.minimum((first_position + 1) // SPAN, num_spans)
        if BM > HALF_ROWS:
            if num_full > 0:
                m, total, acc = attend_full_spans(
                    q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty, scale, first, num_full, m,
                    total, acc, HALF_ROWS, D, KEYS, ONES, STAGES, SCORES, VALUES, SUMS,
                )  # fmt: skip
        else:
            for span in range(num_full):
                m1, sums1, acc1 = attend_span(
                    q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty, pos, scale, span, first + span,
                    HALF_ROWS, D, KEYS, ONES, STAGES, SCORES, VALUES, SUMS, False,
                )  # fmt: skip
                m, total, acc = merge(m, total, acc, m1, sums1, acc1, VALUES)
        for span in range(num_full, num_spans):
            m1, sums1, acc1 = attend_span(
                q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty, pos, scale, span, first + span,
                HALF_ROWS, D, KEYS, ONES, STAGES, SCORES, VALUES, SUMS, True,
            )  # fmt: skip
            m, total, acc = merge(m, total, acc, m1, sums1, acc1, VALUES)
        first += num_spans
        row_head = r.to(gl.int64) * HEADS + head * GROUP + i % GROUP
        d = gl.arange(0, D, layout=gl.SliceLayout(0, VALUES))
        out_at = out + to_rows(row_head, VALUES)[:, None] * D + d[None, :]
        result = acc / to_rows(total, VALUES)[:, None] + 0.0
        gl.store(out_at, result.to(out.dtype.element_ty), mask=to_rows(ok, VALUES)[:, None])


@gluon.jit(do_not_specialize=["R", "max_pages"])
def warp_specialized_kernel(
    q, slots, positions, page_table, cache, out, tiles, R, max_pages, plane, scale,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, HALF_ROWS: gl.constexpr, ONES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, LAUNCH_NEXT: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Attention of the tiles of `prefill_attention_kernel`, whole tiles of BM rows times heads only.

    BM: 2 * HALF_ROWS, or HALF_ROWS with one computing warpgroup.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    PARTS: gl.constexpr = BM // HALF_ROWS
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_ROWS, D], dtype)
    queries = gl.allocate_shared_memory(dtype, [PARTS, HALF_ROWS, D], q_layout)
    ks, vs, k_full, k_empty, v_full, v_empty = make_rings(dtype, D, KEYS, SPAN, STAGES, PARTS)
    ones = make_ones(dtype, KEYS, ONES)
    synchronise_launches(LAUNCH_NEXT, WAIT)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (load_tiles, (slots, positions, page_table, cache, tiles, ks, vs, k_full, k_empty, v_full,
                              v_empty, R, max_pages, plane, NUM_KV, GROUP, D, BM, PAGE, KEYS, SPAN, STAGES,
                              HALF_ROWS)),
                (compute_tiles, (q, slots, positions, out, tiles, queries.index(0), ks, vs, ones, k_full,
                                 k_empty, v_full, v_empty, R, scale, 0, NUM_KV, GROUP, D, BM, KEYS, SPAN,
                                 STAGES, HALF_ROWS, ONES)),
            ],
            [4], [COMPUTE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (load_tiles, (slots, positions, page_table, cache, tiles, ks, vs, k_full, k_empty, v_full,
                              v_empty, R, max_pages, plane, NUM_KV, GROUP, D, BM, PAGE, KEYS, SPAN, STAGES,
                              HALF_ROWS)),
                (compute_tiles, (q, slots, positions, out, tiles, queries.index(0), ks, vs, ones, k_full,
                                 k_empty, v_full, v_empty, R, scale, 0, NUM_KV, GROUP, D, BM, KEYS, SPAN,
                                 STAGES, HALF_ROWS, ONES)),
                (compute_tiles, (q, slots, positions, out, tiles, queries.index(1), ks, vs, ones, k_full,
                                 k_empty, v_full, v_empty, R, scale, 1, NUM_KV, GROUP, D, BM, KEYS, SPAN,
                                 STAGES, HALF_ROWS, ONES)),
            ],
            [4, 4], [COMPUTE_REGISTERS, COMPUTE_REGISTERS],
        )  # fmt: skip


def is_usable(q: Tensor, heads: AttentionShape, cache: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernels compute this attention; the chip must be of compute capability 9.0."""
    is_plain = q.dtype == cache.dtype == torch.bfloat16 and heads.window == 0 and sinks is None
    fits = heads.dim == 128 and heads.value_dim == 0 and HALF_ROWS % (heads.num_q // heads.num_kv) == 0
    return is_plain and fits and SPAN % cache.shape[2] == 0


def is_selected(q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernels are used on Hopper: where they are usable and contexts may be long.

    A captured graph does not know the contexts of its rows, only the width of the page table.
    """
    is_long = rows.page_table.shape[1] * cache.shape[2] >= LONG_TABLE_TOKENS
    return is_long and is_usable(q, heads, cache, sinks)


def launch_tiles(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, tiles: Tensor, programs: int,
    *, height: int, stages: int, launches_next: bool, waits: bool,
) -> None:  # fmt: skip
    """Compute a list of tiles of `height` rows times heads, HALF_ROWS or 2 * HALF_ROWS.

    `stages` spans fit into the rings. `launches_next`, `waits`: LAUNCH_NEXT and WAIT of the kernel.
    """
    options = {"launch_pdl": True} if waits else {}
    warp_specialized_kernel[(heads.num_kv, programs)](
        q, rows.slots, rows.positions, rows.page_table, cache, out, tiles, len(q), rows.page_table.shape[1],
        cache.stride(0), heads.scale * LOG2_E,
        NUM_KV=heads.num_kv, GROUP=heads.num_q // heads.num_kv, D=heads.dim, BM=height, PAGE=cache.shape[2],
        KEYS=KEYS, SPAN=SPAN, STAGES=stages, HALF_ROWS=HALF_ROWS, ONES=ONES_COLUMNS,
        COMPUTE_REGISTERS=TALL_COMPUTE_REGISTERS if height > HALF_ROWS else COMPUTE_REGISTERS,
        LAUNCH_NEXT=launches_next, WAIT=waits,
        num_warps=4, enable_fp_fusion=False, **options,
    )  # fmt: skip


def launch_even(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, tiles: Tensor, programs: int,
    stages: int, pdl: bool,
) -> None:  # fmt: skip
    """Compute a list of tiles of decode rows with `programs` of every KV head."""
    launch_tiles(
        q, rows, heads, cache, out, tiles, programs, height=EVEN_ROWS, stages=stages, launches_next=pdl,
        waits=pdl,
    )  # fmt: skip
