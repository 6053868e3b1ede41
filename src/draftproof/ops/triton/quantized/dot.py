"""Products of rows with quantised weights, one function per weight format, in a fixed order of K.

Tiles, warps, stages and the number of rows change no bit: int8 products are summed in int32, by the tensor
core or, for one row, without it; e4m3 products in chunks of 128 by the tensor core, and chunks in fp32 by
ascending K; 4-bit weights (integers, e2m1) become bf16, and their products are summed as in `gemm/dense.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.kernel_utils import pdl_wait_mask
from draftproof.ops.triton.quantized.inline_quantization import quantized_words, row_scale_of

UNPACK_INT4 = tl.constexpr(
    """
    {
    .reg .b32 low, high;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
    }
    """
)
BIAS = tl.constexpr(128.0)  # of an unpacked integer: byte 0x43 above the integer is the bf16 number 128 + it
UNPACK_E2M1 = tl.constexpr(  # sign to bit 15, the other bits to 8..6 of a bf16 number
    """
    {
    .reg .b32 low, high, sign;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0, 0x1404;
    prmt.b32 $1, low, 0, 0x3424;
    prmt.b32 $2, high, 0, 0x1404;
    prmt.b32 $3, high, 0, 0x3424;
    """
    + "".join(
        f"""
    shl.b32 sign, ${i}, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 ${i}, ${i}, 2;
    and.b32 ${i}, ${i}, 0x01C001C0;
    or.b32 ${i}, ${i}, sign;
    """
        for i in range(4)
    )
    + "}"
)
TO_E2M1 = tl.constexpr(2.0**126)  # an e2m1 code in the place of the bits of a float, times this, is its value


@triton.jit
def load_x(x_at, k, row_ok, rk, K, EVEN_K: tl.constexpr, PDL_WAIT: tl.constexpr):
    """Load a tile of rows [BM, BK] at depth k; PDL_WAIT: wait for the previous kernel first."""
    mask = row_ok[:, None] & pdl_wait_mask(k, PDL_WAIT)
    if not EVEN_K:
        mask = mask & (k + rk < K)[None, :]
    return tl.load(x_at + k, mask=mask, other=0.0)


@triton.jit
def load_w(w_at, k, col_ok, rk, K, EVEN_K: tl.constexpr):
    """Load a tile of the weight [BK, BN] at depth k."""
    mask = col_ok[None, :]
    if not EVEN_K:
        mask = mask & (k + rk < K)[:, None]
    return tl.load(w_at + k, mask=mask, other=0.0)


@triton.jit
def dot_w8a8(
    x, w, rm, wn, row_ok, col_ok, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, PDL_WAIT: tl.constexpr,
):  # fmt: skip
    """Return the integer sums [BM, BN] in fp32."""
    rk = tl.arange(0, BK)
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + wn.to(tl.int64)[None, :] * K + rk[:, None]
    total = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        b = load_w(w_at, k, col_ok, rk, K, EVEN_K)
        a = load_x(x_at, k, row_ok, rk, K, EVEN_K, PDL_WAIT)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    return total.to(tl.float32)


@triton.jit
def dp4a(a, b, total, ASM: tl.constexpr):
    """Add the products of the four int8 in each element of a and b, int32, to `total`."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    for shift in tl.static_range(0, 32, 8):
        total += ((a << (24 - shift)) >> 24) * ((b << (24 - shift)) >> 24)
    return total


@triton.jit
def load_words(at, k, col_ok, word, words, EVEN_K: tl.constexpr):
    """Load words [BN, BK / 4] of a weight from word k on; zeros beyond the last one."""
    mask = col_ok[:, None] & (k < words)
    if not EVEN_K:
        mask = mask & (k + word < words)[None, :]
    return tl.load(at + k, mask=mask, other=0)


@triton.jit
def dot_w8a8_row(
    x, w, row_scales, rm, wn, row_ok, col_ok, K, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    PDL_WAIT: tl.constexpr, ASM: tl.constexpr, X_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the integer sums [1, BN] of one row in fp32 and the scale of the row; see `products`.

    The tensor core, whose tile has 16 rows, is not used. Threads keep sums of their own words of four int8
    and add them up at the end: integers have no order. The next tile of the weight is loaded one iteration
    early. K is a multiple of 4.
    """
    word, words = tl.arange(0, BK // 4), K // 4
    w_words = w.to(tl.pointer_type(tl.int32))
    w_at = w_words + wn.to(tl.int64)[:, None] * words + word[None, :]
    row, limit = tl.sum(rm, 0), tl.sum(row_ok.to(tl.int32), 0) * words  # 0 for a row that does not exist
    following = load_words(w_at, 0, col_ok, word, words, EVEN_K)
    if PDL_WAIT:
        tl.extra.cuda.gdc_wait()
    if X_BLOCK:
        scale, inverse = row_scale_of(x, row, 2 * limit, K, X_BLOCK)
        x_words = x.to(tl.pointer_type(tl.int64))  # four bf16
    else:
        scale = tl.load(row_scales + row, mask=limit > 0, other=0.0)
        x_words = x.to(tl.pointer_type(tl.int32))
    x_at = x_words + row.to(tl.int64) * words + word
    total = tl.zeros((BN, BK // 4), tl.int32)
    for k in range(0, words, BK // 4):
        b = following
        following = load_words(w_at, k + BK // 4, col_ok, word, words, EVEN_K)
        if X_BLOCK:
            a = quantized_words(x_at + k, k + word < limit, inverse)
        else:
            a = tl.load(x_at + k, mask=k + word < limit, other=0)
        total = dp4a(b, tl.broadcast_to(a[None, :], (BN, BK // 4)), total, ASM)
    return tl.sum(total, 1)[None, :].to(tl.float32), scale


@triton.jit
def dot_fp8(
    x, w, row_scales, scales, rm, wn, row_ok, col_ok, N, K, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BLOCK_ROWS: tl.constexpr, EVEN_K: tl.constexpr, PDL_WAIT: tl.constexpr,
):  # fmt: skip
    """Return the sums [BM, BN] over chunks of BK; with BLOCK_ROWS each chunk is scaled before it is added.

    BLOCK_ROWS: output rows that share a scale in scales [K / BK, N / BLOCK_ROWS]; row_scales [M, K / BK].
    """
    rk = tl.arange(0, BK)
    chunks = tl.cdiv(K, BK)
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + wn.to(tl.int64)[None, :] * K + rk[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for chunk in range(chunks):
        k = chunk * BK
        b = load_w(w_at, k, col_ok, rk, K, EVEN_K)
        a = load_x(x_at, k, row_ok, rk, K, EVEN_K, PDL_WAIT)
        part = tl.dot(a, b, out_dtype=tl.float32)
        if BLOCK_ROWS:
            width = tl.cdiv(N, BLOCK_ROWS)
            part = part * tl.load(scales + chunk * width + wn // BLOCK_ROWS, mask=col_ok, other=0.0)[None, :]
            at = row_scales + rm.to(tl.int64) * chunks + chunk
            ready = row_ok & pdl_wait_mask(k, PDL_WAIT)
            part = part * tl.load(at, mask=ready, other=0.0)[:, None]
        total = total + part
    return total


@triton.jit
def group_values(pointer, k, wn, col_ok, N, HALF: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr):
    """Load the values of HALF elements from [K / GROUP, N]: [1, BN] if SHARED, else [HALF / GROUP, 1, BN]."""
    if SHARED:
        values = tl.load(pointer + (k // GROUP) * N + wn, mask=col_ok, other=0)[None, :]
    else:
        group = k // GROUP + tl.arange(0, HALF // GROUP)
        at = pointer + group[:, None, None] * N + wn[None, None, :]
        values = tl.load(at, mask=col_ok[None, None, :], other=0)
    return values


@triton.jit
def dequantized(
    codes, scales, zeros, k, wn, col_ok, N, dtype: tl.constexpr, E2M1: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, PACKED_MATH: tl.constexpr,
):  # fmt: skip
    """Return the values of 4-bit codes [HALF, BN], rounded to bf16, in `dtype`.

    A value is scale * (integer - zero point). E2M1: e2m1 * 2 ** (exponent - 127), which is exact.
    """
    HALF: tl.constexpr = codes.shape[0]
    BN: tl.constexpr = codes.shape[1]
    scale = group_values(scales, k, wn, col_ok, N, HALF, GROUP, SHARED)
    if not SHARED:  # the groups get a dimension of their own, so that a scale is loaded once
        codes = tl.reshape(codes, (HALF // GROUP, GROUP, BN))
    if E2M1:
        if PACKED_MATH:  # codes are bf16; 0x40 is 2 ** -127, of the exponent 0: a subnormal number
            scale = tl.maximum(scale.to(tl.int32) << 7, 0x40).to(tl.int16).to(tl.bfloat16, bitcast=True)
            value = (codes * TO_E2M1).to(tl.bfloat16) * scale
        else:
            code = codes.to(tl.int32)
            number = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
            scale = tl.maximum(scale.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
            value = (number * TO_E2M1 * scale).to(tl.bfloat16).to(dtype)
    else:
        if HAS_ZEROS:
            zero = group_values(zeros, k, wn, col_ok, N, HALF, GROUP, SHARED).to(tl.float32)
        else:
            zero = tl.full((1, 1), ZERO, tl.float32)
        if PACKED_MATH:  # codes are 128 + integer in bf16; every step is exact until the product is rounded
            value = (codes - (zero + BIAS).to(tl.bfloat16)) * scale
        else:
            value = ((codes.to(tl.float32) - zero) * scale.to(tl.float32)).to(tl.bfloat16).to(dtype)
    return tl.reshape(value, (HALF, BN))


@triton.jit
def dot_4bit(
    x, w, scales, zeros, rm, wn, row_ok, col_ok, N, K, BM: tl.constexpr, BN: tl.constexpr,
    E2M1: tl.constexpr, HALF: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, PACKED_MATH: tl.constexpr, EVEN_K: tl.constexpr, PDL_WAIT: tl.constexpr,
):  # fmt: skip
    """Return the sums [BM, BN]; byte j of a piece of HALF bytes holds the elements j and HALF + j.

    The elements are integers, or e2m1 numbers with exponents as scales.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    rk = tl.arange(0, HALF)
    bytes_per_row = tl.cdiv(K, 2 * HALF) * HALF
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + wn.to(tl.int64)[None, :] * bytes_per_row + rk[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, 2 * HALF):
        pair = tl.load(w_at + k // 2, mask=col_ok[None, :], other=0)
        a = load_x(x_at, k, row_ok, rk, K, EVEN_K, PDL_WAIT)
        c = load_x(x_at, k + HALF, row_ok, rk, K, EVEN_K, PDL_WAIT)
        if PACKED_MATH:
            low, high = tl.inline_asm_elementwise(
                UNPACK_E2M1 if E2M1 else UNPACK_INT4, "=r,=r,=r,=r,r", [pair],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = pair & 15, pair >> 4
        b = dequantized(
            low, scales, zeros, k, wn, col_ok, N, dtype, E2M1, ZERO, GROUP, SHARED, HAS_ZEROS, PACKED_MATH
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision="ieee")
        d = dequantized(
            high, scales, zeros, k + HALF, wn, col_ok, N, dtype, E2M1, ZERO, GROUP, SHARED, HAS_ZEROS,
            PACKED_MATH,
        )  # fmt: skip
        total = tl.dot(c, d, total, input_precision="ieee")
    return total
