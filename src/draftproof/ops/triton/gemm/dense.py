"""Matrix products whose bits do not depend on how many rows there are.

out[m, n] = sum over k of x[m, k] * w[n, k], in fp32. The sum is cut into a fixed number of spans of K (by
the weight's shape, `tiles.SPLITS`); a span is summed in ascending order of k by the tensor core (bf16) or
by fused multiply-adds (fp32); spans are added in ascending order. Tiles, warps, stages and the number of
rows change none of that. With few rows the spans run side by side and the last program to arrive adds
them; with many rows one program walks through them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.triton.gemm import tiles
from draftproof.ops.triton.runtime import (
    FLOATS,
    launch_options,
    matrix,
    next_power_of_two,
    pdl_sync_prefetch_weight,
    pdl_wait_mask,
    vector,
)

GROUP = 8  # row tiles that share a pass over the weight's columns: they find it in L2
LINES = 32  # of a weight's row, 128 bytes each, are asked for before the last kernel has ended
# Only for a weight of so many elements, and up to so many rows: asking for a larger one made it come later.
ASKED, ASK_ROWS = 4 << 20, 256
FEW = 64  # up to this many rows the spans of K run side by side


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight as the kernels want it; `split` is the partition of K."""

    weight: Tensor  # [N, K] contiguous
    bias: Tensor | None  # [N] fp32
    split: int


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    weight = matrix("weight", weight.detach())
    columns, depth = weight.shape
    if bias is not None:
        bias = vector("bias", bias.detach().float().contiguous(), columns, (torch.float32,))
    split = tiles.SPLITS.get((columns, depth), 1)
    if depth % split or (depth // split) % 128:
        split = 1
    return PackedLinear(weight, bias, split)


@triton.jit
def _span(
    x_at, w_at, row_ok, col_ok, rk, first, last, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, EARLY: tl.constexpr = False,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Sum over k in [first, last): [BM, BN] fp32. x_at [BM, BK], w_at [BK, BN] point at k = 0.

    EARLY: the first tile of the weight is on its way before the last kernel has ended.
    """
    acc = tl.zeros((BM, BN), tl.float32)
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
def _two_spans(
    x_at, w_at, row_ok, col_ok, rk, span, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Both of two spans at once: two short chains of additions in place of a long one."""
    low = tl.zeros((BM, BN), tl.float32)
    high = tl.zeros((BM, BN), tl.float32)
    for k in range(0, span, BK):
        inside = k + rk < span
        if EVEN_K:
            a = tl.load(x_at + k, mask=row_ok[:, None], other=0.0)
            b = tl.load(w_at + k, mask=col_ok[None, :], other=0.0)
            c = tl.load(x_at + span + k, mask=row_ok[:, None], other=0.0)
            d = tl.load(w_at + span + k, mask=col_ok[None, :], other=0.0)
        else:
            a = tl.load(x_at + k, mask=row_ok[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at + k, mask=col_ok[None, :] & inside[:, None], other=0.0)
            c = tl.load(x_at + span + k, mask=row_ok[:, None] & inside[None, :], other=0.0)
            d = tl.load(w_at + span + k, mask=col_ok[None, :] & inside[:, None], other=0.0)
        low = tl.dot(a, b, low, input_precision="ieee")
        high = tl.dot(c, d, high, input_precision="ieee")
    return low + high


@triton.jit
def _finish(total, out_at, inside, bias_at, col_ok, HAS_BIAS: tl.constexpr):
    """Bias in fp32, one rounding, store."""
    if HAS_BIAS:
        total += tl.load(bias_at, mask=col_ok, other=0.0)[None, :]
    tl.store(out_at, total.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "plane"])  # one binary for every number of rows
def linear_kernel(
    x, w, bias, out, parts, arrived, M, N, K, span, plane,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, ABREAST: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [M, K], w [N, K], bias [N] -> out [M, N]; parts [SPLIT, M, N] and arrived [tiles] if ABREAST."""
    pid = tl.program_id(0)
    grid_m, grid_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * grid_n)
    first_m = group * GROUP
    size = tl.minimum(grid_m - first_m, GROUP)
    within = pid - group * GROUP * grid_n
    tile_m = first_m + within % size
    rm = tile_m * BM + tl.arange(0, BM)
    rn = (within // size) * BN + tl.arange(0, BN)
    if not EARLY:
        pdl_sync_prefetch_weight(w, rn, N, K, tile_m == 0, LINES, PDL)
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rk = tl.arange(0, BK)
    row_ok, col_ok = rm < M, rn < N
    x_at = x + rm.to(tl.int64)[:, None] * K + rk[None, :]
    w_at = w + rn.to(tl.int64)[None, :] * K + rk[:, None]
    where = rm.to(tl.int64)[:, None] * N + rn[None, :]
    inside = row_ok[:, None] & col_ok[None, :]
    bias_at = bias + rn
    if EARLY:
        total = _span(x_at, w_at, row_ok, col_ok, rk, 0, K, K, BM, BN, BK, EVEN_K, EARLY, PDL)
        if PDL:
            tl.extra.cuda.gdc_wait()
        _finish(total, out + where, inside, bias_at, col_ok, HAS_BIAS)
    elif ABREAST:
        part = tl.program_id(1)
        mine = _span(x_at, w_at, row_ok, col_ok, rk, part * span, (part + 1) * span, K, BM, BN, BK, EVEN_K)
        tl.store(parts + part * plane + where, mine, mask=inside)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + pid, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT - 1:
            tl.store(arrived + pid, 0)
            total = tl.load(parts + where, mask=inside, other=0.0, cache_modifier=".cg")
            for s in range(1, SPLIT):
                total += tl.load(parts + s * plane + where, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(total, out + where, inside, bias_at, col_ok, HAS_BIAS)
    elif TWO:
        total = _two_spans(x_at, w_at, row_ok, col_ok, rk, span, K, BM, BN, BK, EVEN_K)
        _finish(total, out + where, inside, bias_at, col_ok, HAS_BIAS)
    else:
        total = _span(x_at, w_at, row_ok, col_ok, rk, 0, span, K, BM, BN, BK, EVEN_K)
        for s in range(1, SPLIT):
            total += _span(x_at, w_at, row_ok, col_ok, rk, s * span, (s + 1) * span, K, BM, BN, BK, EVEN_K)
        _finish(total, out + where, inside, bias_at, col_ok, HAS_BIAS)


def lines(rows: int, columns: int, depth: int, size: int) -> int:
    """How many lines of each of its weight's rows a program asks for early."""
    if rows > ASK_ROWS or columns * depth > ASKED:
        return 0
    return min(LINES, next_power_of_two(depth * size // 128))


def early(tile: tiles.Tile, packed: PackedLinear, pdl: bool) -> bool:
    """Whether the first tile of this weight does not wait for the last kernel."""
    return pdl and tile.early and packed.split == 1 and packed.weight.shape[1] % tile.bk == 0


class Gemm:
    """Launches the kernel; owns the scratch for spans that run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: list[Tensor] = []  # captured graphs may still point at scratch that was outgrown
        self._parts: Tensor | None = None
        self._arrived = torch.zeros(1 << 16, dtype=torch.int32, device=device)

    def scratch(self, size: int) -> Tensor:
        if self._parts is None or self._parts.numel() < size:
            self._parts = torch.empty(size, dtype=torch.float32, device=self.device)
            self._held.append(self._parts)
        return self._parts

    def __call__(
        self,
        x: Tensor,  # [M, K]
        packed: PackedLinear,
        out: Tensor,  # [M, N]
        pdl: bool = False,
        tile: tiles.Tile | None = None,
    ) -> None:
        rows, depth = x.shape
        columns = packed.weight.shape[0]
        tile = tile or tiles.tile_for(rows, columns, depth, packed.weight.dtype == torch.float32)
        span = depth // packed.split
        programs = triton.cdiv(rows, tile.bm) * triton.cdiv(columns, tile.bn)
        abreast = packed.split > 2 and rows <= FEW and programs <= self._arrived.numel()
        parts = self.scratch(packed.split * rows * columns) if abreast else out
        linear_kernel[(programs, packed.split if abreast else 1)](
            x, packed.weight, packed.weight if packed.bias is None else packed.bias, out,
            parts, self._arrived, rows, columns, depth, span, rows * columns,
            BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=GROUP, SPLIT=packed.split, ABREAST=abreast,
            TWO=packed.split == 2, HAS_BIAS=packed.bias is not None, EVEN_K=span % tile.bk == 0,
            LINES=lines(rows, columns, depth, x.element_size()),
            EARLY=early(tile, packed, pdl),
            **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages),
        )  # fmt: skip


def check(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    """x ready for the kernel, and the dtype of the result."""
    x = matrix("x", x, packed.weight.shape[1], (packed.weight.dtype,))
    out_dtype = out_dtype or x.dtype
    if out_dtype not in FLOATS:
        raise ConfigError(f"linear gives fp32 or bf16, not {out_dtype}")
    return x, out_dtype
