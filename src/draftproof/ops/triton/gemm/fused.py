"""A matrix product of two tiles at a time and what follows it: rotation and KV write, or the activation.

A program sums a tile of columns and the tile of their partners (the other half of a head, or up beside
gate), rounds both as `linear` would, and does what the op after it would have done: the bits of two ops in
one kernel. bf16; per-head norms need a whole head and are not done here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.elementwise import silu_gate
from draftproof.ops.triton.gemm import tiles
from draftproof.ops.triton.gemm.dense import PackedLinear, early, lines
from draftproof.ops.triton.runtime import launch_options, pdl_wait_mask, prefetch_l2

MOST = 512  # rows; beyond, the two ops one after the other


@triton.jit
def _spans(
    x_at, w_at, row_ok, col_ok, rk, first, last, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, EARLY: tl.constexpr = False,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Sums over k in [first, last) of both tiles side by side: [BM, 2 BN]. EARLY: see `gemm`."""
    acc = tl.zeros((BM, 2 * BN), tl.float32)
    for k in range(first, last, BK):
        if EARLY:
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
def places(rm, row_ok, j, positions, slots, kv_index, rope, D: tl.constexpr):
    """What `rotate_store` wants to know of rows rm [BM]: cos, sin [BM, BN], place and liveness [BM]."""
    inside = row_ok[:, None] & (j < D // 2)[None, :]
    angle = rope + tl.load(positions + rm, mask=row_ok, other=0)[:, None] * D + j[None, :]
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + D // 2, mask=inside, other=0.0)
    live = tl.load(slots + rm, mask=row_ok, other=-1) >= 0
    return cos, sin, tl.load(kv_index + rm, mask=row_ok, other=0), live


@triton.jit
def rotate_store(
    low, high, cos, sin, place, live, rm, row_ok, head, j, cache, out, plane,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Columns j of a head and their partners, [BM, BN] each: rotated, then to `out` (q) or to the cache."""
    MIDDLE: tl.constexpr = D // 2
    dtype: tl.constexpr = out.dtype.element_ty
    inside = row_ok[:, None] & (j < MIDDLE)[None, :]
    is_v = head >= NUM_Q + NUM_KV
    first = tl.where(is_v, low, low * cos - high * sin).to(dtype)
    second = tl.where(is_v, high, high * cos + low * sin).to(dtype)
    if head < NUM_Q:
        at = out + rm.to(tl.int64)[:, None] * (NUM_Q * D) + head * D + j[None, :]
        tl.store(at, first, mask=inside)
        tl.store(at + MIDDLE, second, mask=inside)
    else:
        kv_head = tl.where(is_v, head - NUM_KV, head) - NUM_Q
        at = cache + tl.where(is_v, plane, 0) + place[:, None] * (NUM_KV * D) + kv_head * D + j[None, :]
        tl.store(at, first, mask=inside & live[:, None])
        tl.store(at + MIDDLE, second, mask=inside & live[:, None])


@triton.jit(do_not_specialize=["M"])
def pair_kernel(
    x, w, bias, out, positions, slots, kv_index, rope, cache, M, N, K, span, apart, plane,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, ROPE: tl.constexpr, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [M, K], w [2 N, K]. ROPE: q to out [M, NUM_Q * D], k and v to the cache; else out [M, N]."""
    dtype: tl.constexpr = x.dtype.element_ty
    grid_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    rm = (pid % grid_m) * BM + tl.arange(0, BM)
    tile = pid // grid_m
    both = tl.arange(0, 2 * BN)  # the tile, then the partners
    if ROPE:
        MIDDLE: tl.constexpr = D // 2
        head = tile // (MIDDLE // BN)
        first = (tile % (MIDDLE // BN)) * BN
        j = first + tl.arange(0, BN)
        rn = head * D + j
        col_ok = j < MIDDLE
        both_ok = first + both % BN < MIDDLE
        wn = head * D + first + both % BN
    else:
        rn = tile * BN + tl.arange(0, BN)
        col_ok = rn < N
        wn = tile * BN + both % BN
        both_ok = wn < N
    wn += tl.where(both < BN, 0, apart)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:  # noqa: SIM102 - a constant, then a value on the device
            if pid % grid_m == 0:
                line = tl.minimum(tl.arange(0, LINES) * 64, K - 1)
                prefetch_l2(w + tl.where(both_ok, wn, 0).to(tl.int64)[:, None] * K + line[None, :])
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    rk = tl.arange(0, BK)
    row_ok = rm < M
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + wn.to(tl.int64)[None, :] * K + rk[:, None]
    if EARLY:
        acc = _spans(x_at, w_at, row_ok, both_ok, rk, 0, K, K, BM, BN, BK, EVEN_K, EARLY, PDL)
        if PDL:
            tl.extra.cuda.gdc_wait()
    else:
        acc = _spans(x_at, w_at, row_ok, both_ok, rk, 0, span, K, BM, BN, BK, EVEN_K)
    for s in range(1, SPLIT):
        acc += _spans(x_at, w_at, row_ok, both_ok, rk, s * span, (s + 1) * span, K, BM, BN, BK, EVEN_K)
    low, high = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
    if HAS_BIAS:
        low += tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
        high += tl.load(bias + rn + apart, mask=col_ok, other=0.0)[None, :]
    inside = row_ok[:, None] & col_ok[None, :]
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if ROPE:
        cos, sin, place, live = places(rm, row_ok, j, positions, slots, kv_index, rope, D)
        rotate_store(
            low, high, cos, sin, place, live, rm, row_ok, head, j, cache, out, plane, NUM_Q, NUM_KV, D
        )
    else:
        tl.store(
            out + rm.to(tl.int64)[:, None] * N + rn[None, :], silu_gate(low, high).to(dtype), mask=inside
        )


def _tile(rows: int, packed: PackedLinear) -> tiles.Tile:
    return tiles.pair_tile_for(rows, *packed.weight.shape)


def linear_silu_mul(
    x: Tensor, packed: PackedLinear, out: Tensor, pdl: bool, tile: tiles.Tile | None = None
) -> None:
    tile = tile or _tile(len(x), packed)
    inner = out.shape[1]
    _launch(x, packed, out, tile, triton.cdiv(inner, tile.bn), inner, inner, pdl)


def linear_rope_store(
    x: Tensor, packed: PackedLinear, rows: Rows, heads: AttentionShape, rope: Tensor, cache: Tensor,
    out: Tensor,
    pdl: bool, tile: tiles.Tile | None = None,
) -> None:  # fmt: skip
    middle = heads.dim // 2
    tile = tile or _tile(len(x), packed)
    tile = tile._replace(bn=min(tile.bn, middle))
    total = heads.num_q + 2 * heads.num_kv
    columns, rest = total * (middle // tile.bn), (rows, heads, rope, cache)
    _launch(x, packed, out, tile, columns, total * middle, middle, pdl, *rest)


def _launch(
    x: Tensor, packed: PackedLinear, out: Tensor, tile: tiles.Tile, columns: int, half: int, apart: int,
    pdl: bool, rows: Rows | None = None, heads: AttentionShape | None = None, rope: Tensor | None = None,
    cache: Tensor | None = None,
) -> None:  # fmt: skip
    count, depth = x.shape
    span = depth // packed.split
    ints = (rows.positions, rows.slots, rows.kv_index) if rows else (out, out, out)
    pair_kernel[(columns * triton.cdiv(count, tile.bm),)](
        x, packed.weight, packed.weight if packed.bias is None else packed.bias, out, *ints,
        out if rope is None else rope, out if cache is None else cache,
        count, half, depth, span, apart, 0 if cache is None else cache.stride(0),
        BM=tile.bm, BN=tile.bn, BK=tile.bk, SPLIT=packed.split, HAS_BIAS=packed.bias is not None,
        EVEN_K=span % tile.bk == 0, ROPE=heads is not None, NUM_Q=heads.num_q if heads else 0,
        NUM_KV=heads.num_kv if heads else 0, D=heads.dim if heads else 0,
        LINES=lines(count, len(packed.weight), depth, 2),
        EARLY=early(tile, packed, pdl),
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False),
    )  # fmt: skip


def takes(packed: PackedLinear, rows: int) -> bool:
    """Whether this kernel does it."""
    return packed.weight.dtype == torch.bfloat16 and 0 < rows <= MOST


def takes_heads(packed: PackedLinear, rows: int, heads: AttentionShape) -> bool:
    return takes(packed, rows) and heads.dim % 32 == 0
