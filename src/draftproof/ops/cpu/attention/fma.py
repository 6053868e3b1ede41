"""Paged attention by fused multiply-add: a row at position p reduces over keys 0..p in an order fixed by p.

Keys are processed in splits of 128. Within a split the softmax is two-pass (all scores, their maximum, then
the weighted sum of V over ascending keys); splits are merged in ascending order, whether one thread computed
all of them or several threads some each. The query heads that share a kv head, and adjacent rows of a
request, share the loads of K and V. A key outside a row's range never affects that row, even if it is NaN.

This file holds the shared pieces and the split by fused multiply-add. `amx` has the split on tiles, `driver`
the kernels that iterate over rows, heads and splits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from draftproof.ops.cpu.attention.arguments import ARG, arg
from draftproof.ops.cpu.attention.kv_blocks import BLOCK, make_gather, make_key_loader
from draftproof.ops.cpu.gemm.microkernel import (
    COLUMNS,
    MAX_ROWS,
    panel_cached,
)
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import (
    device,
    f64_of_bits,
    inlined,
    load_f32,
    load_i64,
    store_f32,
)

SPLIT_KEYS = 128  # keys per split
MAX_QUERIES = 48  # (row, head) pairs that share a pass over K and V
_ZERO = np.float32(0.0)
_LOWEST = np.float32(-3.0e38)


def scratch_bytes(group: int, dim: int) -> int:
    """Return the scratch bytes of a thread.

    `attention`, `split_fma`, `split_amx` and the key loader of gathered keys define its layout.
    """
    queries, wide = max(MAX_QUERIES, group) + 16, -(-dim // COLUMNS) * COLUMNS
    return 4 * (queries * (2 * SPLIT_KEYS + 4 * wide + 8) + 2 * SPLIT_KEYS * wide) + 8192


@inlined
def first_key(position: int, window: int) -> int:
    """Return the first key visible from a position."""
    if window > 0:
        return max(0, position - window + 1)
    return 0


@inlined
def _visible(x: Any, i: int, begin: int, end: int, other: Any) -> Any:
    """Replace the lanes of scores [i, i + 16) outside [begin, end)."""
    if begin <= i and i + 16 <= end:
        return x
    return v.select(v.mask_and(v.mask_first(end - i), v.mask_not_first(begin - i)), x, v.splat(other))


@device
def _softmax(scores: int, begin: int, end: int) -> Any:
    """Replace scores [begin, end) by exp(score - max), zero-padded; return (max, sum)."""
    first = begin // 16 * 16
    best = v.splat(_LOWEST)
    for i in range(first, end, 16):
        best = v.maximum(_visible(v.load(scores + 4 * i), i, begin, end, _LOWEST), best)
    top = v.max_lane(best)
    total = v.splat(_ZERO)
    for i in range(first, end, 16):
        e = _visible(v.exp(v.sub(v.load(scores + 4 * i), v.splat(top))), i, begin, end, _ZERO)
        v.store(scores + 4 * i, e)
        total = v.add(total, e)
    return top, v.sum_lanes(total)


@device
def merge(total: int, state: int, part: int, part_state: int, wide: int) -> None:
    """Add a split's sums [wide] and state (maximum, mass) to those of the splits before it."""
    mass = load_f32(part_state + 4)
    if mass == _ZERO:  # no key of this split is visible to the row
        return
    top, old_top = load_f32(part_state), load_f32(state)
    new_top = max(top, old_top)
    keep = v.exp(v.splat(np.float32(old_top - new_top)))
    gain = v.exp(v.splat(np.float32(top - new_top)))
    masses = v.fma(v.splat(mass), gain, v.mul(v.splat(load_f32(state + 4)), keep))
    store_f32(state, new_top)
    store_f32(state + 4, v.max_lane(masses))
    for i in range(0, wide, 16):
        x = v.mul(v.load(total + 4 * i), keep)
        v.store(total + 4 * i, v.fma(v.load(part + 4 * i), gain, x))


@device
def clear(total: int, state: int, wide: int) -> None:
    """Reset sums and state (maximum, mass)."""
    for d in range(0, wide, 16):
        v.store(total + d * 4, v.splat(_ZERO))
    store_f32(state, _LOWEST)
    store_f32(state + 4, _ZERO)


@device
def write(args: int, row: int, q_head: int, total: int, state: int, bf16: bool) -> None:
    """Divide the sums by the mass, that of the head's sink included, round and store them."""
    dim, sinks = arg(args, ARG.out_dim), arg(args, ARG.sinks)
    mass = v.splat(load_f32(state + 4))
    at = (row * arg(args, ARG.num_q) + q_head) * dim
    if sinks != 0:
        logit, old_top = load_f32(sinks + 4 * q_head), load_f32(state)
        top = max(logit, old_top)
        keep = v.exp(v.splat(np.float32(old_top - top)))
        mass = v.add(v.mul(mass, keep), v.exp(v.splat(np.float32(logit - top))))
        for d in range(0, dim, 16):
            v.store(total + 4 * d, v.mul(v.load(total + 4 * d), keep))
    for d in range(0, dim, 16):
        v.tstore(arg(args, ARG.out), at + d, v.div(v.load(total + 4 * d), mass), dim - d, bf16)


@inlined
def clip(key: int, start: int, end: int) -> int:
    """Clamp a key to [start, end]."""
    return min(max(key, start), end)


