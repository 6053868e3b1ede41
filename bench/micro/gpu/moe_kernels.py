"""Times each kernel of one mixture of experts on a GPU, over a few tiles; the last line of stdout is JSON.

    PYTHONPATH=src python bench/micro/gpu/moe_kernels.py [--shape qwen3-30b-a3b] [--rows 1,8,64,256,1024]
        [--format bf16] [--seconds 240] [--workers 12] [--default-only]

Workers first compile all kernels side by side. Each kernel is then timed alone in a graph of 20 launches that
rotate over the weights of four layers, and once as part of the whole op. Experts are drawn at random. GB/s
counts the weights of the experts that are touched; a list is measured beside the path without one.
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

import torch
from common.measure import finish
from op_checks import GPU, randn
from op_times import micros
from torch import Tensor

from draftproof.models.weight_formats import QUANTIZERS
from draftproof.ops import Moe, Routing
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.moe import tiles
from draftproof.ops.triton.moe.combine import combine
from draftproof.ops.triton.moe.experts import expert_linear
from draftproof.ops.triton.moe.routing import route
from draftproof.ops.triton.moe.tuning_launches import assignment_of, random_experts
from draftproof.ops.triton.quantized.row_quantization import prepare_rows


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture of experts."""

    hidden: int
    inner: int
    routing: Routing


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, Routing(num_experts=128, top_k=8)),
    "deepseek-v2-lite": Shape(2048, 1408, Routing(num_experts=64, top_k=6, normalize=False)),
    "mixtral-8x7b": Shape(4096, 14336, Routing(num_experts=8, top_k=2)),
}
LAYERS, LAUNCHES = 4, 20
TILE_ROWS = (16, 32, 64, 128)


