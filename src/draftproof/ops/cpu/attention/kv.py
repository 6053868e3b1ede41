"""Access to the paged KV cache for all CPU kernels: addresses, loads and stores.

`ops/contract/kv_layout` defines the cache of a layer. Kernels compute addresses and move vectors with these
functions, or load bf16 and fp32 directly. `form` is a compile-time constant of a kernel: one of
`KV_FORMS`. `size` is the bytes of an element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftproof.ops.contract.kv_layout import SCALE_BYTES
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import copy_bytes, device, inlined, load_i32, store_f32

FLOAT, INT8, FP8 = 0, 1, 2
# dtype of the cache -> form
KV_FORMS = {torch.float32: FLOAT, torch.bfloat16: FLOAT, torch.int8: INT8, torch.float8_e4m3fn: FP8}
_ZERO, _NAN = np.float32(0.0), np.float32(np.nan)
_INT8_MAX, _FP8_MAX = np.float32(127.0), np.float32(448.0)
# e4m3: sign, 4 bits of exponent (bias 7), 3 bits of mantissa; below the smallest normal number 2**-6 the
# values are multiples of 2**-9
_FP8_MIN_NORMAL, _FP8_STEP = np.float32(2.0**-6), np.float32(2.0**-9)
_FP8_ALIGN = np.float32(2.0**14)  # its last bit in fp32 is _FP8_STEP: adding it rounds to a multiple
_FP8_MANTISSA_SHIFT = 20  # from the mantissa of e4m3 to that of fp32
_FP8_EXPONENT_SHIFT = (127 - 7) << 23  # from the exponent of e4m3, moved, to that of fp32


@inlined
def element_bytes(bf16: bool, form: int) -> int:
    """Return the bytes of a stored element; `bf16`: dtype of the activations."""
    if form != FLOAT:
        return 1
    return 2 if bf16 else 4


@inlined
def page_start(pages: int, entry: int, page_size: int, num_pages: int) -> int:
    """Return the index of the first key of an entry of the page table."""
    # a page out of range reads valid memory of the cache instead of foreign memory
    return min(max(load_i32(pages + 4 * entry), 0), num_pages - 1) * page_size


@inlined
def token_index(pages: int, key: int, page_size: int, num_pages: int) -> int:
    """Return the index of a key in the cache, from a row of the page table."""
    entry = key // page_size
    return page_start(pages, entry, page_size, num_pages) + key - entry * page_size


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
def _fp8_to_float(data: Any) -> Any:
    """Return the values of e4m3 bytes, exactly; data: int32."""
    magnitude = v.iand(data, v.isplat(0x7F))
    small = v.mul(v.to_float(magnitude), v.splat(_FP8_STEP))
    moved = v.ishl(magnitude, v.isplat(_FP8_MANTISSA_SHIFT))
    normal = v.as_float(v.iadd(moved, v.isplat(_FP8_EXPONENT_SHIFT)))
    value = v.select(v.gt(v.splat(_FP8_MIN_NORMAL), small), small, normal)
    sign = v.ishl(v.iand(data, v.isplat(0x80)), v.isplat(24))
    return v.as_float(v.ior(v.as_int(value), sign))


@inlined
def _float_to_fp8(x: Any) -> Any:
    """Return the e4m3 bytes of values of magnitude at most 448, rounded to nearest even, as int32."""
    bits = v.as_int(x)
    magnitude = v.iand(bits, v.isplat(0x7FFFFFFF))
    size = v.as_float(magnitude)
    align = v.splat(_FP8_ALIGN)
    small = v.isub(v.as_int(v.add(size, align)), v.as_int(align))
    odd = v.iand(v.ishr(magnitude, v.isplat(_FP8_MANTISSA_SHIFT)), v.isplat(1))
    rounded = v.iadd(v.iadd(magnitude, odd), v.isplat((1 << (_FP8_MANTISSA_SHIFT - 1)) - 1))
    normal = v.ishr(v.isub(rounded, v.isplat(_FP8_EXPONENT_SHIFT)), v.isplat(_FP8_MANTISSA_SHIFT))
    value = v.iselect(v.gt(v.splat(_FP8_MIN_NORMAL), size), small, normal)
    return v.ior(value, v.iand(v.ishr(bits, v.isplat(24)), v.isplat(0x80)))


@inlined
def load_quantized(address: int, first: int, count: int, form: int) -> Any:
    """Load elements [first, first + min(count, 16)) of a quantised vector as fp32, then zeros."""
    data = v.iload_i8(address + first) if count >= 16 else v.iload_i8_n(address + first, count)
    if form == FP8:
        return _fp8_to_float(data)
    return v.to_float(data)


@inlined
def copy_kv_bf16(target: int, source: int, dim: int) -> None:
    """Copy a stored vector of `dim` bf16 without conversion."""
    v.copy_bf16(target, source, dim)


@inlined
def _round_elements(x: Any, form: int) -> Any:
    """Return the bytes of scaled values that are at most the largest element."""
    if form == FP8:
        return _float_to_fp8(x)
    return v.to_int(v.rint(x))


@inlined
def _max_element(form: int) -> Any:
    return _FP8_MAX if form == FP8 else _INT8_MAX


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
    divisor = v.splat(scale)
    has_scale = v.gt(divisor, zero)  # in every lane; False for NaN
    for i in range(0, dim, 16):
        x = v.select(has_scale, v.div(v.tload(source, i, dim - i, bf16), divisor), zero)
        x = v.maximum(v.minimum(x, v.splat(limit)), v.splat(-limit))
        if dim - i >= 16:
            v.istore_bytes(target + i, _round_elements(x, form))
        else:
            v.istore_bytes_n(target + i, _round_elements(x, form), dim - i)
    store_f32(scale_at, scale)


def make_store(bf16: bool, form: int) -> Any:
    """Return the function that stores a vector of one token and head; only its own form is compiled."""

    @inlined
    def copy(target: int, scale_at: int, source: int, dim: int) -> None:
        copy_bytes(target, source, dim * (2 if bf16 else 4))

    @inlined
    def quantize(target: int, scale_at: int, source: int, dim: int) -> None:
        _quantize(target, scale_at, source, dim, bf16, form)

    write = copy if form == FLOAT else quantize

    @inlined
    def store(cache: int, index: int, head: int, source: int, page_size: int, num_kv: int, dim: int) -> None:
        """Store a vector of `dim` activations; an index past K is one of V."""
        size = element_bytes(bf16, form)
        target = cache + kv_offset(index, head, page_size, num_kv, dim, size, form)
        write(target, cache + scale_offset(index, head, page_size, num_kv, dim), source, dim)

    return store
