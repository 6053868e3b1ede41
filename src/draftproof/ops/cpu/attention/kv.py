"""Access to the paged KV cache for all CPU kernels: addresses, loads and stores.

A layer's cache is [2, pages, page_size, num_kv, dim]: the plane of K, then the plane of V, in the dtype of
the activations. Kernels compute addresses and move vectors with these functions only, so that another
storage format changes this file and the kernels' element size.
"""

from __future__ import annotations

from typing import Any

from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import copy_bytes, inlined, load_i32


@inlined
def token_index(pages: int, key: int, page_size: int, num_pages: int) -> int:
    """Return the index of a key in the cache, from a row of the page table."""
    entry = key // page_size
    # a page out of range reads valid memory of the cache instead of foreign memory
    page = min(max(load_i32(pages + 4 * entry), 0), num_pages - 1)
    return page * page_size + key - entry * page_size


@inlined
def kv_offset(index: int, head: int, num_kv: int, dim: int, size: int) -> int:
    """Return the offset in bytes of a head's vector in the plane of K or of V."""
    return (index * num_kv + head) * dim * size


@inlined
def key_stride(num_kv: int, dim: int, size: int) -> int:
    """Return the bytes from one key of a head to the next on the same page."""
    return num_kv * dim * size


@inlined
def plane_bytes(num_pages: int, page_size: int, num_kv: int, dim: int, size: int) -> int:
    """Return the size in bytes of the plane of K, which is the offset of the plane of V."""
    return num_pages * page_size * num_kv * dim * size


@inlined
def load_kv(address: int, first: int, count: int, bf16: bool) -> Any:
    """Load elements [first, first + min(count, 16)) of a stored vector as fp32, then zeros."""
    return v.tload(address, first, count, bf16)


@inlined
def copy_kv_bf16(target: int, source: int, dim: int) -> None:
    """Copy a stored vector of `dim` bf16 without conversion."""
    v.copy_bf16(target, source, dim)


@inlined
def store_kv(address: int, source: int, dim: int, size: int) -> None:
    """Store a vector of `dim` activations."""
    copy_bytes(address, source, dim * size)
