"""top-k, then top-p, then min-p, without a sort: what stays is a prefix of the order, so one key bounds it.

The bound is found digit by digit (radix selection): a pass over the row adds each key's weight to the bin
of its digit; the last bin that still begins below the target holds the bound. For top-k the weight is 1, for
top-p it is the probability in fixed point (34 bits behind the point): sums of integers have no order, so
atomics leave no trace in the bits. Keys are 56 bits, seven digits: value, then id downwards; the digits of
the id are looked at only when ties straddle the bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton_cuda.order import ordered

BLOCK = 2048
BINS = 256
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
def truncate_kernel(scaled, top_k, top_p, min_p, hists, out, V, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """scaled, out [R, V]; one program a row; hists [R, BINS] is scratch."""
    row = tl.program_id(0).to(tl.int64)
    line, hist = scaled + row * V, hists + row * BINS
    k = tl.load(top_k + row).to(tl.int64)
    p, least = tl.load(top_p + row).to(tl.float64), tl.load(min_p + row).to(tl.float64)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(line + ids, mask=ids < V, other=float("-inf")))
    top = tl.max(highest, axis=0)
    best = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    floor = k * 0
    if (k > 0) & (k < V):
        floor = _bound(line, hist, V, best, floor, k.to(tl.float64), False, BLOCK, BINS)
    if p < 1.0:
        masses = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            counts = (ids < V) & (_key(x, ids) >= floor)
            masses += tl.where(counts, _weight(x, best, True), 0)
        target = p * tl.sum(masses, axis=0).to(tl.float64)
        floor = tl.maximum(floor, _bound(line, hist, V, best, floor, target, True, BLOCK, BINS))
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        keep = (_key(x, ids) >= floor) & (tl.exp(x.to(tl.float64) - best) >= least)
        tl.store(out + row * V + ids, tl.where(keep, x, float("-inf")), mask=ids < V)


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    rows, vocab = scaled.shape
    out = torch.empty_like(scaled)
    hists = torch.empty((rows, BINS), dtype=torch.int64, device=scaled.device)
    truncate_kernel[(rows,)](
        scaled, top_k, top_p, min_p, hists, out, vocab, BLOCK=BLOCK, BINS=BINS, num_warps=8
    )
    return out
