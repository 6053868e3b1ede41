"""GEMM fused with the op after it: rotary embedding and KV cache write, or a gated activation.

A program computes a tile of columns and the tile of their partners (the other half of a head, or `up` for
`gate`), rounds both as `linear` does and applies the second op, with the bits of the two separate ops. bf16
weights only; QK norms and quantised KV need a whole head and are not supported.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.attention.kv_cache import store_kv
from draftproof.ops.triton.elementwise import act_gate
from draftproof.ops.triton.gemm.dense import dot_rows, loads_weight_first, num_prefetch_lines
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, prefetch_l2

MAX_ROWS = 512  # above it two separate ops are faster


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


@triton.jit(do_not_specialize=["M"])
def fused_linear_kernel(
    x, w, bias, out, positions, slots, kv_index, rope, cache, M, N, K, pair_offset, plane,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, ROPE: tl.constexpr, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr,
    ACTIVATION: tl.constexpr, PREFETCH_LINES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PDL: tl.constexpr,
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
        cos, sin, kv_place, is_real = load_rope_rows(rm, row_ok, j, positions, slots, kv_index, rope, D)
        rope_store_tile(
            low, high, cos, sin, kv_place, is_real, rm, row_ok, head, j, cache, out, plane, NUM_Q, NUM_KV, D
        )
    else:
        pointers = out + rm.to(tl.int64)[:, None] * N + rn[None, :]
        tl.store(pointers, act_gate(low, high, ACTIVATION).to(dtype), mask=inside)


def linear_act_mul(
    x: Tensor, packed: PackedLinear, out: Tensor, pdl: bool, tile: Tile, activation: str = "silu"
) -> Tensor:
    """Store a gate and up projection with its activation to `out`, and return it."""
    columns = triton.cdiv(out.shape[1], tile.bn)
    return _launch(x, packed, out, tile, columns, out.shape[1], out.shape[1], pdl, activation=activation)


def linear_rope_store(
    x: Tensor, packed: PackedLinear, rows: Rows, heads: AttentionShape, rope: Tensor, cache: Tensor,
    out: Tensor, pdl: bool, tile: Tile,
) -> Tensor:  # fmt: skip
    """Store q of a QKV projection with rotary embedding to `out` and return it; k and v go to `cache`."""
    half_dim = heads.dim // 2
    tile = tile._replace(bn=min(tile.bn, half_dim & -half_dim))  # a power of two that divides the half
    total = heads.num_q + 2 * heads.num_kv
    columns, half_columns = total * (half_dim // tile.bn), total * half_dim
    return _launch(x, packed, out, tile, columns, half_columns, half_dim, pdl, rows, heads, rope, cache)


def _launch(
    x: Tensor, packed: PackedLinear, out: Tensor, tile: Tile, columns: int, half_columns: int,
    pair_offset: int, pdl: bool, rows: Rows | None = None, heads: AttentionShape | None = None,
    rope: Tensor | None = None, cache: Tensor | None = None, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Launch the kernel and return `out`; `rows`, `heads`, `rope` and `cache` of a QKV projection."""
    count, depth = x.shape
    ints = (rows.positions, rows.slots, rows.kv_index) if rows else (out, out, out)
    fused_linear_kernel[(columns * triton.cdiv(count, tile.bm),)](
        x, packed.weight, packed.weight if packed.bias is None else packed.bias, out, *ints,
        out if rope is None else rope, out if cache is None else cache,
        count, half_columns, depth, pair_offset, 0 if cache is None else cache.stride(0),
        BM=tile.bm, BN=tile.bn, BK=tile.bk, HAS_BIAS=packed.bias is not None,
        EVEN_K=depth % tile.bk == 0, ROPE=heads is not None, NUM_Q=heads.num_q if heads else 0,
        NUM_KV=heads.num_kv if heads else 0, D=heads.dim if heads else 0, ACTIVATION=activation,
        PREFETCH_LINES=num_prefetch_lines(count, len(packed.weight), depth, 2),
        WEIGHT_FIRST=loads_weight_first(tile, packed, pdl),
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False),
    )  # fmt: skip
    return out