@device
def _add_weighted_values(
    queries: int,
    group: int,
    positions: int,
    window: int,
    split: int,
    start: int,
    end: int,
    weights: int,
    values: int,
    sums: int,
    wide: int,
) -> None:
    """Add weights x values over keys [start, end) of this split to sums [queries, wide].

    Each row uses its own keys only: keys visible to all queries of a group are processed together, the
    others query by query.
    """
    for i in range(0, queries, MAX_ROWS):
        n = min(MAX_ROWS, queries - i)
        both_lo, both_hi = start, end
        for j in range(i, i + n):
            position = load_i64(positions + 8 * (j // group))
            both_lo = max(both_lo, first_key(position, window))
            both_hi = min(both_hi, position + 1)
        both_lo = min(both_lo, end)
        both_hi = max(both_hi, both_lo)
        for stage in range(3):
            if stage == 1:
                lo, hi, rows, last = both_lo, both_hi, n, i + 1
            else:
                lo, hi, rows, last = start, end, 1, i + n
            for j in range(i, last):
                if stage != 1:
                    position = load_i64(positions + 8 * (j // group))
                    lo = clip(first_key(position, window), start, end)
                    hi = clip(position + 1, start, end)
                    if stage == 0:
                        hi = min(hi, both_lo)
                    else:
                        lo = max(lo, both_hi)
                if lo < hi:
                    for column in range(0, wide, COLUMNS):
                        a = weights + (j * SPLIT_KEYS + lo - split) * 4
                        b = values + ((lo - start) * wide + column) * 4
                        c = sums + (j * wide + column) * 4
                        panel_cached(rows, a, SPLIT_KEYS * 4, b, wide * 4, c, wide * 4, hi - lo)


@cache
def make_split(bf16: bool, form: int, unit: int) -> Any:
    """Return the function that computes a split; `unit`: of keys, as `kv_blocks.key_unit` returns it."""
    load_keys, gather = make_key_loader(bf16, form, unit), make_gather(bf16, form)

    @device
    def split_fma(
        args: int,
        first: int,
        rows: int,
        head: int,
        slot: int,
        split: int,
        part: int,
        scratch: int,
    ) -> None:
        """Write the sums and then the states of one split and one kv head, for adjacent rows of a request."""
        size = 2 if bf16 else 4
        num_q, dim, window = arg(args, ARG.num_q), arg(args, ARG.dim), arg(args, ARG.window)
        positions = arg(args, ARG.positions) + 8 * first
        scale = v.splat(np.float32(f64_of_bits(arg(args, ARG.scale))))
        group = num_q // arg(args, ARG.num_kv)
        queries = rows * group
        wide = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
        out_dim = arg(args, ARG.out_dim)
        out_wide = (out_dim + COLUMNS - 1) // COLUMNS * COLUMNS
        part_state = part + queries * out_wide * 4
        values = arg(args, ARG.values)

        qs = scratch  # [queries, wide] fp32, scaled
        scores = qs + queries * wide * 4  # [queries, SPLIT_KEYS]
        # K [dim, BLOCK] and later V [BLOCK, wide] in one buffer: two would fill the cache
        block = scores + queries * SPLIT_KEYS * 4

        lowest, highest = split + SPLIT_KEYS, split
        for row in range(rows):
            position = load_i64(positions + 8 * row)
            lowest = min(lowest, max(split, first_key(position, window)))
            highest = max(highest, min(split + SPLIT_KEYS, position + 1))
            for g in range(group):
                i = row * group + g
                src = arg(args, ARG.q) + ((first + row) * num_q + head * group + g) * dim * size
                for d in range(0, dim, 16):
                    x = v.mul(v.tload(src, d, dim - d, bf16), scale)
                    v.store(qs + (i * wide + d) * 4, x)
        lowest = lowest // BLOCK * BLOCK
        for start in range(lowest, highest, BLOCK):
            end = min(start + BLOCK, highest)
            load_keys(args, slot, head, start, end, block)
            at = scores + (start - split) * 4
            for i in range(queries):
                for key in range(0, BLOCK, 16):
                    v.store(at + (i * SPLIT_KEYS + key) * 4, v.splat(_ZERO))
            for i in range(0, queries, MAX_ROWS):
                n = min(MAX_ROWS, queries - i)
                panel_cached(
                    n,
                    qs + i * wide * 4,
                    wide * 4,
                    block,
                    BLOCK * 4,
                    at + i * SPLIT_KEYS * 4,
                    SPLIT_KEYS * 4,
                    dim,
                )
        for i in range(queries):
            position = load_i64(positions + 8 * (i // group))
            begin = clip(first_key(position, window), split, split + SPLIT_KEYS) - split
            end = clip(position + 1, split, split + SPLIT_KEYS) - split
            clear(part + i * out_wide * 4, part_state + 8 * i, out_wide)
            if begin < end:
                top, mass = _softmax(scores + i * SPLIT_KEYS * 4, begin, end)
                store_f32(part_state + 8 * i, top)
                store_f32(part_state + 8 * i + 4, mass)
        for start in range(lowest, highest, BLOCK):
            end = min(start + BLOCK, highest)
            gather(args, values, slot, head, start, end, block, out_dim)
            _add_weighted_values(
                queries, group, positions, window, split, start, end, scores, block, part, out_wide
            )

    return split_fma