class Kernels:
    """Layers of one shape and the launches of their kernels."""

    def __init__(self, ops: TritonOps, shape: Shape, weight_format: str, layers: int) -> None:
        self.ops, self.shape, self.kind = ops, shape, weight_format
        count, hidden, inner = shape.routing.num_experts, shape.hidden, shape.inner
        self.layers = [
            Moe(
                shape.routing,
                ops.forward.pack_router(randn(count, hidden, seed=layer, dtype=torch.bfloat16) / 45),
                self._packed(count * 2 * inner, hidden, layer),
                self._packed(count * hidden, inner, layer + 9),
            )
            for layer in range(layers)
        ]

    def _packed(self, columns: int, depth: int, seed: int) -> Any:
        weight = torch.cat([randn(part, depth, seed=seed + i, dtype=torch.bfloat16) / depth**0.5
                            for i, part in enumerate([columns // 4] * 4)])  # fmt: skip
        if self.kind == "bf16":
            return self.ops.forward.pack_linear(weight)
        parts = [QUANTIZERS[self.kind](part) for part in weight.chunk(8)]
        data = torch.cat([part.data for part in parts])
        return self.ops.forward.pack_quantized(self.kind, data, torch.cat([part.scales for part in parts]))

    def calls(self, launch: Callable[[Moe], Any]) -> list[Callable[[], Any]]:
        """Return launches that rotate over the layers."""
        return [partial(launch, moe) for moe in islice(cycle(self.layers), LAUNCHES)]

    def linear(self, rows: int, is_gate_up: bool, has_list: bool, tile: Tile) -> list[Callable[[], Any]]:
        """Return launches of a grouped GEMM."""
        rule, hidden, inner = self.shape.routing, self.shape.hidden, self.shape.inner
        count = rule.num_experts
        found = assignment_of(random_experts(rows, rule.top_k, count, GPU), count, tile.bm if has_list else 0)
        x = randn(*((rows, hidden) if is_gate_up else (rows * rule.top_k, inner)), dtype=torch.bfloat16)
        pdl = self.ops.launch.early(found.experts)
        dtype, activation = (torch.bfloat16, "silu") if is_gate_up else (torch.float32, None)

        def launch(moe: Moe) -> Tensor:
            packed = moe.gate_up if is_gate_up else moe.down
            return expert_linear(inputs, packed, found, count, activation, dtype, pdl, tile)

        inputs = prepare_rows(x, self.layers[0].gate_up if is_gate_up else self.layers[0].down, pdl)
        return self.calls(launch)

    def bytes_and_flops(self, rows: int, is_gate_up: bool) -> tuple[int, int]:
        """Return the bytes of the touched weights and the operations of a grouped GEMM."""
        rule = self.shape.routing
        touched = len(random_experts(rows, rule.top_k, rule.num_experts, GPU).unique())
        size = self.shape.hidden * self.shape.inner * (2 if is_gate_up else 1)
        return touched * size * (2 if self.kind == "bf16" else 1), 2 * rows * rule.top_k * size


def candidates(
    kind: str, rows: int, rule: Routing, depth: int, is_gate_up: bool, is_short: bool
) -> Iterator[Tile]:
    """Yield the tiles to time: those of the rows of the default, and the next larger and smaller."""
    chosen = tiles.rows_of_tile(tiles.rows_bucket(rows), rule.top_k, rule.num_experts, kind)
    place = TILE_ROWS.index(chosen)
    near = [chosen] if is_short or rows <= 8 else TILE_ROWS[max(0, place - 1) : place + 2]
    for size in near:
        found = tiles.expert_tiles(kind, size, is_gate_up, depth)
        yield from found[:1] if is_short else found


def time_rows(
    kernels: Kernels, rows: int, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield the name, the launches and (bytes, operations) of every measurement at `rows` rows."""
    rule, hidden, inner = kernels.shape.routing, kernels.shape.hidden, kernels.shape.inner
    x = randn(rows, hidden, dtype=torch.bfloat16)
    pdl = kernels.ops.launch.early(x)
    yield "whole op", lambda: kernels.calls(lambda moe: kernels.ops.forward.moe(x, moe)), None
    for size in dict.fromkeys(
        (0, tiles.rows_of_tile(tiles.rows_bucket(rows), rule.top_k, rule.num_experts, kernels.kind))
    ):

        def routed(moe: Moe, size: int = size) -> Any:
            return route(x, moe.router.linear, rule, None, moe.router.counters, size, pdl)

        if size or rows <= 16:
            yield f"route, list of {size}", lambda f=routed: kernels.calls(f), None
    outputs = torch.empty((rows * rule.top_k, hidden), device=GPU)
    shares = torch.empty((rows, rule.top_k), device=GPU)
    yield (
        "combine",
        lambda: kernels.calls(lambda _: combine(outputs, shares, None, None, torch.bfloat16, pdl)),
        None,
    )
    for is_gate_up, name, depth in ((True, "gate_up", hidden), (False, "down", inner)):
        for tile in candidates(kernels.kind, rows, rule, depth, is_gate_up, options.default_only):
            for has_list in (True, False) if rows <= 16 else (True,):
                label = f"{name} {tuple(tile)[:5]}{'' if has_list else ' without list'}"
                yield (
                    label,
                    lambda a=is_gate_up, b=has_list, c=tile: kernels.linear(rows, a, b, c),
                    kernels.bytes_and_flops(rows, is_gate_up),
                )  # fmt: skip


def main() -> None:
    """Compile in workers, then time and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--rows", default="1,8,64,256,1024")
    parser.add_argument("--format", default="bf16", choices=("bf16", "w8a8", "fp8"))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--default-only", action="store_true", help="time only the default tiles")
    parser.add_argument("--share", type=int, help="compile only, and only this worker's share")
    options = parser.parse_args()
    begin, alone = time.monotonic(), options.share is None
    if alone:
        command = [sys.executable, *sys.argv]
        working = [subprocess.Popen([*command, "--share", str(i)]) for i in range(options.workers)]
        for worker in working:
            worker.wait()
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    kernels = Kernels(TritonOps(GPU), SHAPES[options.shape], options.format, LAYERS if alone else 1)
    found: dict[str, dict[str, Any]] = {}
    number = 0
    for rows in map(int, options.rows.split(",")):
        for label, make, size in time_rows(kernels, rows, options):
            number += 1
            if time.monotonic() - begin > options.seconds:
                continue
            if not alone:
                if number % options.workers == options.share:
                    make()[0]()
                    torch.cuda.synchronize()
                continue
            try:
                duration = micros(make(), 5)
            except Exception as error:  # e.g. a tile that does not fit
                print(f"rows {rows} {label}: {type(error).__name__} {error}", flush=True)
                continue
            line = {"us": duration}
            if size is not None:
                line |= {
                    "GB/s": round(size[0] / duration / 1e3),
                    "TFLOP/s": round(size[1] / duration / 1e6, 1),
                }
            found.setdefault(str(rows), {})[label] = line
            print(f"rows {rows} {label}: {line}", flush=True)
    if alone:
        finish("moe_kernels", {"shape": options.shape, "format": options.format, "rows": found})


if __name__ == "__main__":
    main()
