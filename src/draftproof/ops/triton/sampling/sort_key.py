"""Sort keys of (value, id): one int64 each, larger for a larger value, then for a smaller id."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**63))  # smaller than every key


@triton.jit
def sortable_bits(x):
    """Map fp32 to int32 in the same order; -0 and +0 map to one value."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sort_key(x, ids):
    """Pack the value into the high half of an int64, the complement of the id into the low half."""
    return (sortable_bits(x).to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def key_to_id(key):
    """Return the id that `key` was made of."""
    return (key & 0x7FFFFFFF) ^ 0x7FFFFFFF
