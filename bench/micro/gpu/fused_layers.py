"""All layers in one kernel against the ops one by one, on a GPU: the same bits, and the µs of both.

    PYTHONPATH=src python bench/micro/gpu/fused_layers.py [check|times|pieces]    JSON on the last line

`pieces`: the check with `layers.MERGE_COST` 2, and times of uneven contexts with 0 and 2.
Times are of one CUDA graph of 30 SmolLM2-shaped layers with their embedding and norm, medians of replays.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from op_checks import GPU, LARGE_HEADS, SMALL_HEADS, Paged, randn, rope

from draftproof.models.layers import run_layers
from draftproof.ops import Attention, AttentionShape, Layer, Mlp, Rows
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.fused import layers as fused_layers

BF16 = torch.bfloat16
STEPS = ((1, 1, 100), (1, 1, 500), (1, 1, 2000), (1, 6, 500), (8, 1, 400), (8, 1, 500), (8, 1, 700))
STEPS += ((8, 2, 500), (8, 6, 500), (8, 6, 700), (16, 1, 500), (24, 1, 500), (32, 1, 500), (48, 1, 500))
STEPS += ((64, 1, 300), (64, 1, 500), (64, 1, 700))
UNEVEN = ((32, 1, 0), (48, 1, 0), (64, 1, 0), (96, 1, 0), (64, 1, 500))  # 0: from 178 to 1128, as a chat's


def decoder(
    ops: TritonOps, heads: AttentionShape, hidden: int, inner: int, bias: bool, windows: tuple[int, ...]
) -> list[Layer]:
    def packed(columns: int, depth: int, seed: int) -> object:
        extra = randn(columns, seed=seed + 5, dtype=BF16) if bias else None
        return ops.forward.pack_linear((randn(columns, depth, seed=seed) / depth**0.5).to(BF16), extra)

    width, total = heads.num_q * heads.dim, (heads.num_q + 2 * heads.num_kv) * heads.dim
    return [
        Layer(
            attention_norm=1 + randn(hidden, seed=9 * i, dtype=BF16) / 4,
            attention=Attention(
                heads=replace(heads, window=window),
                qkv=packed(total, hidden, 9 * i + 1),
                out=packed(hidden, width, 9 * i + 2),
            ),
            mlp_norm=1 + randn(hidden, seed=9 * i + 3, dtype=BF16) / 4,
            mlp=Mlp(gate_up=packed(2 * inner, hidden, 9 * i + 4), down=packed(hidden, inner, 9 * i + 5)),
        )
        for i, window in enumerate(windows)
    ]


def padded(rows: Rows, count: int) -> Rows:
    none = torch.zeros(count, dtype=torch.int64, device=GPU)
    columns = ((rows.tokens, 0), (rows.positions, 0), (rows.slots, -1), (rows.kv_index, 0))
    return Rows(*(torch.cat([column, none + fill]) for column, fill in columns), rows.page_table)


def batches(most: int) -> list[list[tuple[int, int]]]:
    """(slot, position) of the rows of a call: 1 to `most` of them, contexts of 1 to 2000."""
    found = [[(0, p)] for p in (0, 1, 63, 64, 127, 128, 255, 256, 383, 384, 500, 511, 512, 1023, 1999)]
    for count in (*range(2, 17), 17, 24, 31, 32, 33, 47, 48, 49, 63, 64):
        found.append([(0, 1980 - 25 * count + i) for i in range(count)])
        found.append([(s, (37 + 211 * s + 13 * count) % 1990) for s in range(count)])
    pairs = ((8, 2), (2, 8), (3, 5), (5, 3), (8, 6), (10, 6), (7, 9), (21, 3))
    found += [[(s, 500 + i) for s in range(n) for i in range(w)] for n, w in pairs]
    found += [[(s, p) for s in range(n)] for n in (8, 16, 40, 64) for p in (5, 400, 600, 700, 1100, 1990)]
    return [where for where in found if len(where) <= most]


def all_layers_at_once(ops: TritonOps) -> None:
    """Check hidden rows and caches against separate ops, bit by bit, and that the counters are zero again."""
    medium = AttentionShape(num_q=15, num_kv=5, dim=64, scale=0.125, window=0)
    for heads, hidden, inner, bias, windows, most in (
        (SMALL_HEADS, 576, 1536, False, (0, 0, 0), 64),
        (medium, 960, 2560, True, (0, 300, 300), 16),
    ):
        layers, norm = decoder(ops, heads, hidden, inner, bias, windows), randn(hidden, seed=8, dtype=BF16)
        paged, table = Paged(heads, [2000] * most, BF16), rope(heads, 2048)
        caches = [paged.cache * (1 + i / 8) for i in range(len(layers))]
        for where in batches(most):
            for pad in {0, min(3, most - len(where))}:
                rows = padded(paged.rows(where), pad)
                x = randn(len(where) + pad, hidden, seed=len(where), dtype=BF16)
                assert ops.forward._fused_layers.supports(x, layers)
                ours, theirs = ([cache.clone() for cache in caches] for _ in range(2))
                got = run_layers(ops, x.clone(), layers, norm, rows, table, ours, 1e-5)[0][: len(where)]
                want = run_layers(ops, x, layers, norm, rows, table, theirs, 1e-5, fused=False)[0]
                want = want[: len(where)]
                assert not want.isnan().any() and torch.equal(got, want), f"hidden {hidden}: {where}"
                for mine, other in zip(ours, theirs, strict=True):
                    assert torch.equal(mine.view(torch.int16), other.view(torch.int16)), f"K, V: {where}"
    assert (
        not ops.forward._fused_layers._counter.any()
        and not ops.forward._fused_layers._scratch["arrived"].any()
    )
    large = decoder(ops, LARGE_HEADS, 4096, 14336, False, (0,))
    assert not ops.forward._fused_layers.supports(randn(1, 4096, dtype=BF16), large)


def captured(call: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = call()
    return graph, out


def micros(graph: torch.cuda.CUDAGraph, rounds: int = 7, count: int = 30) -> float:
    for _ in range(count):
        graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return round(statistics.median(times), 1)


def block_times(ops: TritonOps, steps: tuple[tuple[int, int, int], ...]) -> dict[str, dict[str, float]]:
    """Sequences x rows at a context -> µs of the fused pass and of the ops one by one."""
    layers, norm = decoder(ops, SMALL_HEADS, 576, 1536, False, (0,) * 30), randn(576, seed=8, dtype=BF16)
    paged, table, embedding = (
        Paged(SMALL_HEADS, [2048] * 96, BF16),
        rope(SMALL_HEADS, 2048),
        randn(64, 576, dtype=BF16),
    )
    caches = [paged.cache.clone() for _ in layers]
    found = {}
    for slots, window, context in steps:
        begins = [context or 128 + round(50 * 20 ** (s / (slots - 1))) for s in range(slots)]
        rows = paged.rows([(s, begins[s] + i) for s in range(slots) for i in range(window)])
        rest = (layers, norm, rows, table, caches, 1e-5)
        one = captured(
            lambda rest=rest, rows=rows: run_layers(ops, ops.forward.embed(rows.tokens, embedding), *rest)
        )
        many = captured(
            lambda rest=rest, rows=rows: run_layers(
                ops, ops.forward.embed(rows.tokens, embedding), *rest, fused=False
            )
        )
        took = {"all at once": micros(one[0]), "one by one": micros(many[0])}
        one[0].replay()
        many[0].replay()
        alike = (torch.equal(*pair) for pair in zip(one[1], many[1], strict=True))
        assert all(alike), f"replays differ: {slots}x{window} at {context}"
        found[f"{slots}x{window} at {context}"] = took
        print(f"{slots}x{window} at {context}: {took}", flush=True)
    return found


def main(only: list[str]) -> None:
    ops = TritonOps(GPU)
    report: dict[str, object] = {"bench": "gpu_blocks", "device": torch.cuda.get_device_name()}
    if not only or "check" in only:
        all_layers_at_once(ops)
        report["check"] = "ok"
        print("check ok", flush=True)
    if not only or "times" in only:
        report["µs"] = block_times(ops, STEPS)
    for fold in (0, 2) if "pieces" in only else ():
        fused_layers.MERGE_COST = fold
        report[f"µs, FOLD {fold}"] = block_times(ops, UNEVEN)
    if "pieces" in only:
        all_layers_at_once(ops)
        print("check of pieces ok", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
