"""Checks and times the triton backend on a GPU. Needs torch, triton, numpy, safetensors and this repository.

    PYTHONPATH=src python bench/micro/gpu/op_times.py [--only checks|gemm|attention|small|sampling|step|forward]
        [--seconds 280] [--abreast]

Without --only: checks, times and a forward pass in the shape of SmolLM2. No part starts after --seconds.
The last line of stdout is JSON.

Times are per call, from CUDA graphs of many calls over rotating inputs that together exceed the L2 cache.
Most of a first run is compilation: --abreast runs the checks side by side. Tiles: bench/micro/gpu/gemm_tiles.py.
"""  # noqa: E501

# ruff: noqa: B008, B023 - every lambda here is called before its loop goes on
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import op_checks as checks
from common.measure import commit
from fused_layers import all_layers_at_once
from op_checks import GPU, LARGE, LARGE_HEADS, SMALL, SMALL_HEADS, Paged, keys, randn, rope
from step_ops import STEP_CHECKS, step_times

from draftproof.models.config import ModelConfig
from draftproof.models.decoder import DenseDecoder
from draftproof.models.load import load_checkpoint
from draftproof.models.runner import Runner
from draftproof.ops import Attention
from draftproof.ops.triton.backend import TritonOps

BEGUN = time.perf_counter()
BF16 = torch.bfloat16
L2 = 128 << 20  # bytes that surely do not fit
ROWS = (1, 6, 8, 64, 256)
CHECKS = [*checks.CHECKS, *STEP_CHECKS, all_layers_at_once]


def micros(calls: list[Callable[[], Any]], rounds: int = 5) -> float:
    """Median µs of one call: all calls in one graph, replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return round(statistics.median(times), 2)


def weights(columns: int, depth: int) -> list[Tensor]:
    copies = max(2, min(48, -(-L2 // (columns * depth * 2))))
    return [randn(columns, depth, seed=i, dtype=BF16) / depth**0.5 for i in range(copies)]


def gemm_times(ops: TritonOps) -> dict[str, Any]:
    """µs of ours and of cuBLAS, and our GB/s over the weight's bytes."""
    found = {}
    for columns, depth in SMALL + LARGE:
        held = weights(columns, depth)
        packed = [ops.forward.pack_linear(w) for w in held]
        for rows in ROWS:
            x = randn(rows, depth, dtype=BF16)
            out = torch.empty((rows, columns), dtype=BF16, device=GPU)
            turns = max(len(held), 10 if columns * depth > 1 << 24 else 40)
            ours = micros([lambda p=packed[i % len(held)]: ops.forward.linear(x, p) for i in range(turns)])
            theirs = micros([lambda w=held[i % len(held)]: torch.mm(x, w.t(), out=out) for i in range(turns)])
            rate = round(columns * depth * 2 / ours / 1000)
            found[f"{columns}x{depth} M={rows}"] = [ours, theirs, rate]
            print(f"{columns}x{depth} M={rows}: {ours} µs, cuBLAS {theirs}, {rate} GB/s", flush=True)
    return found


def attention_times(ops: TritonOps) -> dict[str, Any]:
    """µs of one layer; decode rows, verify rows and a prefill chunk."""
    found = {}
    for name, heads in (("smollm2", SMALL_HEADS), ("llama8b", LARGE_HEADS)):
        for context, slots, rows in ((400, 1, 1), (400, 8, 6), (400, 64, 1), (400, 64, 6), (400, 256, 1),
                                     (4000, 1, 1), (4000, 1, 6), (4000, 64, 1), (2048, 1, 2048)):  # fmt: skip
            paged = Paged(heads, [context] * slots, BF16)
            where = [(s, context - rows + i) for s in range(slots) for i in range(rows)]
            q, at = randn(len(where), heads.num_q * heads.dim, dtype=BF16), paged.rows(where)
            calls = [lambda: ops.forward.attention(q, at, heads, paged.cache)] * 10
            found[f"{name} {slots}x{rows} at {context}"] = micros(calls)
    for label, value in found.items():
        print(f"attention {label}: {value} µs", flush=True)
    return found


