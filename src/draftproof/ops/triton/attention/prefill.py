"""Paged attention for many tiles: the sums of `splitkv.py`, one program per tile looping over its spans.

`worklist.py` lists the tiles. With many rows there are two lists, tall tiles (prompts) and short tiles
(decode and verify rows), and the short tiles fill the chip while the last tall tiles finish. With few rows
long tiles are divided into chunks: the first chunk merges its spans, the others store theirs, and the last
program of the tile merges them. Blocks that are visible to every row of a tile may be read without masks.
None of this changes a bit.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import online_softmax, span_loop, splitkv, warp_specialized
from draftproof.ops.triton.attention.kv_cache import (
    convert_elements,
    head_pointers,
    is_quantized,
    kv_offset,
    load_keys,
    load_rows,
    load_scales,
)
from draftproof.ops.triton.attention.merge import merge_rows, spans_in_flight
from draftproof.ops.triton.attention.online_softmax import accumulate_values, merge_partials, store_partial
from draftproof.ops.triton.attention.quantized import decode_kernel as quantized_decode
from draftproof.ops.triton.attention.splitkv import PartialBuffers, padded_dim
from draftproof.ops.triton.attention.tiles import (
    CHUNKED_TILES,
    SHORT_TILES,
    SHORT_TILES_96,
    SHORT_TILES_512,
    TALL_TILES,
    TALL_TILES_SM90,
    TileConfig,
    chunk_programs,
    tile_config,
)
from draftproof.ops.triton.attention.worklist import MAX_CHUNKS, WorkLists
from draftproof.ops.triton.kernel_utils import INTERPRETED, next_power_of_two

MAX_ONE_LIST_ROWS = 512  # with more rows there is a list of tall tiles too
MAX_DEEP_PIPELINE_ROWS = 96  # up to it a program can have two blocks of keys in flight
MIN_CHUNKED_PROGRAMS = 128  # with fewer programs, parallel spans are faster than chunks


@triton.jit
def attend_full_block(
    q, pages, kv, at, scale, m, sums, acc,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    ONES: tl.constexpr,
):  # fmt: skip
    """Do `attend_block` for keys that are visible to all rows, without masks."""
    key = at + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE)
    offset = kv_offset(kv[0], page, key, NUM_KV, D, PAGE)
    k = load_keys(kv[0], offset, None, 0.0, D, BD, "")
    v = load_rows(kv[1], offset, None, 0.0, D, BD, "")
    factor = online_softmax.score_factor(scale, kv, page, key, None, NUM_KV, D, PAGE)
    scores = tl.dot(q, convert_elements(k, q.dtype), input_precision="ieee") * factor
    top, p, decay = online_softmax.softmax_step(scores, m)
    if is_quantized(kv[0].dtype.element_ty):
        value_scales = load_scales(kv[3], page, key, None, NUM_KV, D, PAGE)
        sums, acc = accumulate_values(p, v, value_scales, decay, sums, acc, q.dtype, KEYS, ONES)
    else:
        sums, acc = accumulate_values(p, v, None, decay, sums, acc, q.dtype, KEYS, ONES)
    return top, sums, acc


@triton.jit
def attend_blocks(
    q, pos, pages, kv, first, last, first_position, start, end, scale,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    SPLIT_FULL: tl.constexpr, PREFETCH_PAGES: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted values [BM, BD] of blocks start..end, span by span."""
    BLOCKS: tl.constexpr = SPAN // KEYS
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    m1 = tl.full((BM,), float("-inf"), tl.float32)  # of the current span
    sums1 = tl.zeros((BM, ONES), tl.float32)
    acc1 = tl.zeros((BM, BD), tl.float32)
    masked_start = start
    if SPLIT_FULL and WINDOW == 0:
        masked_start = tl.maximum(start, tl.minimum((first_position + 1) // SPAN * BLOCKS, end))
        for block in range(start, masked_start):
            m1, sums1, acc1 = attend_full_block(
                q, pages, kv, block * KEYS, scale, m1, sums1, acc1,
                NUM_KV, D, BD, PAGE, KEYS, ONES,
            )  # fmt: skip
            if block % BLOCKS == BLOCKS - 1:  # the span is complete
                m, total, acc = merge_partials(m, total, acc, m1, tl.max(sums1, axis=1), acc1)
                m1 = tl.full((BM,), float("-inf"), tl.float32)
    key = masked_start * KEYS + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE, mask=key <= last, other=0) if PREFETCH_PAGES else key
    for block in range(masked_start, end):
        if PREFETCH_PAGES:
            current_page = page
            key = (block + 1) * KEYS + tl.arange(0, KEYS)
            page = tl.load(pages + key // PAGE, mask=key <= last, other=0)
            m1, sums1, acc1 = splitkv.attend_paged_block(
                q, pos, current_page, kv, first, last, block * KEYS, scale,
                m1, sums1, acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES,
            )  # fmt: skip
        else:
            m1, sums1, acc1 = splitkv.attend_block(
                q, pos, pages, kv, first, last, block * KEYS, scale,
                m1, sums1, acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES,
            )  # fmt: skip
        if (block % BLOCKS == BLOCKS - 1) | (block == end - 1):
            m, total, acc = merge_partials(m, total, acc, m1, tl.max(sums1, axis=1), acc1)
            m1 = tl.full((BM,), float("-inf"), tl.float32)
    return m, total, acc


@triton.jit
def store_spans(
    q, pos, pages, kv, first, last, start, end, scale, parts, stats, base, ok, inside,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Sum blocks start..end and store every span separately; page ids are loaded one iteration early."""
    BLOCKS: tl.constexpr = SPAN // KEYS
    key = start * KEYS + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE, mask=key <= last, other=0)
    m1 = tl.full((BM,), float("-inf"), tl.float32)
    sums1 = tl.zeros((BM, ONES), tl.float32)
    acc1 = tl.zeros((BM, BD), tl.float32)
    for block in range(start, end):
        current_page = page
        key = (block + 1) * KEYS + tl.arange(0, KEYS)
        page = tl.load(pages + key // PAGE, mask=key <= last, other=0)
        m1, sums1, acc1 = splitkv.attend_paged_block(
            q, pos, current_page, kv, first, last, block * KEYS, scale,
            m1, sums1, acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES,
        )  # fmt: skip
        if (block % BLOCKS == BLOCKS - 1) | (block == end - 1):
            partial_index = base + block // BLOCKS
            store_partial(parts, stats, partial_index, m1, tl.max(sums1, axis=1), acc1, ok, inside, BD)
            m1 = tl.full((BM,), float("-inf"), tl.float32)


@triton.jit
def attend_chunk(
    q, pos, pages, kv, first, last, first_position, scale, parts, stats, counter, base, part,
    chunk, sink, ok, inside, out_at,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    SPLIT_FULL: tl.constexpr, PREFETCH_PAGES: tl.constexpr, SPAN_LOOP: tl.constexpr,
):  # fmt: skip
    """Sum the part-th `chunk` spans of a tile; return whether all chunks of a divided tile are done.

    The first chunk merges its spans, the others store theirs. Two loops are used, because one loop that
    decides at the end of every span was slower.
    """
    first_span = first // SPAN
    length = last // SPAN - first_span + 1  # spans of the tile
    start = first_span + part * chunk
    end = tl.minimum(first_span + length, start + chunk)
    if part == 0:
        m, total, acc = attend_range(
            q, pos, pages, kv, first, last, first_position, start, end, scale, parts, stats, base, ok, inside,
            NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, SPLIT_FULL, PREFETCH_PAGES, SPAN_LOOP,
        )  # fmt: skip
        if length <= chunk:
            online_softmax.store_normalised(m, total, acc, sink, out_at, inside)
        else:
            store_partial(parts, stats, base + (end - 1), m, total, acc, ok, inside, BD)
    elif SPAN_LOOP:
        span_loop.attend_spans(
            q, pos, pages, kv, first, last, first_position, start, end, scale,
            parts, stats, base, True, ok, inside,
            NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, True,
        )  # fmt: skip
    else:
        store_spans(
            q, pos, pages, kv, first, last, start * (SPAN // KEYS),
            tl.minimum(last // KEYS + 1, end * (SPAN // KEYS)), scale, parts, stats, base, ok, inside,
            NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES,
        )  # fmt: skip
    is_done = False
    if length > chunk:
        tl.debug_barrier()
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        is_done = done == tl.cdiv(length, chunk) - 1
        if is_done:
            tl.store(counter, 0)
    return is_done


@triton.jit
def attend_range(
    q, pos, pages, kv, first, last, first_position, start, end, scale, parts, stats, base, ok, inside,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    SPLIT_FULL: tl.constexpr, PREFETCH_PAGES: tl.constexpr, SPAN_LOOP: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted values [BM, BD] of spans start..end, merged."""
    if SPAN_LOOP:
        return span_loop.attend_spans(
            q, pos, pages, kv, first, last, first_position, start, end, scale,
            parts, stats, base, False, ok, inside,
            NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, False,
        )  # fmt: skip
    else:
        return attend_blocks(
            q, pos, pages, kv, first, last, first_position, start * (SPAN // KEYS),
            tl.minimum(last // KEYS + 1, end * (SPAN // KEYS)), scale,
            NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, SPLIT_FULL, PREFETCH_PAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R", "max_pages", "spans", "chunk"])
def prefill_attention_kernel(
    q, slots, positions, page_table, cache, out, tiles, parts, stats, counters, sinks,
    R, max_pages, plane, spans, chunk, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    CHUNKS: tl.constexpr, SPLIT_FULL: tl.constexpr, PREFETCH_PAGES: tl.constexpr, SPAN_LOOP: tl.constexpr,
    GROUP_PADDED: tl.constexpr, IN_FLIGHT: tl.constexpr, LAUNCH_NEXT: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Attention of q [R, heads * D] -> out; grid (NUM_KV, programs), each looping over tiles from the end.

    Heads of a tile are adjacent programs, because their keys are adjacent in memory. tiles: see
    `chunk_list_kernel` (CHUNKS 1: rows only); parts, stats: see `splitkv_attention_kernel`, if CHUNKS > 1.
    LAUNCH_NEXT: allow the next kernel to start early. WAIT: "first" to wait for the previous kernel before
    all loads, "last" if nothing of it is needed but this kernel must not complete before it.
    SPAN_LOOP: use `span_loop.py`. IN_FLIGHT: spans of a step of `merge_rows`; 0: merge whole tiles.
    """
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    if LAUNCH_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    if WAIT == "first":
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    i = tl.arange(0, BM)
    d = tl.arange(0, BD)
    count = tl.load(tiles)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        row = tl.load(tiles + count - tile)
        part = row % CHUNKS
        row = row // CHUNKS
        slot = tl.load(slots + row)
        r = row + i // GROUP
        ok = (i < HEIGHT * GROUP) & (r < R)
        ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
        pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
        last = tl.max(pos, axis=0)
        first_position = tl.min(tl.where(ok, pos, last), axis=0)
        first = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else first_position * 0
        row_head = r.to(tl.int64) * HEADS + head * GROUP + i % GROUP  # [BM]: index of (row, head)
        inside = ok[:, None] & (d < D)[None, :]
        q_offset = row_head[:, None] * D + d[None, :]
        query = tl.load(q + q_offset, mask=inside, other=0.0)
        pages = page_table + slot * max_pages
        sink = None if sinks is None else online_softmax.load_sinks(sinks, head * GROUP + i % GROUP)
        kv = head_pointers(cache, plane, head, NUM_KV, D, PAGE)
        if CHUNKS == 1:
            m, total, acc = attend_range(
                query, pos, pages, kv, first, last, first_position, first // SPAN, last // SPAN + 1, scale,
                parts, stats, row_head, ok, inside,
                NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, SPLIT_FULL, PREFETCH_PAGES, SPAN_LOOP,
            )  # fmt: skip
            online_softmax.store_normalised(m, total, acc, sink, out + q_offset, inside)
        else:
            is_done = attend_chunk(
                query, pos, pages, kv, first, last, first_position, scale, parts, stats,
                counters + row * NUM_KV + head, row_head * spans, part, chunk, sink, ok, inside,
                out + q_offset,
                NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, SPLIT_FULL, PREFETCH_PAGES, SPAN_LOOP,
            )  # fmt: skip
            if is_done:
                merged = first // SPAN + chunk - 1  # index of the merged result of the first chunk
                num_stored = last // SPAN - merged + 1
                if IN_FLIGHT:
                    merge_rows(
                        parts, stats, sinks, out, row, tl.sum(ok.to(tl.int32)) // GROUP, head, spans,
                        merged, num_stored, NUM_KV, GROUP, D, BD, GROUP_PADDED, IN_FLIGHT,
                    )  # fmt: skip
                else:
                    online_softmax.merge_stored_spans(
                        parts, stats, row_head * spans, merged, num_stored, sink, ok, inside,
                        out + q_offset, BM, BD,
                    )  # fmt: skip
    if WAIT == "last":
        tl.extra.cuda.gdc_wait()


class PrefillAttention:
    """Launcher of the kernels; `worklists`: of the pass that has begun, `has_wgmma`: the chip is Hopper."""

    def __init__(self, has_pdl: bool, has_wgmma: bool, num_sms: int, partials: PartialBuffers) -> None:
        self.has_pdl, self.has_wgmma, self._num_sms, self._partials = has_pdl, has_wgmma, num_sms, partials
        self.worklists = WorkLists()

    def chunk_spans(self, num_rows: int, heads: AttentionShape, table: Tensor, page_size: int) -> int:
        """Return the spans of a chunk of a tile; 0: tiles are not divided."""
        chunked = CHUNKED_TILES.get(padded_dim(heads))
        if chunked is None or num_rows * heads.num_kv < MIN_CHUNKED_PROGRAMS:
            return 0
        spans = triton.cdiv(table.shape[1] * page_size, splitkv.SPAN)
        chunk = chunked.chunk_spans(num_rows, heads.num_kv)
        if not chunk or not splitkv.scratch_fits(num_rows, heads, spans):
            return 0
        return max(chunk, triton.cdiv(spans, MAX_CHUNKS))

    def __call__(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, pdl: bool,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        count, group, width = len(q), heads.num_q // heads.num_kv, padded_dim(heads)
        page_size, is_fp32 = cache.shape[2], q.dtype == torch.float32
        config = partial(tile_config, width=width, is_fp32=is_fp32, group=group)
        launch = partial(_launch, q=q, rows=rows, heads=heads, cache=cache, out=out, sinks=sinks)
        pdl_options = {"LAUNCH_NEXT": pdl, "WAIT": "first" if pdl else ""}
        no_scratch = (out, out, out, 0, 0)
        kernels = quantized_decode if cache.element_size() == 1 else warp_specialized
        selected = kernels if self.has_wgmma and kernels.is_selected(q, rows, heads, cache, sinks) else None
        attend_even = partial(self._attend_even, selected, q, rows, heads, cache, out, pdl)
        if chunk := self.chunk_spans(count, heads, rows.page_table, page_size):
            short = config({width: CHUNKED_TILES[width].config})
            spans = triton.cdiv(rows.page_table.shape[1] * page_size, splitkv.SPAN)
            tiles = attend_even(short, chunk)
            scratch = self._partials.reserve(count * heads.num_q * spans, width, count * heads.num_kv)
            launch(short, tiles, chunk_programs(count, heads), (*scratch, spans, chunk), **pdl_options)
        elif count <= MAX_ONE_LIST_ROWS:
            limits = ((MAX_DEEP_PIPELINE_ROWS, SHORT_TILES_96), (256, SHORT_TILES))
            short = config(next((found for limit, found in limits if count <= limit), SHORT_TILES_512))
            launch(short, attend_even(short, 0), count, no_scratch, **pdl_options)
        else:
            short, tall = config(SHORT_TILES), config(TALL_TILES_SM90 if self.has_wgmma else TALL_TILES)
            heights = short.height // group, tall.height // group
            short_tiles, tall_tiles = self.worklists.short_and_tall(rows, *heights)
            programs = 2 * triton.cdiv(count, heights[1])
            has_stages = tall.specialized_stages and count >= warp_specialized.MIN_TALL_ROWS
            if selected is warp_specialized and has_stages:
                warp_specialized.launch_tiles(
                    q, rows, heads, cache, out, tall_tiles, programs, height=tall.height,
                    stages=tall.specialized_stages, launches_next=self.has_pdl, waits=False,
                )  # fmt: skip
            else:
                launch(tall, tall_tiles, programs, no_scratch, LAUNCH_NEXT=self.has_pdl, WAIT="")
            programs, wait = min(count, len(rows.page_table)), "last" if self.has_pdl else ""
            launch(short, short_tiles, programs, no_scratch, LAUNCH_NEXT=False, WAIT=wait)

    def _attend_even(
        self, kernels: ModuleType | None, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor,
        out: Tensor, pdl: bool, short: TileConfig, chunk: int,
    ) -> Tensor:  # fmt: skip
        """Compute long tiles of even length with `kernels` of Hopper; return the list of other tiles."""
        group, stages = heads.num_q // heads.num_kv, short.specialized_stages
        if kernels is None or not stages:
            return self.worklists.by_keys(rows, short.height // group, chunk, heads.window if chunk else 0)
        per_wave, height = max(1, self._num_sms // heads.num_kv), kernels.EVEN_ROWS // group
        even, others = self.worklists.even_or_others(rows, height, short.height // group, chunk, per_wave)
        programs = min(len(q), per_wave)
        if kernels is quantized_decode:
            quantized_decode.launch_even(q, rows, heads, cache, out, even, programs, pdl)
        else:
            warp_specialized.launch_even(q, rows, heads, cache, out, even, programs, stages, pdl)
        return others


def _launch(
    config: TileConfig, tiles: Tensor, programs: int, scratch: tuple[Tensor, Tensor, Tensor, int, int],
    q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, sinks: Tensor | None,
    **pdl_launch: Any,
) -> None:  # fmt: skip
    """Launch the kernel; `scratch`: parts, stats, counters, spans and chunk (0 for whole tiles)."""
    *partials, spans, chunk = scratch
    group = heads.num_q // heads.num_kv
    group_padded = next_power_of_two(group)
    in_flight = spans_in_flight(config.warps, group_padded, padded_dim(heads)) if config.merges_rows else 0
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    if pdl_launch["WAIT"]:
        options["launch_pdl"] = True
    if config.max_registers and not INTERPRETED:
        options["maxnreg"] = config.max_registers
    prefill_attention_kernel[(heads.num_kv, programs)](
        q, rows.slots, rows.positions, rows.page_table, cache, out, tiles, *partials, sinks,
        len(q), rows.page_table.shape[1], cache.stride(0), spans, chunk, heads.scale * splitkv.LOG2_E,
        NUM_KV=heads.num_kv, GROUP=group, D=heads.dim,
        BD=padded_dim(heads), BM=config.height, PAGE=cache.shape[2], WINDOW=heads.window,
        KEYS=splitkv.KEYS, SPAN=splitkv.SPAN, ONES=splitkv.ONES, SPLIT_FULL=config.splits_full_blocks,
        PREFETCH_PAGES=config.prefetches_pages, SPAN_LOOP=config.span_loop, GROUP_PADDED=group_padded,
        IN_FLIGHT=in_flight,
        CHUNKS=MAX_CHUNKS if chunk else 1, enable_fp_fusion=False, **pdl_launch, **options,
    )  # fmt: skip
