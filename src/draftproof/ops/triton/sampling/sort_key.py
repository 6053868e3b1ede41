"""The order of a row, (value down, id up), as one integer: a larger key comes first, and no two are equal."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below every key


@triton.jit
def ordered(x):
    """fp32 -> int32 in the same order; -0 and +0 are one value."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, ids):
    """Value in the high half, id downwards in the low half: int64."""
    return (ordered(x).to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def id_of(key):
    return (key & 0x7FFFFFFF) ^ 0x7FFFFFFF
