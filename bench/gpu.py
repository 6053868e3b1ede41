"""Exactness and speed on a GPU; the last line of stdout is JSON. Status 1: a check failed.

    python bench/gpu.py [--model smollm2-135m] [--parts bits,control,speed,logprobs,fast,floor,profile,…]
                        [--tokens 256] [--batches 1,8,64,256] [--seconds 500] [--quantization int8]
                        [--kv-cache-dtype fp8]
    python bench/gpu.py --shape qwen3-30b-a3b --parts speed,logprobs,experts,floor --tokens 128 --tasks chat

--shape: dummy weights in the shape of a public model, made without a download.
bits, control: exactness, see `common/gpu_exactness.py`. logprobs: cost, see `common/gpu_logprob_cost.py`.
speed: tokens a second of `LLM.generate`, prefill and detokenisation included, sides in turn.
drafters: cost of all logprobs beside each proposer, `--drafter-seconds`, with `--head` and `--draft-model`.
fast: numerics="fast" against "exact". floor: limit by memory bandwidth. profile: time of a step by kernel.
kv: step time of decoding at a long context by kv_cache_dtype, `--kv-context` tokens, `--kv-batch` requests.
transformers: its speed and its logits, on the same weights.
experts: how many experts of a layer one step of decoding touches; their weights bound its speed from below.
Parts without time left are skipped and named. Prompts: bench/common/prompts.py.
With dummy weights (--load-format dummy) a config with tied embeddings repeats its last token, so drafts from
the text are accepted; with an untied head they are rejected.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from common.gpu_engine import SETTINGS, Bench, decoding, kernels_of, params_of, steps_of, timed, warm_clock
from common.gpu_exactness import bits, control
from common.gpu_logprob_cost import drafters, logprobs
from common.measure import finish
from common.memory_floor import memory_floor
from common.shapes import SHAPES, write_shape

ROUNDS = 3


# --- speed ------------------------------------------------------------------------------------------------


def interleaved(
    bench: Bench, sides: dict[str, Callable[[], dict[str, float]]], rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Return medians over rounds in which every side has its turn, without the first round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            one = side()
            if turn:
                found[name].append(one)
        if bench.is_time_up and turn:
            break
    return {
        name: {key: round(statistics.median(one[key] for one in many), 3) for key in many[0]}
        for name, many in found.items()
    }


def compare(
    bench: Bench, task: str, batch: int, sides: dict[str, dict[str, Any]], **engine: Any
) -> dict[str, Any]:
    """Measure sides that differ by an option of their requests."""
    llm, prompts = bench.llm(**engine), bench.prompts(task, batch)
    warm_clock()
    rounds = 3 * ROUNDS if batch < 64 else ROUNDS + 2  # short rounds vary more
    calls = {
        name: lambda c=changes: timed(llm, prompts, params_of(batch, bench.options.tokens, **c))
        for name, changes in sides.items()
    }
    found = interleaved(bench, calls, rounds)
    print(f"{task} batch {batch}", found, flush=True)
    return found


def speed(bench: Bench) -> dict[str, Any]:
    """Measure plain and n-gram decoding on chat prompts and on the copy task."""
    out = {}
    for task, batch in product(bench.options.tasks, bench.options.batches):
        if not bench.is_time_up:
            out[f"{task} {batch}"] = compare(bench, task, batch, SETTINGS)
    return out


def fast(bench: Bench) -> dict[str, Any]:
    """Compare exact with fast numerics: decoding, and the prefill of 2048-token prompts."""
    out: dict[str, Any] = {}
    for numerics in ("exact", "fast", "exact", "fast"):
        llm = bench.llm(numerics=numerics)
        for batch in bench.options.batches:
            prompts = bench.prompts("chat", batch)
            params = params_of(batch, bench.options.tokens, **SETTINGS["plain"])
            timed(llm, prompts, params)
            out.setdefault(f"decode {batch}", {}).setdefault(numerics, []).append(
                round(timed(llm, prompts, params)["tok/s"], 1)
            )
        vocab, draw = llm.engine.limits.vocab_size, random.Random(7)
        long = [[draw.randrange(3, vocab) for _ in range(2048)] for _ in range(16)]
        one = params_of(16, 1, speculative=False)
        timed(llm, long, one)
        rate = timed(llm, long, one)["tok/s"] * 2048
        out.setdefault("prefill of 2048", {}).setdefault(numerics, []).append(round(rate))
        print(numerics, {name: line[numerics][-1] for name, line in out.items()}, flush=True)
        if bench.is_time_up:
            break
    for line in out.values():
        if "fast" in line:
            line["exact over fast"] = round(max(line["exact"]) / max(line["fast"]), 3)
    return out


# --- step time, memory floor, transformers ------------------------------------------------------------------


def profile(bench: Bench) -> dict[str, Any]:
    """Return step time, busy share of the GPU and kernel times of plain decoding."""
    llm, out = bench.llm(), {}
    for batch in bench.options.batches:
        found = kernels_of(llm, bench.prompts("chat", batch), params_of(batch, 512, speculative=False))
        out[str(batch)] = {**found, "kernels": dict(list(found["kernels"].items())[:16])}
        print("profile", batch, out[str(batch)], flush=True)
    return out


def floor(bench: Bench) -> dict[str, Any]:
    """Return tokens a second at batch 1 if a step only read the weights, at the bandwidth measured here."""
    found = memory_floor(bench.llm())
    print("floor", found, flush=True)
    return found


def experts(bench: Bench) -> dict[str, Any]:
    """Return the mean number of experts that the rows of one step select, over layers and steps."""
    from draftproof.ops.triton.moe import op

    llm, out, route = bench.llm(enforce_eager=True), {}, op.route
    for batch in bench.options.batches:
        counts: list[int] = []

        def counted(x: Any, *args: Any, counts: list[int] = counts, rows: int = batch) -> Any:
            found = route(x, *args)
            if len(x) == rows:
                counts.append(len(found.experts.unique()))
            return found

        op.route = counted
        prompts = bench.prompts("chat", batch)
        with decoding(llm.engine, prompts, params_of(batch, 64, speculative=False)):
            counts.clear()
            for _ in range(8):
                llm.engine.step()
        op.route = route
        out[str(batch)] = round(statistics.mean(counts), 1) if counts else 0
        print("experts", batch, out[str(batch)], flush=True)
    return out


def kv(bench: Bench) -> dict[str, Any]:
    """Compare decoding at a long context by the storage of K and V; `auto` is measured first and last."""
    options, out = bench.options, {}
    for turn, name in enumerate(("auto", "fp8", "int8", "auto")):
        if bench.is_time_up and turn:
            break
        sizes = {"max_model_len": options.kv_context + 256, "max_num_seqs": options.kv_batch}
        llm = bench.llm(kv_cache_dtype=name, **sizes)
        vocab, draw = llm.engine.limits.vocab_size, random.Random(7)
        long = [
            [draw.randrange(3, vocab) for _ in range(options.kv_context)] for _ in range(options.kv_batch)
        ]
        with decoding(llm.engine, long, params_of(options.kv_batch, 250, speculative=False)):
            seconds = min(steps_of(llm.engine, 40) for _ in range(4))
        out.setdefault(name, []).append(round(seconds * 1e6, 1))
        print("kv", name, "step us", out[name], flush=True)
    best = {name: min(steps) for name, steps in out.items()}
    return {"step us": out, "speed over auto": {n: round(best["auto"] / one, 3) for n, one in best.items()}}


def transformers(bench: Bench) -> dict[str, Any]:
    """Compare speed of greedy decoding and logits with transformers on the same weights."""
    from common.peers.transformers_peer import side_by_side

    llm, kind = bench.llm(), bench.options.load_format
    return side_by_side(llm, bench.prompts("chat", 8), bench.options.tokens, load_format=kind)


PARTS = {
    f.__name__: f
    for f in (bits, control, speed, logprobs, drafters, fast, floor, profile, kv, transformers, experts)
}


def main() -> None:
    """Run the chosen parts."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=SHAPES, help="dummy weights in this shape instead of --model")
    parser.add_argument("--layers", type=int, default=0, help="number of layers of --shape; 0: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default="none", help="none, int8, fp8 or int4, made on load")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["chat", "copy"])
    parser.add_argument("--ways", type=int, default=3, help="bits: 1 n-gram drafts, 2 and junk, 3 and midway")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--bit-tokens", type=int, default=96)
    parser.add_argument("--max-len", type=int, default=2304)
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256]
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="of all parts but kv")
    parser.add_argument("--kv-context", type=int, default=16384, help="of the part kv")
    parser.add_argument("--kv-batch", type=int, default=16, help="of the part kv")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--logprob-seconds", type=float, default=100, help="of the part logprobs")
    parser.add_argument("--drafter-seconds", type=float, default=200, help="of the part drafters")
    parser.add_argument("--head", help="drafters: a head's folder; default: the one shipped for the model")
    parser.add_argument("--draft-model", help="drafters: default: the model itself")
    parser.add_argument("--save", type=Path, help="write the figures after every part")
    options = parser.parse_args()
    if options.shape:
        folder = Path(tempfile.mkdtemp(prefix="draftproof-shape-")) / options.shape
        options.model, options.load_format = write_shape(options.shape, folder, options.layers), "dummy"
    bench = Bench(options)
    model = options.shape or options.model
    found: dict[str, Any] = {"model": model, "quantization": options.quantization}
    for name in options.parts:
        begin = time.monotonic()
        found[name] = "no time left" if bench.is_time_up else PARTS[name](bench)
        print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)
        if options.save:
            options.save.write_text(json.dumps(found))
    finish("gpu", found)
    failed = [name for name in options.parts if _fails(found[name])]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _fails(part: Any) -> bool:
    return isinstance(part, dict) and part.get("passes") is False


if __name__ == "__main__":
    main()
