"""Times the kernels of a Qwen3-30B-A3B layer at few rows on a GPU and compares their bits.

    PYTHONPATH=src:tests/support:tests python bench/micro/gpu/moe_few_rows.py [--beside other_routing.py]
        [--parts route,qkv,experts] [--seconds 55]

Routing is timed in a few variants, and beside another version of `ops/triton/moe/routing.py`. The QKV
projection with QK norms is timed as two ops and as one kernel, the grouped GEMM over a few tiles. Every case
is a graph of early launches that rotate over more weights than fit into the L2 cache. One line per case; the
last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/
sys.path.insert(0, str(Path(__file__).parent))

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from common.measure import finish
from op_checks import GPU, Paged, randn, rope
from op_times import micros
from torch import Tensor

from draftproof.ops import Attention, AttentionShape, Routing
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.compile_ahead import compile_ahead
from draftproof.ops.triton.gemm import fused
from draftproof.ops.triton.gemm.tiles import Tile
from draftproof.ops.triton.moe import routing
from draftproof.ops.triton.moe.experts import expert_linear
from draftproof.ops.triton.moe.tiles import FEW_ROWS
from draftproof.ops.triton.moe.tuning import assignment_of, random_experts

BF16 = torch.bfloat16
HIDDEN, INNER, RULE = 2048, 768, Routing(num_experts=128, top_k=8)
HEADS = AttentionShape(num_q=32, num_kv=4, dim=128, scale=128**-0.5, window=0)
EPS, CONTEXT, LIST_ROWS = 1e-6, 400, 16
ROUTE_ROWS, QKV_ROWS, EXPERT_ROWS = (1, 8, 64, 256), (1, 8, 16, 64), (1, 8)
MANY_ROWS = 1024  # routed by one program a row tile
ROUTERS, QKV_LAYERS, EXPERT_LAYERS = 160, 8, 4  # more bytes than the L2 cache
# Constants of `routing` that a variant replaces.
ROUTE_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "16 experts": {"FEW_EXPERTS": 16},
    "8 experts": {"EXPERTS": 8},
    "step 512, 4 stages": {"BF16_STEP": 512, "STAGES": 4},
    "8 warps": {"WARPS": 8},
    "without prefetch": {"num_prefetch_lines": lambda *_: 0},
}
QKV_TILES = {
    16: (
        Tile(16, 16, 256, 2, 4, True), Tile(16, 16, 256, 4, 4, True), Tile(16, 16, 512, 4, 3, True),
        Tile(16, 32, 256, 4, 4, True), Tile(16, 32, 128, 4, 6, True), Tile(16, 64, 128, 4, 6, True),
        Tile(16, 64, 128, 8, 6, True),
    ),
    64: (
        Tile(64, 32, 128, 4, 6), Tile(64, 32, 128, 4, 6, True), Tile(64, 16, 128, 4, 6),
        Tile(64, 16, 256, 4, 4), Tile(64, 64, 128, 4, 4),
    ),
}  # fmt: skip
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


def load_module(path: str) -> Any:
    """Import another version of a kernel file."""
    spec = importlib.util.spec_from_file_location("beside", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["beside"] = module
    spec.loader.exec_module(module)
    return module


def route_cases(ops: TritonOps, beside: str | None) -> Iterator[Case]:
    """Yield the variants of routing."""
    routers = [
        ops.forward.pack_router(randn(128, HIDDEN, seed=i, dtype=BF16) / HIDDEN**0.5) for i in range(ROUTERS)
    ]
    every = randn(MANY_ROWS, HIDDEN, seed=7, dtype=BF16)
    variants = [(label, routing, constants) for label, constants in ROUTE_VARIANTS.items()]
    if beside:
        variants.insert(0, ("beside", load_module(beside), {}))
    for rows in ROUTE_ROWS:
        x, size = every[:rows].contiguous(), LIST_ROWS if rows > FEW_ROWS else 0
        pdl = ops.launch.early(x)
        for label, module, constants in [("as part of many rows", routing, None), *variants]:

            def route(
                router: Any, given: Tensor = x, m: Any = module, c: dict[str, Any] | None = constants,
                size: int = size, pdl: bool = pdl,
            ) -> Any:  # fmt: skip
                with ExitStack() as stack:
                    for name, value in (c or {}).items():
                        stack.enter_context(mock.patch.object(m, name, value))
                    return m.route(given, router.linear, RULE, None, router.counters, size, pdl)

            def result(route: Any = route, c: Any = constants, rows: int = rows) -> tuple[Tensor, ...]:
                found = route(routers[0], every) if c is None else route(routers[0])
                return found.experts[:rows], found.weights[:rows]

            calls = [] if constants is None else [lambda r=r, f=route: f(r) for r in routers]
            yield Case(f"route, {rows} rows", label or "default", calls, result)


def qkv_cases(ops: TritonOps) -> Iterator[Case]:
    """Yield the QKV projection with norms, rotary embedding and KV write as two ops and as one."""
    columns = (HEADS.num_q + 2 * HEADS.num_kv) * HEADS.dim
    packed = [
        ops.forward.pack_linear(randn(columns, HIDDEN, seed=i, dtype=BF16) / HIDDEN**0.5)
        for i in range(QKV_LAYERS)
    ]
    q_norm, k_norm = (1 + randn(HEADS.dim, seed=i, dtype=BF16) / 8 for i in (1, 2))
    table, turns = rope(HEADS, 2 * CONTEXT), 3 * QKV_LAYERS
    for rows in QKV_ROWS:
        x, paged = randn(rows, HIDDEN, seed=rows, dtype=BF16), Paged(HEADS, [CONTEXT + 1] * rows, BF16)
        these, cache = paged.rows([(slot, CONTEXT) for slot in range(rows)]), torch.zeros_like(paged.cache)
        pdl = ops.launch.early(x)
        norms = fused.HeadNorms(q_norm, k_norm, EPS, ops.forward._arrivals)
        target = fused.QkvTarget(these, HEADS, table, cache, norms)

        def separate(weight: Any, x: Tensor = x, these: Any = these, cache: Tensor = cache) -> Tensor:
            attention = Attention(HEADS, weight, None, q_norm, k_norm)
            qkv = ops.forward.linear(x, weight)
            return ops.forward.rope_store(qkv, these, attention, table, cache, EPS)

        def together(weight: Any, tile: Tile, x: Tensor = x, target: Any = target, pdl: bool = pdl) -> Tensor:
            out = torch.empty((len(x), HEADS.num_q * HEADS.dim), dtype=BF16, device=GPU)
            return fused.linear_rope_store(x, weight, target, out, pdl, tile)

        tiles = QKV_TILES[64 if rows > 16 else 16]
        runs = {"two ops": separate, "linear alone": lambda w, x=x: ops.forward.linear(x, w)}
        runs |= {str(tuple(tile)): lambda w, t=tile, f=together: f(w, t) for tile in tiles}
        for label, run in runs.items():

            def result(run: Any = run, cache: Tensor = cache) -> tuple[Tensor, ...]:
                cache.zero_()
                return run(packed[0]), cache.clone()

            group = f"qkv, {rows} rows" + (", no epilogue" if label == "linear alone" else "")
            calls = [lambda i=i, f=run: f(packed[i % QKV_LAYERS]) for i in range(turns)]
            yield Case(group, label, calls, result, columns * HIDDEN * 2)


def expert_cases(ops: TritonOps) -> Iterator[Case]:
    """Yield the grouped GEMMs over their tiles."""
    count = RULE.num_experts
    for name, width, depth, tiles in (
        ("gate_up", 2 * INNER, HIDDEN, GATE_UP_TILES),
        ("down", HIDDEN, INNER, DOWN_TILES),
    ):
        packed = [
            ops.forward.pack_linear(
                torch.empty((count * width, depth), dtype=BF16, device=GPU).normal_(0, depth**-0.5)
            )
            for _ in range(EXPERT_LAYERS)
        ]
        is_gate_up = name == "gate_up"
        for rows in EXPERT_ROWS:
            experts = random_experts(rows, RULE.top_k, count, GPU)
            found = assignment_of(experts, count, LIST_ROWS if rows > FEW_ROWS else 0)
            x = randn(rows if is_gate_up else rows * RULE.top_k, depth, seed=3, dtype=BF16)
            more = ("silu", BF16) if is_gate_up else (None, torch.float32)
            pdl, size = ops.launch.early(x), len(experts.unique()) * width * depth * 2
            for tile in tiles:

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


def measure(case: Case, firsts: dict[str, tuple[Tensor, ...]]) -> dict[str, Any]:
    """Return the time of a case and whether its bits are those of the first of its group."""
    found = tuple(tensor.clone() for tensor in case.result())
    first = firsts.setdefault(case.group, found)
    line: dict[str, Any] = {"equal bits": all(map(torch.equal, found, first))}
    if case.calls:
        line["us"] = micros(case.calls, 7)
        if case.bytes_read:
            line["GB/s"] = round(case.bytes_read / line["us"] / 1e3)
    return line


def main() -> None:
    """Compile all kernels side by side, then check and time them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", help="another version of routing.py")
    parser.add_argument("--parts", default="route,qkv,experts")
    parser.add_argument("--seconds", type=float, default=55)
    options = parser.parse_args()
    begin, ops = time.monotonic(), TritonOps(GPU)
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "route": lambda: route_cases(ops, options.beside),
        "qkv": lambda: qkv_cases(ops),
        "experts": lambda: expert_cases(ops),
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
