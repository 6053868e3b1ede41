"""Attention of decode and verify rows at long contexts with quantised KV on Hopper.

A warp computes a span, so a program computes as many spans at a time as it has warps: a group. A tile has 16
rows times heads, not the 64 of `warp_specialized.py`: most of 64 would be padding, and its softmax and the
conversion of elements together would take longer than the copies of a span. Where tiles are even, a program
merges the spans of a tile in ascending order. With few rows all programs divide the spans of every tile and
store them; `merge_spans_kernel` follows. See `spans.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.contract.kv_layout import kv_format
from draftproof.ops.triton.attention import warp_specialized
from draftproof.ops.triton.attention.merge import MERGE_COLUMNS, merge_spans_kernel
from draftproof.ops.triton.attention.online_softmax import LOG2_E
from draftproof.ops.triton.attention.quantized.spans import (
    ACC,
    BM,
    COPY,
    MERGED,
    PIECE,
    PLAIN_SHARED,
    QUERIES,
    ROWS,
    SCALE_BYTES,
    SPAN,
    STAGED_SHARED,
    WARPS,
    D,
    attend_group,
    copy_block,
    empty_state,
    load_page_ids,
    make_ring,
    merge_group,
    store_group,
    warps_and_numbers,
)
from draftproof.ops.triton.kernel_utils import launch_options

EVEN_ROWS = BM.value  # rows times heads of a tile
MAX_FEW_ROWS = 8  # of a call whose spans all programs divide


@gluon.jit
def few_rows_tile(all_slots, all_positions, row, GROUP: gl.constexpr):
    """Return slot, last position of the tile that begins at a row, and first position of the slot.

    The last position is -1 where no tile begins. all_slots, all_positions [BM]: of all rows; slot -1: none.
    """
    HEIGHT: gl.constexpr = BM // GROUP
    i = gl.arange(0, BM, layout=ROWS)
    slot = gl.max(gl.where(i == row, all_slots, -1), axis=0)
    previous_slot = gl.max(gl.where(i == row - 1, all_slots, -1), axis=0)
    same_slot = (all_slots == slot) & (slot >= 0)
    last = gl.max(gl.where(same_slot & (i // HEIGHT == row // HEIGHT), all_positions, -1), axis=0)
    first_position = gl.min(gl.where(same_slot, all_positions, 0x7FFFFFFF), axis=0)
    begins = (row % HEIGHT == 0) | (previous_slot != slot)
    return slot, gl.where(begins, last, -1), first_position


@gluon.jit
def listed_tile(slots, positions, row, R, GROUP: gl.constexpr):
    """Return slot and last position of the tile that begins at a row."""
    slot = gl.load(slots + row).to(gl.int32)
    r = row + gl.arange(0, BM, layout=ROWS) // GROUP
    ok = r < R
    ok = ok & (gl.load(slots + r, mask=ok, other=-1).to(gl.int32) == slot)
    return slot, gl.max(gl.load(positions + r, mask=ok, other=-1).to(gl.int32), axis=0)


@gluon.jit
def next_group(
    group, slots, positions, tiles, all_slots, all_positions, R, num_tiles, step,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Return the next group of spans of a program, up to one per warp; its tile is num_tiles at the end.

    A group: tile, row, slot, last position, spans, spans of earlier tiles, first span of the group. FEW: the
    programs of a KV head take the spans of all tiles in turn, `step` apart; otherwise whole tiles.
    """
    tile, row, slot, last, count, offset, start = group
    start += step * WARPS
    while (start >= count) & (tile < num_tiles):
        offset += count
        count = 0
        last = -1
        tile += 1 if FEW else gl.num_programs(1)
        if tile < num_tiles:
            if FEW:
                row = tile
                slot, last, _ = few_rows_tile(all_slots, all_positions, row, GROUP)
            else:
                row = gl.load(tiles + num_tiles - tile)
                slot, last = listed_tile(slots, positions, row, R, GROUP)
            count = (last + SPAN) // SPAN
        start = (gl.program_id(0) // NUM_KV + step - offset % step) % step if FEW else 0
    return tile, row, slot, last, count, offset, start


@gluon.jit
def store_tile(out, state, slots, row, slot, head, R, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Do `online_softmax.store_normalised`."""
    _, total, acc = state
    i = gl.arange(0, BM, layout=gl.SliceLayout(1, MERGED))
    r = row + i // GROUP
    ok = r < R
    ok = ok & (gl.load(slots + r, mask=ok, other=-1).to(gl.int32) == slot)
    row_head = r.to(gl.int64) * HEADS + head * GROUP + i % GROUP
    column = gl.arange(0, D // 4, layout=gl.SliceLayout(0, MERGED))[None, :]
    for part in gl.static_range(4):
        d = part // 2 * (D // 2) + column * 2 + part % 2
        result = acc[part] / total[:, None] + 0.0
        gl.store(out + row_head[:, None] * D + d, result.to(out.dtype.element_ty), mask=ok[:, None])


@gluon.jit
def tile_rows(
    slots, positions, row, slot, head, R, HEADS: gl.constexpr, GROUP: gl.constexpr, FEW: gl.constexpr
):
    """Return indices of (row, head) of a tile [WARPS, BM], whether they exist, positions or -1."""
    HEIGHT: gl.constexpr = BM // GROUP
    warp, i = warps_and_numbers(ACC, 2, BM)
    r = row + warp * 0 + i // GROUP
    ok = r < R
    if FEW:
        ok = ok & (r // HEIGHT == row // HEIGHT)
    ok = ok & (gl.load(slots + r, mask=ok, other=-1).to(gl.int32) == slot)
    pos = gl.load(positions + r, mask=ok, other=-1).to(gl.int32)
    return r.to(gl.int64) * HEADS + head * GROUP + i % GROUP, ok, pos


@gluon.jit
def head_pointers(plane, head, NUM_KV: gl.constexpr, PAGE: gl.constexpr):
    """Return pointers to the elements of a head on page 0, in pairs [D / 2], and to its first scale."""
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COPY))))
    pairs = (plane + head * D).to(gl.pointer_type(gl.int16), bitcast=True) + pair
    scales = plane + PAGE * NUM_KV * D + head * (PAGE * SCALE_BYTES)
    return pairs, scales.to(gl.pointer_type(gl.float32), bitcast=True)


@gluon.jit
def load_queries(q, row, head, ok, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Load the queries of a tile for every warp [WARPS, BM, D] in the order of `natural_groups`.

    ok [WARPS, BM]: rows that exist.
    """
    warp, i = warps_and_numbers(QUERIES, 2, BM)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERIES)))[None, None, :]
    d = d // 32 * 32 + d // 2 % 2 * 16 + d // 4 % 4 * 4 + d // 16 % 2 * 2 + d % 2
    row_head = (warp * 0 + row + i // GROUP).to(gl.int64) * HEADS + head * GROUP + i % GROUP
    ok = gl.convert_layout(ok, gl.SliceLayout(2, QUERIES))
    return gl.load(q + row_head[:, :, None] * D + d, mask=ok[:, :, None], other=0.0)


@gluon.jit
def wait_for_new_keys(group, step, first_position):
    """Wait for the previous kernel unless all keys of a group are older than the rows of this pass."""
    _, _, _, _, count, _, start = group
    spans_after = (gl.minimum(count - start, step * WARPS) - 1) // step * step
    if (start >= count) | ((start + spans_after + 1) * SPAN > first_position):
        cuda.gdc_wait()


@gluon.jit(do_not_specialize=["R", "max_pages", "spans"])
def quantized_rows_kernel(
    q, slots, positions, page_table, cache, out, parts, stats, tiles, R, max_pages, plane, spans, scale,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, FEW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attention of q [R, heads * D]; FEW: all spans into parts and stats, otherwise tiles of a list into out.

    parts [R * heads, spans, D], stats [R * heads, spans, 2]. Grid: (programs,), the KV head fastest, because
    memory of a token holds its KV heads side by side; otherwise (NUM_KV, programs).
    """
    HEADS: gl.constexpr = NUM_KV * GROUP
    ring, scales = make_ring()
    if PDL:
        cuda.gdc_launch_dependents()
    zero = gl.program_id(0) * 0
    i = gl.arange(0, BM, layout=ROWS)
    if FEW:
        head, num_tiles, step = gl.program_id(0) % NUM_KV, R, gl.num_programs(0) // NUM_KV
        all_slots = gl.load(slots + i, mask=i < R, other=-1).to(gl.int32)
        all_positions = gl.load(positions + i, mask=i < R, other=-1).to(gl.int32)
        group = (zero - 1, zero, zero, zero - 1, zero, zero, zero)
    else:
        if PDL:
            cuda.gdc_wait()
        head, num_tiles, step = gl.program_id(0), gl.load(tiles), 1
        all_slots, all_positions = i, i  # not used
        group = (gl.program_id(1) - gl.num_programs(1), zero, zero, zero - 1, zero, zero, zero)
        staged = gl.allocate_shared_memory(gl.float32, [WARPS, BM, D // 4], STAGED_SHARED)
        staged_stats = gl.allocate_shared_memory(gl.float32, [2, WARPS, BM], PLAIN_SHARED)
        state = empty_state()
    keys, key_scales = head_pointers(cache, head, NUM_KV, PAGE)
    values, value_scales = head_pointers(cache + plane, head, NUM_KV, PAGE)
    group = next_group(
        group, slots, positions, tiles, all_slots, all_positions, R, num_tiles, step, NUM_KV, GROUP, FEW
    )
    ids = load_page_ids(page_table, group, step, max_pages, PAGE)
    if FEW and PDL:
        first_position = few_rows_tile(all_slots, all_positions, group[1], GROUP)[2]
        wait_for_new_keys(group, step, first_position)
    copy_block(ring, scales, 0, keys, key_scales, ids, group, step, 0, NUM_KV, PAGE)
    copy_block(ring, scales, 1, values, value_scales, ids, group, step, 0, NUM_KV, PAGE)
    copy_block(ring, scales, 2, keys, key_scales, ids, group, step, 1, NUM_KV, PAGE)
    if FEW and PDL:
        cuda.gdc_wait()
    index = 0  # of the first block of the group in the ring
    while group[0] < num_tiles:
        tile, row, slot, _, count, _, start = group
        following = next_group(
            group, slots, positions, tiles, all_slots, all_positions, R, num_tiles, step, NUM_KV, GROUP, FEW
        )
        next_ids = load_page_ids(page_table, following, step, max_pages, PAGE)
        row_head, ok, pos = tile_rows(slots, positions, row, slot, head, R, HEADS, GROUP, FEW)
        m1, sums1, acc1 = attend_group(
            load_queries(q, row, head, ok, HEADS, GROUP), pos, scale, ring, scales, index, keys, values,
            key_scales, value_scales, group, following, ids, next_ids, step, cache.dtype.element_ty, NUM_KV,
            PAGE,
        )  # fmt: skip
        if FEW:
            store_group(parts, stats, row_head * spans, start, step, count, ok, m1, sums1, acc1)
        else:
            state = merge_group(staged, staged_stats, state, start == 0, m1, sums1, acc1)
            if following[0] != tile:
                store_tile(out, state, slots, row, slot, head, R, HEADS, GROUP)
        group, ids = following, next_ids
        index += 4
    async_copy.wait_group(0)


def is_usable(q: Tensor, heads: AttentionShape, cache: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernel computes this attention; the chip must be of compute capability 9.0."""
    is_quantized = q.dtype == torch.bfloat16 and kv_format(cache.dtype) is not None
    is_plain = heads.window == 0 and heads.value_dim == 0 and sinks is None
    fits = heads.dim == D.value and EVEN_ROWS % (heads.num_q // heads.num_kv) == 0
    return is_quantized and is_plain and fits and cache.shape[2] % PIECE.value == 0


def is_selected(q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernel is used on Hopper: where it is usable and contexts may be long."""
    is_long = rows.page_table.shape[1] * cache.shape[2] >= warp_specialized.LONG_TABLE_TOKENS
    return is_long and is_usable(q, heads, cache, sinks)


def is_few_selected(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None
) -> bool:
    """Return whether all programs divide the spans: for few rows where contexts may be long."""
    return len(q) <= MAX_FEW_ROWS and is_selected(q, rows, heads, cache, sinks)


def _launch(
    grid: tuple[int, ...], q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor,
    scratch: tuple[Tensor, Tensor], tiles: Tensor, spans: int, *, few: bool, pdl: bool,
) -> None:  # fmt: skip
    """Launch the kernel."""
    quantized_rows_kernel[grid](
        q, rows.slots, rows.positions, rows.page_table, cache, out, *scratch, tiles, len(q),
        rows.page_table.shape[1], cache.stride(0), spans, heads.scale * LOG2_E,
        NUM_KV=heads.num_kv, GROUP=heads.num_q // heads.num_kv, PAGE=cache.shape[2], FEW=few,
        **launch_options(pdl, num_warps=WARPS.value, enable_fp_fusion=False),
    )  # fmt: skip


def launch_few(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, scratch: tuple[Tensor, Tensor],
    num_sms: int, pdl: bool,
) -> None:  # fmt: skip
    """Compute all spans with a program per SM, then merge them."""
    spans = triton.cdiv(rows.page_table.shape[1] * cache.shape[2], SPAN.value)
    programs = max(1, num_sms // heads.num_kv) * heads.num_kv
    _launch((programs,), q, rows, heads, cache, out, scratch, out, spans, few=True, pdl=pdl)
    merge_spans_kernel[(len(q), heads.num_q, heads.dim // MERGE_COLUMNS)](
        rows.slots, rows.positions, *scratch, out, spans,
        HEADS=heads.num_q, D=heads.dim, COLUMNS=MERGE_COLUMNS, SPAN=SPAN.value,
        **launch_options(pdl, num_warps=1, enable_fp_fusion=False),
    )  # fmt: skip


def launch_even(
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, tiles: Tensor, programs: int,
    pdl: bool,
) -> None:  # fmt: skip
    """Compute a list of whole tiles with `programs` of every KV head."""
    grid = (heads.num_kv, programs)
    _launch(grid, q, rows, heads, cache, out, (out, out), tiles, 0, few=False, pdl=pdl)
