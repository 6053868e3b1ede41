"""Lists of attention's tiles, made once a pass on the device.

A program for every row would spend its time finding out that it has nothing to do. Tiles that see many keys
start first, and where there are few of them they may be cut into chunks of spans: programs share the memory
evenly, so that the longest tile would end long after the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import Rows
from draftproof.ops.triton.attention import splitkv
from draftproof.ops.triton.runtime import next_power_of_two

BLOCK = 1024  # rows that the lists of high and low tiles are made from at a time
CHUNKS = 8  # of a tile, at most


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["R", "chunk"])
def by_keys_kernel(
    slots, positions, out, R, chunk,
    LOW: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """out [1 + R * CHUNKS]: how many chunks, then row * CHUNKS + chunk of each; most keys last. R <= BLOCK.

    A slot's rows are cut every LOW rows into tiles, and those every `chunk` spans of their keys (CHUNKS 1:
    not at all).
    """
    row = tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < R, other=-1)
    before = tl.load(slots + row - 1, mask=(row < R) & (row > 0), other=-2)
    first = tl.associative_scan(tl.where(slot != before, row, 0), 0, _larger)
    starts = (slot >= 0) & ((row - first) % LOW == 0)
    lowest = tl.load(positions + row, mask=row < R, other=0).to(tl.int32)
    last = lowest
    for i in tl.static_range(1, LOW):
        same = tl.load(slots + row + i, mask=row + i < R, other=-2) == slot
        last = tl.maximum(last, tl.load(positions + row + i, mask=same & (row + i < R), other=0).to(tl.int32))
    start = tl.maximum(lowest - WINDOW + 1, 0) // SPAN * SPAN if WINDOW else lowest * 0
    part = tl.arange(0, CHUNKS)
    keys = (last + 1 - start)[:, None] - part[None, :] * (chunk * SPAN)  # [BLOCK, CHUNKS] from this chunk on
    there = starts[:, None] & (keys > 0)
    if CHUNKS > 1:
        keys = tl.minimum(keys, chunk * SPAN)
    keys = tl.minimum(keys, (1 << 31) // (BLOCK * CHUNKS) - 1)  # more than anybody has
    order = tl.where(there, keys * (BLOCK * CHUNKS) + row[:, None] * CHUNKS + part[None, :], -1)
    order = tl.sort(tl.reshape(order, (BLOCK * CHUNKS,)))
    count = tl.sum(tl.sum(there.to(tl.int32), axis=1), axis=0)
    place = tl.arange(0, BLOCK * CHUNKS) - (BLOCK * CHUNKS - count)
    tl.store(out + 1 + place, order % (BLOCK * CHUNKS), mask=place >= 0)
    tl.store(out, count)


@triton.jit(do_not_specialize=["R"])
def low_and_high_kernel(slots, low, high, R, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """low, high [1 + R]: how many tiles, then their first rows.

    A slot's rows are cut every HIGH rows; what is left goes to `low` if it is at most LOW rows.
    """
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
        starts = (slot >= 0) & ((row - first) % HIGH == 0)
        further = tl.load(slots + row + LOW, mask=row + LOW < R, other=-2)
        tall = starts & (further == slot)
        place = highs + tl.cumsum(tall.to(tl.int32), axis=0)  # from 1 on
        tl.store(high + place, row, mask=tall)
        highs += tl.sum(tall.to(tl.int32), axis=0)
        short = starts & (further != slot)
        place = lows + tl.cumsum(short.to(tl.int32), axis=0)
        tl.store(low + place, row, mask=short)
        lows += tl.sum(short.to(tl.int32), axis=0)
    tl.store(low, lows)
    tl.store(high, highs)


class TileLists:
    """The lists of a pass that was announced; of other rows they are made anew every time."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._found: dict[tuple[int, ...], Tensor] = {}

    def begin(self, rows: Rows) -> None:
        self._rows, self._found = rows, {}

    def _list(self, rows: Rows, key: tuple[int, ...], size: tuple[int, ...]) -> tuple[Tensor, bool]:
        """The list with that key, and whether it is new."""
        found = self._found.get(key) if rows is self._rows else None
        if found is not None:
            return found, False
        found = torch.empty(size, dtype=torch.int32, device=rows.slots.device)
        if rows is self._rows:
            self._found[key] = found
        return found, True

    def by_keys(self, rows: Rows, low: int, chunk: int, window: int) -> Tensor:
        """The list of tiles of `low` rows in chunks of that many spans, or, if 0, in one."""
        count, chunks = len(rows.slots), CHUNKS if chunk else 1
        found, new = self._list(rows, (low, chunk, window), (1 + count * chunks,))
        if new:
            by_keys_kernel[(1,)](
                rows.slots, rows.positions, found, count, chunk,
                LOW=low, BLOCK=max(16, next_power_of_two(count)), CHUNKS=chunks, WINDOW=window,
                SPAN=splitkv.SPAN, num_warps=8,
            )  # fmt: skip
        return found

    def low_and_high(self, rows: Rows, low: int, high: int) -> Tensor:
        """Lists of low and high tiles [2, 1 + R]."""
        count = len(rows.slots)
        found, new = self._list(rows, (low, high), (2, 1 + count))
        if new:
            low_and_high_kernel[(1,)](rows.slots, *found, count, LOW=low, HIGH=high, BLOCK=BLOCK, num_warps=8)
        return found
