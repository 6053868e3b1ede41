"""Access to the paged KV cache for all CPU kernels: addresses, loads and stores.

`ops/contract/kv_layout` defines the cache of a layer. Kernels compute addresses and move vectors with these
functions only. `form` is a compile-time constant of a kernel: one of `KV_FORMS`. `size` is the bytes of an
element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftproof.ops.contract.kv_layout import SCALE_BYTES
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import copy_bytes, device, inlined, load_i32, store_f32

FLOAT, INT8 = 0, 1
# dtype of the cache -> form
KV_FORMS = {torch.float32: FLOAT, torch.bfloat16: FLOAT, torch.int8: INT8}
_ZERO, _INFINITY, _NAN = np.float32(0.0), np.float32(np.inf), np.float32(np.nan)
_INT8_MAX = np.float32(127.0)


@inlined
def element_bytes(bf16: bool, form: int) -> int:
    """Return the bytes of a stored element; `bf16`: dtype of the activations."""
    if form != FLOAT:
        return 1
    return 2 if bf16 else 4


@inlined
def token_index(pages: int, key: int, page_size: int, num_pages: int) -> int:
    """Return the index of a key in the cache, from a row of the page table."""
    entry = key // page_size
    # a page out of range reads valid memory of the cache instead of foreign memory
    page = min(max(load_i32(pages + 4 * entry), 0), num_pages - 1)
    return page * page_size + key - entry * page_size


@inlined
def _scales_offset(index: int, page_size: int, num_kv: int, form: int) -> int:
    """Return the bytes of the scales of all pages before the page of an index."""
    if form == FLOAT:
        return 0
    return index // page_size * page_size * num_kv * SCALE_BYTES


@inlined
def kv_offset(index: int, head: int, page_size: int, num_kv: int, dim: int, size: int, form: int) -> int:
    """Return the offset in bytes of a head's vector in the plane of K or of V."""
    return (index * num_kv + head) * dim * size + _scales_offset(index, page_size, num_kv, form)


@inlined
def scale_offset(index: int, head: int, page_size: int, num_kv: int, dim: int) -> int:
    """Return the offset in bytes of the scale of a head's vector; a head's scales on a page are adjacent."""
    page = index // page_size
    page_start = page * page_size * num_kv * (dim + SCALE_BYTES)
    place = head * page_size + index - page * page_size
    return page_start + page_size * num_kv * dim + place * SCALE_BYTES


@inlined
def key_stride(num_kv: int, dim: int, size: int) -> int:
    """Return the bytes from one key of a head to the next on the same page."""
    return num_kv * dim * size


@inlined
def plane_bytes(num_pages: int, page_size: int, num_kv: int, dim: int, size: int, form: int) -> int:
    """Return the size in bytes of the plane of K, which is the offset of the plane of V."""
    return kv_offset(num_pages * page_size, 0, page_size, num_kv, dim, size, form)


@inlined
def load_kv(address: int, first: int, count: int, bf16: bool, form: int) -> Any:
    """Load elements [first, first + min(count, 16)) of a stored vector as fp32, then zeros."""
    if form == FLOAT:
        return v.tload(address, first, count, bf16)
    data = v.iload_i8(address + first) if count >= 16 else v.iload_i8_n(address + first, count)
    return v.to_float(data)


@inlined
def copy_kv_bf16(target: int, source: int, dim: int) -> None:
    """Copy a stored vector of `dim` bf16 without conversion."""
    v.copy_bf16(target, source, dim)


@inlined
def _round_elements(x: Any, form: int) -> Any:
    """Return the bytes of scaled values that are at most the largest element."""
    return v.to_int(v.rint(x))


@inlined
def _max_element(form: int) -> Any:
    return _INT8_MAX


@device
def _quantize(target: int, scale_at: int, source: int, dim: int, bf16: bool, form: int) -> None:
    """Store the elements and the scale of `dim` activations; see `KVFormat`."""
    zero, top, check = v.splat(_ZERO), v.splat(_ZERO), v.splat(_ZERO)
    for i in range(0, dim, 16):
        x = v.tload(source, i, dim - i, bf16)
        top = v.maximum(v.maximum(x, v.sub(zero, x)), top)
        check = v.add(check, v.sub(x, x))  # NaN if a value is not finite
    limit = _max_element(form)
    scale = np.float32(v.max_lane(top) / limit)
    if v.sum_lanes(check) != _ZERO:
        scale = _NAN
    divisor = v.splat(scale if scale > _ZERO else _INFINITY)
    for i in range(0, dim, 16):
        x = v.div(v.tload(source, i, dim - i, bf16), divisor)
        x = v.select(v.ge(x, x), x, zero)  # a row with infinities
        x = v.maximum(v.minimum(x, v.splat(limit)), v.splat(-limit))
        if dim - i >= 16:
            v.istore_bytes(target + i, _round_elements(x, form))
        else:
            v.istore_bytes_n(target + i, _round_elements(x, form), dim - i)
    store_f32(scale_at, scale)


@inlined
def store_kv(
    cache: int,
    index: int,
    head: int,
    source: int,
    page_size: int,
    num_kv: int,
    dim: int,
    bf16: bool,
    form: int,
) -> None:
    """Store a vector of `dim` activations of one token and head; an index past K is one of V."""
    size = element_bytes(bf16, form)
    target = cache + kv_offset(index, head, page_size, num_kv, dim, size, form)
    if form == FLOAT:
        copy_bytes(target, source, dim * size)
    else:
        scale_at = cache + scale_offset(index, head, page_size, num_kv, dim)
        _quantize(target, scale_at, source, dim, bf16, form)
