"""cuBLAS for many rows, where a check has shown that it returns the bits of the Triton kernel.

cuBLAS picks a kernel by shape, and some of its kernels split K. So a piece of exactly P rows of a weight
shape uses cuBLAS only after P random rows times that weight gave equal bits from both. Where cuBLAS splits K
for a plain product, it may not for a product with a bias, here of zeros, or for a batch of two products, here
of half the rows each. A call of M rows is divided into such pieces, and the remaining rows use Triton. The
check runs once per (shape, P, dtype), at the first use outside a graph capture; inside a capture, an
unchecked piece uses Triton.

This is `mode` "proven". "fast" uses cuBLAS wherever a measurement was faster, "always" everywhere: in both
modes the bits of a row depend on the number of rows. "never" disables it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.ops.triton.compile_ahead import is_compiling
from draftproof.ops.triton.gemm.autotune import graph_milliseconds
from draftproof.ops.triton.gemm.dense import Gemm
from draftproof.ops.triton.gemm.weight import PackedLinear

PIECE_ROWS = range(8192, 0, -512)
# Row counts (buckets of `graphs`) at which all rows of a large weight may use cuBLAS; not in pieces, because
# each piece reads the weight.
WHOLE_ROWS = (80, 96, 128, 160, 192, 256, 320, 384, 512)
MIN_WHOLE_ELEMENTS = 1 << 23  # elements of a weight
NUM_CHECKS = 2  # random inputs a check compares
CALLS_PER_MEASUREMENT = 20  # calls of one measurement
CALL_KINDS = ("plain", "bias")
# An fp32 result with a bias is a kernel that fills it and a product that adds to it.
FP32_CALL_KINDS = ("plain", "halves", "bias")
MIN_HALVES_ROWS = 160  # 4096 x 14336, bias and halves: 43 and 50 µs at 128 rows, 47 and 44 at 160
PDL_LOSS_US = 2.0  # loss around a kernel without programmatic dependent launch

Mode = Literal["never", "proven", "fast", "always"]


class Cublas:
    """Record of the proven pieces, and the product by pieces."""

    def __init__(self, gemm: Gemm, mode: Mode = "proven") -> None:
        self.gemm = gemm
        self.mode = mode
        self.faster: dict[Hashable, bool] = {}  # measured pair of calls -> is the second one faster
        # (N, K, P, dtype, dtype of the result)
        self.proven: dict[tuple[int, int, int, torch.dtype, torch.dtype], str] = {}  # kind of call, or ""
        self._zeros: dict[tuple[int, torch.dtype], Tensor] = {}

    def call_kind(self, packed: PackedLinear, rows: int, out_dtype: torch.dtype) -> str:
        """Return the kind of cuBLAS call with equal bits for `rows` rows, or ""; check it if possible."""
        columns, depth = packed.weight.shape
        key = (columns, depth, rows, packed.weight.dtype, out_dtype)
        found = self.proven.get(key)
        if found is None:
            if is_compiling() or torch.cuda.is_current_stream_capturing():
                return ""
            is_wide = out_dtype == torch.float32 and rows >= MIN_HALVES_ROWS and rows % 2 == 0
            kinds = FP32_CALL_KINDS if is_wide else CALL_KINDS
            equal_kinds = (kind for kind in kinds if self._has_equal_bits(packed, rows, out_dtype, kind))
            found = self.proven[key] = next(equal_kinds, "")
        return found

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, call_kind: str = "plain") -> None:
        """Compute x [M, K] times weight [N, K] by cuBLAS, in the dtype of `out`."""
        options = {} if out.dtype == x.dtype else {"out_dtype": out.dtype}
        if call_kind == "bias":
            key = (len(weight), weight.dtype)
            if key not in self._zeros:
                self._zeros[key] = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
            torch.addmm(self._zeros[key], x, weight.t(), out=out, **options)
        elif call_kind == "halves":
            weights = weight.t().expand(2, *weight.t().shape)  # [2, K, N], in one place
            torch.bmm(x.view(2, -1, x.shape[1]), weights, out=out.view(2, -1, out.shape[1]), **options)
        else:
            torch.mm(x, weight.t(), out=out, **options)

    def _has_equal_bits(
        self, packed: PackedLinear, rows: int, out_dtype: torch.dtype, call_kind: str
    ) -> bool:
        """Compare both libraries on random rows."""
        weight = packed.weight
        random = torch.Generator(device=weight.device).manual_seed(rows)
        plain = PackedLinear(weight, None)
        for _ in range(NUM_CHECKS):
            x = torch.randn((rows, weight.shape[1]), generator=random, device=weight.device).to(weight.dtype)
            shape = (2, rows, weight.shape[0])
            triton_out, cublas_out = torch.empty(shape, dtype=out_dtype, device=weight.device)
            self.gemm(x, plain, triton_out)
            self.multiply(x, weight, cublas_out, call_kind)
            if not torch.equal(triton_out, cublas_out):  # a host sync, once per shape at warm-up
                return False
        return True

    def call_for_all_rows(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> str:
        """Return the kind of cuBLAS call for all rows of x, or ""."""
        rows, weight = len(x), packed.weight
        if self.mode == "never" or packed.bias is not None or rows == 0:
            return ""
        if self.mode == "always":
            return "plain"
        if rows not in WHOLE_ROWS or weight.numel() < MIN_WHOLE_ELEMENTS or weight.dtype != torch.bfloat16:
            return ""
        return self.call_kind(packed, rows, out_dtype or x.dtype)

    def leading_rows(self, x: Tensor, packed: PackedLinear, out: Tensor, pdl: bool) -> int:
        """Compute the leading rows that proven pieces cover, and return their number."""
        rows, done = x.shape[0], 0
        if self.mode == "never" or packed.bias is not None:
            return 0
        if self.mode == "fast":
            key = ("linear", packed.weight.shape, rows, x.dtype, out.dtype)
            kinds = (lambda: self.gemm(x, packed, out), lambda: self.multiply(x, packed.weight, out))
            call_kind = "plain" if rows and self.is_second_faster(key, *kinds, pdl) else ""
        else:
            call_kind = self.call_for_all_rows(x, packed, out.dtype)
        if call_kind:
            self.multiply(x, packed.weight, out, call_kind)
            return rows
        if out.dtype != x.dtype or self.mode == "fast":
            return 0
        for piece in PIECE_ROWS:
            while rows - done >= piece and (call_kind := self.call_kind(packed, piece, out.dtype)):
                part = slice(done, done + piece)
                self.multiply(x[part], packed.weight, out[part], call_kind)
                done += piece
        return done

    def is_second_faster(
        self, key: Hashable, first: Callable[[], Any], second: Callable[[], Any], pdl: bool
    ) -> bool:
        """Return whether `second` is faster than `first`; measured once per `key`, outside a graph capture.

        With `pdl` the kernels of `first` start early, and a library kernel between them loses PDL_LOSS_US.
        """
        found = self.faster.get(key)
        if found is None:
            if is_compiling() or torch.cuda.is_current_stream_capturing():
                return False
            times = [graph_milliseconds([call] * CALLS_PER_MEASUREMENT) for call in (first, second) * 2]
            loss = CALLS_PER_MEASUREMENT * PDL_LOSS_US / 1000 if pdl else 0.0
            found = self.faster[key] = min(times[1::2]) + loss < 0.97 * min(times[::2])
        return found
