"""Times the kernels of a Qwen3-30B-A3B layer at few rows on a GPU and compares their bits.

    PYTHONPATH=src:tests/support:tests python bench/micro/gpu/moe_few_rows.py
        [--parts route,experts,layers,one_row] [--rows 64,128,256] [--seconds 55]

Routing is timed in a few variants, the grouped GEMM over a few tiles. `layers` are whole layers with
heights of the tiles, where no rows are equal, all, or half of them (skewed). `one_row` is whole layers of one
row, as separate ops and in one kernel. Every case is a graph of early launches that rotate over more weights
than fit into the L2 cache. One line per case; the last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/
sys.path.insert(0, str(Path(__file__).parent))

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from common.measure import finish
from op_checks import GPU, randn, rope
from op_times import micros
from torch import Tensor

from draftproof.models.layers import run_layers
from draftproof.ops import Attention, AttentionShape, Layer, Moe, Routing, Rows
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.compile_ahead import compile_ahead
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.moe import routing, tiles
from draftproof.ops.triton.moe.experts import expert_linear
from draftproof.ops.triton.moe.tiles import FEW_ROWS
from draftproof.ops.triton.moe.tuning_launches import assignment_of, random_experts

BF16 = torch.bfloat16
HIDDEN, INNER, RULE = 2048, 768, Routing(num_experts=128, top_k=8)
LIST_ROWS = 16
ROUTE_ROWS, EXPERT_ROWS = (1, 8, 64, 256), (1, 8)
MANY_ROWS = 1024  # routed by one program a row tile
ROUTERS, EXPERT_LAYERS = 160, 4  # more bytes than the L2 cache
# Constants of `routing` that a variant replaces.
ROUTE_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "8 experts": {"EXPERTS": 8},
    "step 512, 4 stages": {"BF16_STEP_COLUMNS": 512, "NUM_STAGES": 4},
    "8 warps": {"NUM_WARPS": 8},
}
HEADS = AttentionShape(num_q=32, num_kv=4, dim=128, scale=128**-0.5, window=0)
LAYERS, CONTEXT, PAGE, EPS = 6, 150, 16, 1e-6
ONE_ROW_CONTEXTS = (60, 150, 300, 1000)  # tokens
# Rows of the tiles of experts; 0: by the number of rows.
HEIGHTS = (0, 16, 32, 64, 128)
GATE_UP_TILES = (
    Tile(16, 16, 128, 4, 5), Tile(16, 16, 256, 2, 4), Tile(16, 16, 256, 4, 4), Tile(16, 16, 512, 4, 3),
    Tile(16, 16, 256, 2, 6), Tile(16, 32, 128, 4, 5), Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 8, 4),
)  # fmt: skip
DOWN_TILES = (
    Tile(16, 64, 128, 4, 4), Tile(16, 16, 256, 2, 3), Tile(16, 32, 256, 2, 3), Tile(16, 32, 256, 4, 3),
    Tile(16, 32, 128, 4, 6), Tile(16, 64, 128, 2, 6), Tile(16, 128, 128, 4, 6), Tile(16, 64, 256, 4, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One measurement: launches of a kernel, and the tensors whose bits those of its group share."""

    group: str
    label: str
    calls: list[Callable[[], Any]]
    result: Callable[[], tuple[Tensor, ...]]
    bytes_read: int = 0
    num_parts: int = 1  # of a call: the time is that of one


def route_cases(ops: TritonOps) -> Iterator[Case]:
    """Yield the variants of routing."""
    routers = [
        ops.forward.pack_router(randn(128, HIDDEN, seed=i, dtype=BF16) / HIDDEN**0.5) for i in range(ROUTERS)
    ]
    every = randn(MANY_ROWS, HIDDEN, seed=7, dtype=BF16)
    for rows in ROUTE_ROWS:
        x, size = every[:rows].contiguous(), LIST_ROWS if rows > FEW_ROWS else 0
        pdl = ops.launch.early(x)
        for label, constants in [("as part of many rows", None), *ROUTE_VARIANTS.items()]:

            def route(
                router: Any, given: Tensor = x, c: dict[str, Any] | None = constants, size: int = size,
                pdl: bool = pdl,
            ) -> Any:  # fmt: skip
                with ExitStack() as stack:
                    for name, value in (c or {}).items():
                        stack.enter_context(mock.patch.object(routing, name, value))
                    return routing.route(given, router.linear, RULE, None, router.counters, size, pdl)

            def result(route: Any = route, c: Any = constants, rows: int = rows) -> tuple[Tensor, ...]:
                found = route(routers[0], every) if c is None else route(routers[0])
                return found.experts[:rows], found.weights[:rows]

            calls = [] if constants is None else [lambda r=r, f=route: f(r) for r in routers]
            yield Case(f"route, {rows} rows", label or "default", calls, result)


