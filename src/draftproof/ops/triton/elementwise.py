"""Embedding, RMS norm and gated activation kernels: one program per row, or per part of a row.

The reduction tree of a norm is written out (`tree_sum_rows`), so that no tensor layout can change it. Kernels
with a norm are compiled without contraction of multiply and add, for the same reason. Every forward pass
launches `embed_kernel` or `joined_norms_kernel` before it stores KV or attends: see `pdl_begin_pass`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.kernel_utils import (
    launch_options,
    next_power_of_two,
    pdl_begin_pass,
    pdl_launch_next,
    pdl_sync,
    pdl_wait,
)

MULTI_ROW_MIN_ROWS = 256  # above it a program takes several rows, to hide the latency of memory
ROWS_PER_PROGRAM = 4  # at most
PLACES_BLOCK = 256  # tokens of one program of `vocab_places_kernel`


@triton.jit(do_not_specialize=["VOCAB"])  # also ranks * rows: one binary for every number of rows
def embed_kernel(tokens, table, out, VOCAB, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Gather rows: out [R, D] = table[tokens]; a token outside the table gives zeros."""
    pdl_begin_pass(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = (token >= 0) & (token < VOCAB)
    x = tl.load(table + token * D + column, mask=(column < D) & known, other=0.0)
    tl.store(out + row * D + column, x, mask=column < D)


@triton.jit(do_not_specialize=["R", "num_rows", "first", "num_ranks"])
def vocab_places_kernel(
    tokens, own, places, R, num_rows, first, num_ranks, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store the row of each token [R] in a rank's part of a table, and its place in those of all ranks."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.maximum(tl.load(tokens + row, mask=row < R, other=0), 0)
    tl.store(own + row, tl.minimum(tl.maximum(token - first, 0), num_rows - 1), mask=row < R)
    tl.store(places + row, tl.minimum(token // num_rows, num_ranks - 1) * R + row, mask=row < R)


@triton.constexpr_function
def tree_levels(count):
    """Return the number of levels of a binary tree with `count` leaves."""
    return (count - 1).bit_length()


@triton.jit
def tree_sum_rows(x):
    """Sum the rows of x [M, N] in pairs of neighbours, N a power of two -> [M]."""
    M: tl.constexpr = x.shape[0]
    for _ in tl.static_range(tree_levels(x.shape[1])):
        x = tl.sum(tl.reshape(x, (M, x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (M,))


@triton.jit
def inverse_rms(total, eps, D: tl.constexpr):
    """Return 1 / rms of a row of D values from the sum of their squares."""
    return tl.rsqrt(total / D + eps)


@triton.jit
def rms_normed(x, weight, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Normalise x [BLOCK] fp32, zero beyond D: x / rms(x), rounded to `dtype`, times weight, in fp32."""
    scale = inverse_rms(tl.sum(tree_sum_rows((x * x)[None, :]), axis=0), eps, D)
    return (x * scale).to(dtype).to(tl.float32) * weight


@triton.jit
def rms_normed_rows(x, weight, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Normalise rows x [M, BLOCK] fp32, as `rms_normed` does with one."""
    scale = inverse_rms(tree_sum_rows(x * x), eps, D)[:, None]
    return (x * scale).to(dtype).to(tl.float32) * weight[None, :]


@triton.jit
def rms_norm_kernel(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """RMS norm of x [R, D] with weight [D] -> out [R, D]."""
    pdl_launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0)
    pdl_wait(PDL)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    y = rms_normed(value, w.to(tl.float32), eps, D, out.dtype.element_ty)
    tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["R"])
def add_rms_norm_kernel(
    x, output_norm, residual, weight, out, total, eps, R,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store total = x + residual, each rounded, and out = RMS norm of total, all [R, D].

    x is normed before the sum with the weight output_norm [D], if that is not None.
    """
    pdl_launch_next(PDL)
    row = tl.program_id(0) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0)
    if output_norm is not None:
        output_weight = tl.load(output_norm + column, mask=column < D, other=0.0)
    pdl_wait(PDL)
    here = row.to(tl.int64)[:, None] * D + column[None, :]
    ok = (row < R)[:, None] & (column < D)[None, :]
    a = tl.load(x + here, mask=ok, other=0.0).to(residual.dtype.element_ty).to(tl.float32)
    b = tl.load(residual + here, mask=ok, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if output_norm is not None:
        a = rms_normed_rows(a, output_weight.to(tl.float32), eps, D, dtype).to(dtype).to(tl.float32)
    summed = (a + b).to(total.dtype.element_ty)
    tl.store(total + here, summed, mask=ok)
    y = rms_normed_rows(summed.to(tl.float32), w.to(tl.float32), eps, D, dtype)
    tl.store(out + here, y.to(dtype), mask=ok)


@triton.jit
def joined_norms_kernel(
    tokens, table, x, token_norm, hidden_norm, out, VOCAB, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RMS norms of table[tokens] and of x [R, D], concatenated -> out [R, 2 D]; one program per norm."""
    pdl_begin_pass(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        token = tl.load(tokens + row)
        ok = (column < D) & (token >= 0) & (token < VOCAB)
        value = tl.load(table + token * D + column, mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(token_norm + column, mask=column < D, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        weight = tl.load(hidden_norm + column, mask=column < D, other=0.0).to(tl.float32)
    y = rms_normed(value, weight, eps, D, out.dtype.element_ty)
    line = out + (2 * row + tl.program_id(1)) * D
    tl.store(line + column, y.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def act_gate(gate, up, ACTIVATION: tl.constexpr):
    """Return act(gate) * up in fp32; see `ops/reference/activations.py`."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "swiglu_oai")
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        z = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
        return gate / (1.0 + tl.exp(-z)) * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


@triton.jit
def act_mul_kernel(
    gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    """Gated activation of gate_up [R, 2 INNER] -> out [R, INNER]."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = gate_up + row * 2 * INNER + column
    gate = tl.load(line, mask=column < INNER, other=0.0).to(tl.float32)
    up = tl.load(line + INNER, mask=column < INNER, other=0.0).to(tl.float32)
    y = act_gate(gate, up, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + row * INNER + column, y, mask=column < INNER)


@triton.jit
def add_kernel(x, residual, out, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add x and residual [R, D] -> out [R, D]."""
    pdl_sync(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * D + column
    a = tl.load(x + at, mask=column < D, other=0.0).to(tl.float32)
    b = tl.load(residual + at, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + at, (a + b).to(out.dtype.element_ty), mask=column < D)


@triton.jit
def scale_kernel(x, out, factor, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Multiply x [R, D] by `factor` -> out [R, D]."""
    pdl_sync(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * D + column
    y = tl.load(x + at, mask=column < D, other=0.0).to(tl.float32) * factor
    tl.store(out + at, y.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def row_norms_kernel(
    qkv, q_norm, k_norm, out, eps, Q: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """RMS norms of q [R, Q] and k [R, K] of qkv [R, Q + 2 K] -> out; one program for q, for k and for v."""
    pdl_sync(PDL)
    column = tl.arange(0, BLOCK)
    part = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * (Q + 2 * K) + tl.where(part == 0, 0, Q + (part - 1) * K) + column
    ok = column < tl.where(part == 0, Q, K)
    value = tl.load(qkv + at, mask=ok, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    y = value
    if part == 0:
        y = rms_normed(value, tl.load(q_norm + column, mask=ok, other=0.0).to(tl.float32), eps, Q, dtype)
    elif part == 1:
        y = rms_normed(value, tl.load(k_norm + column, mask=ok, other=0.0).to(tl.float32), eps, K, dtype)
    tl.store(out + at, y.to(dtype), mask=ok)


def _norm_options(pdl: bool, block: int) -> dict[str, Any]:
    """Return the launch options of a norm whose programs hold `block` elements."""
    return launch_options(pdl, num_warps=max(1, min(8, block // 256)), enable_fp_fusion=False)


def _column_grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """Return the grid of programs over rows and blocks of columns, and the columns of a block."""
    block = min(1024, next_power_of_two(width))
    return (rows, triton.cdiv(width, block)), block


def embed(tokens: Tensor, table: Tensor, pdl: bool) -> Tensor:
    """Return the rows of `table` [V, D] at `tokens` [R]."""
    vocab, width = table.shape
    out = torch.empty((len(tokens), width), dtype=table.dtype, device=table.device)
    grid, block = _column_grid(len(tokens), width)
    embed_kernel[grid](tokens, table, out, vocab, D=width, BLOCK=block, **launch_options(pdl, num_warps=4))
    return out


def vocab_places(
    tokens: Tensor, num_rows: int, first: int, num_ranks: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows of `tokens` in a part of a table that begins with `first`, and in all parts."""
    own, places = torch.empty_like(tokens), torch.empty_like(tokens)
    grid = (triton.cdiv(len(tokens), PLACES_BLOCK),)
    options = launch_options(pdl, num_warps=4)
    if len(tokens):
        vocab_places_kernel[grid](
            tokens, own, places, len(tokens), num_rows, first, num_ranks, BLOCK=PLACES_BLOCK, **options
        )
    return own, places


def rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    """Return the RMS norm of x [R, D]."""
    out, width = torch.empty_like(x), x.shape[1]
    block = next_power_of_two(width)
    rms_norm_kernel[(len(x),)](x, weight, out, eps, D=width, BLOCK=block, **_norm_options(pdl, block))
    return out


def joined_norms(
    tokens: Tensor, table: Tensor, x: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float, pdl: bool
) -> Tensor:
    """Return the norms of table[tokens] and of x [R, D], concatenated to [R, 2 D]."""
    rows, width = x.shape
    out = torch.empty((rows, 2 * width), dtype=x.dtype, device=x.device)
    block = next_power_of_two(width)
    joined_norms_kernel[(rows, 2)](
        tokens, table, x, token_norm, hidden_norm, out, len(table), eps,
        D=width, BLOCK=block, **_norm_options(pdl, block),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, output_norm: Tensor | None, residual: Tensor, weight: Tensor, eps: float, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x + residual [R, D], and the sum; fp32 rows x are rounded first.

    x is normed before the sum with the weight `output_norm`, if that is not None.
    """
    out, total, (count, width) = torch.empty_like(residual), torch.empty_like(residual), x.shape
    block = next_power_of_two(width)
    rows = 1 if count <= MULTI_ROW_MIN_ROWS else max(1, min(ROWS_PER_PROGRAM, 4096 // block))
    add_rms_norm_kernel[(triton.cdiv(count, rows),)](
        x, output_norm, residual, weight, out, total, eps, count,
        D=width, BLOCK=block, ROWS_PER_PROGRAM=rows, **_norm_options(pdl, block * rows),
    )  # fmt: skip
    return out, total


def act_mul(gate_up: Tensor, activation: str, pdl: bool) -> Tensor:
    """Return act(gate) * up [R, INNER] of gate_up [R, 2 INNER]."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    grid, block = _column_grid(rows, inner)
    options = launch_options(pdl, num_warps=4, enable_fp_fusion=False)  # as the GEMM that contains it
    act_mul_kernel[grid](gate_up, out, INNER=inner, BLOCK=block, ACTIVATION=activation, **options)
    return out


def add(x: Tensor, residual: Tensor, pdl: bool) -> Tensor:
    """Return x + residual, [R, D] each."""
    out, (rows, width) = torch.empty_like(x), x.shape
    grid, block = _column_grid(rows, width)
    add_kernel[grid](x, residual, out, D=width, BLOCK=block, **launch_options(pdl, num_warps=4))
    return out


def scale(x: Tensor, factor: float, pdl: bool) -> Tensor:
    """Return x [R, D] times `factor`."""
    out, (rows, width) = torch.empty_like(x), x.shape
    grid, block = _column_grid(rows, width)
    scale_kernel[grid](x, out, factor, D=width, BLOCK=block, **launch_options(pdl, num_warps=4))
    return out


def row_norms(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, pdl: bool) -> Tensor:
    """Return qkv [R, Q + 2 K] with q [R, Q] and k [R, K] normed."""
    out, (q_width, k_width) = torch.empty_like(qkv), (len(q_norm), len(k_norm))
    block = next_power_of_two(max(q_width, k_width))
    row_norms_kernel[(len(qkv), 3)](
        qkv, q_norm, k_norm, out, eps, Q=q_width, K=k_width, BLOCK=block, **_norm_options(pdl, block)
    )
    return out
