"""top-k, then top-p, then min-p, without a sort: what stays is a prefix of the order, so one key bounds it.

One pass adds each token's weight to a bin by its distance from the best value; the last bin that still begins
below the target holds the bound. A second pass collects that bin's keys, few as a rule, and the bound is
found among them by bisection. For top-k the weight is 1, for top-p it is the probability in fixed point
(34 bits behind the point): sums of integers have no order, so atomics leave no trace in the bits.

Where ties fill the bin, the bound is found digit by digit (radix selection) over the whole row. Keys are
56 bits, seven digits: value, then id downwards; the digits of the id are looked at only when ties straddle
the bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton_cuda.order import ordered

BLOCK = 8192
BINS = 256  # of a digit
FINE = 2048  # bins of the first pass
SCALE = tl.constexpr(64.0)  # of them for a distance of 1
HELD = 2048  # keys that are bisected
ID_BITS = tl.constexpr(24)  # vocabularies up to 16 million
ONE = tl.constexpr(17179869184.0)  # 2^34: weight of the best token


@triton.jit
def _key(x, ids):
    """56 bits, never negative: value up, then id down."""
    value = ordered(x).to(tl.int64) + 2147483648
    return (value << ID_BITS) | (16777215 - ids).to(tl.int64)


@triton.jit
def _weight(x, best, MASS: tl.constexpr):
    """1, or the probability relative to the best one's, in fixed point; int64."""
    if MASS:
        return (tl.exp(x.to(tl.float64) - best) * ONE + 0.5).to(tl.int64)
    else:
        return (x == x).to(tl.int64) * 0 + 1


