"""cuBLAS for many rows, where it has been seen to give exactly the Triton kernel's bits.

cuBLAS picks a kernel by shape, and some of its kernels split K. So nothing is assumed: a piece of
exactly P rows of a weight shape goes to cuBLAS only after P random rows times that weight gave equal
bits from both. Where it splits K for a plain product, it may not for one with a bias, of zeros here. A call
of M rows is cut into such pieces; the rest goes to Triton. The check runs once per (shape, P, dtype), at
the first use outside a graph capture; inside one, an unchecked piece goes to Triton.

That is `mode` "proven". "fast" takes cuBLAS wherever it was quicker when measured, "always" everywhere: with
these a row's bits depend on how many rows there are. "never" leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.ops.triton.compile_ahead import is_compiling
from draftproof.ops.triton.gemm.dense import Gemm, PackedLinear

PIECES = range(8192, 0, -512)  # rows
# A call of exactly so many rows (a bucket of `graph`) of a large weight may go as a whole; not in pieces,
# because each piece reads the weight.
WHOLE = (80, 96, 128, 160, 192, 256, 320, 384, 512)
LARGE = 1 << 23  # elements of a weight
NUM_CHECKS = 2  # random inputs a check compares
ROUNDS = 20  # calls of one measurement
LATE = 2.0  # microseconds that are lost around a kernel that is not launched early

Mode = Literal["never", "proven", "fast", "always"]


class Cublas:
    """Which pieces are proven, and the product by pieces."""

    def __init__(self, gemm: Gemm, mode: Mode = "proven") -> None:
        self.gemm = gemm
        self.mode = mode
        self.quicker: dict[Hashable, bool] = {}  # what was measured -> is the second way quicker
        # (N, K, P, dtype, dtype of the result)
        self.proven: dict[tuple[int, int, int, torch.dtype, torch.dtype], str] = {}  # which way, or ""
        self._zeros: dict[tuple[int, torch.dtype], Tensor] = {}

    def way(self, packed: PackedLinear, rows: int, out_dtype: torch.dtype) -> str:
        """By which call a piece of exactly `rows` rows may go to cuBLAS, or ""; checks it if it can be."""
        columns, depth = packed.weight.shape
        key = (columns, depth, rows, packed.weight.dtype, out_dtype)
        found = self.proven.get(key)
        if found is None:
            if is_compiling() or torch.cuda.is_current_stream_capturing():
                return ""
            ways = ("plain", "bias") if out_dtype == packed.weight.dtype else ("plain",)
            right = (w for w in ways if packed.split == 1 and self._equal(packed, rows, out_dtype, w))
            found = self.proven[key] = next(right, "")
        return found

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, way: str = "plain") -> None:
        """cuBLAS: x [M, K] times weight [N, K], in out's dtype."""
        if way == "bias":
            key = (len(weight), weight.dtype)
            if key not in self._zeros:
                self._zeros[key] = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
            torch.addmm(self._zeros[key], x, weight.t(), out=out)
        elif out.dtype == x.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)

    def _equal(self, packed: PackedLinear, rows: int, out_dtype: torch.dtype, way: str) -> bool:
        weight = packed.weight
        random = torch.Generator(device=weight.device).manual_seed(rows)
        plain = PackedLinear(weight, None, packed.split)
        for _ in range(NUM_CHECKS):
            x = torch.randn((rows, weight.shape[1]), generator=random, device=weight.device).to(weight.dtype)
            ours, theirs = torch.empty((2, rows, weight.shape[0]), dtype=out_dtype, device=weight.device)
            self.gemm(x, plain, ours)
            self.multiply(x, weight, theirs, way)
            if not torch.equal(ours, theirs):  # a host sync, once per shape at start-up
                return False
        return True

    def whole(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> str:
        """By which call all of x goes to cuBLAS, or ""."""
        rows, weight = len(x), packed.weight
        if self.mode == "never" or packed.bias is not None or rows == 0:
            return ""
        if self.mode == "always":
            return "plain"
        if rows not in WHOLE or weight.numel() < LARGE or weight.dtype != torch.bfloat16:
            return ""
        return self.way(packed, rows, out_dtype or x.dtype)

    def leading_rows(self, x: Tensor, packed: PackedLinear, out: Tensor, early: bool) -> int:
        """Do as many leading rows as proven pieces cover; returns how many were done."""
        rows, done = x.shape[0], 0
        if self.mode == "never" or packed.bias is not None:
            return 0
        if self.mode == "fast":
            key = ("linear", packed.weight.shape, rows, x.dtype, out.dtype)
            ways = (lambda: self.gemm(x, packed, out), lambda: self.multiply(x, packed.weight, out))
            way = "plain" if rows and self.second_is_quicker(key, *ways, early) else ""
        else:
            way = self.whole(x, packed, out.dtype)
        if way:
            self.multiply(x, packed.weight, out, way)
            return rows
        if out.dtype != x.dtype or self.mode == "fast":
            return 0
        for piece in PIECES:
            while rows - done >= piece and (way := self.way(packed, piece, out.dtype)):
                part = slice(done, done + piece)
                self.multiply(x[part], packed.weight, out[part], way)
                done += piece
        return done

    def second_is_quicker(
        self, key: Hashable, first: Callable[[], Any], second: Callable[[], Any], early: bool
    ) -> bool:
        """Two ways to the same end: measured when `key` is new, outside a capture; inside one, the first.

        If the first way's kernels are launched `early`, a library's kernel in their midst costs LATE.
        """
        found = self.quicker.get(key)
        if found is None:
            if is_compiling() or torch.cuda.is_current_stream_capturing():
                return False
            times = [_time(first), _time(second), _time(first), _time(second)]
            late = ROUNDS * LATE / 1000 if early else 0.0
            found = self.quicker[key] = min(times[1::2]) + late < 0.97 * min(times[::2])
        return found


def _time(call: Callable[[], Any]) -> float:
    """Milliseconds of ROUNDS calls, in a graph: launched one by one, small ones would measure the host."""
    call()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(ROUNDS):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
