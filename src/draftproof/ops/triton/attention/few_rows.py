"""Attention of few rows at long contexts on Hopper: all spans in one launch, their merge in a second one.

One program per SM: the programs of a KV head take the spans of all tiles in turn, so that the KV heads of a
token are read at the same time. See `kv_rings.py` for the rings. Keys and values of earlier passes are
copied before the previous kernel has completed; queries and keys of this pass follow its end.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import warp_specialized
from draftproof.ops.triton.attention.kv_rings import (
    attend_span,
    count_steps,
    load_spans,
    make_ones,
    make_rings,
    store_span,
    thread_barrier,
)
from draftproof.ops.triton.attention.merge import MERGE_COLUMNS, merge_spans_kernel
from draftproof.ops.triton.attention.online_softmax import KEYS, LOG2_E, SPAN
from draftproof.ops.triton.attention.warp_specialized import (
    COMPUTE_REGISTERS,
    HALF_ROWS,
    ONES_COLUMNS,
    synchronise_launches,
)
from draftproof.ops.triton.kernel_utils import launch_options

MAX_ROWS = 8  # of a call
STAGES = 2  # spans in the rings
PADDED_ROWS = 16  # of the tensors that describe the rows; at least MAX_ROWS


class FewRowsConfig(NamedTuple):
    """Registers of the kernel; speed only."""

    registers: int = 168  # of a thread, on average of both warpgroups; the rest belongs to other kernels
    compute_registers: int = COMPUTE_REGISTERS  # of a thread that computes


CONFIG = FewRowsConfig()
# Of one row whose context may be long: programs of the next kernels start beside it. Several rows and short
# contexts do not gain from it.
LONG_ROW_CONFIG = FewRowsConfig(registers=128, compute_registers=168)
LONG_ROW_TABLE_TOKENS = 32768  # of the page table


@gluon.jit
def describe_rows(
    slots, positions, R, HEIGHT: gl.constexpr, SPAN: gl.constexpr, PADDED_ROWS: gl.constexpr
):  # fmt: skip
    """Return row numbers, spans, last position and first position of a slot [PADDED_ROWS].

    A tile begins at the first row of a slot and at multiples of its height; other rows have 0 spans.
    """
    pairs: gl.constexpr = gl.BlockedLayout([1, PADDED_ROWS], [32, 1], [4, 1], [1, 0])
    i = gl.arange(0, PADDED_ROWS, layout=gl.SliceLayout(1, pairs))
    j = gl.arange(0, PADDED_ROWS, layout=gl.SliceLayout(0, pairs))
    slot = gl.load(slots + i, mask=i < R, other=-1)
    previous_slot = gl.load(slots + i - 1, mask=(i > 0) & (i < R), other=-2)
    starts_tile = (slot >= 0) & ((i % HEIGHT == 0) | (previous_slot != slot))
    slot_of_other = gl.load(slots + j, mask=j < R, other=-2)
    pos = gl.load(positions + j, mask=j < R, other=0).to(gl.int32)
    same_slot = slot[:, None] == slot_of_other[None, :]
    same_tile = same_slot & ((i // HEIGHT)[:, None] == (j // HEIGHT)[None, :])
    last = gl.max(gl.where(same_tile, pos[None, :], -1), axis=1)
    first_position = gl.min(gl.where(same_slot, pos[None, :], 0x7FFFFFFF), axis=1)
    return i, gl.where(starts_tile, last // SPAN + 1, 0), last, first_position


@gluon.jit
def element(x, i, at):
    """Return element `at` of x, which is not negative; i: the numbers of the elements."""
    return gl.max(gl.where(i == at, x, 0), axis=0)


@gluon.jit
def share_of_program(offset, NUM_KV: gl.constexpr):
    """Return the first span of a program within a tile, and the distance of its spans.

    The programs of a KV head take the spans of all tiles in turn; the tile begins at `offset` of them.
    """
    program, programs = gl.program_id(0) // NUM_KV, gl.num_programs(0) // NUM_KV
    return (program + programs - offset % programs) % programs, programs


@gluon.jit
def load_share(
    slots, positions, page_table, cache, ks, vs, k_full, k_empty, v_full, v_empty, R, max_pages, plane,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, HALF_ROWS: gl.constexpr, PADDED_ROWS: gl.constexpr,
    WAIT: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of the spans of a program into the rings."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    keys = cache + gl.program_id(0) % NUM_KV * D + gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    i, counts, lasts, first_positions = describe_rows(
        slots, positions, R, HALF_ROWS // GROUP, SPAN, PADDED_ROWS
    )
    offset = 0
    index = 0  # of the span in the rings
    for row in range(R):
        count = element(counts, i, row)
        start, step = share_of_program(offset, NUM_KV)
        if start < count:
            pages = page_table + gl.load(slots + row) * max_pages
            num_full = element(first_positions, i, row) // SPAN
            index = load_spans(
                pages, keys, keys + plane, ks, vs, k_full, k_empty, v_full, v_empty, index, start, count,
                step, num_full, element(lasts, i, row), NUM_KV, D, PAGE, KEYS, SPAN, STAGES, layout, WAIT,
            )  # fmt: skip
        offset += count


@gluon.jit
def compute_share(
    q, slots, positions, parts, stats, q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty,
    R, spans, scale,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr, HALF_ROWS: gl.constexpr, ONES: gl.constexpr, PADDED_ROWS: gl.constexpr,
    WAIT: gl.constexpr,
):  # fmt: skip
    """Compute the spans of a program and store each of them."""
    HEADS: gl.constexpr = NUM_KV * GROUP
    HEIGHT: gl.constexpr = HALF_ROWS // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    head = gl.program_id(0) % NUM_KV
    rows_number, counts, _, first_positions = describe_rows(slots, positions, R, HEIGHT, SPAN, PADDED_ROWS)
    offset = 0
    index = 0
    for row in range(R):
        count = element(counts, rows_number, row)
        start, step = share_of_program(offset, NUM_KV)
        if start < count:
            num_full = gl.minimum((element(first_positions, rows_number, row) + 1) // SPAN, count)
            masked_start = start + count_steps(start, num_full, step) * step
            slot = gl.load(slots + row)
            i = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, SCORES))
            r = row + i // GROUP
            ok = (r < R) & (r // HEIGHT == row // HEIGHT)
            ok = ok & (gl.load(slots + r, mask=ok, other=-1) == slot)
            pos = gl.load(positions + r, mask=ok, other=-1).to(gl.int32)
            base = (r.to(gl.int64) * HEADS + head * GROUP + i % GROUP) * spans
            i = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, q_layout))
            r = row + i // GROUP
            has_query = (r < R) & (r // HEIGHT == row // HEIGHT)
            has_query = has_query & (gl.load(slots + r, mask=has_query, other=-1) == slot)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, q_layout))
            row_head = r.to(gl.int64) * HEADS + head * GROUP + i % GROUP
            if WAIT:
                cuda.gdc_wait()
            query = gl.load(q + row_head[:, None] * D + d[None, :], mask=has_query[:, None], other=0.0)
            thread_barrier()
            q_shared.store(query)
            fence_async_shared()
            thread_barrier()
            for span in range(start, masked_start, step):
                m1, sums1, acc1 = attend_span(
                    q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty, pos, scale, span, index,
                    HALF_ROWS, D, KEYS, ONES, STAGES, SCORES, VALUES, SUMS, False,
                )  # fmt: skip
                store_span(parts, stats, base + span, m1, sums1, acc1, ok, D, VALUES)
                index += 1
            for span in range(masked_start, count, step):
                m1, sums1, acc1 = attend_span(
                    q_shared, ks, vs, ones, k_full, k_empty, v_full, v_empty, pos, scale, span, index,
                    HALF_ROWS, D, KEYS, ONES, STAGES, SCORES, VALUES, SUMS, True,
                )  # fmt: skip
                store_span(parts, stats, base + span, m1, sums1, acc1, ok, D, VALUES)
                index += 1
        offset += count
    if WAIT:  # also without spans: the next kernel may read what the kernels before this one have stored
        cuda.gdc_wait()


@gluon.jit(do_not_specialize=["R", "max_pages", "spans"])
def few_rows_kernel(
    q, slots, positions, page_table, cache, parts, stats, R, max_pages, plane, spans, scale,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, HALF_ROWS: gl.constexpr, ONES: gl.constexpr,
    PADDED_ROWS: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Store the partial results of all spans: parts [R * heads, spans, D], stats [R * heads, spans, 2].

    The KV head is the fastest part of the program index: memory of a token holds its KV heads side by side.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_ROWS, D], dtype)
    queries = gl.allocate_shared_memory(dtype, [1, HALF_ROWS, D], q_layout)
    ks, vs, k_full, k_empty, v_full, v_empty = make_rings(dtype, D, KEYS, SPAN, STAGES, 1)
    ones = make_ones(dtype, KEYS, ONES)
    synchronise_launches(PDL, False)
    gl.warp_specialize(
        [
            (load_share, (slots, positions, page_table, cache, ks, vs, k_full, k_empty, v_full, v_empty, R,
                          max_pages, plane, NUM_KV, GROUP, D, PAGE, KEYS, SPAN, STAGES, HALF_ROWS,
                          PADDED_ROWS, PDL)),
            (compute_share, (q, slots, positions, parts, stats, queries.index(0), ks, vs, ones, k_full,
                             k_empty, v_full, v_empty, R, spans, scale, NUM_KV, GROUP, D, KEYS, SPAN, STAGES,
                             HALF_ROWS, ONES, PADDED_ROWS, PDL)),
        ],
        [4], [COMPUTE_REGISTERS],
    )  # fmt: skip


def is_selected(q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernels are used on Hopper: for few rows where contexts may be long."""
    return len(q) <= MAX_ROWS and warp_specialized.is_selected(q, rows, heads, cache, sinks)