@triton.jit
def _value_of(prefix):
    """The fp32 value whose 32 bits of key are `prefix`."""
    bits = (prefix - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bound(line, hist, V, best, floor, target, MASS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Least key that stays when keys >= floor stay, best first, while the weight before is below target."""
    bins = tl.arange(0, BINS)
    prefix, before = floor * 0, floor * 0  # int64 scalars
    digits = (floor * 0 + 7).to(tl.int32)
    for digit in range(7):
        if digit < digits:
            shift = (6 - digit) * 8
            tl.store(hist + bins, tl.zeros((BINS,), tl.int64))
            tl.debug_barrier()
            for start in range(0, V, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
                key = _key(x, ids)
                match = (ids < V) & (key >= floor) & ((key >> (shift + 8)) == prefix)
                bin_of = 255 - ((key >> shift) & 255)
                tl.atomic_add(hist + bin_of, _weight(x, best, MASS), mask=match, sem="relaxed")
            tl.debug_barrier()
            weight = tl.load(hist + bins, cache_modifier=".cg")
            tl.debug_barrier()
            ahead = tl.cumsum(weight, axis=0) - weight + before
            stays = (weight > 0) & (ahead.to(tl.float64) < target)
            chosen = tl.max(tl.where(stays, bins, 0), axis=0)
            before = tl.sum(tl.where(bins == chosen, ahead, 0), axis=0)
            prefix = prefix * 256 + (255 - chosen)
            if digit == 3:  # the value is known: do all its ties stay?
                ties = tl.sum(tl.where(bins == chosen, weight, 0), axis=0)
                each = _weight(_value_of(prefix), best, MASS)
                if (before + ties - each).to(tl.float64) < target:
                    digits = digits * 0 + 4
    return tl.where(digits == 4, prefix << ID_BITS, prefix)


@triton.jit
def _bin_of(x, top, FINE: tl.constexpr):
    """0 for the best value; never falls as x falls."""
    return tl.minimum((top - x) * SCALE, FINE - 1.0).to(tl.int32)


@triton.jit
def _bisect(keys, weights, before, target):
    """Least bound with the weight of keys above it, and `before`, below target; the best key stays."""
    high = tl.max(keys, axis=0)
    low = tl.min(tl.where(keys < 0, high, keys), axis=0) - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.sum(tl.where(keys > middle, weights, 0), axis=0) + before
        stays = above.to(tl.float64) < target
        high, low = tl.where(stays, middle, high), tl.where(stays, low, middle)
    return high


@triton.jit
def _find(
    line, hist, held, V, top, best, floor, fine, target,
    MASS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """As `_bound`; fine [FINE] holds the weight of each bin. Also: the bin, and its keys (or too many)."""
    bins = tl.arange(0, FINE)
    ahead = tl.cumsum(fine, axis=0) - fine
    chosen = tl.max(tl.where((fine > 0) & (ahead.to(tl.float64) < target), bins, 0), axis=0)
    before = tl.sum(tl.where(bins == chosen, ahead, 0), axis=0)
    tl.debug_barrier()
    tl.store(hist, before * 0)
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        key = _key(x, ids)
        match = (ids < V) & (key >= floor) & (_bin_of(x, top, FINE) == chosen)
        place = tl.atomic_add(hist + ids * 0, 1, mask=match, sem="relaxed")
        tl.store(held + place, key, mask=match & (place < HELD))
    tl.debug_barrier()
    count = tl.load(hist, cache_modifier=".cg")
    at = tl.arange(0, HELD)
    keys = tl.load(held + at, mask=at < count, other=-1, cache_modifier=".cg")
    tl.debug_barrier()
    if count <= HELD:
        weights = tl.where(at < count, _weight(_value_of(keys >> ID_BITS), best, MASS), 0)
        found = _bisect(keys, weights, before, target)
    else:
        found = _bound(line, hist, V, best, floor, target, MASS, BLOCK, BINS)
    return found, chosen, keys, count


@triton.jit
def truncate_kernel(
    scaled, top_k, top_p, min_p, scratch, out, V,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """scaled, out [R, V]; one program a row; scratch [R, BINS + 2 FINE + HELD]."""
    row = tl.program_id(0).to(tl.int64)
    line, hist = scaled + row * V, scratch + row * (BINS + 2 * FINE + HELD)
    counts, masses, held = hist + BINS, hist + BINS + FINE, hist + BINS + 2 * FINE
    k = tl.load(top_k + row).to(tl.int64)
    p, least = tl.load(top_p + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
    bins = tl.arange(0, FINE)
    tl.store(counts + bins, tl.zeros((FINE,), tl.int64))
    tl.store(masses + bins, tl.zeros((FINE,), tl.int64))
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(line + ids, mask=ids < V, other=float("-inf")))
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    best = top.to(tl.float64)
    floor = k * 0
    by_k, by_p = (k > 0) & (k < V), p < 1.0
    if by_k | by_p:
        tl.debug_barrier()
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            bin_of = _bin_of(x, top, FINE)
            if by_k:
                tl.atomic_add(counts + bin_of, _weight(x, best, False), mask=ids < V, sem="relaxed")
            if by_p:
                weight = _weight(x, best, True)
                tl.atomic_add(masses + bin_of, weight, mask=(ids < V) & (weight > 0), sem="relaxed")
        tl.debug_barrier()
    mass = tl.load(masses + bins, cache_modifier=".cg")
    if by_k:
        count = tl.load(counts + bins, cache_modifier=".cg")
        floor, chosen, keys, size = _find(line, hist, held, V, top, best, floor, count, k.to(tl.float64),
                                          False, BLOCK, BINS, FINE, HELD)  # fmt: skip
        if by_p:  # of the bin that holds the bound, the mass of what stays
            if size <= HELD:
                weights = _weight(_value_of(keys >> ID_BITS), best, True)
                part = tl.sum(tl.where(keys >= floor, weights, 0), axis=0)
            else:
                parts = tl.zeros((BLOCK,), tl.int64)
                for start in range(0, V, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
                    counts_too = (ids < V) & (_key(x, ids) >= floor) & (_bin_of(x, top, FINE) == chosen)
                    parts += tl.where(counts_too, _weight(x, best, True), 0)
                part = tl.sum(parts, axis=0)
            mass = tl.where(bins < chosen, mass, tl.where(bins == chosen, part, 0))
    if by_p:
        target = p * tl.sum(mass, axis=0).to(tl.float64)
        bound, _, _, _ = _find(line, hist, held, V, top, best, floor, mass, target,
                               True, BLOCK, BINS, FINE, HELD)  # fmt: skip
        floor = tl.maximum(floor, bound)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        keep = _key(x, ids) >= floor
        if least > 0.0:
            keep = keep & (tl.exp(x.to(tl.float64) - best) >= least)
        tl.store(out + row * V + ids, tl.where(keep, x, float("-inf")), mask=ids < V)


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    rows, vocab = scaled.shape
    out = torch.empty_like(scaled)
    scratch = torch.empty((rows, BINS + 2 * FINE + HELD), dtype=torch.int64, device=scaled.device)
    truncate_kernel[(rows,)](
        scaled, top_k, top_p, min_p, scratch, out, vocab,
        BLOCK=BLOCK, BINS=BINS, FINE=FINE, HELD=HELD, num_warps=16,
    )  # fmt: skip
    return out
