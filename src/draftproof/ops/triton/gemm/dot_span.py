"""Inner loops over K that the GEMM kernels share: the order of every sum is defined here."""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.runtime import pdl_wait_mask


@triton.jit
def dot_span(
    x_at, w_at, row_ok, col_ok, rk, first, last, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr = False, PDL: tl.constexpr = False,
):  # fmt: skip
    """Sum over k in [first, last): [BM, BN] fp32; x_at [BM, BK] and w_at [BK, BN] point at k = 0.

    WEIGHT_FIRST: the first tile of the weight is loaded before the previous kernel has completed.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(first, last, BK):
        if WEIGHT_FIRST:
            b = tl.load(w_at + k, mask=col_ok[None, :], other=0.0)
            a = tl.load(x_at + k, mask=row_ok[:, None] & pdl_wait_mask(k, PDL), other=0.0)
        elif EVEN_K:
            a = tl.load(x_at + k, mask=row_ok[:, None], other=0.0)
            b = tl.load(w_at + k, mask=col_ok[None, :], other=0.0)
        else:
            inside = k + rk < K
            a = tl.load(x_at + k, mask=row_ok[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at + k, mask=col_ok[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def dot_two_spans(
    x_at, w_at, row_ok, col_ok, rk, span, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Sum two spans of K in one loop, as two independent chains of additions, and add them."""
    low = tl.zeros((BM, BN), tl.float32)
    high = tl.zeros((BM, BN), tl.float32)
    for k in range(0, span, BK):
        inside = k + rk < span
        if EVEN_K:
            a = tl.load(x_at + k, mask=row_ok[:, None], other=0.0)
            b = tl.load(w_at + k, mask=col_ok[None, :], other=0.0)
            c = tl.load(x_at + span + k, mask=row_ok[:, None], other=0.0)
            d = tl.load(w_at + span + k, mask=col_ok[None, :], other=0.0)
        else:
            a = tl.load(x_at + k, mask=row_ok[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at + k, mask=col_ok[None, :] & inside[:, None], other=0.0)
            c = tl.load(x_at + span + k, mask=row_ok[:, None] & inside[None, :], other=0.0)
            d = tl.load(w_at + span + k, mask=col_ok[None, :] & inside[:, None], other=0.0)
        low = tl.dot(a, b, low, input_precision="ieee")
        high = tl.dot(c, d, high, input_precision="ieee")
    return low + high