def small_times(ops: TritonOps) -> dict[str, Any]:
    found = {}
    for rows in (1, 64, 512):
        for width, inner, heads in ((576, 1536, SMALL_HEADS), (4096, 14336, LARGE_HEADS)):
            x, weight = randn(rows, width, dtype=BF16), randn(width, dtype=BF16)
            both, table = randn(rows, 2 * inner, dtype=BF16), rope(heads, 1024)
            paged = Paged(heads, [512] * rows, BF16)
            at = paged.rows([(s, 400) for s in range(rows)])
            qkv = randn(rows, (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=BF16)
            tokens = torch.zeros(rows, dtype=torch.int64, device=GPU)
            calls = {
                "embed": lambda: ops.forward.embed(tokens, x),
                "rms_norm": lambda: ops.forward.rms_norm(x, weight, 1e-6),
                "add_rms_norm": lambda: ops.forward.add_rms_norm(x, x, weight, 1e-6),
                "act_mul": lambda: ops.forward.act_mul(both),
                "rope_store": lambda: ops.forward.rope_store(
                    qkv, at, Attention(heads, None, None), table, paged.cache, 1e-6
                ),
            }
            for name, call in calls.items():
                found[f"{name} {width} M={rows}"] = micros([call] * 20)
    print(found, flush=True)
    return found


def sampling_times(ops: TritonOps) -> dict[str, Any]:
    found = {}
    for vocab in (49152, 128256):
        for rows in (1, 64, 256):
            x, (seeds, positions) = 3 * randn(rows, vocab), keys(rows)
            k = torch.full((rows,), 50, device=GPU)
            p, m = torch.full((rows,), 0.9, device=GPU), torch.zeros(rows, device=GPU)
            calls = {
                "argmax": lambda: ops.sampling.argmax(x),
                "gumbel_argmax": lambda: ops.sampling.gumbel_argmax(x, seeds, positions, 0),
                "logsumexp": lambda: ops.sampling.logsumexp(x),
                "rank": lambda: ops.sampling.rank(x, positions % vocab),
                "top 5": lambda: ops.sampling.top(x, 5),
                "top 20": lambda: ops.sampling.top(x, 20),
                "truncate k=50 p=0.9": lambda: ops.sampling.truncate(x, k, p, m),
                "truncate p=0.9": lambda: ops.sampling.truncate(x, k * 0, p, m),
            }
            for name, call in calls.items():
                found[f"{name} V={vocab} R={rows}"] = micros([call] * 5)
                print(f"{name} V={vocab} R={rows}: {found[f'{name} V={vocab} R={rows}']} µs", flush=True)
    return found


CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, intermediate_size=1536, norm_eps=1e-5, rope_theta=100000.0,
    max_position=2048, tie_embeddings=True, dtype="bfloat16",
)  # fmt: skip
STEPS = ((1, 1), (1, 6), (8, 1), (8, 6), (64, 1), (64, 6), (256, 1))
FIRST: dict[str, Tensor] = {}  # hidden rows of the first pass with these steps


