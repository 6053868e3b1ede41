"""Embedding, RMS norms and the gated activation: one program a row (or a piece of one), one fixed tree.

The tree of a norm's sum is written out (`tree`), so that no layout of a kernel can change it; compiled
without contraction of multiply and add, for the same reason.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import begin, launch_options, power_of_two

MANY = 256  # rows; with more, a norm's program takes several, so that one hides the other's latency
ROWS = 4


@triton.jit
def embed_kernel(tokens, table, out, VOCAB, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [R, D] = table[tokens]; a token outside the table gives zeros."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = (token >= 0) & (token < VOCAB)
    x = tl.load(table + token * D + at, mask=(at < D) & known, other=0.0)
    tl.store(out + row * D + at, x, mask=at < D)


@triton.constexpr_function
def levels(width):
    return width.bit_length() - 1


@triton.jit
def tree(x):
    """x [M, N] -> sums of rows [M], neighbours first; N a power of two. Two terms have one sum."""
    M: tl.constexpr = x.shape[0]
    for _ in tl.static_range(levels(x.shape[1])):
        x = tl.sum(tl.reshape(x, (M, x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (M,))


@triton.jit
def row_scale(total, eps, D: tl.constexpr):
    """1 / rms of a row of D values from the sum of their squares."""
    return tl.rsqrt(total / D + eps)


@triton.jit
def normed(x, weight, eps, D: tl.constexpr, dtype: tl.constexpr):
    """x [BLOCK] fp32, zero beyond D -> x / rms(x), rounded to dtype, times weight; fp32 of that."""
    scale = row_scale(tl.sum(tree((x * x)[None, :]), axis=0), eps, D)
    return (x * scale).to(dtype).to(tl.float32) * weight


@triton.jit
def rms_norm_kernel(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [R, D], weight [D] -> out [R, D]."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    y = normed(value, w, eps, D, out.dtype.element_ty)
    tl.store(out + row * D + at, y.to(out.dtype.element_ty), mask=at < D)


@triton.jit(do_not_specialize=["R"])
def add_rms_norm_kernel(
    x, residual, weight, out, total, eps, R,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total = x + residual, rounded; out = norm of it; all [R, D]. ROWS rows a program."""
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    here = row.to(tl.int64)[:, None] * D + at[None, :]
    ok = (row < R)[:, None] & (at < D)[None, :]
    a = tl.load(x + here, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(residual + here, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    summed = (a + b).to(total.dtype.element_ty)
    tl.store(total + here, summed, mask=ok)
    dtype: tl.constexpr = out.dtype.element_ty
    value = summed.to(tl.float32)
    scale = row_scale(tree(value * value), eps, D)[:, None]
    y = (value * scale).to(dtype).to(tl.float32) * w[None, :]
    tl.store(out + here, y.to(dtype), mask=ok)


@triton.jit
def joined_norms_kernel(
    tokens, table, x, first, second, out, VOCAB, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [R, 2 D]: norm of table[tokens], then norm of x [R, D]; a program each."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        token = tl.load(tokens + row)
        ok = (at < D) & (token >= 0) & (token < VOCAB)
        value = tl.load(table + token * D + at, mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(first + at, mask=at < D, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
        weight = tl.load(second + at, mask=at < D, other=0.0).to(tl.float32)
    y = normed(value, weight, eps, D, out.dtype.element_ty)
    line = out + (2 * row + tl.program_id(1)) * D
    tl.store(line + at, y.to(out.dtype.element_ty), mask=at < D)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_mul_kernel(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up [R, 2 INNER] -> silu(gate) * up [R, INNER]."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = gate_up + row * 2 * INNER + at
    gate = tl.load(line, mask=at < INNER, other=0.0).to(tl.float32)
    up = tl.load(line + INNER, mask=at < INNER, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + at, gated(gate, up).to(out.dtype.element_ty), mask=at < INNER)


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def embed(tokens: Tensor, table: Tensor, out: Tensor, pdl: bool) -> None:
    vocab, width = table.shape
    block = min(1024, power_of_two(width))
    grid = (len(tokens), triton.cdiv(width, block))
    embed_kernel[grid](tokens, table, out, vocab, D=width, BLOCK=block, **launch_options(pdl, num_warps=4))


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, pdl: bool) -> None:
    width = x.shape[1]
    block = power_of_two(width)
    options = launch_options(pdl, num_warps=_warps(block), enable_fp_fusion=False)
    rms_norm_kernel[(len(x),)](x, weight, out, eps, D=width, BLOCK=block, **options)


def joined_norms(
    tokens: Tensor,
    table: Tensor,
    x: Tensor,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    eps: float,
    pdl: bool,
) -> None:
    width = x.shape[1]
    block = power_of_two(width)
    options = launch_options(pdl, num_warps=_warps(block), enable_fp_fusion=False)
    joined_norms_kernel[(len(x), 2)](
        tokens, table, x, first, second, out, len(table), eps, D=width, BLOCK=block, **options
    )


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, pdl: bool
) -> None:
    count, width = x.shape
    block = power_of_two(width)
    rows = 1 if count <= MANY else max(1, min(ROWS, 4096 // block))
    options = launch_options(pdl, num_warps=_warps(block * rows), enable_fp_fusion=False)
    add_rms_norm_kernel[(triton.cdiv(count, rows),)](
        x, residual, weight, out, total, eps, count, D=width, BLOCK=block, ROWS=rows, **options
    )


def silu_mul(gate_up: Tensor, out: Tensor, pdl: bool) -> None:
    inner = out.shape[1]
    block = min(1024, power_of_two(inner))
    grid = (len(out), triton.cdiv(inner, block))
    silu_mul_kernel[grid](gate_up, out, INNER=inner, BLOCK=block, **launch_options(pdl, num_warps=4))
