"""Top-k, top-p and min-p without a sort: the kept tokens are a prefix of the order, bounded by one key.

Fast path: a row is split into groups, and the best value of each group is found. At least n tokens reach
the n-th best of these values, and usually few more. A second pass collects them. If the bound lies among
them (n is top_k, or TOP_P_MIN for top-p alone), it is found by bisection.

Second path: a pass adds the weight of each token to a bin by its distance from the best value. The last bin
that begins below the target contains the bound; its keys are collected and bisected. The weight is 1 for
top-k and the probability in fixed point (34 fractional bits) for top-p. Integer sums do not depend on the
order of the atomics.

Third path, where ties fill the bin: radix selection over the whole row. Keys have 56 bits, seven digits:
value, then the complement of the id. The digits of the id are needed only if ties straddle the bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.kernel_utils import next_power_of_two
from draftproof.ops.triton.sampling.sort_key import sortable_bits

BLOCK = 8192  # ids of one load
BINS = 256  # of a digit of the radix selection
FINE_BINS = 2048  # of the second path
BINS_PER_UNIT = tl.constexpr(64.0)  # bins for a distance of 1 between logits
MAX_KEYS = 2048  # keys that are bisected
GROUP = 64  # ids of a group
TOP_P_MIN = 512  # candidates of the fast path without top-k
ID_BITS = tl.constexpr(24)  # vocabularies up to 16 million
WEIGHT_ONE = tl.constexpr(17179869184.0)  # 2^34: weight of the best token


@triton.jit
def _key(x, ids):
    """Return a key of 56 bits, not negative: the value, then the complement of the id."""
    value = sortable_bits(x).to(tl.int64) + 2147483648
    return (value << ID_BITS) | (16777215 - ids).to(tl.int64)


@triton.jit
def _weight(x, best, MASS: tl.constexpr):
    """Return 1, or with MASS the probability relative to the best one's in fixed point; int64."""
    if MASS:
        return (tl.exp(x.to(tl.float64) - best) * WEIGHT_ONE + 0.5).to(tl.int64)
    else:
        return (x == x).to(tl.int64) * 0 + 1


