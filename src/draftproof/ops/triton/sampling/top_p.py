"""top-k, then top-p, then min-p, without a sort: what stays is a prefix of the order, so one key bounds it.

A row is cut into groups, and the best value of each is found. At least n tokens are as good as the n-th
best of those, and few more as a rule; they are collected in a second pass, and where the bounds lie among
them (n is top_k, or SOME for top-p alone), the bounds are found there, by bisection.

Where they do not, a pass adds each token's weight to a bin by its distance from the best value; the last bin
that still begins below the target holds the bound, and its keys are collected and bisected. For top-k the
weight is 1, for top-p it is the probability in fixed point (34 bits behind the point): sums of integers have
no order, so atomics leave no trace in the bits.

Where ties fill the bin, the bound is found digit by digit (radix selection) over the whole row. Keys are
56 bits, seven digits: value, then id downwards; the digits of the id are looked at only when ties straddle
the bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import power_of_two
from draftproof.ops.triton.sampling.sort_key import ordered

BLOCK = 8192
BINS = 256  # of a digit
FINE = 2048  # bins of the first pass
SCALE = tl.constexpr(64.0)  # of them for a distance of 1
HELD = 2048  # keys that are bisected
GROUP = 64  # ids of a group
SOME = 512  # tokens that top-p alone looks at first
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
def _weights(keys, best, MASS: tl.constexpr):
    """Weight of each key; 0 where there is none (-1)."""
    return tl.where(keys < 0, 0, _weight(_value_of(tl.maximum(keys, 0) >> ID_BITS), best, MASS))


@triton.jit
def _collect(
    line, counter, held, V, top, floor, chosen, BLOCK: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr
):
    """Keys >= floor, of one bin unless `chosen` is negative: [HELD] in no order, -1 beyond; and how many."""
    tl.debug_barrier()
    tl.store(counter, floor * 0)
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        key = _key(x, ids)
        match = (ids < V) & (key >= floor) & ((chosen < 0) | (_bin_of(x, top, FINE) == chosen))
        place = tl.atomic_add(counter + ids * 0, 1, mask=match, sem="relaxed")
        tl.store(held + place, key, mask=match & (place < HELD))
    tl.debug_barrier()
    count = tl.load(counter, cache_modifier=".cg")
    at = tl.arange(0, HELD)
    keys = tl.load(held + at, mask=at < count, other=-1, cache_modifier=".cg")
    tl.debug_barrier()
    return keys, count


@triton.jit
def _find(
    line, hist, held, V, top, best, floor, fine, target,
    MASS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """As `_bound`; fine [FINE] holds the weight of each bin."""
    bins = tl.arange(0, FINE)
    ahead = tl.cumsum(fine, axis=0) - fine
    chosen = tl.max(tl.where((fine > 0) & (ahead.to(tl.float64) < target), bins, 0), axis=0)
    before = tl.sum(tl.where(bins == chosen, ahead, 0), axis=0)
    keys, count = _collect(line, hist, held, V, top, floor, chosen, BLOCK, FINE, HELD)
    if count <= HELD:
        found = _bisect(keys, _weights(keys, best, MASS), before, target)
    else:
        found = _bound(line, hist, V, best, floor, target, MASS, BLOCK, BINS)
    return found


@triton.jit
def _slowly(
    line, hist, V, top, best, k, p,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Least key that top-k and top-p keep, by bins."""
    counts, masses, held = hist + BINS, hist + BINS + FINE, hist + BINS + 2 * FINE
    bins = tl.arange(0, FINE)
    tl.store(counts + bins, tl.zeros((FINE,), tl.int64))
    tl.store(masses + bins, tl.zeros((FINE,), tl.int64))
    by_k, by_p = (k > 0) & (k < V), p < 1.0
    floor = k * 0
    tl.debug_barrier()
    if by_k:
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            place = counts + _bin_of(x, top, FINE)
            tl.atomic_add(place, _weight(x, best, False), mask=ids < V, sem="relaxed")
        tl.debug_barrier()
        count = tl.load(counts + bins, cache_modifier=".cg")
        floor = _find(line, hist, held, V, top, best, floor, count, k.to(tl.float64),
                      False, BLOCK, BINS, FINE, HELD)  # fmt: skip
    if by_p:
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            weight = _weight(x, best, True)
            counted = (ids < V) & (weight > 0) & (_key(x, ids) >= floor)
            tl.atomic_add(masses + _bin_of(x, top, FINE), weight, mask=counted, sem="relaxed")
        tl.debug_barrier()
        mass = tl.load(masses + bins, cache_modifier=".cg")
        target = p * tl.sum(mass, axis=0).to(tl.float64)
        found = _find(line, hist, held, V, top, best, floor, mass, target, True, BLOCK, BINS, FINE, HELD)
        floor = tl.maximum(floor, found)
    return floor


