"""GEMM with int8 weights and int8 activations (W8A8).

Each row of x is rounded to int8 with a scale of its own; a weight has one scale per output column. The
products are summed in int32, which is exact, so no tile changes the bits. Every operation on floats is
rounded once, as in `ops/reference/quantized.py`: the launches forbid fused multiply-adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import launch_options, next_power_of_two, pdl_sync

INT8_MAX = tl.constexpr(127.0)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds fp32 to an integer
MAX_BLOCK = 4096  # columns of x that one program holds at a time
# maximum rows -> tile
TILES = {
    16: Tile(16, 32, 128, 4, 5),
    64: Tile(64, 64, 128, 4, 4),
    256: Tile(64, 128, 128, 4, 4),
    1 << 30: Tile(128, 128, 128, 8, 3),
}


@triton.jit
def quantize_rows_kernel(
    x, out, scales, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Round x [R, D] to int8 by the largest magnitude of each row -> out [R, D], scales [R]."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        ok = start + column < D
        top = tl.maximum(
            top, tl.abs(tl.load(x + row * D + start + column, mask=ok, other=0.0).to(tl.float32))
        )
    largest = tl.max(top, 0)
    inverse = tl.where(largest > 0, tl.math.div_rn(INT8_MAX, tl.where(largest > 0, largest, 1.0)), 0.0)
    for start in range(0, D, BLOCK):
        ok = start + column < D
        value = tl.load(x + row * D + start + column, mask=ok, other=0.0).to(tl.float32)
        rounded = (value * inverse + ROUNDING) - ROUNDING
        tl.store(out + row * D + start + column, rounded.to(tl.int8), mask=ok)
    tl.store(scales + row, tl.math.div_rn(largest, INT8_MAX))


@triton.jit(do_not_specialize=["M"])
def w8a8_kernel(
    x, row_scales, w, scales, bias, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GEMM of int8 x [M, K] with row_scales [M], int8 w [N, K] with scales [N], bias [N] -> out [M, N]."""
    pdl_sync(PDL)
    pid = tl.program_id(0)
    grid_m = tl.cdiv(M, BM)
    rm = (pid % grid_m) * BM + tl.arange(0, BM)
    rn = (pid // grid_m) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    row_ok, col_ok = rm < M, rn < N
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + rn.to(tl.int64)[None, :] * K + rk[:, None]
    total = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        inside = k + rk < K
        a = tl.load(x_at + k, mask=row_ok[:, None] & inside[None, :], other=0)
        b = tl.load(w_at + k, mask=col_ok[None, :] & inside[:, None], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    y = total.to(tl.float32) * tl.load(scales + rn, mask=col_ok, other=0.0)[None, :]
    y = y * tl.load(row_scales + rm, mask=row_ok, other=0.0)[:, None]
    if HAS_BIAS:
        y = y + tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


def linear(x: Tensor, packed: PackedLinear, out: Tensor, pdl: bool) -> None:
    """Store x [M, K] times an int8 weight to out [M, N]."""
    (rows, depth), columns = x.shape, packed.weight.shape[0]
    assert packed.scales is not None
    quantized = torch.empty((rows, depth), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    block = min(MAX_BLOCK, next_power_of_two(depth))
    # a product and a sum in one rounding would differ from the reference
    quantize_rows_kernel[(rows,)](
        x, quantized, scales, D=depth, BLOCK=block, **launch_options(pdl, num_warps=4, enable_fp_fusion=False)
    )
    tile = next(tile for limit, tile in TILES.items() if rows <= limit)
    bias = packed.scales if packed.bias is None else packed.bias
    w8a8_kernel[(triton.cdiv(rows, tile.bm) * triton.cdiv(columns, tile.bn),)](
        quantized, scales, packed.weight, packed.scales, bias, out, rows, columns, depth,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, HAS_BIAS=packed.bias is not None,
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False),
    )  # fmt: skip
