"""Attention of many tiles: the sums of `attention`, one program walking through the spans of a tile.

A list, made once a pass on the device, says where tiles start: a program for every row would spend its time
finding out that it has nothing to do. With many rows there are two lists, one of high tiles (prompts) and
one of low ones (decode and verify rows), and the low ones fill the chip while the last high ones end.
Blocks that every row of a tile sees whole are read without masks. None of that changes a bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import Heads, Rows
from draftproof.ops.triton_cuda import attention
from draftproof.ops.triton_cuda.attention import _block, _finish, _fold
from draftproof.ops.triton_cuda.runtime import INTERPRETED, power_of_two

BLOCK = 1024  # rows that the list is made from at a time
FEW = 512  # rows; with more there are high tiles too


class Shape(NamedTuple):
    """How a tile is worked on; speed alone."""

    height: int  # in rows times heads
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread: fewer let more programs in


# Width of a head -> shape. HIGH: many rows; LOW: their decode rows, and calls up to 256 rows; MIDDLE: to FEW.
HIGH = {64: Shape(64, 4, 2), 128: Shape(64, 4, 3)}
MIDDLE = {64: Shape(16, 4, 3, 168), 128: Shape(16, 4, 3, 128)}
LOW = {64: Shape(16, 2, 3), 128: Shape(16, 2, 3)}


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["R"])
def tiles_kernel(slots, low, high, R, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """low, high [1 + R]: how many tiles, then their first rows.

    A slot's rows are cut every HIGH rows; what is left goes to `low` if it is at most LOW rows. HIGH 0: all
    rows are cut every LOW rows and go to `low`.
    """
    STEP: tl.constexpr = HIGH if HIGH else LOW
    lows = tl.zeros((), tl.int32)
    highs = tl.zeros((), tl.int32)
    segment = tl.zeros((), tl.int32)  # where the slot of the block before began
    for start in range(0, R, BLOCK):
        row = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + row, mask=row < R, other=-1)
        before = tl.load(slots + row - 1, mask=(row < R) & (row > 0), other=-2)
        first = tl.where(slot != before, row, 0)
        first = tl.maximum(tl.associative_scan(first, 0, _larger), segment)
        segment = tl.max(first, axis=0)
        starts = (slot >= 0) & ((row - first) % STEP == 0)
        if HIGH:
            further = tl.load(slots + row + LOW, mask=row + LOW < R, other=-2)
            tall = starts & (further == slot)
            place = highs + tl.cumsum(tall.to(tl.int32), axis=0)  # from 1 on
            tl.store(high + place, row, mask=tall)
            highs += tl.sum(tall.to(tl.int32), axis=0)
            starts = starts & (further != slot)
        place = lows + tl.cumsum(starts.to(tl.int32), axis=0)
        tl.store(low + place, row, mask=starts)
        lows += tl.sum(starts.to(tl.int32), axis=0)
    tl.store(low, lows)
    if HIGH:
        tl.store(high, highs)


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


@triton.jit(do_not_specialize=["R", "max_pages"])
def walk_kernel(
    q, slots, positions, page_table, cache, out, tiles, R, max_pages, plane, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, ONES: tl.constexpr,
    LEAD: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """q, out [R, heads * D]; grid (any, NUM_KV): a program takes every so many-th tile, the last ones first.

    LEAD: the next kernel may be launched early. WAIT: "first" if this one was, "last" if it needs nothing
    of the kernel before it but must not end before that one.
    """
    HEIGHT: tl.constexpr = BM // GROUP
    HEADS: tl.constexpr = NUM_KV * GROUP
    BLOCKS: tl.constexpr = SPAN // KEYS
    if LEAD:
        tl.extra.cuda.gdc_launch_dependents()
    if WAIT == "first":
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    i = tl.arange(0, BM)
    d = tl.arange(0, BD)
    count = tl.load(tiles)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(tiles + count - tile)
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
        m = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        m1 = tl.full((BM,), float("-inf"), tl.float32)  # of the span that is being summed
        sums1 = tl.zeros((BM, ONES), tl.float32)
        acc1 = tl.zeros((BM, BD), tl.float32)
        start = (first // SPAN) * BLOCKS
        if WINDOW == 0:
            start = (lowest + 1) // SPAN * BLOCKS
            for block in range(start):
                m1, sums1, acc1 = _whole_block(query, pages, cache_k, cache_v, block * KEYS, scale, m1,
                                               sums1, acc1, NUM_KV, D, BD, PAGE, KEYS, ONES)  # fmt: skip
                if block % BLOCKS == BLOCKS - 1:  # the span is complete
                    m, total, acc = _fold(m, total, acc, m1, tl.max(sums1, axis=1), acc1)
                    m1 = tl.full((BM,), float("-inf"), tl.float32)
        end = last // KEYS
        for block in range(start, end + 1):
            m1, sums1, acc1 = _block(query, pos, pages, cache_k, cache_v, first, last, block * KEYS, scale,
                                     m1, sums1, acc1, NUM_KV, D, BD, PAGE, WINDOW, KEYS, ONES)  # fmt: skip
            if (block % BLOCKS == BLOCKS - 1) | (block == end):
                m, total, acc = _fold(m, total, acc, m1, tl.max(sums1, axis=1), acc1)
                m1 = tl.full((BM,), float("-inf"), tl.float32)
        _finish(total, acc, out + here, inside)
    if WAIT == "last":
        tl.extra.cuda.gdc_wait()


class Walk:
    """Launches the kernels; holds the lists of a pass that has begun."""

    def __init__(self, early: bool) -> None:
        self.early = early  # kernels can be launched early on this device
        self._rows: Rows | None = None
        self._lists: dict[tuple[int, int], Tensor] = {}

    def begin(self, rows: Rows) -> None:
        self._rows, self._lists = rows, {}

    def _tiles(self, rows: Rows, low: int, high: int) -> Tensor:
        """Lists of low and high tiles [2, 1 + R]; made once if the pass over these rows was announced."""
        found = self._lists.get((low, high)) if rows is self._rows else None
        if found is None:
            count = len(rows.slots)
            found = torch.empty((2, 1 + count), dtype=torch.int32, device=rows.slots.device)
            tiles_kernel[(1,)](rows.slots, *found, count, LOW=low, HIGH=high, BLOCK=BLOCK, num_warps=8)
            if rows is self._rows:
                self._lists[low, high] = found
        return found

    def __call__(self, q: Tensor, rows: Rows, heads: Heads, cache: Tensor, out: Tensor, pdl: bool) -> None:
        count, group = len(q), heads.num_q // heads.num_kv
        width = max(16, power_of_two(heads.dim))
        wide = cache.dtype == torch.float32
        low = _shape(MIDDLE if 256 < count <= FEW else LOW, width, wide, group)
        if count <= FEW:
            tiles = self._tiles(rows, low.height // group, 0)
            _launch(low, tiles[0], count, q, rows, heads, cache, out, LEAD=pdl, WAIT="first" if pdl else "")
            return
        high = _shape(HIGH, width, wide, group)
        tiles = self._tiles(rows, low.height // group, high.height // group)
        programs = 2 * triton.cdiv(count, high.height // group)
        _launch(high, tiles[1], programs, q, rows, heads, cache, out, LEAD=self.early, WAIT="")
        programs, wait = min(count, len(rows.page_table)), "last" if self.early else ""
        _launch(low, tiles[0], programs, q, rows, heads, cache, out, LEAD=False, WAIT=wait)


def _shape(shapes: dict[int, Shape], width: int, wide: bool, group: int) -> Shape:
    shape = shapes.get(width, Shape(16, 4, 2))
    if wide:  # one thread an output: higher tiles would not fit its registers
        shape = Shape(16, 4 if width <= 128 else 8, 2)
    return shape._replace(height=max(shape.height, power_of_two(group)))


def _launch(
    shape: Shape, tiles: Tensor, programs: int, q: Tensor, rows: Rows, heads: Heads, cache: Tensor,
    out: Tensor, **when: Any,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages}
    if when["WAIT"]:
        options["launch_pdl"] = True
    if shape.registers and not INTERPRETED:
        options["maxnreg"] = shape.registers
    walk_kernel[(programs, heads.num_kv)](
        q, rows.slots, rows.positions, rows.page_table, cache, out, tiles,
        len(q), rows.page_table.shape[1], cache.stride(0), heads.scale * attention.LOG2_E,
        NUM_KV=heads.num_kv, GROUP=heads.num_q // heads.num_kv, D=heads.dim,
        BD=max(16, power_of_two(heads.dim)), BM=shape.height, PAGE=cache.shape[2], WINDOW=heads.window,
        KEYS=attention.KEYS, SPAN=attention.SPAN, ONES=attention.ONES, enable_fp_fusion=False, **when,
        **options,
    )  # fmt: skip