@triton.jit
def _quickly(
    line, hist, V, top, best, k, p, nth,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The same from the keys whose value is at least `nth`; -1 if the bounds are not among them."""
    keys, count = _collect(line, hist, hist + BINS + 2 * FINE, V, top, nth << ID_BITS, -1, BLOCK, FINE, HELD)
    floor = k * 0 - 1
    by_k = (k > 0) & (k < V)
    if (count <= HELD) & ((count >= k) | (k >= V)):
        if by_k:
            floor = _bisect(keys, _weights(keys, best, False), k * 0, k.to(tl.float64))
        if p < 1.0:
            weights = tl.where(keys >= floor, _weights(keys, best, True), 0)
            mass = tl.sum(weights, axis=0)
            whole = mass
            if floor < 0:  # no top-k: all tokens count
                masses = tl.zeros((BLOCK,), tl.int64)
                for start in range(0, V, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
                    masses += tl.where(ids < V, _weight(x, best, True), 0)
                whole = tl.sum(masses, axis=0)
            target = p * whole.to(tl.float64)
            if mass.to(tl.float64) >= target:
                floor = tl.maximum(floor, _bisect(keys, weights, k * 0, target))
    return floor


@triton.jit
def _nth_best(groups, V, n, GROUP: tl.constexpr, ALL: tl.constexpr):
    """The n-th best value (32 bits of a key) of groups [ALL]; the least of all if there are fewer."""
    at = tl.arange(0, ALL)
    values = tl.load(groups + at, mask=at * GROUP < V, other=-1, cache_modifier=".cg")
    return _bisect(values, (values >= 0).to(tl.int64), n * 0, n.to(tl.float64))


@triton.jit
def truncate_kernel(
    scaled, top_k, top_p, min_p, scratch, out, V, size,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, HELD: tl.constexpr, GROUP: tl.constexpr,
    ALL: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """scaled, out [R, V]; one program a row; scratch [R, size], size = BINS + 2 FINE + HELD + ALL."""
    row = tl.program_id(0).to(tl.int64)
    line, hist = scaled + row * V, scratch + row * size
    groups = hist + BINS + 2 * FINE + HELD
    k = tl.load(top_k + row).to(tl.int64)
    p, least = tl.load(top_p + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
    highest = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        one = tl.max(tl.load(line + ids, mask=ids < V, other=float("-inf")), axis=1)
        tl.store(groups + group, ordered(one).to(tl.int64) + 2147483648, mask=group * GROUP < V)
        highest = tl.maximum(highest, one)
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    best = top.to(tl.float64)
    floor = k * 0
    by_k = (k > 0) & (k < V)
    if by_k | (p < 1.0):
        tl.debug_barrier()
        nth = _nth_best(groups, V, tl.where(by_k, k, SOME), GROUP, ALL)
        floor = _quickly(line, hist, V, top, best, k, p, nth, BLOCK, BINS, FINE, HELD)
        if floor < 0:
            floor = _slowly(line, hist, V, top, best, k, p, BLOCK, BINS, FINE, HELD)
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
    groups = power_of_two(triton.cdiv(vocab, GROUP))
    some = min(SOME, max(1, groups // 2))
    size = BINS + 2 * FINE + HELD + groups
    scratch = torch.empty((rows, size), dtype=torch.int64, device=scaled.device)
    truncate_kernel[(rows,)](
        scaled, top_k, top_p, min_p, scratch, out, vocab, size,
        BLOCK=BLOCK, BINS=BINS, FINE=FINE, HELD=HELD, GROUP=GROUP, ALL=groups, SOME=some, num_warps=16,
    )  # fmt: skip
    return out
