"""Attention of many tiles: the sums of `attention`, one program walking through the spans of a tile.

Where tiles are, `tile_lists` says. With many rows there are two lists, one of high tiles (prompts) and one of
low ones (decode and verify rows), and the low ones fill the chip while the last high ones end. With few rows
long tiles are cut into chunks: the first chunk folds its spans, the others leave theirs for the last program
of the tile to fold. Blocks that every row of a tile sees whole may be read without masks. None of that
changes a bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention import splitkv
from draftproof.ops.triton.attention.splitkv import (
    Partials,
    _block,
    _finish,
    _fold,
    _gather,
    paged_block,
    scratch_fits,
)
from draftproof.ops.triton.attention.worklist import CHUNKS, TileLists
from draftproof.ops.triton.runtime import INTERPRETED, next_power_of_two

FEW = 512  # rows; with more there are high tiles too
FEWER = 96  # rows, up to which a program has room for two blocks of keys in flight
CUT = 48  # rows, up to which tiles are cut into chunks
PROGRAMS = 128  # with fewer, each walking through a tile, spans side by side are quicker than chunks
PER_SPAN = 8  # rows for each span of a chunk: the fewer tiles, the shorter the chunks


class Shape(NamedTuple):
    """How a tile is worked on; speed alone."""

    height: int  # in rows times heads
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread: fewer let more programs in
    apart: bool = True  # blocks that all rows see have a loop of their own, without masks
    ahead: bool = False  # pages are looked up a turn early, so that keys do not wait for them


# Width of a head -> shape. HIGH: many rows; LOW: their decode rows, and calls up to 256 rows; MIDDLE: to FEW;
# LOWEST: to FEWER. CHUNKED: to CUT, for the widths that gained by it.
HIGH = {64: Shape(64, 4, 2), 128: Shape(128, 8, 3, apart=False, ahead=True)}
MIDDLE = {64: Shape(16, 4, 3, 168), 128: Shape(16, 4, 3, 128)}
LOW = {64: Shape(16, 2, 3), 128: Shape(16, 2, 3)}
LOWEST = {64: Shape(16, 2, 3), 128: Shape(16, 4, 3, apart=False, ahead=True)}
CHUNKED = {128: Shape(16, 4, 3, apart=False, ahead=True)}


@triton.jit
def _whole_block(
    q, pages, cache_k, cache_v, at, scale, m, sums, acc,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    ONES: tl.constexpr,
):  # fmt: skip
    """`_block` of keys that all rows see."""
    d = tl.arange(0, BD)
    key = at + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE).to(tl.int64)
    place = (page * PAGE + key % PAGE) * (NUM_KV * D)
    if BD == D:
        k = tl.load(cache_k + place[None, :] + d[:, None])
        v = tl.load(cache_v + place[:, None] + d[None, :])
    else:
        k = tl.load(cache_k + place[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
        v = tl.load(cache_v + place[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    top = tl.maximum(m, tl.max(scores, axis=1))
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(scores - base[:, None]).to(q.dtype)
    decay = tl.exp2(m - base)[:, None]
    ones = tl.full((KEYS, ONES), 1.0, tl.float32).to(q.dtype)
    sums = tl.dot(p, ones, sums * decay, input_precision="ieee")
    acc = tl.dot(p, v, acc * decay, input_precision="ieee")
    return top, sums, acc


@triton.jit
def _keep(parts, stats, where, m, total, acc, ok, inside, BD: tl.constexpr):
    """Leaves a result at `where` [BM] for `_gather`."""
    d = tl.arange(0, BD)
    tl.store(parts + where[:, None] * BD + d[None, :], acc, mask=inside)
    tl.store(stats + where * 2, m, mask=ok)
    tl.store(stats + where * 2 + 1, total, mask=ok)


@triton.jit
def _walk_blocks(
    q, pos, pages, cache_k, cache_v, first, last, lowest, start, end, scale,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr, APART: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Blocks start..end, span by span: maximum [BM], sum [BM], weighted values [BM, BD]."""
    BLOCKS: tl.constexpr = SPAN // KEYS
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    m1 = tl.full((BM,), float("-inf"), tl.float32)  # of the span that is being summed
    sums1 = tl.zeros((BM, ONES), tl.float32)
    acc1 = tl.zeros((BM, BD), tl.float32)
    middle = start
    if APART and WINDOW == 0:
        middle = tl.maximum(start, tl.minimum((lowest + 1) // SPAN * BLOCKS, end))
        for block in range(start, middle):
            m1, sums1, acc1 = _whole_block(q, pages, cache_k, cache_v, block * KEYS, scale, m1, sums1, acc1,
                                           NUM_KV, D, BD, PAGE, KEYS, ONES)  # fmt: skip
            if block % BLOCKS == BLOCKS - 1:  # the span is complete
                m, total, acc = _fold(m, total, acc, m1, tl.max(sums1, axis=1), acc1)
                m1 = tl.full((BM,), float("-inf"), tl.float32)
    key = middle * KEYS + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE, mask=key <= last, other=0) if AHEAD else key
    for block in range(middle, end):
        if AHEAD:
            this = page
            key = (block + 1) * KEYS + tl.arange(0, KEYS)
            page = tl.load(pages + key // PAGE, mask=key <= last, other=0)
            m1, sums1, acc1 = paged_block(q, pos, this, cache_k, cache_v, first, last, block * KEYS, scale,
                                          m1, sums1, acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS,
                                          ONES)  # fmt: skip
        else:
            m1, sums1, acc1 = _block(q, pos, pages, cache_k, cache_v, first, last, block * KEYS, scale, m1,
                                     sums1, acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES)  # fmt: skip
        if (block % BLOCKS == BLOCKS - 1) | (block == end - 1):
            m, total, acc = _fold(m, total, acc, m1, tl.max(sums1, axis=1), acc1)
            m1 = tl.full((BM,), float("-inf"), tl.float32)
    return m, total, acc


@triton.jit
def _keep_blocks(
    q, pos, pages, cache_k, cache_v, first, last, start, end, scale, parts, stats, base, ok, inside,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Blocks start..end; every span is kept by itself."""
    BLOCKS: tl.constexpr = SPAN // KEYS
    m1 = tl.full((BM,), float("-inf"), tl.float32)
    sums1 = tl.zeros((BM, ONES), tl.float32)
    acc1 = tl.zeros((BM, BD), tl.float32)
    for block in range(start, end):
        m1, sums1, acc1 = _block(q, pos, pages, cache_k, cache_v, first, last, block * KEYS, scale, m1, sums1,
                                 acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES)  # fmt: skip
        if (block % BLOCKS == BLOCKS - 1) | (block == end - 1):
            where = base + block // BLOCKS
            _keep(parts, stats, where, m1, tl.max(sums1, axis=1), acc1, ok, inside, BD)
            m1 = tl.full((BM,), float("-inf"), tl.float32)


@triton.jit
def _chunk(
    q, pos, pages, cache_k, cache_v, first, last, lowest, scale, parts, stats, counter, base, part, chunk,
    ok, inside, out_at,
    NUM_KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr, APART: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The part-th `chunk` spans of a tile; the last program of the tile to arrive finishes it.

    Two loops and not one that chooses at the end of every span: that took longer.
    """
    first_span = first // SPAN
    length = last // SPAN - first_span + 1  # of the tile, in spans
    kept = first_span + chunk - 1  # there the first chunk leaves what it has folded
    start = (first_span + part * chunk) * (SPAN // KEYS)
    end = tl.minimum(last // KEYS + 1, start + chunk * (SPAN // KEYS))
    if part == 0:
        m, total, acc = _walk_blocks(q, pos, pages, cache_k, cache_v, first, last, lowest, start, end, scale,
                                     NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, APART,
                                     AHEAD)  # fmt: skip
        if length <= chunk:
            _finish(total, acc, out_at, inside)
        else:
            _keep(parts, stats, base + kept, m, total, acc, ok, inside, BD)
    else:
        _keep_blocks(q, pos, pages, cache_k, cache_v, first, last, start, end, scale, parts, stats, base, ok,
                     inside, NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES)  # fmt: skip
    if length > chunk:
        tl.debug_barrier()
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if done == tl.cdiv(length, chunk) - 1:
            tl.store(counter, 0)
            _gather(parts, stats, base, kept, length - chunk + 1, ok, inside, out_at, BM, BD)


@triton.jit(do_not_specialize=["R", "max_pages", "spans", "chunk"])
def walk_kernel(
    q, slots, positions, page_table, cache, out, tiles, parts, stats, arrived,
    R, max_pages, plane, spans, chunk, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    CHUNKS: tl.constexpr, APART: tl.constexpr, AHEAD: tl.constexpr, LEAD: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """q, out [R, heads * D]; grid (NUM_KV, any): a program takes every so many-th tile, the last ones first.

    AttentionShape of a tile run side by side: their keys lie side by side in memory.
    tiles: see `by_keys_kernel` (CHUNKS 1: rows); parts, stats: see `attention_kernel`, if CHUNKS > 1.
    LEAD: the next kernel may be launched early. WAIT: "first" if this one was, "last" if it needs nothing
    of the kernel before it but must not end before that one.
    """
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    if LEAD:
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
        lowest = tl.min(tl.where(ok, pos, last), axis=0)
        first = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW else lowest * 0
        line = r.to(tl.int64) * HEADS + head * GROUP + i % GROUP  # [BM]: which (row, head)
        inside = ok[:, None] & (d < D)[None, :]
        here = line[:, None] * D + d[None, :]
        query = tl.load(q + here, mask=inside, other=0.0)
        pages = page_table + slot * max_pages
        cache_k = cache + head * D
        cache_v = cache_k + plane
        if CHUNKS == 1:
            start, end = first // SPAN * (SPAN // KEYS), last // KEYS + 1
            m, total, acc = _walk_blocks(query, pos, pages, cache_k, cache_v, first, last, lowest, start, end,
                                         scale, NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES,
                                         APART, AHEAD)  # fmt: skip
            _finish(total, acc, out + here, inside)
        else:
            _chunk(query, pos, pages, cache_k, cache_v, first, last, lowest, scale, parts, stats,
                   arrived + row * NUM_KV + head, line * spans, part, chunk, ok, inside, out + here,
                   NUM_KV, D, BD, BM, PAGE, WINDOW, KEYS, SPAN, ONES, APART, AHEAD)  # fmt: skip
    if WAIT == "last":
        tl.extra.cuda.gdc_wait()


class Walk:
    """Launches the kernels; `lists` are of the pass that has begun."""

    def __init__(self, early: bool, partials: Partials) -> None:
        self.early = early  # kernels can be launched early on this device
        self.lists = TileLists()
        self._partials = partials

    def chunk(self, num_rows: int, heads: AttentionShape, table: Tensor, page_size: int) -> int:
        """How many spans a chunk of a tile has, or 0: tiles are not cut."""
        spans = triton.cdiv(table.shape[1] * page_size, splitkv.SPAN)
        pays = num_rows * heads.num_kv >= PROGRAMS and max(16, next_power_of_two(heads.dim)) in CHUNKED
        if not pays or num_rows > CUT or not scratch_fits(num_rows, heads, spans):
            return 0
        return max(num_rows // PER_SPAN, triton.cdiv(spans, CHUNKS), 1)

    def __call__(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, out: Tensor, pdl: bool
    ) -> None:
        count, group = len(q), heads.num_q // heads.num_kv
        width = max(16, next_power_of_two(heads.dim))
        wide = cache.dtype == torch.float32
        early = {"LEAD": pdl, "WAIT": "first" if pdl else ""}
        none = (out, out, out, 0, 0)
        if chunk := self.chunk(count, heads, rows.page_table, cache.shape[2]):
            low = _shape(CHUNKED, width, wide, group)
            spans = triton.cdiv(rows.page_table.shape[1] * cache.shape[2], splitkv.SPAN)
            tiles = self.lists.by_keys(rows, low.height // group, chunk, heads.window)
            scratch = self._partials.reserve(count * heads.num_q * spans, width, count * heads.num_kv)
            programs = count + count // 2  # there may be more chunks: then some take two
            _launch(low, tiles, programs, q, rows, heads, cache, out, (*scratch, spans, chunk), **early)
        elif count <= FEW:
            shapes = LOWEST if count <= FEWER else LOW if count <= 256 else MIDDLE
            low = _shape(shapes, width, wide, group)
            tiles = self.lists.by_keys(rows, low.height // group, 0, 0)
            _launch(low, tiles, count, q, rows, heads, cache, out, none, **early)
        else:
            low, high = _shape(LOW, width, wide, group), _shape(HIGH, width, wide, group)
            lows, highs = self.lists.low_and_high(rows, low.height // group, high.height // group)
            programs = 2 * triton.cdiv(count, high.height // group)
            _launch(high, highs, programs, q, rows, heads, cache, out, none, LEAD=self.early, WAIT="")
            programs, wait = min(count, len(rows.page_table)), "last" if self.early else ""
            _launch(low, lows, programs, q, rows, heads, cache, out, none, LEAD=False, WAIT=wait)


def _shape(shapes: dict[int, Shape], width: int, wide: bool, group: int) -> Shape:
    shape = shapes.get(width, Shape(16, 4, 2))
    if wide:  # one thread an output: higher tiles would not fit its registers
        shape = Shape(16, 4 if width <= 128 else 8, 2)
    return shape._replace(height=max(shape.height, next_power_of_two(group)))


def _launch(
    shape: Shape, tiles: Tensor, programs: int, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor,
    out: Tensor, scratch: tuple[Tensor, Tensor, Tensor, int, int], **when: Any,
) -> None:  # fmt: skip
    """`scratch`: parts, stats, arrived, spans and chunk of the kernel; chunk 0: tiles are not cut."""
    *partials, spans, chunk = scratch
    options: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages}
    if when["WAIT"]:
        options["launch_pdl"] = True
    if shape.registers and not INTERPRETED:
        options["maxnreg"] = shape.registers
    walk_kernel[(heads.num_kv, programs)](
        q, rows.slots, rows.positions, rows.page_table, cache, out, tiles, *partials,
        len(q), rows.page_table.shape[1], cache.stride(0), spans, chunk, heads.scale * splitkv.LOG2_E,
        NUM_KV=heads.num_kv, GROUP=heads.num_q // heads.num_kv, D=heads.dim,
        BD=max(16, next_power_of_two(heads.dim)), BM=shape.height, PAGE=cache.shape[2], WINDOW=heads.window,
        KEYS=splitkv.KEYS, SPAN=splitkv.SPAN, ONES=splitkv.ONES, APART=shape.apart,
        AHEAD=shape.ahead,
        CHUNKS=CHUNKS if chunk else 1, enable_fp_fusion=False, **when, **options,
    )  # fmt: skip
