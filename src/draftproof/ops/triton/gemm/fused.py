"""GEMM fused with the op after it: rotary embedding and KV cache write, or a gated activation.

A program computes a tile of columns and the tile of their partners (the other half of a head, or `up` for
`gate`), rounds both as `linear` does and applies the second op, with the bits of the two separate ops. bf16
weights only. A QK norm needs a whole head: the last program of a head applies it. Quantised KV needs one too
and is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention.kv_cache import store_kv
from draftproof.ops.triton.elementwise import act_gate, inverse_rms, norm_half, tree_sum_rows
from draftproof.ops.triton.gemm.dense import dot_rows, loads_weight_first, num_prefetch_lines
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, prefetch_l2

MAX_ROWS = 512  # above it two separate ops are faster
MAX_NORM_ROWS = 64  # with QK norms
MIN_DOT_ROWS = 16  # of a tile; one row alone may have a tile of its own
MAX_ARRIVALS = 1 << 12  # counters of programs that have stored their part of a head


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """QK norms of a QKV projection; a launch leaves the counters `arrivals` [MAX_ARRIVALS] int32 at zero."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    arrivals: Tensor

    @staticmethod
    def supports(rows: int, heads: AttentionShape) -> bool:
        """Return whether the kernels norm the heads of so many rows."""
        half_dim, tiles = heads.dim // 2, MAX_NORM_ROWS // MIN_DOT_ROWS * (heads.num_q + heads.num_kv)
        return rows <= MAX_NORM_ROWS and half_dim & (half_dim - 1) == 0 and tiles <= MAX_ARRIVALS


