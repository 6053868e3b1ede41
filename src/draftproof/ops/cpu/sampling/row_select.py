"""Selection in one row of fp32 logits: argmax, k-th value, nucleus; vector passes, no full sort.

The order is (value down, id up) throughout. A k-th value is found by bisection over the bits of a
float: at most 32 passes that only count, whatever the data, ties included. NaN compares false.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import (
    bits_of_f32,
    device,
    f32_of_bits,
    inlined,
    load_f32,
    load_i32,
    load_i64,
    store_i64,
)

MINUS_INF = np.float32(-np.inf)


@inlined
def lload(row: int, i: int, vocab: int) -> Any:
    """Load 16 logits from id i on; -inf after the last."""
    if vocab - i >= 16:
        return v.load(row + 4 * i)
    return v.select(v.mask_first(vocab - i), v.load_n(row + 4 * i, vocab - i), v.splat(MINUS_INF))


@device
def best_id(row: int, vocab: int, scratch: int) -> int:
    """Return the lowest id with the greatest value."""
    best, ids = v.splat(MINUS_INF), v.isplat(0)
    at, step = v.iadd(v.isplat(0), v.isplat(0)), v.isplat(1)
    for i in range(0, vocab, 16):
        x = lload(row, i, vocab)
        better = v.gt(x, best)
        best = v.select(better, x, best)
        ids = v.iselect(better, at, ids)
        at = v.iadd(at, step)
    v.store(scratch, best)
    v.istore(scratch + 64, ids)
    top, found = MINUS_INF, np.int64(0)
    for lane in range(16):
        value = load_f32(scratch + 4 * lane)
        token = load_i32(scratch + 64 + 4 * lane) * 16 + lane
        if value > top or (value == top and value > MINUS_INF and token < found):
            top, found = value, token
    return found


@device
def best_value(row: int, vocab: int) -> Any:
    best = v.splat(MINUS_INF)
    for i in range(0, vocab, 16):
        best = v.maximum(lload(row, i, vocab), best)
    return v.max_lane(best)


@device
def count_from(row: int, vocab: int, limit: Any) -> int:
    """Count the values that are at least `limit`."""
    count, bound = np.int64(0), v.splat(limit)
    for i in range(0, vocab, 16):
        valid = v.mask_bits(v.ge(lload(row, i, vocab), bound))
        if vocab - i < 16:
            valid &= (1 << (vocab - i)) - 1
        count += v.count_ones(valid)
    return count


@device
def count_above(row: int, vocab: int, limit: Any) -> int:
    """Count the values greater than `limit`."""
    count, bound = np.int64(0), v.splat(limit)
    for i in range(0, vocab, 16):
        count += v.count_ones(v.mask_bits(v.gt(lload(row, i, vocab), bound)))
    return count


@inlined
def key_of(x: Any) -> int:
    """Return an integer that orders like the float (-0 just below +0)."""
    bits = bits_of_f32(x)
    if bits >= 0x80000000:
        return 0x7FFFFFFF - bits
    return bits


@inlined
def value_of(key: int) -> Any:
    if key < 0:
        return f32_of_bits(0x7FFFFFFF - key)
    return f32_of_bits(key)


@device
def kth_value(row: int, vocab: int, k: int) -> Any:
    """Return the greatest value that at least k values reach; -inf if NaN leaves fewer."""
    low, high = key_of(MINUS_INF), key_of(best_value(row, vocab)) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if count_from(row, vocab, value_of(middle)) >= k:
            low = middle
        else:
            high = middle
    return value_of(low)


@device
def mass_above(row: int, masses: int, vocab: int, limit: Any) -> float:
    """Sum the masses [vocab] of the ids whose value is greater than `limit`."""
    total, bound = v.dzero(0), v.splat(limit)
    for i in range(0, vocab, 16):
        mass = v.to_double(v.load(masses + 4 * i))
        total = v.dadd(total, v.dselect(v.gt(lload(row, i, vocab), bound), mass, v.dzero(0)))
    return v.dsum_lanes(total)


@device
def nucleus_value(row: int, masses: int, vocab: int, enough: float) -> Any:
    """Return the smallest value with less than `enough` mass above it."""
    low, high = key_of(MINUS_INF) - 1, key_of(best_value(row, vocab))
    while high - low > 1:
        middle = (low + high) >> 1
        if mass_above(row, masses, vocab, value_of(middle)) < enough:
            high = middle
        else:
            low = middle
    return value_of(high)


@device
def gather_above(row: int, vocab: int, limit: Any, keys: int) -> int:
    """Write the sort keys [n] int64 of the values greater than `limit`, in order of id, and return n.

    Sorted keys are in the order (value down, id up).
    """
    count, bound = np.int64(0), v.splat(limit)
    for i in range(0, vocab, 16):
        bits = v.mask_bits(v.gt(lload(row, i, vocab), bound))
        while bits != 0:
            token = i + v.first_one(bits)
            # adding 0 makes -0 into +0: equal values must have equal keys
            value = load_f32(row + 4 * token) + np.float32(0.0)
            store_i64(keys + 8 * count, (0x7FFFFFFF - key_of(value)) << 31 | token)
            count += 1
            bits &= bits - 1
    return count


@device
def sort(keys: int, spare: int, count: int) -> int:
    """Merge-sort int64 keys; return the address of the sorted ones, `keys` or `spare`."""
    run = 1
    while run < count:
        for start in range(0, count, 2 * run):
            left, left_end = start, min(start + run, count)
            right, right_end = left_end, min(start + 2 * run, count)
            for out in range(start, right_end):
                take_left = left < left_end
                if take_left and right < right_end:
                    take_left = load_i64(keys + 8 * left) <= load_i64(keys + 8 * right)
                if take_left:
                    store_i64(spare + 8 * out, load_i64(keys + 8 * left))
                    left += 1
                else:
                    store_i64(spare + 8 * out, load_i64(keys + 8 * right))
                    right += 1
        keys, spare = spare, keys
        run *= 2
    return keys
