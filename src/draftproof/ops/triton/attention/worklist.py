"""Work lists of attention tiles, built on the device once per forward pass.

With a program per row most programs would find no tile. Tiles with many keys start first, and few tiles may
be divided into chunks of spans: memory bandwidth is shared evenly, so the longest tile would finish long
after the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import Rows
from draftproof.ops.triton.attention import splitkv
from draftproof.ops.triton.kernel_utils import next_power_of_two

LIST_ALIGNMENT = 16  # elements: the compiler distinguishes addresses by their alignment
BLOCK = 1024  # rows of one step of the kernel for short and tall tiles
MAX_CHUNKS = 8  # of a tile
MIN_EVEN_SPANS = 16  # of the longest tile: 2,048 tokens; 16 rows of that length 53 to 37 µs
# Whole tiles reach the memory bandwidth, chunks three quarters of it (H200, 16 rows at 16,384 tokens). So
# whole tiles are faster while an SM has at most 5/4 of the average number of spans.
MAX_UNEVEN_NUMERATOR, MAX_UNEVEN_DENOMINATOR = 5, 4


@triton.jit
def _maximum(a, b):
    """Return the maximum, for a scan."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["R", "chunk"])
def chunk_list_kernel(
    slots, positions, out, R, chunk,
    SHORT: tl.constexpr, BLOCK: tl.constexpr, MAX_CHUNKS: tl.constexpr, WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Store out [1 + R * MAX_CHUNKS]: the count, then row * MAX_CHUNKS + chunk of each, most keys last.

    Requires R <= BLOCK. The rows of a slot are divided into tiles of SHORT rows, and these into chunks of
    `chunk` spans (MAX_CHUNKS 1: no chunks).
    """
    row = tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < R, other=-1)
    previous_slot = tl.load(slots + row - 1, mask=(row < R) & (row > 0), other=-2)
    first = tl.associative_scan(tl.where(slot != previous_slot, row, 0), 0, _maximum)
    starts_tile = (slot >= 0) & ((row - first) % SHORT == 0)
    position = tl.load(positions + row, mask=row < R, other=0).to(tl.int32)
    last = position
    for i in tl.static_range(1, SHORT):
        same = tl.load(slots + row + i, mask=row + i < R, other=-2) == slot
        last = tl.maximum(last, tl.load(positions + row + i, mask=same & (row + i < R), other=0).to(tl.int32))
    start = tl.maximum(position - WINDOW + 1, 0) // SPAN * SPAN if WINDOW else position * 0
    chunk_index = tl.arange(0, MAX_CHUNKS)
    # [BLOCK, chunks]: keys from this chunk on
    keys = (last + 1 - start)[:, None] - chunk_index[None, :] * (chunk * SPAN)
    exists = starts_tile[:, None] & (keys > 0)
    if MAX_CHUNKS > 1:
        keys = tl.minimum(keys, chunk * SPAN)
    keys = tl.minimum(keys, (1 << 31) // (BLOCK * MAX_CHUNKS) - 1)  # keep the sort key within int32
    sort_key = keys * (BLOCK * MAX_CHUNKS) + row[:, None] * MAX_CHUNKS + chunk_index[None, :]
    sort_key = tl.where(exists, sort_key, -1)
    sort_key = tl.sort(tl.reshape(sort_key, (BLOCK * MAX_CHUNKS,)))
    count = tl.sum(tl.sum(exists.to(tl.int32), axis=1), axis=0)
    place = tl.arange(0, BLOCK * MAX_CHUNKS) - (BLOCK * MAX_CHUNKS - count)
    tl.store(out + 1 + place, sort_key % (BLOCK * MAX_CHUNKS), mask=place >= 0)
    tl.store(out, count)


@triton.jit(do_not_specialize=["R"])
def tile_lists_kernel(slots, short, tall, R, SHORT: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr):
    """Store the lists short, tall [1 + R]: the number of tiles, then their first rows.

    The rows of a slot are divided every TALL rows; a tile of at most SHORT rows goes to the list `short`.
    """
    num_short = tl.zeros((), tl.int32)
    num_tall = tl.zeros((), tl.int32)
    segment = tl.zeros((), tl.int32)  # first row of the last slot of the previous block
    for start in range(0, R, BLOCK):
        row = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + row, mask=row < R, other=-1)
        previous_slot = tl.load(slots + row - 1, mask=(row < R) & (row > 0), other=-2)
        first = tl.where(slot != previous_slot, row, 0)
        first = tl.maximum(tl.associative_scan(first, 0, _maximum), segment)
        segment = tl.max(first, axis=0)
        starts_tile = (slot >= 0) & ((row - first) % TALL == 0)
        slot_after = tl.load(slots + row + SHORT, mask=row + SHORT < R, other=-2)
        is_tall = starts_tile & (slot_after == slot)
        place = num_tall + tl.cumsum(is_tall.to(tl.int32), axis=0)  # from 1
        tl.store(tall + place, row, mask=is_tall)
        num_tall += tl.sum(is_tall.to(tl.int32), axis=0)
        is_short = starts_tile & (slot_after != slot)
        place = num_short + tl.cumsum(is_short.to(tl.int32), axis=0)
        tl.store(short + place, row, mask=is_short)
        num_short += tl.sum(is_short.to(tl.int32), axis=0)
    tl.store(short, num_short)
    tl.store(tall, num_tall)


@triton.jit(do_not_specialize=["per_wave"])
def choose_list_kernel(
    positions, even, others, per_wave,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, MIN_SPANS: tl.constexpr, NUMERATOR: tl.constexpr,
    DENOMINATOR: tl.constexpr, ONE_WAVE: tl.constexpr,
):  # fmt: skip
    """Empty the list `others` if the tiles of `even` are long and even, otherwise `even`.

    `per_wave` tiles run at the same time; ONE_WAVE: more tiles are not chosen. Both lists hold the same rows,
    at most BLOCK.
    """
    count = tl.load(even)
    i = tl.arange(0, BLOCK)
    row = tl.load(even + 1 + i, mask=i < count, other=0)
    position = tl.load(positions + row, mask=i < count, other=0).to(tl.int32)
    spans = tl.where(i < count, position // SPAN + 1, 0)
    longest = tl.max(spans, axis=0)
    places_of_waves = tl.cdiv(count, per_wave) * per_wave
    is_even = places_of_waves * longest * DENOMINATOR <= tl.sum(spans, axis=0) * NUMERATOR
    is_chosen = is_even & (longest >= MIN_SPANS)
    if ONE_WAVE:
        is_chosen = is_chosen & (count <= per_wave)
    tl.store(even, 0, mask=is_chosen == 0)
    tl.store(others, 0, mask=is_chosen)


class WorkLists:
    """Cache of the lists of the current forward pass; lists of other rows are rebuilt every time."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._lists: dict[tuple[int, ...], Tensor] = {}

    def begin(self, rows: Rows) -> None:
        """Start a forward pass over `rows`."""
        self._rows, self._lists = rows, {}

    def _list(self, rows: Rows, key: tuple[int, ...], size: tuple[int, ...]) -> tuple[Tensor, bool]:
        """Return the list of a key, and whether it is new."""
        tiles = self._lists.get(key) if rows is self._rows else None
        if tiles is not None:
            return tiles, False
        tiles = torch.empty(size, dtype=torch.int32, device=rows.slots.device)
        if rows is self._rows:
            self._lists[key] = tiles
        return tiles, True

    def by_keys(self, rows: Rows, short: int, chunk: int, window: int) -> Tensor:
        """Return the list of tiles of `short` rows in chunks of `chunk` spans; 0: whole tiles."""
        count, chunks = len(rows.slots), MAX_CHUNKS if chunk else 1
        tiles, is_new = self._list(rows, (short, chunk, window), (1 + count * chunks,))
        if is_new:
            _store_by_keys(rows, tiles, short, chunk, window)
        return tiles

    def even_or_others(self, rows: Rows, even: int, short: int, chunk: int, per_wave: int) -> Tensor:
        """Return a list of whole tiles of `even` rows and the list of `by_keys`; one of them is empty.

        If `by_keys` has whole tiles too, several of them per SM, `even` has one wave of tiles at most.
        """
        count, chunks = len(rows.slots), MAX_CHUNKS if chunk else 1
        size = triton.cdiv(1 + count * chunks, LIST_ALIGNMENT) * LIST_ALIGNMENT
        tiles, is_new = self._list(rows, (even, short, chunk, per_wave), (2, size))
        if is_new:
            _store_by_keys(rows, tiles[0], even, 0, 0)
            _store_by_keys(rows, tiles[1], short, chunk, 0)
            choose_list_kernel[(1,)](
                rows.positions, tiles[0], tiles[1], per_wave, BLOCK=max(16, next_power_of_two(count)),
                SPAN=splitkv.SPAN, MIN_SPANS=MIN_EVEN_SPANS, NUMERATOR=MAX_UNEVEN_NUMERATOR,
                DENOMINATOR=MAX_UNEVEN_DENOMINATOR, ONE_WAVE=chunk == 0, num_warps=1,
            )  # fmt: skip
        return tiles

    def short_and_tall(self, rows: Rows, short: int, tall: int) -> Tensor:
        """Return the lists of short and tall tiles [2, 1 + R]."""
        count = len(rows.slots)
        tiles, is_new = self._list(rows, (short, tall), (2, 1 + count))
        if is_new:
            tile_lists_kernel[(1,)](
                rows.slots, *tiles, count, SHORT=short, TALL=tall, BLOCK=BLOCK, num_warps=8
            )
        return tiles


def _store_by_keys(rows: Rows, tiles: Tensor, short: int, chunk: int, window: int) -> None:
    """Launch `chunk_list_kernel`; chunk 0: whole tiles."""
    count = len(rows.slots)
    chunk_list_kernel[(1,)](
        rows.slots, rows.positions, tiles, count, chunk,
        SHORT=short, BLOCK=max(16, next_power_of_two(count)), MAX_CHUNKS=MAX_CHUNKS if chunk else 1,
        WINDOW=window, SPAN=splitkv.SPAN, num_warps=8,
    )  # fmt: skip