def random_weight(ops: TritonOps, columns: int, depth: int) -> Any:
    """Return a packed random weight [columns, depth]."""
    weight = torch.empty((columns, depth), dtype=BF16, device=GPU).normal_(0, depth**-0.5)
    return ops.forward.pack_linear(weight)


def expert_cases(ops: TritonOps) -> Iterator[Case]:
    """Yield the grouped GEMMs over their tiles."""
    count = RULE.num_experts
    for name, width, depth, choices in (
        ("gate_up", 2 * INNER, HIDDEN, GATE_UP_TILES),
        ("down", HIDDEN, INNER, DOWN_TILES),
    ):
        packed = [random_weight(ops, count * width, depth) for _ in range(EXPERT_LAYERS)]
        is_gate_up = name == "gate_up"
        for rows in EXPERT_ROWS:
            experts = random_experts(rows, RULE.top_k, count, GPU)
            found = assignment_of(experts, count, LIST_ROWS if rows > FEW_ROWS else 0)
            x = randn(rows if is_gate_up else rows * RULE.top_k, depth, seed=3, dtype=BF16)
            more = ("silu", BF16) if is_gate_up else (None, torch.float32)
            pdl, size = ops.launch.early(x), len(experts.unique()) * width * depth * 2
            for tile in choices:

                def run(
                    weight: Any, x: Tensor = x, found: Any = found, more: Any = more, pdl: bool = pdl,
                    tile: Tile = tile,
                ) -> Tensor:  # fmt: skip
                    return expert_linear(x, weight, found, count, *more, pdl, tile)

                calls = [lambda i=i, f=run, p=packed: f(p[i % EXPERT_LAYERS]) for i in range(20)]
                yield Case(
                    f"{name}, {rows} rows", str(tuple(tile)[:5]), calls,
                    lambda f=run, p=packed: (f(p[0]),), size,
                )  # fmt: skip


def make_layer(ops: TritonOps) -> Layer:
    """Return a layer with random weights."""
    packed = partial(random_weight, ops)

    def norm(size: int) -> Tensor:
        return torch.ones(size, dtype=BF16, device=GPU)

    count, dim = RULE.num_experts, HEADS.dim
    width = HEADS.num_q * dim
    attention = Attention(
        HEADS, packed(width + 2 * HEADS.num_kv * dim, HIDDEN), packed(HIDDEN, width), norm(dim), norm(dim)
    )
    router = ops.forward.pack_router(
        torch.empty((count, HIDDEN), dtype=BF16, device=GPU).normal_(0, HIDDEN**-0.5)
    )
    moe = Moe(RULE, router, packed(count * 2 * INNER, HIDDEN), packed(count * HIDDEN, INNER))
    return Layer(norm(HIDDEN), attention, norm(HIDDEN), moe)


