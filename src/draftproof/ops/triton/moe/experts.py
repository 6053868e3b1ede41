"""Grouped GEMM: rows times the weight of an expert, for all experts in one launch.

The weights of all experts are stacked, [E * N, K]. A program multiplies a tile of pairs (row, rank) that
selected the same expert and a tile of columns. The sum over k has the order of `gemm/dense.py`, or of the
format in `quantized/dot.py`, and depends neither on the tile nor on the other pairs in it.

The grid depends on the number of rows only: programs beyond the work list return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.contract.types import ExpertPart
from draftproof.ops.triton.elementwise import act_gate
from draftproof.ops.triton.gemm.dense import dot_rows
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, pdl_sync
from draftproof.ops.triton.moe.routing import MAX_EXPERT_TILES, Assignment
from draftproof.ops.triton.quantized.gemm import format_constants, products
from draftproof.ops.triton.quantized.row_quantization import QuantizedRows

FP32_STAGES = 2  # of tiles of 4-bit weights beside rows in fp32


@triton.jit
def pairs_of_item(item, experts, order, counts, items, R, BM: tl.constexpr, HAS_LIST: tl.constexpr):
    """Return the expert of a work item, its pairs [BM] and which of them exist; without a list: one pair."""
    line = tl.arange(0, BM)
    if HAS_LIST:
        entry = tl.load(items + 1 + item)
        expert = entry // MAX_EXPERT_TILES
        place = (entry % MAX_EXPERT_TILES) * BM + line
        exists = place < tl.load(counts + expert)
        pair = tl.load(order + expert.to(tl.int64) * R + place, mask=exists, other=0)
    else:
        expert = tl.load(experts + item)
        pair, exists = item + line * 0, line == 0
    return expert, pair, exists


@triton.jit(do_not_specialize=["R"])
def expert_linear_kernel(
    x, w, bias, row_scales, scales, zeros, experts, order, counts, items, out, R, N, K, num_weight_rows,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOP_K: tl.constexpr, GATE_UP: tl.constexpr,
    HAS_LIST: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, INT4_ZERO: tl.constexpr,
    SCALE_GROUP: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, PACKED_MATH: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Multiply pairs by the weights of their experts, w [E * N, K] -> out [R * TOP_K, N].

    GATE_UP: x [R, K], w [E * 2 N, K], gated activation after it. Else: x [R * TOP_K, K]. LAST > 0: w holds
    the experts FIRST..LAST alone, and the pairs of others are not written.
    """
    pdl_sync(PDL)
    grid_n = tl.cdiv(N, BN)
    item, tile_n = tl.program_id(0) // grid_n, tl.program_id(0) % grid_n
    if HAS_LIST:  # noqa: SIM102 - a constant, then a value on the device
        if item >= tl.load(items):
            return
    expert, pair, exists = pairs_of_item(item, experts, order, counts, items, R, BM, HAS_LIST)
    if LAST > 0:
        if (expert < FIRST) | (expert >= LAST):
            return
        expert = expert - FIRST
    rm = pair // TOP_K if GATE_UP else pair
    rn = tile_n * BN + tl.arange(0, BN)
    if GATE_UP:
        WIDTH: tl.constexpr = 2 * BN  # columns of gate, then of up
        column = tl.arange(0, WIDTH)
        wn = tile_n * BN + column % BN
        col_ok = wn < N
        first = expert * (2 * N)
        wn = first + wn + tl.where(column < BN, 0, N)
    else:
        WIDTH: tl.constexpr = BN
        col_ok = rn < N
        first = expert * N
        wn = first + rn
    if FORMAT == "":
        rk = tl.arange(0, BK)
        x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
        w_at = w + wn.to(tl.int64)[None, :] * K + rk[:, None]
        y = dot_rows(x_at, w_at, exists, col_ok, rk, K, BM, WIDTH, BK, EVEN_K, False, PDL)
    else:
        y = products(
            x, w, row_scales, scales, zeros, rm, wn, exists, col_ok, num_weight_rows, K, BM, WIDTH, BK,
            FORMAT, BLOCK_ROWS, HALF, INT4_ZERO, SCALE_GROUP, SHARED, HAS_ZEROS, PACKED_MATH, EVEN_K, False,
        )  # fmt: skip
    inside = exists[:, None] & (rn < N)[None, :]
    place = out + pair.to(tl.int64)[:, None] * N + rn[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if GATE_UP:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BM, 2, BN)), (0, 2, 1)))
        if HAS_BIAS:
            gate += tl.load(bias + first + rn, mask=rn < N, other=0.0)[None, :]
            up += tl.load(bias + first + N + rn, mask=rn < N, other=0.0)[None, :]
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        tl.store(place, act_gate(gate, up, ACTIVATION).to(dtype), mask=inside)
    else:
        if HAS_BIAS:
            y += tl.load(bias + wn, mask=col_ok, other=0.0)[None, :]
        tl.store(place, y.to(dtype), mask=inside)


def expert_linear(
    x: Tensor | QuantizedRows, packed: PackedLinear, found: Assignment, num_experts: int,
    activation: str | None, dtype: torch.dtype, pdl: bool, tile: Tile, part: ExpertPart | None = None,
) -> Tensor:  # fmt: skip
    """Return the products of all pairs, [R * top_k, N] of `dtype`; `activation`: of a gate and up GEMM.

    `packed` has `num_experts` experts; with a `part` they are that part, and other pairs are undefined.
    """
    is_gate_up = activation is not None
    rows, top_k = found.experts.shape
    values, scales = (x, packed.scales) if isinstance(x, Tensor) else (x.values, x.scales)
    columns = packed.columns // num_experts // (2 if is_gate_up else 1)
    out = torch.empty((rows * top_k, columns), dtype=dtype, device=packed.weight.device)
    num_items = rows * top_k if found.items is None else len(found.items) - 1
    parts = packed.bias, scales, packed.scales, packed.zeros  # an absent part is not read
    lists = found.order, found.counts, found.items
    # Rows in fp32 beside 4-bit weights take twice the shared memory that tiles are chosen by.
    stages = FP32_STAGES if packed.half and values.dtype == torch.float32 else tile.stages
    expert_linear_kernel[(num_items * triton.cdiv(columns, tile.bn),)](
        values, packed.weight, *(out if part is None else part for part in parts), found.experts,
        *(found.experts if part is None else part for part in lists), out, rows, columns,
        packed.depth, packed.columns, TOP_K=top_k, GATE_UP=is_gate_up, HAS_LIST=found.items is not None,
        ACTIVATION=activation or "", **format_constants(values, packed, tile),
        FIRST=0 if part is None else part.first, LAST=0 if part is None else part.first + part.count,
        **launch_options(pdl, num_warps=tile.warps, num_stages=stages, enable_fp_fusion=False),
    )  # fmt: skip
    return out
