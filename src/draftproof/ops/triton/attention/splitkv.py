"""Split-KV paged attention for few tiles.

A program handles a tile: adjacent rows of one slot times the query heads that share a KV head. The order of
sums is that of `online_softmax.py`, with blocks of KEYS and spans of SPAN tokens. The spans of a tile run in
parallel, and the last program of a tile merges them. Tiles are found on the device: a program starts a tile
if its row is the first of its slot or a multiple of the tile height, and returns at once otherwise. So the
grid depends on the number of rows only, and a graph can capture it. `prefill.py` handles many tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import few_rows, online_softmax, preloaded, span_loop
from draftproof.ops.triton.attention.kv_cache import (
    head_pointers,
    is_quantized,
    kv_offset,
    load_keys,
    load_rows,
    load_scales,
    prefetch_span,
)
from draftproof.ops.triton.attention.merge import merge_rows, spans_in_flight
from draftproof.ops.triton.attention.online_softmax import (
    accumulate_values,
    load_sinks,
    masked_scores,
    merge_stored_spans,
    score_factor,
    softmax_step,
    store_normalised,
    store_partial,
)
from draftproof.ops.triton.attention.quantized import decode_kernel as quantized_decode
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two

KEYS, SPAN, LOG2_E = online_softmax.KEYS, online_softmax.SPAN, online_softmax.LOG2_E
MAX_SPLIT_PROGRAMS = 800  # about six per SM of an H200; the spans of a tile are divided up to this number
MAX_SCRATCH_BYTES = 256 << 20  # of partial results; above it `prefill.py` is used
ONES = 16  # columns of the matrix of ones: the minimum of the tensor core


class SplitTile(NamedTuple):
    """Configuration of the kernel; speed only."""

    height: int  # rows times heads
    warps: int
    stages: int
    span_loop: bool = False  # loop of `span_loop.py`
    merges_rows: bool = False  # merge of `merge.py`
    max_programs: int = MAX_SPLIT_PROGRAMS


# Maximum number of rows -> configuration. Three stages keep two blocks of keys in flight, because a span has
# two blocks; in the span loop two spans, which leaves room for one program per SM.
TILES = (
    (1, SplitTile(16, 4, 3, span_loop=True, merges_rows=True, max_programs=132)),
    (8, SplitTile(16, 4, 3, span_loop=True, merges_rows=True, max_programs=528)),
    (1 << 30, SplitTile(16, 2, 3)),
)
BLOCK_LOOP_TILE = SplitTile(16, 4, 2)  # of fp32 and wide heads
MAX_SPAN_LOOP_WIDTH = 128  # elements of a head: a wider span loop would take long to compile
SPAN_LOOP_ELEMENT_BYTES = 8  # of shared memory: keys and values in bf16 of two spans
SPAN_LOOP_EXTRA_BYTES = 12 << 10  # queries and scores


@triton.jit
def attend_block(
    q, pos, pages, kv, first, last, at, scale, m, sums, acc,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Add keys at..at + KEYS to maximum [BM], sum [BM, ONES] and values [BM, BD] of their span."""
    key = at + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE, mask=(key >= first) & (key <= last), other=0)
    return attend_paged_block(
        q, pos, page, kv, first, last, at, scale, m, sums, acc,
        NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES,
    )  # fmt: skip


@triton.jit
def attend_paged_block(
    q, pos, page, kv, first, last, at, scale, m, sums, acc,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Do `attend_block` for keys whose pages [KEYS] are loaded; kv: see `head_pointers`."""
    key = at + tl.arange(0, KEYS)
    exists = (key >= first) & (key <= last)  # memory of other keys may hold NaN
    offset = kv_offset(kv[0], page, key, NUM_KV, D, PAGE)
    k = load_keys(kv[0], offset, exists, 0.0, D, BD, "")
    factor = score_factor(scale, kv, page, key, exists, NUM_KV, D, PAGE)
    top, p, decay = softmax_step(masked_scores(q, k, key, pos, factor, WINDOW), m)
    v = load_rows(kv[1], offset, exists, 0.0, D, BD, "")
    if is_quantized(kv[0].dtype.element_ty):
        value_scales = load_scales(kv[3], page, key, exists, NUM_KV, D, PAGE)
        sums, acc = accumulate_values(p, v, value_scales, decay, sums, acc, q.dtype, KEYS, ONES)
    else:
        sums, acc = accumulate_values(p, v, None, decay, sums, acc, q.dtype, KEYS, ONES)
    return top, sums, acc


@triton.jit
def attend_span(
    q, pos, pages, kv, first, last, start, scale,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Return maximum [BM], sum [BM] and weighted values [BM, BD] of one span; keys first..last exist.

    A block without existing keys changes nothing, so there are always SPAN // KEYS blocks.
    """
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, ONES), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for block in tl.static_range(0, SPAN, KEYS):
        m, sums, acc = attend_block(
            q, pos, pages, kv, first, last, start + block, scale, m, sums, acc,
            NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES,
        )  # fmt: skip
    return m, tl.max(sums, axis=1), acc  # all columns of `sums` are equal


