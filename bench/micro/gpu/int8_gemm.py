"""Times w8a8 GEMMs of an 8B model on a GPU: few rows, quantised before or inside the kernel, and many rows.

    PYTHONPATH=src python bench/micro/gpu/int8_gemm.py [--rows 1,2,4,8,16] [--many 1024,2048,4096,8192]
        [--workers 14] [--seconds 55]

Few rows: an addition, which makes x, then `quantize_rows` and the GEMM, or the GEMM that quantises x itself.
A graph of 20 of these, with programmatic dependent launch, rotates over weights that exceed the L2 cache.
Many rows: the Triton kernel, and `torch._int_mm` (cuBLAS) with a kernel that scales its sums, in TOPS. Bits
are compared first. Workers compile the kernels side by side. The last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/
sys.path.insert(0, str(Path(__file__).parent))

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from common.measure import finish
from op_checks import GPU, randn
from op_times import BF16, L2, micros
from torch import Tensor

from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.elementwise import add
from draftproof.ops.triton.gemm.tiles import ANY_ROWS, QUANTIZED_TILES, Tile
from draftproof.ops.triton.gemm.weight import PackedLinear
from draftproof.ops.triton.quantized import gemm as quantized
from draftproof.ops.triton.quantized.rows import QuantizedRows, quantize

FEW_SHAPES = {"o_proj": (4096, 4096), "down": (4096, 14336)}  # columns, depth
MANY_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LAUNCHES = 20
PREFETCHED_LINES = (32, 0)  # of each weight row before the wait, by a GEMM that quantises its rows
ONE_ROW_TILES = tuple(
    Tile(1, *sizes, 1, True)
    for sizes in ((8, 1024, 4), (8, 2048, 4), (16, 1024, 4), (16, 2048, 8), (32, 1024, 8), (16, 512, 2))
)
FEW_ROW_TILES = tuple(
    Tile(16, *sizes, True)
    for sizes in (
        (32, 512, 4, 6), (32, 512, 4, 4), (32, 512, 8, 4), (32, 256, 4, 6), (32, 1024, 8, 3), (16, 512, 2, 4),
        (16, 512, 4, 4), (16, 1024, 4, 3), (64, 256, 4, 6), (64, 512, 8, 3),
    )
)  # fmt: skip
MANY_ROW_TILES = (
    *QUANTIZED_TILES["w8a8"][ANY_ROWS], Tile(128, 256, 128, 8, 4), Tile(256, 128, 128, 8, 3),
)  # fmt: skip


@triton.jit
def scale_kernel(sums, row_scales, scales, out, N, BLOCK: tl.constexpr):
    """Scale integer sums [M, N] by row and column -> out [M, N]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(sums + row * N + column, mask=column < N, other=0).to(tl.float32)
    y = y * tl.load(scales + column, mask=column < N, other=0.0) * tl.load(row_scales + row)
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=column < N)


