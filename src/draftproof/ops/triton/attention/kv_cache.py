"""Loads and stores of the paged KV cache [2, pages, page size, KV heads, head dim].

All kernels that read or write the cache use these functions, so that its layout and format are defined here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kv_offset(page, key, NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the offset in a plane of the token at position `key`, on page `page`."""
    return (page.to(tl.int64) * PAGE + key % PAGE) * (NUM_KV * D)


@triton.jit
def load_keys(cache, offset, exists, other, D: tl.constexpr, BD: tl.constexpr, MODIFIER: tl.constexpr):
    """Load keys [BD, KEYS] at offset [KEYS]; `other` where `exists` is False; `exists` None: all exist."""
    d = tl.arange(0, BD)
    pointers = cache + offset[None, :] + d[:, None]
    if exists is not None:
        mask = exists[None, :] & (d < D)[:, None]
        return tl.load(pointers, mask=mask, other=other, cache_modifier=MODIFIER)
    elif BD == D:
        return tl.load(pointers, cache_modifier=MODIFIER)
    else:
        return tl.load(pointers, mask=(d < D)[:, None], other=other, cache_modifier=MODIFIER)


@triton.jit
def load_values(cache, offset, exists, other, D: tl.constexpr, BD: tl.constexpr, MODIFIER: tl.constexpr):
    """Load values [KEYS, BD] at offset [KEYS]; `other` where `exists` is False; `exists` None: all exist."""
    d = tl.arange(0, BD)
    pointers = cache + offset[:, None] + d[None, :]
    if exists is not None:
        mask = exists[:, None] & (d < D)[None, :]
        return tl.load(pointers, mask=mask, other=other, cache_modifier=MODIFIER)
    elif BD == D:
        return tl.load(pointers, cache_modifier=MODIFIER)
    else:
        return tl.load(pointers, mask=(d < D)[None, :], other=other, cache_modifier=MODIFIER)


@triton.jit
def store_kv(cache, plane_offset, token_offset, kv_head, j, low, high, mask, D: tl.constexpr):
    """Store both halves of a head, columns j and j + D // 2; plane_offset selects keys or values."""
    pointers = cache + plane_offset + token_offset + kv_head * D + j
    tl.store(pointers, low, mask=mask)
    tl.store(pointers + D // 2, high, mask=mask)