def forward_times(pdl: bool, context: int = 400) -> dict[str, Any]:
    """Return the µs of a SmolLM2-shaped pass, and of one with logits and argmax."""
    ops = TritonOps(GPU, pdl=pdl)
    loaded = load_checkpoint(CONFIG, dtype="bfloat16", load_format="dummy")
    slots, pages = 256, 2048 // 16
    begun = time.perf_counter()
    model = DenseDecoder(loaded.config, dict(loaded.weights), ops, 2048)
    used = -(-(context + 8) // 16)
    runner = Runner(model, ops, BF16, num_pages=1 + slots * used, page_size=16, max_rows=512)
    for cache in runner.caches:
        cache.normal_(generator=torch.Generator(device=GPU).manual_seed(3))
    table = torch.zeros((slots, pages), dtype=torch.int32, device=GPU)
    order = torch.randperm(slots * used, generator=torch.Generator().manual_seed(4))
    table[:, :used] = 1 + order.view(slots, used).to(torch.int32).to(GPU)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"seconds to pack": round(time.perf_counter() - begun, 1)}
    first: Tensor | None = None
    for batch, window in STEPS:
        slot = torch.arange(batch, device=GPU).repeat_interleave(window)
        position = context + torch.arange(window, device=GPU).repeat(batch)
        rows = runner.rows((slot * 31 + position) % 49152, position, slot, table)
        graph = ops.runtime.graph(lambda r=rows: runner.forward(r))
        hidden = graph().clone()
        assert not hidden.isnan().any(), "NaN in hidden rows"
        first = hidden[0].clone() if first is None else first
        plain = FIRST.setdefault(f"{batch}x{window}", hidden.clone())
        assert torch.equal(hidden, plain), "early launch gives other bits"
        same = torch.equal(hidden[0], first)
        best = ops.runtime.graph(lambda r=rows: ops.sampling.argmax(runner.logits(runner.forward(r))))
        line = {"graph": micros_of(graph), "with argmax": micros_of(best)}
        found[f"{batch}x{window}"] = line | {"row 0 has the bits of 1x1": same}
        print(f"forward pdl={pdl} {batch}x{window}: {found[f'{batch}x{window}']}", flush=True)
    return found


def micros_of(call: Callable[[], Any], count: int = 40) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 1000 / count, 1)


def checks_abreast(seconds: float) -> dict[str, str]:
    """Every check in a process of its own, all at once: most of a first run is compilation."""
    names = [f"check {c.__name__}" for c in CHECKS]
    command = [sys.executable, __file__, "--seconds", str(seconds), "--only"]
    running = {n: subprocess.Popen([*command, n], stdout=subprocess.PIPE, text=True) for n in names}
    found = {}
    for name, process in running.items():
        lines = process.communicate()[0].splitlines() or [""]
        found[name] = json.loads(lines[-1])[name] if lines[-1].startswith("{") else "\n".join(lines)[-1500:]
        print(f"== {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--abreast", action="store_true", help="the checks side by side, in processes")
    parser.add_argument("--seconds", type=float, default=280)
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "gpu_ops", "commit": commit(), "device": torch.cuda.get_device_name()}
    report |= {"torch": torch.__version__, "seconds to import": round(time.perf_counter() - BEGUN, 1)}
    ops, alone = TritonOps(GPU), TritonOps(GPU, pdl=False)  # a single op is timed without its neighbour
    if options.abreast:
        report |= checks_abreast(options.seconds)
    parts: dict[str, Callable[[], Any]] = {f"check {c.__name__}": lambda c=c: c(ops) for c in CHECKS}
    parts["forward"] = lambda: forward_times(False)
    parts["forward, early launch"] = lambda: forward_times(True)
    parts["gemm µs, cuBLAS µs, GB/s"] = lambda: gemm_times(alone)
    parts["attention"] = lambda: attention_times(alone)
    parts["small"] = lambda: small_times(alone)
    parts["sampling"] = lambda: sampling_times(alone)
    parts["step"] = lambda: step_times(micros)
    for name, part in parts.items():
        if name in report or (options.only and options.only not in name):
            continue
        if time.perf_counter() - BEGUN > options.seconds:
            report[name] = "no time left"
            continue
        begun = time.perf_counter()
        try:
            report[name] = part() or "ok"
        except Exception:
            report[name] = traceback.format_exc()[-1500:]
            print(report[name], flush=True)
        torch.cuda.synchronize()
        print(
            f"== {name}: {time.perf_counter() - begun:.1f} s {'' if report[name] != 'ok' else 'ok'}",
            flush=True,
        )
    found = ops.forward.cublas.proven | alone.forward.cublas.proven
    proven = {f"{n}x{k} M={m} {d} {o}": v for (n, k, m, d, o), v in found.items()}
    report["cublas gives our bits"] = proven
    report["seconds"] = round(time.perf_counter() - BEGUN, 1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
