"""Loads and stores of the paged KV cache of a layer; `ops/contract/kv_layout` defines its layout.

All kernels that read or write the cache use these functions, so that its layout and formats are defined here.
The dtype of the cache selects the format. A quantised block is multiplied as it is stored: the scales of keys
multiply the scores, the scales of values the softmax weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.contract import kv_layout
from draftproof.ops.triton.kernel_utils import HAS_PTX, prefetch_l2

SCALE_BYTES = tl.constexpr(kv_layout.SCALE_BYTES)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds fp32 to an integer
INFINITY_BITS = tl.constexpr(0x7F800000)  # of fp32; those of NaN are larger


@triton.constexpr_function
def is_quantized(dtype) -> bool:
    """Return whether elements of this dtype have scales."""
    return dtype.primitive_bitwidth == 8


@triton.constexpr_function
def max_element(dtype) -> float:
    """Return the element that the largest magnitude of a row becomes."""
    return 127.0 if dtype == tl.int8 else 448.0


@triton.jit
def kv_offset(cache, page, key, NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the offset in a plane of the token at position `key`, on page `page`."""
    if is_quantized(cache.dtype.element_ty):
        return page.to(tl.int64) * (PAGE * NUM_KV * (D + SCALE_BYTES)) + key % PAGE * (NUM_KV * D)
    else:
        return (page.to(tl.int64) * PAGE + key % PAGE) * (NUM_KV * D)


@triton.jit
def prefetch_span(
    cache, plane, pages, span, last, head,
    NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Prefetch keys and values of a span, up to position `last`, before the previous kernel has completed."""
    key = span * SPAN + tl.arange(0, SPAN)
    page = tl.load(pages + key // PAGE, mask=key <= last, other=0).to(tl.int64)
    offset = kv_offset(cache, page, key, NUM_KV, D, PAGE) + head * D
    for column in tl.static_range(0, D, 64):
        prefetch_l2(cache + offset + column)
        prefetch_l2(cache + plane + offset + column)


@triton.jit
def head_pointers(cache, plane, head, NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return pointers to keys and values of a head on page 0, then to their scales if they are quantised."""
    keys, values = cache + head * D, cache + plane + head * D
    if is_quantized(cache.dtype.element_ty):
        scales = cache + PAGE * NUM_KV * D + head * (PAGE * SCALE_BYTES)
        kind: tl.constexpr = tl.pointer_type(tl.float32)
        return keys, values, scales.to(kind, bitcast=True), (scales + plane).to(kind, bitcast=True)
    else:
        return keys, values


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
def load_rows(cache, offset, exists, other, D: tl.constexpr, BD: tl.constexpr, MODIFIER: tl.constexpr):
    """Load keys or values [KEYS, BD] at offset [KEYS]; `other` and `exists`: see `load_keys`."""
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
def convert_elements(block, dtype: tl.constexpr):
    """Convert a block of keys or values to the dtype that the tensor core multiplies, exactly.

    The compiler permutes operands of short tiles if it finds that they were loaded as bytes (kWidth 4), so an
    instruction would add other elements of a sum than in tall tiles. An impure move hides the bytes.
    """
    if not is_quantized(block.dtype):
        return block
    elif HAS_PTX and dtype != tl.float32:
        converted = block.to(tl.float32).to(dtype)
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [converted], dtype=converted.dtype, is_pure=False, pack=2
        )
    else:
        return block.to(tl.float32).to(dtype)


@triton.jit
def load_scales(scales, page, key, exists, NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Load the scales [KEYS] of quantised keys or values."""
    stride: tl.constexpr = PAGE * NUM_KV * (D + SCALE_BYTES) // SCALE_BYTES
    pointers = scales + page.to(tl.int64) * stride + key % PAGE
    if exists is not None:
        return tl.load(pointers, mask=exists, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def round_elements(scaled, dtype: tl.constexpr):
    """Round scaled values to elements, to nearest even."""
    limit: tl.constexpr = max_element(dtype)
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if dtype == tl.float8e4nv:
        return scaled.to(dtype)
    else:
        return ((scaled + ROUNDING) - ROUNDING).to(dtype)


@triton.jit
def quantize_heads(low, high, dtype: tl.constexpr):
    """Return the elements of both halves of heads [H, D / 2] and their scales [H, 1]; see `KVFormat`."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    top = tl.max(
        tl.maximum(tl.abs(low).to(tl.int32, bitcast=True), tl.abs(high).to(tl.int32, bitcast=True)), 1
    )
    is_finite = top < INFINITY_BITS
    scale = tl.math.div_rn(tl.where(is_finite, top, 0).to(tl.float32, bitcast=True), max_element(dtype))
    has_scale = (is_finite & (scale > 0))[:, None]
    divisor = tl.where(has_scale, scale[:, None], 1.0)
    low = tl.where(has_scale, tl.math.div_rn(low, divisor), 0.0)
    high = tl.where(has_scale, tl.math.div_rn(high, divisor), 0.0)
    scale = tl.where(is_finite, scale, float("nan"))[:, None]
    return round_elements(low, dtype), round_elements(high, dtype), scale


@triton.jit
def store_kv(
    cache, plane_offset, index, kv_head, j, low, high, mask,
    NUM_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Store both halves of heads, columns j and j + D // 2; plane_offset selects keys or values.

    index: token index (page * PAGE + offset). A quantised format needs all columns of a head in one call.
    """
    if is_quantized(cache.dtype.element_ty):
        low, high, scale = quantize_heads(low, high, cache.dtype.element_ty)
        base = cache + plane_offset + index // PAGE * (PAGE * NUM_KV * (D + SCALE_BYTES))
        scales = base + PAGE * NUM_KV * D + (kv_head * PAGE + index % PAGE) * SCALE_BYTES
        is_stored = tl.max(mask.to(tl.int32), 1)[:, None] > 0
        tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True), scale, mask=is_stored)
        pointers = base + index % PAGE * (NUM_KV * D) + kv_head * D + j
    else:
        pointers = cache + plane_offset + index * (NUM_KV * D) + kv_head * D + j
    tl.store(pointers, low, mask=mask)
    tl.store(pointers + D // 2, high, mask=mask)