@triton.jit
def load_rope_rows(rm, row_ok, j, positions, slots, kv_index, rope, D: tl.constexpr):
    """Load cos, sin [BM, BN], the KV place [BM] and is_real [BM] (not padding) of rows rm [BM]."""
    inside = row_ok[:, None] & (j < D // 2)[None, :]
    angle = rope + tl.load(positions + rm, mask=row_ok, other=0)[:, None] * D + j[None, :]
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + D // 2, mask=inside, other=0.0)
    is_real = tl.load(slots + rm, mask=row_ok, other=-1) >= 0
    return cos, sin, tl.load(kv_index + rm, mask=row_ok, other=0), is_real


@triton.jit
def rope_store_tile(
    low, high, cos, sin, kv_place, is_real, rm, row_ok, head, j, cache, out, plane,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotate columns j of a head and their partners, [BM, BN] each; store q to `out`, k, v to the cache."""
    HALF_DIM: tl.constexpr = D // 2
    dtype: tl.constexpr = out.dtype.element_ty
    inside = row_ok[:, None] & (j < HALF_DIM)[None, :]
    is_v = head >= NUM_Q + NUM_KV
    first = tl.where(is_v, low, low * cos - high * sin).to(dtype)
    second = tl.where(is_v, high, high * cos + low * sin).to(dtype)
    if head < NUM_Q:
        pointers = out + rm.to(tl.int64)[:, None] * (NUM_Q * D) + head * D + j[None, :]
        tl.store(pointers, first, mask=inside)
        tl.store(pointers + HALF_DIM, second, mask=inside)
    else:
        kv_head = tl.where(is_v, head - NUM_KV, head) - NUM_Q
        stored = inside & is_real[:, None]
        PAGE: tl.constexpr = 0  # only quantised formats need the page size
        store_kv(
            cache, tl.where(is_v, plane, 0), kv_place[:, None], kv_head, j[None, :], first, second, stored,
            NUM_KV, D, PAGE,
        )  # fmt: skip


@triton.jit
def norm_rope_store(
    low, high, rm, row_ok, head, j, positions, slots, kv_index, rope, cache, out, plane, q_norm, k_norm, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate and store columns j of a head and their partners; with NORM: all columns, normed unless v."""
    if NORM:  # noqa: SIM102 - a constant, then a value on the device
        if head < NUM_Q + NUM_KV:
            dtype: tl.constexpr = out.dtype.element_ty
            norm = q_norm
            if head >= NUM_Q:
                norm = k_norm
            scale = inverse_rms(tree_sum_rows(low * low + high * high), eps, D)
            low = norm_half(low, scale, tl.load(norm + j).to(tl.float32), dtype)
            high = norm_half(high, scale, tl.load(norm + D // 2 + j).to(tl.float32), dtype)
    cos, sin, kv_place, is_real = load_rope_rows(rm, row_ok, j, positions, slots, kv_index, rope, D)
    rope_store_tile(
        low, high, cos, sin, kv_place, is_real, rm, row_ok, head, j, cache, out, plane, NUM_Q, NUM_KV, D
    )


@triton.jit
def finish_head_tile(
    low, high, rm, row_ok, row_tile, head, j, positions, slots, kv_index, rope, cache, out, plane,
    q_norm, k_norm, eps, product, arrivals,
    BN: tl.constexpr, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm with NORM, rotate and store columns j [BN] of a head and their partners, low and high [BM, BN].

    The head is normed by the last of its programs, which reads `product` [M, (NUM_Q + NUM_KV) * D] of all.
    """
    HALF_DIM: tl.constexpr = D // 2
    TILES: tl.constexpr = HALF_DIM // BN
    if NORM and TILES > 1:
        if head < NUM_Q + NUM_KV:
            dtype: tl.constexpr = out.dtype.element_ty
            line = product + rm.to(tl.int64)[:, None] * ((NUM_Q + NUM_KV) * D) + head * D
            tl.store(line + j[None, :], low.to(dtype), mask=row_ok[:, None])
            tl.store(line + HALF_DIM + j[None, :], high.to(dtype), mask=row_ok[:, None])
            tl.debug_barrier()  # the stores of all threads precede the arrival
            counter = arrivals + row_tile * (NUM_Q + NUM_KV) + head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == TILES - 1:
                tl.store(counter, 0)
                column = tl.arange(0, HALF_DIM)
                first = tl.load(line + column[None, :], mask=row_ok[:, None], other=0.0).to(tl.float32)
                second = tl.load(line + HALF_DIM + column[None, :], mask=row_ok[:, None], other=0.0)
                norm_rope_store(
                    first, second.to(tl.float32), rm, row_ok, head, column, positions, slots, kv_index, rope,
                    cache, out, plane, q_norm, k_norm, eps, NUM_Q, NUM_KV, D, True,
                )  # fmt: skip
        else:
            norm_rope_store(
                low, high, rm, row_ok, head, j, positions, slots, kv_index, rope, cache, out, plane, q_norm,
                k_norm, eps, NUM_Q, NUM_KV, D, False,
            )  # fmt: skip
    else:
        norm_rope_store(
            low, high, rm, row_ok, head, j, positions, slots, kv_index, rope, cache, out, plane, q_norm,
            k_norm, eps, NUM_Q, NUM_KV, D, NORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def fused_linear_kernel(
    x, w, bias, out, positions, slots, kv_index, rope, cache, q_norm, k_norm, product, arrivals, eps,
    M, N, K, pair_offset, plane,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, ROPE: tl.constexpr, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, PREFETCH_LINES: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x [M, K] and w [2 N, K]; ROPE: q to out [M, NUM_Q * D], k, v to the cache; else out [M, N]."""
    dtype: tl.constexpr = x.dtype.element_ty
    grid_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    rm = (pid % grid_m) * BM + tl.arange(0, BM)
    tile = pid // grid_m
    pair = tl.arange(0, 2 * BN)  # columns of the tile, then their partners
    if ROPE:
        HALF_DIM: tl.constexpr = D // 2
        head = tile // (HALF_DIM // BN)
        first = (tile % (HALF_DIM // BN)) * BN
        j = first + tl.arange(0, BN)
        rn = head * D + j
        col_ok = j < HALF_DIM
        pair_ok = first + pair % BN < HALF_DIM
        wn = head * D + first + pair % BN
    else:
        rn = tile * BN + tl.arange(0, BN)
        col_ok = rn < N
        wn = tile * BN + pair % BN
        pair_ok = wn < N
    wn += tl.where(pair < BN, 0, pair_offset)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH_LINES:  # noqa: SIM102 - a constant, then a value on the device
            if pid % grid_m == 0:
                offset = tl.minimum(tl.arange(0, PREFETCH_LINES) * 64, K - 1)
                prefetch_l2(w + tl.where(pair_ok, wn, 0).to(tl.int64)[:, None] * K + offset[None, :])
        if not WEIGHT_FIRST:
            tl.extra.cuda.gdc_wait()
    rk = tl.arange(0, BK)
    row_ok = rm < M
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + wn.to(tl.int64)[None, :] * K + rk[:, None]
    acc = dot_rows(x_at, w_at, row_ok, pair_ok, rk, K, BM, 2 * BN, BK, EVEN_K, WEIGHT_FIRST, PDL)
    low, high = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
    if HAS_BIAS:
        low += tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
        high += tl.load(bias + rn + pair_offset, mask=col_ok, other=0.0)[None, :]
    inside = row_ok[:, None] & col_ok[None, :]
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if ROPE:
        finish_head_tile(
            low, high, rm, row_ok, pid % grid_m, head, j, positions, slots, kv_index, rope, cache, out, plane,
            q_norm, k_norm, eps, product, arrivals, BN, NUM_Q, NUM_KV, D, NORM,
        )  # fmt: skip
    else:
        pointers = out + rm.to(tl.int64)[:, None] * N + rn[None, :]
        tl.store(pointers, act_gate(low, high, ACTIVATION).to(dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class QkvTarget:
    """Where a QKV projection writes k and v, and what is applied to its rows before."""

    rows: Rows
    heads: AttentionShape
    rope: Tensor
    cache: Tensor
    norms: HeadNorms | None = None

    def split(self, tile: Tile) -> tuple[Tile, int]:
        """Return `tile` with columns that divide half of a head, and the number of its column tiles."""
        half_dim = self.heads.dim // 2
        tile = tile._replace(bn=min(tile.bn, half_dim & -half_dim))  # a power of two that divides the half
        return tile, (self.heads.num_q + 2 * self.heads.num_kv) * (half_dim // tile.bn)


def qkv_arguments(target: QkvTarget | None, out: Tensor) -> tuple[Any, ...]:
    """Return the arguments of a kernel from `positions` to `eps`; `out` for those that are not read."""
    if target is None:
        return (*[out] * 9, 0.0)
    rows, heads, norms = target.rows, target.heads, target.norms
    given = (rows.positions, rows.slots, rows.kv_index, target.rope, target.cache)
    if norms is None:
        return (*given, *[out] * 4, 0.0)
    product = torch.empty(
        (len(out), (heads.num_q + heads.num_kv) * heads.dim), dtype=out.dtype, device=out.device
    )
    return (*given, norms.q, norms.k, product, norms.arrivals, norms.eps)


def qkv_constants(target: QkvTarget | None) -> dict[str, Any]:
    """Return the constants of a kernel that describe the heads."""
    if target is None:
        return {"ROPE": False, "NUM_Q": 0, "NUM_KV": 0, "D": 0, "NORM": False}
    heads = target.heads
    sizes = {"NUM_Q": heads.num_q, "NUM_KV": heads.num_kv, "D": heads.dim}
    return {"ROPE": True, **sizes, "NORM": target.norms is not None}


def linear_act_mul(
    x: Tensor, packed: PackedLinear, out: Tensor, pdl: bool, tile: Tile, activation: str = "silu"
) -> Tensor:
    """Store a gate and up projection with its activation to `out`, and return it."""
    inner = out.shape[1]
    return _launch(x, packed, out, tile, triton.cdiv(inner, tile.bn), inner, inner, pdl, activation)


def linear_rope_store(
    x: Tensor, packed: PackedLinear, target: QkvTarget, out: Tensor, pdl: bool, tile: Tile
) -> Tensor:
    """Store q of a QKV projection to `out` and return it; k and v go to the cache of `target`."""
    tile, columns = target.split(tile)
    half_dim = target.heads.dim // 2
    return _launch(x, packed, out, tile, columns, packed.columns // 2, half_dim, pdl, target=target)


def _launch(
    x: Tensor, packed: PackedLinear, out: Tensor, tile: Tile, columns: int, half_columns: int,
    pair_offset: int, pdl: bool, activation: str = "silu", target: QkvTarget | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel and return `out`; `target` of a QKV projection."""
    count, depth = x.shape
    fused_linear_kernel[(columns * triton.cdiv(count, tile.bm),)](
        x, packed.weight, packed.weight if packed.bias is None else packed.bias, out,
        *qkv_arguments(target, out), count, half_columns, depth, pair_offset,
        0 if target is None else target.cache.stride(0),
        BM=tile.bm, BN=tile.bn, BK=tile.bk, HAS_BIAS=packed.bias is not None,
        EVEN_K=depth % tile.bk == 0, ACTIVATION=activation, **qkv_constants(target),
        PREFETCH_LINES=num_prefetch_lines(count, len(packed.weight), depth, 2),
        WEIGHT_FIRST=loads_weight_first(tile, packed, pdl),
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False),
    )  # fmt: skip
    return out
