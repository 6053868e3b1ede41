"""Attention over one split of keys on AMX tiles, for bf16; quantised keys are read by `fma` alone.

Scores: q [16, dim] times K, whose 16 x 16 pairs are transposed into tiles. Sums: weights times V, whose
keys are interleaved in pairs. The weights are given to the tiles as two bf16 terms (high and low), so
they keep 16 bits; the products are exact and the sums fp32, as in the other split.

A tile multiplies every key of a split with every row, with weight 0 where the row may not see the key.
That is exact only for finite values, so a NaN or infinity in V is taken out of the tiles, and a row that
does see it becomes NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof.ops.cpu.attention.fma import ARG, SPLIT, arg, clear, clip, first_key
from draftproof.ops.cpu.attention.kv import (
    FLOAT,
    copy_kv_bf16,
    key_stride,
    kv_offset,
    token_index,
)
from draftproof.ops.cpu.gemm.microkernel import COLUMNS, transpose
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.amx import TILE_BYTES, tiles_dot, tiles_dot_pair
from draftproof.ops.cpu.jit.compile import device, f64_of_bits, inlined, load_i64, store_f32, store_i64

_ZERO, _LOWEST, _NAN = np.float32(0.0), np.float32(-3.0e38), np.float32(np.nan)
_UPPER = 0xFFFF0000
_EXPONENT = 0x7F80  # exponent bits of a bf16; all ones in NaN and infinity


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
def _pack_keys(args: int, places: int, keys: int, padded: int, lines: int, packed: int) -> None:
    """Write packed [keys / 64, padded / 32, 4]: tiles of 16 pairs x 16 keys."""
    dim, cache = arg(args, ARG.dim), arg(args, ARG.cache)
    for block in range(0, keys, 64):
        for key in range(block, min(block + 64, keys)):
            copy_kv_bf16(lines + (key - block) * padded * 2, cache + load_i64(places + 8 * key), dim)
        to = packed + block * padded * 2
        for step in range(padded // 32):
            for tile in range(4):
                src = lines + tile * 16 * padded * 2 + step * 64
                transpose(src, padded * 2, to, 64)
                to += TILE_BYTES


@inlined
def _bits(address: int, count: int) -> Any:
    if count >= 16:
        return v.iload_u16(address)
    return v.iload_u16_n(address, count)


@device
def _pack_values(args: int, places: int, keys: int, wide: int, packed: int, flags: int) -> bool:
    """Write packed [wide / 64, keys / 32, 4]: tiles of 16 pairs of keys x 16 columns, then zeros.

    Values that are not finite are packed as 0, and `flags` [keys] int64 is 1 at their keys; returns
    whether there are any (if not, the flags are not written).
    """
    dim, cache = arg(args, ARG.dim), arg(args, ARG.values)
    steps = (keys + 31) // 32
    any_bad = False
    exponents, none = v.isplat(_EXPONENT), v.isplat(0)
    for key in range(0, 32 * steps, 2):
        even = cache + load_i64(places + 8 * min(key, keys - 1))
        odd = cache + load_i64(places + 8 * min(key + 1, keys - 1))
        even_dim = dim if key < keys else 0
        odd_dim = dim if key + 1 < keys else 0
        line = packed + (key // 32) * 4 * TILE_BYTES + key % 32 * 32
        for d in range(0, wide, 16):
            a = _bits(even + 2 * d, even_dim - d)
            b = _bits(odd + 2 * d, odd_dim - d)
            a_bad, b_bad = v.ieq(v.iand(a, exponents), exponents), v.ieq(v.iand(b, exponents), exponents)
            if v.mask_bits(v.mask_or(a_bad, b_bad)) != 0:
                if not any_bad:
                    any_bad = True
                    for i in range(SPLIT):
                        store_i64(flags + 8 * i, 0)
                if v.mask_bits(a_bad) != 0:
                    store_i64(flags + 8 * key, 1)
                if v.mask_bits(b_bad) != 0:
                    store_i64(flags + 8 * (key + 1), 1)
                a, b = v.iselect(a_bad, none, a), v.iselect(b_bad, none, b)
            to = line + (d // 64 * steps * 4 + d % 64 // 16) * TILE_BYTES
            v.istore(to, v.ior(a, v.ishl(b, v.isplat(16))))
    return any_bad


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
    scores = qs + tall * padded * 2  # [tall, SPLIT] fp32
    high = scores + tall * SPLIT * 4  # [tall, SPLIT] bf16: weights
    low = high + tall * SPLIT * 2  # [tall, SPLIT] bf16: the remainder after `high`
    sums = low + tall * SPLIT * 2  # [tall, wide] fp32
    packed = sums + tall * wide * 4  # tiles of K, then of V
    lines = packed + SPLIT * wide * 2  # [64, padded] bf16
    places = lines + 64 * wide * 2  # [SPLIT] int64
    flags = places + SPLIT * 8  # [SPLIT] int64

    lowest, highest = split + SPLIT, split
    for row in range(rows):
        position = load_i64(positions + 8 * row)
        lowest = min(lowest, max(split, first_key(position, window)))
        highest = max(highest, min(split + SPLIT, position + 1))
    lowest = lowest // 64 * 64
    if highest <= lowest:
        for i in range(queries):
            clear(part + i * wide * 4, part_state + 8 * i, wide)
        return
    if padded > dim:  # padding must be 0: 0 * NaN is not 0
        for at in range(qs, scores, 64):
            v.store(at, v.splat(_ZERO))
        for at in range(lines, lines + 64 * padded * 2, 64):
            v.store(at, v.splat(_ZERO))
    for i in range(queries):
        src = arg(args, ARG.q) + ((first + i // group) * num_q + head * group + i % group) * dim * 2
        v.copy_bf16(qs + i * padded * 2, src, dim)

    _find_keys(args, slot, head, lowest, highest, places)
    _pack_keys(args, places, highest - lowest, padded, lines, packed)
    for block in range(lowest, highest, 64):
        tiles = packed + (block - lowest) // 64 * (padded // 32) * 4 * TILE_BYTES
        for i in range(0, tall, 16):
            to = scores + (i * SPLIT + block - split) * 4
            tiles_dot(qs + i * padded * 2, 0, padded * 2, tiles, padded // 32, to, SPLIT * 4)
    keys = (highest - lowest + 31) // 32 * 32
    at = lowest - split
    for i in range(queries):
        position = load_i64(positions + 8 * (i // group))
        begin = clip(first_key(position, window), lowest, highest) - lowest
        end = clip(position + 1, lowest, highest) - lowest
        line = i * SPLIT + at
        top, mass = _softmax(scores + line * 4, high + line * 2, low + line * 2, begin, end, keys, scale)
        store_f32(part_state + 8 * i, top)
        store_f32(part_state + 8 * i + 4, mass)

    any_bad = _pack_values(args, places, highest - lowest, wide, packed, flags)
    for i in range(0, tall, 16):
        line = (i * SPLIT + at) * 2
        for d in range(0, wide, 64):
            tiles = packed + d // 64 * (keys // 32) * 4 * TILE_BYTES
            to = sums + (i * wide + d) * 4
            tiles_dot_pair(high + line, low + line, SPLIT * 2, tiles, keys // 32, to, wide * 4)
    for i in range(queries):
        position = load_i64(positions + 8 * (i // group))
        sees_bad = False
        if any_bad:
            begin = clip(first_key(position, window), lowest, highest) - lowest
            end = clip(position + 1, lowest, highest) - lowest
            for key in range(begin, end):
                sees_bad |= load_i64(flags + 8 * key) != 0
        if sees_bad:
            for d in range(0, wide, 16):
                v.store(part + (i * wide + d) * 4, v.splat(_NAN))
        else:
            for d in range(0, wide, 16):
                v.store(part + (i * wide + d) * 4, v.load(sums + (i * wide + d) * 4))