@triton.jit(do_not_specialize=["R", "num_parallel"])  # one binary for every number of rows
def splitkv_attention_kernel(
    q, slots, positions, page_table, cache, out, parts, stats, counters, sinks,
    R, max_pages, plane, spans, num_parallel, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    SPAN_LOOP: tl.constexpr, GROUP_PADDED: tl.constexpr, IN_FLIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of q [R, heads * D] -> out; parts [R * heads, spans, BD], stats [R * heads, spans, 2].

    SPAN_LOOP: use `span_loop.py`. IN_FLIGHT: spans of a step of `merge_rows`; 0: merge whole tiles.
    """
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    row = R - 1 - tl.program_id(0)  # later rows have the most keys, so they start first
    head, split = tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        pages = page_table + tl.maximum(tl.load(slots + row), 0) * max_pages
        prefetch_span(cache, plane, pages, split, tl.load(positions + row), head, NUM_KV, D, PAGE, SPAN)
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row)
    previous_slot = tl.load(slots + tl.maximum(row - 1, 0))
    starts_tile = (slot >= 0) & ((row % HEIGHT == 0) | (row == 0) | (previous_slot != slot))
    if starts_tile:
        i = tl.arange(0, BM)
        r = row + i // GROUP
        ok = (i < HEIGHT * GROUP) & (r < R) & (r // HEIGHT == row // HEIGHT)
        ok = ok & (tl.load(slots + r, mask=ok, other=-1) == slot)
        pos = tl.load(positions + r, mask=ok, other=-1).to(tl.int32)
        last = tl.max(pos, axis=0)
        first_position = tl.min(tl.where(ok, pos, last), axis=0)
        first = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else first_position * 0
        d = tl.arange(0, BD)
        row_head = r.to(tl.int64) * HEADS + head * GROUP + i % GROUP  # [BM]: which (row, head)
        inside = ok[:, None] & (d < D)[None, :]
        q_offset = row_head[:, None] * D + d[None, :]
        query = tl.load(q + q_offset, mask=inside, other=0.0)
        pages = page_table + slot * max_pages
        sink = None if sinks is None else load_sinks(sinks, head * GROUP + i % GROUP)
        kv = head_pointers(cache, plane, head, NUM_KV, D, PAGE)
        first_span = first // SPAN
        count = last // SPAN - first_span + 1
        length = tl.cdiv(count, num_parallel)  # spans of a program, the same number in all but the last
        start = first_span + split * length
        if split * length < count:
            end = tl.minimum(start + length, first_span + count)
            if SPAN_LOOP:
                m, total, acc = span_loop.attend_spans(
                    query, pos, pages, kv, first, last, first_position, start, end, scale,
                    parts, stats, row_head * spans, count > 1, ok, inside,
                    NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, True,
                )  # fmt: skip
                if count == 1:
                    store_normalised(m, total, acc, sink, out + q_offset, inside)
            else:
                for s in range(start, end):
                    m, total, acc = attend_span(
                        query, pos, pages, kv, first, last, s * SPAN, scale,
                        NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES,
                    )  # fmt: skip
                    if count == 1:
                        store_normalised(m, total, acc, sink, out + q_offset, inside)
                    else:
                        store_partial(parts, stats, row_head * spans + s, m, total, acc, ok, inside, BD)
            if count > 1:
                tl.debug_barrier()
                counter = counters + row * NUM_KV + head
                num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if num_done == tl.cdiv(count, length) - 1:
                    tl.store(counter, 0)
                    if IN_FLIGHT:
                        merge_rows(
                            parts, stats, sinks, out, row, tl.sum(ok.to(tl.int32)) // GROUP, head, spans,
                            first_span, count, NUM_KV, GROUP, D, BD, GROUP_PADDED, IN_FLIGHT,
                        )  # fmt: skip
                    else:
                        merge_stored_spans(
                            parts, stats, row_head * spans, first_span, count, sink, ok, inside,
                            out + q_offset, BM, BD,
                        )  # fmt: skip


class PartialBuffers:
    """Scratch of spans that run in parallel: partial results, and counters of finished programs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._old_scratch: list[Tensor] = []  # captured graphs may still use replaced scratch
        self.parts = torch.empty(1, dtype=torch.float32, device=device)
        self.stats = torch.empty(1, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device)

    def reserve(self, lines: int, width: int, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return parts, stats and counters for `lines` partial results of `width` columns."""
        if self.parts.numel() < lines * width or self.stats.numel() < lines * 2:
            self._old_scratch += [self.parts, self.stats]
            self.parts = torch.empty(lines * width, dtype=torch.float32, device=self.device)
            self.stats = torch.empty(lines * 2, dtype=torch.float32, device=self.device)
        if self.counters.numel() < tiles:
            self._old_scratch.append(self.counters)
            self.counters = torch.zeros(tiles, dtype=torch.int32, device=self.device)
        return self.parts, self.stats, self.counters


def padded_dim(heads: AttentionShape) -> int:
    """Return the head dim padded for the tensor core."""
    return max(16, next_power_of_two(heads.dim))


def scratch_fits(num_rows: int, heads: AttentionShape, spans: int) -> bool:
    """Return whether the partial results of all spans stay below the limit."""
    return num_rows * heads.num_q * spans * padded_dim(heads) * 4 <= MAX_SCRATCH_BYTES


class SplitKVAttention:
    """Launcher of the kernel; of `preloaded`, `few_rows` and `quantized/decode_kernel` where selected.

    `num_hopper_sms`: of a chip of compute capability 9.0, otherwise 0.
    """

    def __init__(self, partials: PartialBuffers, max_shared_bytes: int, num_hopper_sms: int = 0) -> None:
        self._partials, self._max_shared_bytes = partials, max_shared_bytes
        self._num_hopper_sms = num_hopper_sms

    def num_parallel_spans(
        self, num_rows: int, heads: AttentionShape, table: Tensor, page_size: int, dtype: torch.dtype
    ) -> int:
        """Return the number of spans that run in parallel; with 1 `prefill.py` is used."""
        spans = triton.cdiv(table.shape[1] * page_size, SPAN)
        if not scratch_fits(num_rows, heads, spans):
            return 1
        limit = self.tile(num_rows, padded_dim(heads), dtype).max_programs
        return max(1, min(spans, limit // (num_rows * heads.num_kv)))

    def tile(self, num_rows: int, width: int, dtype: torch.dtype) -> SplitTile:
        """Return the configuration for `num_rows` rows of queries of `dtype` and heads of `width`."""
        tile = next(tile for limit, tile in TILES if num_rows <= limit)
        shared = SPAN_LOOP_ELEMENT_BYTES * SPAN * width + SPAN_LOOP_EXTRA_BYTES
        if dtype == torch.float32 or width > MAX_SPAN_LOOP_WIDTH:
            return BLOCK_LOOP_TILE._replace(warps=tile.warps)
        if tile.span_loop and shared > self._max_shared_bytes:
            return TILES[-1][1]
        return tile

    def __call__(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, pdl: bool,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        num_rows, max_pages, page_size = len(q), rows.page_table.shape[1], cache.shape[2]
        group, width = heads.num_q // heads.num_kv, padded_dim(heads)
        spans = triton.cdiv(max_pages * page_size, SPAN)
        num_parallel = self.num_parallel_spans(num_rows, heads, rows.page_table, page_size, q.dtype)
        scratch = self._partials.reserve(num_rows * heads.num_q * spans, width, num_rows * heads.num_kv)
        if self._num_hopper_sms and few_rows.is_selected(q, rows, heads, cache, sinks):
            few_rows.launch(q, rows, heads, cache, out, scratch[:2], self._num_hopper_sms, pdl)
            return
        if self._num_hopper_sms and quantized_decode.is_few_selected(q, rows, heads, cache, sinks):
            quantized_decode.launch_few(q, rows, heads, cache, out, scratch[:2], self._num_hopper_sms, pdl)
            return
        tile = self.tile(num_rows, width, q.dtype)
        if preloaded.is_selected(q, width, cache, self._max_shared_bytes):
            preloaded.launch(q, rows, heads, cache, out, scratch, num_parallel, width, pdl, sinks)
            return
        group_padded = next_power_of_two(group)
        in_flight = spans_in_flight(tile.warps, group_padded, width) if tile.merges_rows else 0
        splitkv_attention_kernel[(num_rows, heads.num_kv, num_parallel)](
            q, rows.slots, rows.positions, rows.page_table, cache, out, *scratch, sinks,
            num_rows, max_pages, cache.stride(0), spans, num_parallel, heads.scale * LOG2_E,
            NUM_KV=heads.num_kv, GROUP=group, D=heads.dim, BD=width, BM=max(tile.height, group_padded),
            PAGE=page_size, WINDOW=heads.window, KEYS=KEYS, SPAN=SPAN, ONES=ONES, SPAN_LOOP=tile.span_loop,
            GROUP_PADDED=group_padded, IN_FLIGHT=in_flight,
            **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False),
        )  # fmt: skip
