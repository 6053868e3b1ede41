"""cuBLAS for many rows, where it has been seen to give exactly the Triton kernel's bits.

cuBLAS picks a kernel by shape, and some of its kernels split K. So nothing is assumed: a piece of
exactly P rows of a weight shape goes to cuBLAS only after P random rows times that weight gave equal
bits from both. A call of M rows is cut into such pieces; the rest goes to Triton. The check runs once per
(shape, P, dtype), at the first use outside a graph capture; inside one, an unchecked piece goes to Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.triton_cuda.gemm import Gemm, PackedLinear

PIECES = (8192, 4096, 2048, 1024, 512)  # rows; large first
# A call of exactly so many rows (a bucket of `graph`) of a large weight may go as a whole; not in pieces,
# because each piece reads the weight.
WHOLE = (96, 128, 192, 256, 384, 512)
LARGE = 1 << 23  # elements of a weight
TRIES = 2  # random inputs a check compares


class Cublas:
    """Which pieces are proven, and the product by pieces."""

    def __init__(self, gemm: Gemm, enabled: bool = True) -> None:
        self.gemm = gemm
        self.enabled = enabled
        # (N, K, P, dtype, dtype of the result)
        self.proven: dict[tuple[int, int, int, torch.dtype, torch.dtype], bool] = {}

    def usable(self, packed: PackedLinear, rows: int, out_dtype: torch.dtype) -> bool:
        """Whether a piece of exactly `rows` rows may go to cuBLAS; checks it if it can be checked now."""
        columns, depth = packed.weight.shape
        key = (columns, depth, rows, packed.weight.dtype, out_dtype)
        found = self.proven.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                return False
            found = self.proven[key] = packed.split == 1 and self._equal(packed, rows, out_dtype)
        return found

    def _equal(self, packed: PackedLinear, rows: int, out_dtype: torch.dtype) -> bool:
        weight = packed.weight
        random = torch.Generator(device=weight.device).manual_seed(rows)
        plain = PackedLinear(weight, None, packed.split)
        for _ in range(TRIES):
            x = torch.randn((rows, weight.shape[1]), generator=random, device=weight.device).to(weight.dtype)
            ours, theirs = torch.empty((2, rows, weight.shape[0]), dtype=out_dtype, device=weight.device)
            self.gemm(x, plain, ours)
            multiply(x, weight, theirs)
            if not torch.equal(ours, theirs):  # a host sync, once per shape at start-up
                return False
        return True

    def whole(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> bool:
        """Whether a call with this x goes to cuBLAS as a whole."""
        rows, weight = len(x), packed.weight
        if not self.enabled or packed.bias is not None or rows not in WHOLE or weight.numel() < LARGE:
            return False
        return weight.dtype == torch.bfloat16 and self.usable(packed, rows, out_dtype or x.dtype)

    def leading_rows(self, x: Tensor, packed: PackedLinear, out: Tensor) -> int:
        """Do as many leading rows as proven pieces cover; returns how many were done."""
        rows, done = x.shape[0], 0
        if not self.enabled or packed.bias is not None:
            return 0
        if self.whole(x, packed, out.dtype):
            multiply(x, packed.weight, out)
            return rows
        if out.dtype != x.dtype:
            return 0
        for piece in PIECES:
            while rows - done >= piece and self.usable(packed, piece, out.dtype):
                multiply(x[done : done + piece], packed.weight, out[done : done + piece])
                done += piece
        return done


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """cuBLAS: x [M, K] times weight [N, K], in out's dtype."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