def layer_cases(ops: TritonOps, row_counts: list[int]) -> Iterator[Case]:
    """Yield passes over whole layers with each height of the tiles of experts."""
    layers, table = [make_layer(ops) for _ in range(LAYERS)], rope(HEADS, 1024)
    pages = 1 + torch.arange(max(row_counts) * (CONTEXT // PAGE + 1), dtype=torch.int32, device=GPU)
    pages = pages.view(max(row_counts), -1)
    shape = (2, pages.numel() + 1, PAGE, HEADS.num_kv, HEADS.dim)
    caches = [torch.empty(shape, dtype=BF16, device=GPU).normal_() for _ in layers]
    for rows in row_counts:
        for kind, num_equal in (("distinct", 1), ("equal", rows), ("skewed", rows // 2)):
            slots, positions = torch.arange(rows, device=GPU), torch.full((rows,), CONTEXT, device=GPU)
            own = pages[:rows].clone()
            own[:num_equal] = own[0]
            index = own[:, CONTEXT // PAGE].long() * PAGE + CONTEXT % PAGE
            page_table = torch.zeros((rows, 1024 // PAGE), dtype=torch.int32, device=GPU)
            page_table[:, : own.shape[1]] = own
            at = Rows(slots, positions, slots, index, page_table)
            x = randn(rows, HIDDEN, seed=rows, dtype=BF16)
            x[:num_equal] = x[0]
            for height in HEIGHTS:

                def run(x: Tensor = x, at: Rows = at, height: int = height) -> tuple[Tensor, ...]:
                    sizes = {tiles.ANY_ROWS: height} if height else tiles.TILE_ROWS
                    with mock.patch.object(tiles, "TILE_ROWS", sizes):
                        last = layers[-1].mlp_norm
                        return run_layers(ops, x, layers, last, at, table, caches, EPS)

                label = f"height {height}" if height else "default"
                yield Case(f"layers, {rows} {kind} rows", label, [run] * 3, run, num_parts=LAYERS)


def one_row_cases(ops: TritonOps) -> Iterator[Case]:
    """Yield passes of one row over whole layers, by separate ops and in one kernel."""
    layers, table = [make_layer(ops) for _ in range(LAYERS)], rope(HEADS, 1024)
    pages = 1 + torch.arange(1024 // PAGE, dtype=torch.int32, device=GPU)[None]
    shape = (2, pages.numel() + 1, PAGE, HEADS.num_kv, HEADS.dim)
    caches = [torch.empty(shape, dtype=BF16, device=GPU).normal_() for _ in layers]
    x, slot = randn(1, HIDDEN, seed=1, dtype=BF16), torch.zeros(1, dtype=torch.int64, device=GPU)
    for context in ONE_ROW_CONTEXTS:
        position, index = slot + context, pages[:, context // PAGE].long() * PAGE + context % PAGE
        at = Rows(slot, position, slot, index, pages)
        for label, one_launch in (("separate ops", False), ("one kernel", True)):

            def run(at: Rows = at, one_launch: bool = one_launch) -> tuple[Tensor, ...]:
                with mock.patch.object(ops.forward, "one_launch", one_launch):
                    return run_layers(ops, x.clone(), layers, layers[-1].mlp_norm, at, table, caches, EPS)

            yield Case(f"one row, {context} tokens", label, [run] * 3, run, num_parts=LAYERS)


def measure(case: Case, firsts: dict[str, tuple[Tensor, ...]]) -> dict[str, Any]:
    """Return the time of a case and whether its bits are those of the first of its group."""
    found = tuple(tensor.clone() for tensor in case.result())
    first = firsts.setdefault(case.group, found)
    line: dict[str, Any] = {"equal bits": all(map(torch.equal, found, first))}
    if case.calls:
        line["us"] = round(micros(case.calls, 15) / case.num_parts, 2)
        if case.bytes_read:
            line["GB/s"] = round(case.bytes_read / line["us"] / 1e3)
    return line


def main() -> None:
    """Compile all kernels side by side, then check and time them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="route,experts")
    parser.add_argument("--rows", default="64,128,256", help="of layers")
    parser.add_argument("--seconds", type=float, default=55)
    options = parser.parse_args()
    begin, ops = time.monotonic(), TritonOps(GPU)
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "route": lambda: route_cases(ops),
        "experts": lambda: expert_cases(ops),
        "layers": lambda: layer_cases(ops, [int(rows) for rows in options.rows.split(",")]),
        "one_row": lambda: one_row_cases(ops),
    }
    cases = [case for part in options.parts.split(",") for case in parts[part]()]
    compile_ahead([case.calls[0] if case.calls else case.result for case in cases], lambda *_: None)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    firsts: dict[str, tuple[Tensor, ...]] = {}
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        if time.monotonic() - begin > options.seconds:
            break
        try:
            line = measure(case, firsts)
        except Exception as error:  # e.g. a tile that does not fit
            line = {"error": f"{type(error).__name__} {error}"[:120]}
        found.setdefault(case.group, {})[case.label] = line
        print(f"{case.group}, {case.label}: {line}", flush=True)
    finish("moe_few_rows", {"cases": found})


if __name__ == "__main__":
    main()