def few_rows_config(num_rows: int, table_tokens: int) -> FewRowsConfig:
    """Return the configuration for rows with a page table of `table_tokens`; a graph knows no more."""
    return LONG_ROW_CONFIG if num_rows == 1 and table_tokens >= LONG_ROW_TABLE_TOKENS else CONFIG


def launch(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, scratch: tuple[Tensor, Tensor],
    num_sms: int, pdl: bool,
) -> None:  # fmt: skip
    """Compute all spans with a program per SM, then merge them."""
    parts, stats = scratch
    num_rows, max_pages, page_size = len(q), rows.page_table.shape[1], cache.shape[2]
    spans, config = triton.cdiv(max_pages * page_size, SPAN), few_rows_config(num_rows, max_pages * page_size)
    programs = max(1, num_sms // heads.num_kv) * heads.num_kv
    few_rows_kernel[(programs,)](
        q, rows.slots, rows.positions, rows.page_table, cache, parts, stats, num_rows, max_pages,
        cache.stride(0), spans, heads.scale * LOG2_E,
        NUM_KV=heads.num_kv, GROUP=heads.num_q // heads.num_kv, D=heads.dim, PAGE=page_size, KEYS=KEYS,
        SPAN=SPAN, STAGES=STAGES, HALF_ROWS=HALF_ROWS, ONES=ONES_COLUMNS, PADDED_ROWS=PADDED_ROWS,
        COMPUTE_REGISTERS=config.compute_registers,
        **launch_options(pdl, num_warps=4, enable_fp_fusion=False, maxnreg=config.registers),
    )  # fmt: skip
    merge_spans_kernel[(num_rows, heads.num_q, heads.dim // MERGE_COLUMNS)](
        rows.slots, rows.positions, parts, stats, out, spans,
        HEADS=heads.num_q, D=heads.dim, COLUMNS=MERGE_COLUMNS, SPAN=SPAN,
        **launch_options(pdl, num_warps=1, enable_fp_fusion=False),
    )  # fmt: skip
