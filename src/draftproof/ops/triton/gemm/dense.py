"""GEMM whose bits do not depend on the number of rows.

out[m, n] = sum over k of x[m, k] * w[n, k], in fp32. K is divided into a fixed number of spans, which depends
on the weight shape only (`tiles.SPLIT_K`). A span is summed in ascending order of k by the tensor core (bf16)
or by fused multiply-adds (fp32), and spans are added in ascending order. Tiles, warps, stages and the number
of rows change none of that. With few rows the spans run in parallel, and the last program to finish adds
them; with many rows one program sums all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.gemm import tiles
from draftproof.ops.triton.gemm.dot_span import dot_span, dot_two_spans
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.runtime import launch_options, next_power_of_two, pdl_sync_prefetch_weight

GROUP = 8  # row tiles that traverse the columns of the weight together, so that they find it in L2
PREFETCH_LINES = (
    32  # of 128 bytes of a weight row that are prefetched before the previous kernel has completed
)
# Limits of the prefetch: with a larger weight or more rows it made the loads slower.
MAX_PREFETCH_ELEMENTS, MAX_PREFETCH_ROWS = 4 << 20, 256
MAX_PARALLEL_SPLIT_ROWS = 64  # up to this many rows the spans of K run in parallel


@triton.jit
def _store_out(total, out_at, inside, bias_at, col_ok, HAS_BIAS: tl.constexpr):
    """Add the bias in fp32, round once and store."""
    if HAS_BIAS:
        total += tl.load(bias_at, mask=col_ok, other=0.0)[None, :]
    tl.store(out_at, total.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "plane"])  # one binary for every number of rows
def linear_kernel(
    x, w, bias, out, partials, counters, M, N, K, span, plane,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, PARALLEL: tl.constexpr, TWO_SPANS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, PREFETCH_LINES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GEMM of x [M, K], w [N, K], bias [N] -> out [M, N]; partials [SPLIT, M, N] are used if PARALLEL."""
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
    bias_at = bias + rn
    if WEIGHT_FIRST:
        total = dot_span(x_at, w_at, row_ok, col_ok, rk, 0, K, K, BM, BN, BK, EVEN_K, WEIGHT_FIRST, PDL)
        if PDL:
            tl.extra.cuda.gdc_wait()
        _store_out(total, out + offset, inside, bias_at, col_ok, HAS_BIAS)
    elif PARALLEL:
        split = tl.program_id(1)
        partial = dot_span(
            x_at, w_at, row_ok, col_ok, rk, split * span, (split + 1) * span, K, BM, BN, BK, EVEN_K
        )
        tl.store(partials + split * plane + offset, partial, mask=inside)
        tl.debug_barrier()
        num_done = tl.atomic_add(counters + pid, 1, sem="acq_rel", scope="gpu")
        if num_done == SPLIT - 1:
            tl.store(counters + pid, 0)
            total = tl.load(partials + offset, mask=inside, other=0.0, cache_modifier=".cg")
            for s in range(1, SPLIT):
                total += tl.load(partials + s * plane + offset, mask=inside, other=0.0, cache_modifier=".cg")
            _store_out(total, out + offset, inside, bias_at, col_ok, HAS_BIAS)
    elif TWO_SPANS:
        total = dot_two_spans(x_at, w_at, row_ok, col_ok, rk, span, K, BM, BN, BK, EVEN_K)
        _store_out(total, out + offset, inside, bias_at, col_ok, HAS_BIAS)
    else:
        total = dot_span(x_at, w_at, row_ok, col_ok, rk, 0, span, K, BM, BN, BK, EVEN_K)
        for s in range(1, SPLIT):
            total += dot_span(x_at, w_at, row_ok, col_ok, rk, s * span, (s + 1) * span, K, BM, BN, BK, EVEN_K)
        _store_out(total, out + offset, inside, bias_at, col_ok, HAS_BIAS)


def num_prefetch_lines(rows: int, columns: int, depth: int, size: int) -> int:
    """Return the number of lines of each weight row that a program prefetches."""
    if rows > MAX_PREFETCH_ROWS or columns * depth > MAX_PREFETCH_ELEMENTS:
        return 0
    return min(PREFETCH_LINES, next_power_of_two(depth * size // 128))


def loads_weight_first(tile: tiles.Tile, packed: PackedLinear, pdl: bool) -> bool:
    """Return whether the first weight tile is loaded before the previous kernel has completed."""
    return pdl and tile.weight_first and packed.split_k == 1 and packed.weight.shape[1] % tile.bk == 0


class Gemm:
    """Launcher of the kernel; it owns the scratch of spans that run in parallel."""

    def __init__(self, device: torch.device, table: tiles.TileTable | None = None) -> None:
        self.device = device
        self.tiles = table or tiles.TileTable()
        self._old_scratch: list[Tensor] = []  # captured graphs may still use replaced scratch
        self._partials: Tensor | None = None
        self._counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)

    def scratch(self, size: int) -> Tensor:
        """Return scratch for `size` partial sums."""
        if self._partials is None or self._partials.numel() < size:
            self._partials = torch.empty(size, dtype=torch.float32, device=self.device)
            self._old_scratch.append(self._partials)
        return self._partials

    def __call__(
        self,
        x: Tensor,  # [M, K]
        packed: PackedLinear,
        out: Tensor,  # [M, N]
        pdl: bool = False,
        tile: tiles.Tile | None = None,
    ) -> None:
        """Launch the kernel with `tile`, by default the one that is selected for the shape."""
        rows, depth = x.shape
        columns = packed.weight.shape[0]
        tile = tile or self.tiles.select("dense", rows, packed)
        span = depth // packed.split_k
        programs = triton.cdiv(rows, tile.bm) * triton.cdiv(columns, tile.bn)
        parallel = (
            packed.split_k > 2 and rows <= MAX_PARALLEL_SPLIT_ROWS and programs <= self._counters.numel()
        )
        partials = self.scratch(packed.split_k * rows * columns) if parallel else out
        linear_kernel[(programs, packed.split_k if parallel else 1)](
            x, packed.weight, packed.weight if packed.bias is None else packed.bias, out,
            partials, self._counters, rows, columns, depth, span, rows * columns,
            BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=GROUP, SPLIT=packed.split_k, PARALLEL=parallel,
            TWO_SPANS=packed.split_k == 2, HAS_BIAS=packed.bias is not None, EVEN_K=span % tile.bk == 0,
            PREFETCH_LINES=num_prefetch_lines(rows, columns, depth, x.element_size()),
            WEIGHT_FIRST=loads_weight_first(tile, packed, pdl),
            **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages),
        )  # fmt: skip