@triton.jit
def _key_value(prefix):
    """Return the fp32 value whose 32 key bits are `prefix`."""
    bits = (prefix - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _radix_select(
    line, hist, V, best, floor, target, MASS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """Return the smallest kept key; keys >= floor are kept while the weight before them is below target."""
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
            weight_before = tl.cumsum(weight, axis=0) - weight + before
            kept = (weight > 0) & (weight_before.to(tl.float64) < target)
            chosen = tl.max(tl.where(kept, bins, 0), axis=0)
            before = tl.sum(tl.where(bins == chosen, weight_before, 0), axis=0)
            prefix = prefix * 256 + (255 - chosen)
            if digit == 3:  # all bits of the value are known; stop if all its ties are kept
                ties = tl.sum(tl.where(bins == chosen, weight, 0), axis=0)
                each = _weight(_key_value(prefix), best, MASS)
                if (before + ties - each).to(tl.float64) < target:
                    digits = digits * 0 + 4
    return tl.where(digits == 4, prefix << ID_BITS, prefix)


@triton.jit
def _distance_bin(x, top, FINE_BINS: tl.constexpr):
    """Return the bin of the distance from the best value; 0 for the best value, monotonic in x."""
    return tl.minimum((top - x) * BINS_PER_UNIT, FINE_BINS - 1.0).to(tl.int32)


@triton.jit
def _bisect(keys, weights, before, target):
    """Return the smallest bound for which `before` plus the weight of larger keys is below target."""
    high = tl.max(keys, axis=0)
    low = tl.min(tl.where(keys < 0, high, keys), axis=0) - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.sum(tl.where(keys > middle, weights, 0), axis=0) + before
        kept = above.to(tl.float64) < target
        high, low = tl.where(kept, middle, high), tl.where(kept, low, middle)
    return high


@triton.jit
def _weights(keys, best, MASS: tl.constexpr):
    """Return the weight of each key; 0 for an empty entry (-1)."""
    return tl.where(keys < 0, 0, _weight(_key_value(tl.maximum(keys, 0) >> ID_BITS), best, MASS))


@triton.jit
def _collect(
    line, counter, candidates, V, top, floor, chosen,
    BLOCK: tl.constexpr, FINE_BINS: tl.constexpr, MAX_KEYS: tl.constexpr,
):  # fmt: skip
    """Collect the keys >= floor, of bin `chosen` unless it is negative: [MAX_KEYS], and a count."""
    tl.debug_barrier()
    tl.store(counter, floor * 0)
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        key = _key(x, ids)
        match = (ids < V) & (key >= floor) & ((chosen < 0) | (_distance_bin(x, top, FINE_BINS) == chosen))
        output_index = tl.atomic_add(counter + ids * 0, 1, mask=match, sem="relaxed")
        tl.store(candidates + output_index, key, mask=match & (output_index < MAX_KEYS))
    tl.debug_barrier()
    count = tl.load(counter, cache_modifier=".cg")
    index = tl.arange(0, MAX_KEYS)
    keys = tl.load(candidates + index, mask=index < count, other=-1, cache_modifier=".cg")
    tl.debug_barrier()
    return keys, count


@triton.jit
def _select_in_bin(
    line, hist, candidates, V, top, best, floor, bin_weights, target,
    MASS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, FINE_BINS: tl.constexpr,
    MAX_KEYS: tl.constexpr,
):  # fmt: skip
    """Return what `_radix_select` returns, from the weight of each bin in `bin_weights` [FINE_BINS]."""
    bins = tl.arange(0, FINE_BINS)
    weight_before = tl.cumsum(bin_weights, axis=0) - bin_weights
    chosen = tl.max(tl.where((bin_weights > 0) & (weight_before.to(tl.float64) < target), bins, 0), axis=0)
    before = tl.sum(tl.where(bins == chosen, weight_before, 0), axis=0)
    keys, count = _collect(line, hist, candidates, V, top, floor, chosen, BLOCK, FINE_BINS, MAX_KEYS)
    if count <= MAX_KEYS:
        found = _bisect(keys, _weights(keys, best, MASS), before, target)
    else:
        found = _radix_select(line, hist, V, best, floor, target, MASS, BLOCK, BINS)
    return found


@triton.jit
def _select_by_bins(
    line, hist, V, top, best, k, p,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE_BINS: tl.constexpr, MAX_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the smallest key that top-k and top-p keep, by bins of distance."""
    counts, masses, candidates = hist + BINS, hist + BINS + FINE_BINS, hist + BINS + 2 * FINE_BINS
    bins = tl.arange(0, FINE_BINS)
    tl.store(counts + bins, tl.zeros((FINE_BINS,), tl.int64))
    tl.store(masses + bins, tl.zeros((FINE_BINS,), tl.int64))
    by_k, by_p = (k > 0) & (k < V), p < 1.0
    floor = k * 0
    tl.debug_barrier()
    if by_k:
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            output_index = counts + _distance_bin(x, top, FINE_BINS)
            tl.atomic_add(output_index, _weight(x, best, False), mask=ids < V, sem="relaxed")
        tl.debug_barrier()
        count = tl.load(counts + bins, cache_modifier=".cg")
        floor = _select_in_bin(line, hist, candidates, V, top, best, floor, count, k.to(tl.float64),
                      False, BLOCK, BINS, FINE_BINS, MAX_KEYS)  # fmt: skip
    if by_p:
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            weight = _weight(x, best, True)
            counted = (ids < V) & (weight > 0) & (_key(x, ids) >= floor)
            tl.atomic_add(masses + _distance_bin(x, top, FINE_BINS), weight, mask=counted, sem="relaxed")
        tl.debug_barrier()
        mass = tl.load(masses + bins, cache_modifier=".cg")
        target = p * tl.sum(mass, axis=0).to(tl.float64)
        found = _select_in_bin(line, hist, candidates, V, top, best, floor, mass, target,
                               True, BLOCK, BINS, FINE_BINS, MAX_KEYS)  # fmt: skip
        floor = tl.maximum(floor, found)
    return floor


@triton.jit
def _select_by_candidates(
    line, hist, V, top, best, k, p, nth,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE_BINS: tl.constexpr, MAX_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the smallest kept key from the keys with value >= `nth`; -1 if it is not among these keys."""
    candidates = hist + BINS + 2 * FINE_BINS
    keys, count = _collect(line, hist, candidates, V, top, nth << ID_BITS, -1, BLOCK, FINE_BINS, MAX_KEYS)
    floor = k * 0 - 1
    by_k = (k > 0) & (k < V)
    if (count <= MAX_KEYS) & ((count >= k) | (k >= V)):
        if by_k:
            floor = _bisect(keys, _weights(keys, best, False), k * 0, k.to(tl.float64))
        if p < 1.0:
            weights = tl.where(keys >= floor, _weights(keys, best, True), 0)
            mass = tl.sum(weights, axis=0)
            total_mass = mass
            if floor < 0:  # without top-k all tokens count
                masses = tl.zeros((BLOCK,), tl.int64)
                for start in range(0, V, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
                    masses += tl.where(ids < V, _weight(x, best, True), 0)
                total_mass = tl.sum(masses, axis=0)
            target = p * total_mass.to(tl.float64)
            if mass.to(tl.float64) >= target:
                floor = tl.maximum(floor, _bisect(keys, weights, k * 0, target))
    return floor


@triton.jit
def _nth_best_group(groups, V, n, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the n-th best group value (32 bits of a key); the smallest one if there are fewer groups."""
    index = tl.arange(0, GROUPS)
    values = tl.load(groups + index, mask=index * GROUP < V, other=-1, cache_modifier=".cg")
    return _bisect(values, (values >= 0).to(tl.int64), n * 0, n.to(tl.float64))


@triton.jit
def truncate_kernel(
    scaled, top_k, top_p, min_p, scratch, out, V, size,
    BLOCK: tl.constexpr, BINS: tl.constexpr, FINE_BINS: tl.constexpr, MAX_KEYS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TOP_P_MIN: tl.constexpr,
):  # fmt: skip
    """Store scaled [R, V] to out [R, V] with -inf at dropped ids; one program per row.

    The scratch [R, size] has size = BINS + 2 * FINE_BINS + MAX_KEYS + GROUPS.
    """
    row = tl.program_id(0).to(tl.int64)
    line, hist = scaled + row * V, scratch + row * size
    groups = hist + BINS + 2 * FINE_BINS + MAX_KEYS
    k = tl.load(top_k + row).to(tl.int64)
    p, min_prob = tl.load(top_p + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
    highest = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        group_max = tl.max(tl.load(line + ids, mask=ids < V, other=float("-inf")), axis=1)
        tl.store(groups + group, sortable_bits(group_max).to(tl.int64) + 2147483648, mask=group * GROUP < V)
        highest = tl.maximum(highest, group_max)
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    best = top.to(tl.float64)
    floor = k * 0
    by_k = (k > 0) & (k < V)
    if by_k | (p < 1.0):
        tl.debug_barrier()
        nth = _nth_best_group(groups, V, tl.where(by_k, k, TOP_P_MIN), GROUP, GROUPS)
        floor = _select_by_candidates(line, hist, V, top, best, k, p, nth, BLOCK, BINS, FINE_BINS, MAX_KEYS)
        if floor < 0:
            floor = _select_by_bins(line, hist, V, top, best, k, p, BLOCK, BINS, FINE_BINS, MAX_KEYS)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        keep = _key(x, ids) >= floor
        if min_prob > 0.0:
            keep = keep & (tl.exp(x.to(tl.float64) - best) >= min_prob)
        tl.store(out + row * V + ids, tl.where(keep, x, float("-inf")), mask=ids < V)


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return scaled [R, V] with -inf at the ids that top-k, top-p or min-p drop."""
    rows, vocab = scaled.shape
    out = torch.empty_like(scaled)
    groups = next_power_of_two(triton.cdiv(vocab, GROUP))
    some = min(TOP_P_MIN, max(1, groups // 2))
    size = BINS + 2 * FINE_BINS + MAX_KEYS + groups
    scratch = torch.empty((rows, size), dtype=torch.int64, device=scaled.device)
    truncate_kernel[(rows,)](
        scaled, top_k, top_p, min_p, scratch, out, vocab, size,
        BLOCK=BLOCK, BINS=BINS, FINE_BINS=FINE_BINS, MAX_KEYS=MAX_KEYS, GROUP=GROUP, GROUPS=groups,
        TOP_P_MIN=some, num_warps=16,
    )  # fmt: skip
    return out
