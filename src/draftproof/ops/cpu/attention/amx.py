"""Attention over one split of keys on AMX tiles, for bf16; quantised keys are read by `fma` alone.

Scores: 16 keys, loaded as tiles from where they are stored, times the queries, which are transposed once;
then a transpose gives a line of scores to each query. Sums: weights times V, whose keys are interleaved in
pairs. The weights are given to the tiles as two bf16 terms (high and low), so they keep 16 bits; the products
are exact and the sums fp32, as in the other split.

A tile multiplies every key of a split with every row, with weight 0 where the row may not see the key.
That is exact only for finite values, so a NaN or infinity in V is taken out of the tiles, and a row that
does see it becomes NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof.ops.cpu.attention.amx_value_tiles import PAIRED_KEYS, clear_values, pack_values
from draftproof.ops.cpu.attention.arguments import ARG, arg
from draftproof.ops.cpu.attention.fma import SPLIT_KEYS, clear, clip, first_key
from draftproof.ops.cpu.attention.kv import (
    FLOAT,
    copy_kv_bf16,
    key_stride,
    kv_offset,
    token_index,
)
from draftproof.ops.cpu.gemm.microkernel import COLUMNS, transpose, transpose_few
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.amx import TILE_BYTES, tiles_dot_keys, tiles_dot_values
from draftproof.ops.cpu.jit.compile import (
    device,
    f64_of_bits,
    load_i64,
    prefetch,
    store_f32,
    store_i64,
)

_ZERO, _LOWEST, _NAN = np.float32(0.0), np.float32(-3.0e38), np.float32(np.nan)
_UPPER = 0xFFFF0000
TILE_KEYS = 16  # keys, or queries, of a tile
PREFETCH_KEYS = 32  # distance at which K is prefetched
FEW_QUERIES = 4  # queries whose scores are transposed without the rest of the tile


@device
def _find_keys(args: int, slot: int, head: int, start: int, end: int, places: int) -> None:
    """Write places [end - start] int64: offsets in bytes of the head's vectors in a plane of the cache."""
    page_size, max_pages = arg(args, ARG.page_size), arg(args, ARG.max_pages)
    num_kv, dim = arg(args, ARG.num_kv), arg(args, ARG.dim)
    pages = arg(args, ARG.page_table) + slot * max_pages * 4
    key = start
    while key < end:
        index = token_index(pages, key, page_size, arg(args, ARG.num_pages))
        place = kv_offset(index, head, page_size, num_kv, dim, 2, FLOAT)
        stop = (key // page_size + 1) * page_size
        for i in range(key, min(end, stop)):
            store_i64(places + 8 * (i - start), place)
            place += key_stride(num_kv, dim, 2)
        key = stop


@device
def _dot_keys(
    args: int, places: int, keys: int, queries: int, padded: int, packed: int, c: int, lines: int, scores: int
) -> None:
    """Write scores [queries, SPLIT_KEYS] of `keys` keys, 16 at a time; packed: tiles of the queries.

    Keys are read where they are stored if 16 of them are on one page and fill whole tiles.
    """
    dim, cache = arg(args, ARG.dim), arg(args, ARG.cache)
    stride, in_place = key_stride(arg(args, ARG.num_kv), dim, 2), padded == dim
    if arg(args, ARG.page_size) % TILE_KEYS != 0:
        in_place = False
    values = arg(args, ARG.values)
    for first in range(0, keys, TILE_KEYS):
        ahead = first + PREFETCH_KEYS
        for key in range(ahead, min(ahead + TILE_KEYS, keys)):
            for line in range(0, 2 * dim, 64):
                prefetch(cache + load_i64(places + 8 * key) + line)
        for key in range(first, min(first + TILE_KEYS, keys)):
            for line in range(0, 2 * dim, 64):
                prefetch(values + load_i64(places + 8 * key) + line)
        if in_place:
            rows, row_bytes = cache + load_i64(places + 8 * first), stride
        else:
            rows, row_bytes = lines, 2 * padded
            for key in range(first, min(first + TILE_KEYS, keys)):
                copy_kv_bf16(lines + (key - first) * 2 * padded, cache + load_i64(places + 8 * key), dim)
        for query in range(0, queries, TILE_KEYS):
            tiles = packed + query * 2 * padded
            tiles_dot_keys(rows, row_bytes, tiles, padded // 32, c)
            to = scores + 4 * (query * SPLIT_KEYS + first)
            if queries - query <= FEW_QUERIES:
                transpose_few(c, 64, to, 4 * SPLIT_KEYS)
            else:
                transpose(c, 64, to, 4 * SPLIT_KEYS)


@device
def _softmax(scores: int, high: int, low: int, begin: int, end: int, keys: int, scale: Any) -> Any:
    """Write the weights exp(scale * score - max) of keys [begin, end) and return (max, sum).

    Weights are split into bf16 `high` + `low` [keys], with zeros elsewhere.
    """
    best = v.splat(_LOWEST)
    for i in range(begin // 16 * 16, end, 16):
        x = v.mul(v.load(scores + 4 * i), scale)
        if i < begin or i + 16 > end:
            valid = v.mask_and(v.mask_first(end - i), v.mask_not_first(begin - i))
            x = v.select(valid, x, v.splat(_LOWEST))
        best = v.maximum(x, best)
    top = v.max_lane(best)
    total, none = v.splat(_ZERO), v.isplat(0)
    for i in range(0, keys, 16):
        if i >= end or i + 16 <= begin:
            v.istore_high(high + 2 * i, none)
            v.istore_high(low + 2 * i, none)
            continue
        weight = v.exp(v.sub(v.mul(v.load(scores + 4 * i), scale), v.splat(top)))
        if i < begin or i + 16 > end:
            valid = v.mask_and(v.mask_first(end - i), v.mask_not_first(begin - i))
            weight = v.select(valid, weight, v.splat(_ZERO))
        total = v.add(total, weight)
        upper = v.iand(v.as_int(weight), v.isplat(_UPPER))  # the first 8 bits; `low` has the next 8, rounded
        v.istore_high(high + 2 * i, upper)
        rest = v.sub(weight, v.as_float(upper))
        v.istore_high(low + 2 * i, v.iadd(v.as_int(rest), v.isplat(0x8000)))
    return top, v.sum_lanes(total)


@device
def split_amx(
    args: int, first: int, rows: int, head: int, slot: int, split: int, part: int, scratch: int
) -> None:
    """Write the sums and then the states of one split and one kv head, for adjacent rows of a request."""
    num_q, dim, window = arg(args, ARG.num_q), arg(args, ARG.dim), arg(args, ARG.window)
    positions = arg(args, ARG.positions) + 8 * first
    scale = v.splat(np.float32(f64_of_bits(arg(args, ARG.scale))))
    group = num_q // arg(args, ARG.num_kv)
    queries = rows * group
    tall = (queries + 15) // 16 * 16
    padded = (dim + 31) // 32 * 32
    wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    part_state = part + queries * wide * 4

    scratch = (scratch + 63) // 64 * 64
    qs = scratch  # [tall, padded] bf16
    query_tiles = qs + tall * padded * 2  # [tall / 16, padded / 32]: tiles of 16 pairs x 16 queries
    scores = query_tiles + tall * padded * 2  # [tall, SPLIT_KEYS] fp32
    high = scores + tall * SPLIT_KEYS * 4  # [tall, SPLIT_KEYS] bf16: weights
    low = high + tall * SPLIT_KEYS * 2  # [tall, SPLIT_KEYS] bf16: the remainder after `high`
    sums = low + tall * SPLIT_KEYS * 2  # [tall, wide] fp32
    packed = sums + tall * wide * 4  # tiles of V
    lines = packed + SPLIT_KEYS * wide * 2  # [16, padded] bf16: keys
    places = lines + TILE_KEYS * wide * 2  # [SPLIT_KEYS] int64
    flags = places + SPLIT_KEYS * 8  # [SPLIT_KEYS] int64
    c = flags + SPLIT_KEYS * 8  # [16, 16] fp32: scores of a tile

    lowest, highest = split + SPLIT_KEYS, split
    for row in range(rows):
        position = load_i64(positions + 8 * row)
        lowest = min(lowest, max(split, first_key(position, window)))
        highest = max(highest, min(split + SPLIT_KEYS, position + 1))
    lowest = lowest // PAIRED_KEYS * PAIRED_KEYS  # tiles of V begin at the same keys for every row
    if highest <= lowest:
        for i in range(queries):
            clear(part + i * wide * 4, part_state + 8 * i, wide)
        return
    if padded > dim:  # padding must be 0: 0 * NaN is not 0
        for at in range(qs, query_tiles, 64):
            v.store(at, v.splat(_ZERO))
        for at in range(lines, lines + TILE_KEYS * padded * 2, 64):
            v.store(at, v.splat(_ZERO))
    for i in range(queries):
        src = arg(args, ARG.q) + ((first + i // group) * num_q + head * group + i % group) * dim * 2
        v.copy_bf16(qs + i * padded * 2, src, dim)
    for i in range(0, tall, TILE_KEYS):
        line, tiles = qs + i * padded * 2, query_tiles + i * padded * 2
        for step in range(padded // 32):
            transpose(line + 64 * step, padded * 2, tiles + TILE_BYTES * step, 64)

    _find_keys(args, slot, head, lowest, highest, places)
    at = lowest - split
    _dot_keys(args, places, highest - lowest, queries, padded, query_tiles, c, lines, scores + 4 * at)
    keys = (highest - lowest + 31) // 32 * 32
    for i in range(queries):
        position = load_i64(positions + 8 * (i // group))
        begin = clip(first_key(position, window), lowest, highest) - lowest
        end = clip(position + 1, lowest, highest) - lowest
        line = i * SPLIT_KEYS + at
        top, mass = _softmax(scores + line * 4, high + line * 2, low + line * 2, begin, end, keys, scale)
        store_f32(part_state + 8 * i, top)
        store_f32(part_state + 8 * i + 4, mass)

    any_bad = pack_values(args, places, highest - lowest, wide, packed)
    if any_bad:
        clear_values(args, places, highest - lowest, packed, flags)
    for i in range(0, tall, 16):
        line = (i * SPLIT_KEYS + at) * 2
        for d in range(0, wide, 64):
            tiles = packed + d // 64 * (keys // 32) * 4 * TILE_BYTES
            to = sums + (i * wide + d) * 4
            tiles_dot_values(high + line, low + line, SPLIT_KEYS * 2, tiles, keys // 32, to, wide * 4)
    for i in range(queries):
        position = load_i64(positions + 8 * (i // group))
        sees_bad = False
        if any_bad:
            begin = clip(first_key(position, window), lowest, highest) - lowest
            end = clip(position + 1, lowest, highest) - lowest
            for key in range(begin, end):
                sees_bad |= load_i64(flags + 8 * key) != 0
        for d in range(0, wide, 32):
            to, line = part + (i * wide + d) * 4, sums + (i * wide + d) * 4
            if sees_bad:
                v.store(to, v.splat(_NAN))
                v.store(to + 64, v.splat(_NAN))
            else:
                even, odd = v.load(line), v.load(line + 64)
                v.store(to, v.quarters_low(even, odd))
                v.store(to + 64, v.quarters_high(even, odd))
