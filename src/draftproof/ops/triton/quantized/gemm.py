"""GEMM with a quantised weight, alone or with the op after it (SiLU-mul, rotary embedding and KV write).

A program computes a tile of columns; with an op after it also the tile of their partners, as in
`gemm/fused.py`, with the bits of the separate ops. Every operation on floats is rounded once, as in
`ops/reference/quantized.py`: the launches forbid fused multiply-adds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.triton.elementwise import act_gate
from draftproof.ops.triton.gemm.fused import load_rope_rows, rope_store_tile
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import HAS_PTX, INTERPRETED, launch_options, next_power_of_two
from draftproof.ops.triton.quantized.dot import dot_4bit, dot_fp8, dot_w8a8, dot_w8a8_row
from draftproof.ops.triton.quantized.row_quantization import QuantizedRows

GROUP = 8  # row tiles that traverse the columns of the weight together, so that they find it in L2
INLINE_VALUES_PER_THREAD = 64  # values of x that a thread holds to find the largest magnitude of a row
INT4_ZERO = 8  # zero point of a symmetric 4-bit weight


@triton.jit
def products(
    x, w, row_scales, scales, zeros, rm, wn, row_ok, col_ok, N, K, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr,
    INT4_ZERO: tl.constexpr, SCALE_GROUP: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr,
    PACKED_MATH: tl.constexpr, EVEN_K: tl.constexpr, PDL_WAIT: tl.constexpr, X_BLOCK: tl.constexpr = 0,
):  # fmt: skip
    """Return the scaled sums [BM, BN] in fp32 of rows rm and weight rows wn.

    PDL_WAIT: the weight is loaded before the previous kernel has completed; the function waits for it.
    X_BLOCK > 0: x is bf16 beside a w8a8 weight, BM is 1, and the row is quantised here.
    """
    if FORMAT == "w4a16" or FORMAT == "mxfp4":
        y = dot_4bit(
            x, w, scales, zeros, rm, wn, row_ok, col_ok, N, K, BM, BN, FORMAT == "mxfp4", HALF, INT4_ZERO,
            SCALE_GROUP, SHARED, HAS_ZEROS, PACKED_MATH, EVEN_K, PDL_WAIT,
        )  # fmt: skip
    elif FORMAT == "w8a8" and BM == 1:
        y, row_scale = dot_w8a8_row(
            x, w, row_scales, rm, wn, row_ok, col_ok, K, BN, BK, EVEN_K, PDL_WAIT, HAS_PTX, X_BLOCK
        )
    elif FORMAT == "w8a8":
        y = dot_w8a8(x, w, rm, wn, row_ok, col_ok, K, BM, BN, BK, EVEN_K, PDL_WAIT)
    else:
        y = dot_fp8(
            x, w, row_scales, scales, rm, wn, row_ok, col_ok, N, K, BM, BN, BK, BLOCK_ROWS, EVEN_K, PDL_WAIT
        )
    if PDL_WAIT:
        tl.extra.cuda.gdc_wait()
    if FORMAT == "fp8" or (FORMAT == "w8a8" and BM > 1):
        row_scale = tl.load(row_scales + rm, mask=row_ok, other=0.0)[:, None]
    if FORMAT == "w8a8" or FORMAT == "fp8":
        y = y * tl.load(scales + wn, mask=col_ok, other=0.0)[None, :]
        y = y * row_scale
    return y


@triton.jit(do_not_specialize=["M"])  # one binary for every number of rows
def quantized_linear_kernel(
    x, w, row_scales, scales, zeros, bias, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, INT4_ZERO: tl.constexpr,
    SCALE_GROUP: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, PACKED_MATH: tl.constexpr,
    EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PDL: tl.constexpr, X_BLOCK: tl.constexpr,
):  # fmt: skip
    """GEMM of x [M, K] and a weight [N, K] -> out [M, N]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not WEIGHT_FIRST:
            tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    grid_m, grid_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * grid_n)
    size = tl.minimum(grid_m - group * GROUP, GROUP)
    within = pid - group * GROUP * grid_n
    rm = (group * GROUP + within % size) * BM + tl.arange(0, BM)
    rn = (within // size) * BN + tl.arange(0, BN)
    row_ok, col_ok = rm < M, rn < N
    y = products(
        x, w, row_scales, scales, zeros, rm, rn, row_ok, col_ok, N, K, BM, BN, BK, FORMAT, BLOCK_ROWS, HALF,
        INT4_ZERO, SCALE_GROUP, SHARED, HAS_ZEROS, PACKED_MATH, EVEN_K, WEIGHT_FIRST, X_BLOCK,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit(do_not_specialize=["M"])
def quantized_pairs_kernel(
    x, w, row_scales, scales, zeros, bias, out, positions, slots, kv_index, rope, cache, M, N, K, pair_offset,
    plane, weight_rows,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, ROPE: tl.constexpr,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, INT4_ZERO: tl.constexpr,
    SCALE_GROUP: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, PACKED_MATH: tl.constexpr,
    EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x [M, K] and w [2 N, K]; ROPE: q to out [M, NUM_Q * D], k, v to the cache; else out [M, N]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not WEIGHT_FIRST:
            tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
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
        wn = head * D + first + pair % BN
        pair_ok = first + pair % BN < HALF_DIM
    else:
        rn = tile * BN + tl.arange(0, BN)
        col_ok = rn < N
        wn = tile * BN + pair % BN
        pair_ok = wn < N
    wn += tl.where(pair < BN, 0, pair_offset)
    row_ok = rm < M
    y = products(
        x, w, row_scales, scales, zeros, rm, wn, row_ok, pair_ok, weight_rows, K, BM, 2 * BN, BK, FORMAT,
        BLOCK_ROWS, HALF, INT4_ZERO, SCALE_GROUP, SHARED, HAS_ZEROS, PACKED_MATH, EVEN_K, WEIGHT_FIRST,
    )  # fmt: skip
    low, high = tl.split(tl.permute(tl.reshape(y, (BM, 2, BN)), (0, 2, 1)))
    if HAS_BIAS:
        low += tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
        high += tl.load(bias + rn + pair_offset, mask=col_ok, other=0.0)[None, :]
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if ROPE:
        cos, sin, kv_place, is_real = load_rope_rows(rm, row_ok, j, positions, slots, kv_index, rope, D)
        rope_store_tile(
            low, high, cos, sin, kv_place, is_real, rm, row_ok, head, j, cache, out, plane, NUM_Q, NUM_KV, D
        )
    else:
        pointers = out + rm.to(tl.int64)[:, None] * N + rn[None, :]
        inside = row_ok[:, None] & col_ok[None, :]
        tl.store(pointers, act_gate(low, high, ACTIVATION).to(dtype), mask=inside)


def format_constants(x: Tensor, packed: PackedLinear, tile: Tile) -> dict[str, Any]:
    """Return the constants of a kernel with `products` that depend on the weight and the tile."""
    step = 2 * packed.half or tile.bk
    has_bf16_scales = packed.scales is not None and packed.scales.dtype in (torch.bfloat16, torch.uint8)
    return {
        "BM": tile.bm, "BN": tile.bn, "BK": step, "FORMAT": packed.format or "",
        "EVEN_K": packed.depth % step == 0, "HAS_BIAS": packed.bias is not None,
        "HAS_ZEROS": packed.zeros is not None, "BLOCK_ROWS": packed.block_rows, "HALF": packed.half,
        "INT4_ZERO": INT4_ZERO, "SCALE_GROUP": packed.group,
        "SHARED": packed.group % max(packed.half, 1) == 0,
        "PACKED_MATH": x.dtype == torch.bfloat16 and has_bf16_scales and not INTERPRETED,
    }  # fmt: skip


def _constants(x: Tensor, packed: PackedLinear, tile: Tile, pdl: bool) -> dict[str, Any]:
    """Return the constants and options of a launch."""
    constants = format_constants(x, packed, tile)
    first = pdl and tile.weight_first and constants["EVEN_K"]
    options = launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False)
    return {**constants, "WEIGHT_FIRST": first, **options}


def _inputs(x: Tensor | QuantizedRows, packed: PackedLinear) -> tuple[Tensor, ...]:
    """Return the tensors that a kernel reads: x, weight, scales of x, scales, zero points, bias."""
    assert packed.scales is not None
    values, row_scales = (x.values, x.scales) if isinstance(x, QuantizedRows) else (x, packed.scales)
    zeros = packed.weight if packed.zeros is None else packed.zeros
    bias = packed.scales if packed.bias is None else packed.bias
    return values, packed.weight, row_scales, packed.scales, zeros, bias


def linear(x: Tensor | QuantizedRows, packed: PackedLinear, out: Tensor, pdl: bool, tile: Tile) -> None:
    """Store x [M, K] times a quantised weight to out [M, N]."""
    values, *weights = _inputs(x, packed)
    (rows, depth), columns = values.shape, packed.columns
    is_inline = packed.format == "w8a8" and not isinstance(x, QuantizedRows)
    assert not is_inline or (tile.bm == 1 and values.dtype == torch.bfloat16), (tile, values.dtype)
    block = min(next_power_of_two(depth), INLINE_VALUES_PER_THREAD * 32 * tile.warps) if is_inline else 0
    quantized_linear_kernel[(triton.cdiv(rows, tile.bm) * triton.cdiv(columns, tile.bn),)](
        values, *weights, out, rows, columns, depth, GROUP=GROUP, X_BLOCK=block,
        **_constants(values, packed, tile, pdl),
    )  # fmt: skip


def linear_act_mul(
    x: Tensor | QuantizedRows, packed: PackedLinear, out: Tensor, pdl: bool, tile: Tile,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Store a gate and up projection with its activation to `out`, and return it."""
    inner = out.shape[1]
    columns = triton.cdiv(inner, tile.bn)
    return _launch_pairs(x, packed, out, tile, columns, inner, inner, pdl, activation=activation)


def linear_rope_store(
    x: Tensor | QuantizedRows, packed: PackedLinear, rows: Rows, heads: AttentionShape, rope: Tensor,
    cache: Tensor, out: Tensor, pdl: bool, tile: Tile,
) -> Tensor:  # fmt: skip
    """Store q of a QKV projection with rotary embedding to `out` and return it; k and v go to `cache`."""
    half_dim = heads.dim // 2
    tile = tile._replace(bn=min(tile.bn, half_dim & -half_dim))  # a power of two that divides the half
    total = heads.num_q + 2 * heads.num_kv
    columns, half_columns = total * (half_dim // tile.bn), total * half_dim
    return _launch_pairs(x, packed, out, tile, columns, half_columns, half_dim, pdl, rows, heads, rope, cache)


def _launch_pairs(
    x: Tensor | QuantizedRows, packed: PackedLinear, out: Tensor, tile: Tile, columns: int, half_columns: int,
    pair_offset: int, pdl: bool, rows: Rows | None = None, heads: AttentionShape | None = None,
    rope: Tensor | None = None, cache: Tensor | None = None, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Launch the kernel and return `out`; `rows`, `heads`, `rope` and `cache` of a QKV projection."""
    values, *weights = _inputs(x, packed)
    count, depth = values.shape
    ints = (rows.positions, rows.slots, rows.kv_index) if rows else (out, out, out)
    quantized_pairs_kernel[(columns * triton.cdiv(count, tile.bm),)](
        values, *weights, out, *ints, out if rope is None else rope, out if cache is None else cache,
        count, half_columns, depth, pair_offset, 0 if cache is None else cache.stride(0), packed.columns,
        ROPE=heads is not None, NUM_Q=heads.num_q if heads else 0, NUM_KV=heads.num_kv if heads else 0,
        D=heads.dim if heads else 0, ACTIVATION=activation, **_constants(values, packed, tile, pdl),
    )  # fmt: skip
    return out