@dataclass(frozen=True)
class FewRows:
    """Way to multiply a few rows."""

    rows: int
    tile: Tile
    is_inline: bool  # quantised inside the GEMM
    lines: int = 0

    @property
    def binary(self) -> object:
        """Return what the compiled kernel depends on."""
        return self if self.is_inline else self.tile

    def run(self, x: Tensor, residual: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        """Launch the kernels."""
        total = add(x, residual, True)
        rows = total if self.is_inline else quantize(total, "w8a8", True)
        with mock.patch.object(quantized, "INLINE_PREFETCH_LINES", self.lines):
            quantized.linear(rows, packed, out, True, self.tile)
        return out


def few_ways(rows: int) -> Iterator[FewRows]:
    """Yield the ways to multiply `rows` rows."""
    for tile in (*ONE_ROW_TILES, *FEW_ROW_TILES[:2]) if rows == 1 else FEW_ROW_TILES:
        yield FewRows(rows, tile, is_inline=False)
        for lines in (
            PREFETCHED_LINES if tile in (*ONE_ROW_TILES[:2], FEW_ROW_TILES[0]) else PREFETCHED_LINES[:1]
        ):
            yield FewRows(rows, tile, is_inline=True, lines=lines)


def random_weight(ops: TritonOps, columns: int, depth: int, seed: int = 0) -> PackedLinear:
    """Return a random weight."""
    torch.manual_seed(seed)
    data = torch.randint(-127, 128, (columns, depth), dtype=torch.int8, device=GPU)
    return ops.forward.pack_quantized("w8a8", data, randn(columns, seed=seed).abs() / depth)


def few_calls(way: FewRows, weights: list[PackedLinear]) -> list[Callable[[], Tensor]]:
    """Return launches that rotate over the weights."""
    x, residual = (randn(way.rows, weights[0].depth, seed=seed, dtype=BF16) for seed in (1, 2))
    out = torch.empty((way.rows, weights[0].columns), dtype=BF16, device=GPU)
    return [partial(way.run, x, residual, packed, out) for packed in islice(cycle(weights), LAUNCHES)]


def time_few(ops: TritonOps, row_counts: list[int], is_late: Callable[[], bool]) -> dict[str, Any]:
    """Return the µs of the fastest ways of each shape and number of rows."""
    found = {}
    for name, (columns, depth) in FEW_SHAPES.items():
        weights = [
            random_weight(ops, columns, depth, seed) for seed in range(max(3, L2 // (columns * depth)))
        ]
        for rows in row_counts:
            times: dict[FewRows, float] = {}
            want = None
            for way in few_ways(rows):
                if is_late():
                    break
                calls = few_calls(way, weights)
                try:
                    got = calls[0]().clone()
                    want = got if want is None else want
                    assert torch.equal(got, want), f"other bits: {way}"
                    times[way] = micros(calls, 3)
                except triton.runtime.errors.OutOfResources:
                    print(f"# {way} does not fit", flush=True)
            line = {"floor": round(columns * depth / 4.8e6, 1)}
            for label, is_inline in (("separate", False), ("inline", True)):
                ways = sorted((way for way in times if way.is_inline == is_inline), key=times.__getitem__)
                line[label] = [[times[way], list(way.tile[:5]), way.lines] for way in ways]
            found[f"{name} rows {rows}"] = line
            print(f"{name} rows {rows}: floor {line['floor']} us", flush=True)
            for label in ("separate", "inline"):
                print(f"    {label}: {line[label][:4]}", flush=True)
    return found


def many_calls(
    packed: PackedLinear, rows: QuantizedRows, out: Tensor, sums: Tensor
) -> dict[str, Callable[[], Any]]:
    """Return the ways to multiply many rows."""
    columns = packed.columns

    def cublas() -> None:
        torch._int_mm(rows.values, packed.weight.t(), out=sums)

    def cublas_scaled() -> None:
        cublas()
        grid = (len(rows), triton.cdiv(columns, 1024))
        scale_kernel[grid](sums, rows.scales, packed.scales, out, columns, BLOCK=1024, enable_fp_fusion=False)

    ways: dict[str, Callable[[], Any]] = {"cublas": cublas_scaled, "cublas without scales": cublas}
    for tile in MANY_ROW_TILES:
        ways[f"triton {tuple(tile[:5])}"] = partial(quantized.linear, rows, packed, out, False, tile)
    return ways


def many_rows(packed: PackedLinear, count: int) -> tuple[QuantizedRows, Tensor, Tensor]:
    """Return random quantised rows, and room for the result and for integer sums."""
    values = torch.randint(-127, 128, (count, packed.depth), dtype=torch.int8, device=GPU)
    out = torch.empty((count, packed.columns), dtype=BF16, device=GPU)
    sums = torch.empty((count, packed.columns), dtype=torch.int32, device=GPU)
    return QuantizedRows(values, randn(count).abs() / 127, BF16), out, sums


def time_many(ops: TritonOps, row_counts: list[int], is_late: Callable[[], bool]) -> dict[str, Any]:
    """Return the TOPS of every way, for each shape and number of rows."""
    found = {}
    for columns, depth in MANY_SHAPES:
        packed = random_weight(ops, columns, depth)
        for count in row_counts:
            rows, out, sums = many_rows(packed, count)
            want, line = None, {}
            for label, call in many_calls(packed, rows, out, sums).items():
                if is_late():
                    break
                try:
                    call()
                    want = out.clone() if want is None else want
                    assert torch.equal(out, want), f"other bits: {label}"
                    line[label] = round(2e-6 * count * columns * depth / micros([call] * 2, 3))
                except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                    print(f"# {columns}x{depth} rows {count} {label}: {error}"[:300], flush=True)
            found[f"{columns}x{depth} rows {count}"] = line
            print(f"{columns}x{depth} rows {count}: TOPS {line}", flush=True)
            del rows, out, sums
    return found


def compile_share(ops: TritonOps, row_counts: list[int], share: int, workers: int) -> None:
    """Compile every `workers`-th kernel."""
    weights = [random_weight(ops, *shape) for shape in FEW_SHAPES.values()]
    ways = {way.binary: way for rows in row_counts for way in few_ways(rows)}
    calls = [partial(few_calls, way, [packed]) for way in ways.values() for packed in weights]
    # both depths of a way in one worker: most have the same binary
    todo = [calls[i : i + len(weights)] for i in range(0, len(calls), len(weights))]
    many = many_calls(weights[0], *many_rows(weights[0], 256))
    todo += [[lambda call=call: [call]] for call in many.values()]
    for makers in todo[share::workers]:
        for make in makers:
            try:
                make()[0]()
            except triton.runtime.errors.OutOfResources:  # reported by the process that times
                continue
    torch.cuda.synchronize()


def main() -> None:
    """Compile in workers, then time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument(
        "--many", default="1024,2048,4096,8192", help="numbers of rows to compare with cuBLAS"
    )
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=55, help="nothing new is timed after this")
    parser.add_argument("--share", type=int, help="compile only, and only this worker's share")
    options = parser.parse_args()
    few, many = ([int(count) for count in line.split(",") if count] for line in (options.rows, options.many))
    begin = time.monotonic()
    if options.share is not None:
        compile_share(TritonOps(GPU), few, options.share, options.workers)
        return
    command = [sys.executable, *sys.argv]
    working = [subprocess.Popen([*command, "--share", str(i)]) for i in range(options.workers)]
    for worker in working:
        worker.wait()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    ops = TritonOps(GPU)

    def is_late() -> bool:
        return time.monotonic() - begin > options.seconds

    figures = {"us": time_few(ops, few, is_late), "tops": time_many(ops, many, is_late)}
    finish("int8_gemm", {**figures, "seconds": round(time.monotonic() - begin, 1)})


if __name__ == "__main__":
    main()
