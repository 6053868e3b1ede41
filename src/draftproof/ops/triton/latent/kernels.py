"""Kernels of latent attention around `attention`: norms and KV store, per-head products with rotation.

A row whose slot is negative is padding: its latent row is not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import LatentAttention, Rows
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync

MAX_DEPTH_BLOCK = 64  # columns of one step of a product
COLUMN_BLOCK = 64  # columns of the result of one program
FEW_ROWS = 16  # up to it a program handles one tensor core tile of rows


@triton.jit
def rotate_halves(source, angle, mask, HALF: tl.constexpr, BH: tl.constexpr, PAIRS: tl.constexpr):
    """Load rope columns at source [..., 1], halves or adjacent pairs, and return both rotated halves.

    angle [..., 1]: pointer to cos [HALF], then sin, in fp32. source, angle and mask have the same rank.
    """
    j = tl.arange(0, BH)[None, :]
    mask = mask & (j < HALF)
    if PAIRS:
        first = tl.load(source + 2 * j, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + 2 * j + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(source + j, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + j + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angle + j, mask=mask, other=0.0)
    sin = tl.load(angle + HALF + j, mask=mask, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_halves(target, low, high, mask, HALF: tl.constexpr, BH: tl.constexpr):
    """Store both rotated halves at target [..., 1]."""
    j = tl.arange(0, BH)[None, :]
    mask = mask & (j < HALF)
    tl.store(target + j, low.to(target.dtype.element_ty), mask=mask)
    tl.store(target + j + HALF, high.to(target.dtype.element_ty), mask=mask)


@triton.jit
def norm_columns(source, weight, target, eps, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store the RMS norm of WIDTH columns of one row."""
    dtype: tl.constexpr = target.dtype.element_ty
    i = tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    unit = (x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)).to(dtype).to(tl.float32)
    scaled = unit * tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(target + i, scaled.to(dtype), mask=(i < WIDTH) & mask)


@triton.jit
def latent_store_kernel(
    qkv, positions, slots, kv_index, rope, cache, q_out, q_norm, latent_norm, eps,
    Q: tl.constexpr, BQ: tl.constexpr, LATENT: tl.constexpr, BL: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store latent rows of qkv [R, Q + LATENT + 2 HALF]; program (row, 1) norms the query columns."""
    pdl_sync(PDL)
    WIDTH: tl.constexpr = LATENT + 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    source = qkv + row * (Q + WIDTH)
    if tl.program_id(1) == 1:
        norm_columns(source, q_norm, q_out + row * Q, eps, True, Q, BQ)
    else:
        is_stored = tl.load(slots + row) >= 0
        target = cache + tl.load(kv_index + row) * WIDTH
        norm_columns(source + Q, latent_norm, target, eps, is_stored, LATENT, BL)
        one = tl.arange(0, 1)[:, None]
        angle = rope + tl.load(positions + row) * (2 * HALF) + one
        low, high = rotate_halves(source + Q + LATENT + one, angle, one == 0, HALF, BH, PAIRS)
        store_halves(target + LATENT + one, low, high, (one == 0) & is_stored, HALF, BH)


@triton.jit(do_not_specialize=["R"])
def head_linear_kernel(
    x, weight, out, positions, rope, R,
    X_ROW: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, X_HEAD: tl.constexpr,
    OUT_HEAD: tl.constexpr, W_HEAD: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the first K columns of each head of x to the first N columns of the head in `out`.

    Grid: blocks of columns, heads, blocks of rows. HALF > 0: one more block of columns rotates the last
    2 HALF columns of each head of x to the last columns of the head in `out`.
    """
    pdl_sync(PDL)
    head = tl.program_id(1)
    r = tl.program_id(2) * BM + tl.arange(0, BM)
    source = x + r.to(tl.int64)[:, None] * X_ROW + head * X_HEAD  # [BM, 1]
    target = out + (r.to(tl.int64)[:, None] * HEADS + head) * OUT_HEAD
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = (r < R)[:, None]
    if HALF > 0:  # noqa: SIM102 - a constant, then a value on the device
        if tl.program_id(0) * BN >= N:
            angle = rope + tl.load(positions + r, mask=r < R, other=0)[:, None] * (2 * HALF)
            low, high = rotate_halves(source + X_HEAD - 2 * HALF, angle, is_row, HALF, BH, PAIRS)
            store_halves(target + OUT_HEAD - 2 * HALF, low, high, is_row, HALF, BH)
    if tl.program_id(0) * BN < N:
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(source + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)
            w = weight + head.to(tl.int64) * W_HEAD + k[:, None] * W_K + n[None, :] * W_N
            b = tl.load(w, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        tl.store(target + n[None, :], acc.to(out.dtype.element_ty), mask=is_row & (n < N)[None, :])


def latent_store(
    qkv: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor, cache: Tensor, pdl: bool
) -> Tensor:
    """Return the query columns [R, q_columns], a view where they are not normed."""
    columns, latent = attention.q_columns, attention.heads.value_dim
    q_norm, half = attention.q_norm, attention.rope_dim // 2
    q = qkv[:, :columns] if q_norm is None else qkv.new_empty((len(qkv), columns))
    if len(qkv):
        latent_store_kernel[(len(qkv), 1 if q_norm is None else 2)](
            qkv, rows.positions, rows.slots, rows.kv_index, rope, cache, q,
            rope if q_norm is None else q_norm, attention.latent_norm, attention.norm_eps,
            Q=columns, BQ=next_power_of_two(columns), LATENT=latent, BL=next_power_of_two(latent),
            HALF=half, BH=next_power_of_two(half), PAIRS=attention.rope_pairs,
            **launch_options(pdl, num_warps=4, enable_fp_fusion=False),
        )  # fmt: skip
    return q


def head_linear(
    x: Tensor, weight: Tensor, out_head: int, pdl: bool, rotation: tuple[Rows, LatentAttention, Tensor] | None
) -> Tensor:
    """Return [R, H * out_head]: products of x [R, H * X] and weight [H, N, K], then rotated columns."""
    num_heads, width, depth = weight.shape
    out = torch.empty((len(x), num_heads * out_head), dtype=x.dtype, device=x.device)
    positions, rope, half, pairs = out, out, 0, False
    if rotation is not None:
        rows, attention, rope = rotation
        positions, half, pairs = rows.positions, attention.rope_dim // 2, attention.rope_pairs
    if len(x):
        block = 16 if len(x) <= FEW_ROWS else 64
        columns = min(COLUMN_BLOCK, max(16, next_power_of_two(width)))
        grid = (triton.cdiv(width, columns) + (half > 0), num_heads, triton.cdiv(len(x), block))
        head_linear_kernel[grid](
            x, weight, out, positions, rope, len(x),
            X_ROW=x.stride(0), HEADS=num_heads, N=width, K=depth, X_HEAD=x.shape[1] // num_heads,
            OUT_HEAD=out_head, W_HEAD=weight.stride(0), W_N=weight.stride(1), W_K=weight.stride(2), BM=block,
            BN=columns, BK=min(MAX_DEPTH_BLOCK, max(16, next_power_of_two(depth))),
            HALF=half, BH=max(1, next_power_of_two(half)), PAIRS=pairs,
            **launch_options(pdl, num_warps=4, num_stages=3, enable_fp_fusion=False),
        )  # fmt: skip
    return out
