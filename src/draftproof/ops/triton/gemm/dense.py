"""GEMM whose bits do not depend on the number of rows.

out[m, n] = sum over k of x[m, k] * w[n, k], in fp32, in ascending order of k by the tensor core (bf16) or by
fused multiply-adds (fp32). Tiles, warps, stages and the number of rows change none of that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.gemm.tiles import Tile, TileTable
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.kernel_utils import (
    launch_options,
    next_power_of_two,
    pdl_sync_prefetch_weight,
    pdl_wait_mask,
)

GROUP_ROW_TILES = 8  # row tiles that traverse the columns of the weight together, so that they find it in L2
PREFETCH_LINES = 32  # of 128 bytes of a weight row, prefetched before the previous kernel has completed
# Limits of the prefetch: with a larger weight or more rows it made the loads slower.
MAX_PREFETCH_ELEMENTS, MAX_PREFETCH_ROWS = 4 << 20, 256


@triton.jit
def dot_rows(
    x_at, w_at, row_ok, col_ok, rk, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum over k in [0, K): [BM, BN] fp32; x_at [BM, BK] and w_at [BK, BN] point at k = 0.

    WEIGHT_FIRST: the first tile of the weight is loaded before the previous kernel has completed; the
    function waits for that kernel.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
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
    if WEIGHT_FIRST and PDL:
        tl.extra.cuda.gdc_wait()
    return acc


@triton.jit(do_not_specialize=["M"])  # one binary for every number of rows
def linear_kernel(
    x, w, bias, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, PREFETCH_LINES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GEMM of x [M, K], w [N, K], bias [N] -> out [M, N]."""
    pid = tl.program_id(0)
    grid_m, grid_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * grid_n)
    first_m = group * GROUP
    size = tl.minimum(grid_m - first_m, GROUP)
    within = pid - group * GROUP * grid_n
    tile_m = first_m + within % size
    rm = tile_m * BM + tl.arange(0, BM)
    rn = (within // size) * BN + tl.arange(0, BN)
    if not WEIGHT_FIRST:
        pdl_sync_prefetch_weight(w, rn, N, K, tile_m == 0, PREFETCH_LINES, PDL)
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rk = tl.arange(0, BK)
    row_ok, col_ok = rm < M, rn < N
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + rn.to(tl.int64)[None, :] * K + rk[:, None]
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    inside = row_ok[:, None] & col_ok[None, :]
    total = dot_rows(x_at, w_at, row_ok, col_ok, rk, K, BM, BN, BK, EVEN_K, WEIGHT_FIRST, PDL)
    if HAS_BIAS:  # added in fp32; the sum is rounded once
        total += tl.load(bias + rn, mask=col_ok, other=0.0)[None, :]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


def num_prefetch_lines(rows: int, columns: int, depth: int, size: int) -> int:
    """Return the number of lines of each weight row that a program prefetches."""
    if rows > MAX_PREFETCH_ROWS or columns * depth > MAX_PREFETCH_ELEMENTS:
        return 0
    return min(PREFETCH_LINES, next_power_of_two(depth * size // 128))


def loads_weight_first(tile: Tile, packed: PackedLinear, pdl: bool) -> bool:
    """Return whether the first weight tile is loaded before the previous kernel has completed."""
    return pdl and tile.weight_first and packed.weight.shape[1] % tile.bk == 0


class Gemm:
    """Launcher of the kernel with the tiles of `tiles`."""

    def __init__(self, tiles: TileTable) -> None:
        self.tiles = tiles

    def __call__(
        self, x: Tensor, packed: PackedLinear, out: Tensor, pdl: bool = False, tile: Tile | None = None
    ) -> None:
        """Store x [M, K] times the weight to out [M, N], by default with the tile selected for the shape."""
        (rows, depth), columns = x.shape, packed.weight.shape[0]
        tile = tile or self.tiles.select("dense", rows, packed)
        linear_kernel[(triton.cdiv(rows, tile.bm) * triton.cdiv(columns, tile.bn),)](
            x, packed.weight, packed.weight if packed.bias is None else packed.bias, out, rows, columns,
            depth, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=GROUP_ROW_TILES,
            HAS_BIAS=packed.bias is not None, EVEN_K=depth % tile.bk == 0,
            PREFETCH_LINES=num_prefetch_lines(rows, columns, depth, x.element_size()),
            WEIGHT_FIRST=loads_weight_first(tile, packed, pdl),
            **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages),
        )  # fmt: skip
