"""Cost of tensor parallelism on one GPU; the last line of stdout is JSON.

    python bench/tensor_parallel_cost.py [--shape llama-3-8b] [--layers 0] [--batches 1,8,64,256] [--steps 60]
                                         [--sides nccl,invariant]

Seconds of a decoding step with one rank, engines in turn. "plain": without tensor parallelism. "nccl": layers
cut as for several ranks, with NCCL in the captured graphs. "invariant": `tp_invariant=True`, 8 parts of K.
`--sides`: those that are compared with "plain".
`--layers`: fewer layers than the published model has. `--device cpu` runs gloo, as a test of this program.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common.gpu_engine import decoding, params_of, warm_clock
from common.measure import finish
from common.shapes import SHAPES, write_shape

from draftproof import LLM
from draftproof.engine import build
from draftproof.engine import engine as engine_module
from draftproof.engine.parallel import rank_checkpoint
from draftproof.engine.parallel.rank_processes import RankProcesses

PROMPT_TOKENS = 64
SPARE_TOKENS = 64  # of a request beside the measured steps, so that none ends


def build_llm(folder: str, side: str, options: argparse.Namespace) -> LLM:
    """Return the engine of a side."""
    tokens = max(options.batches) * (PROMPT_TOKENS + options.steps + SPARE_TOKENS)
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "device": options.device,
        "skip_tokenizer_init": True,
        "max_num_seqs": max(options.batches),
        "max_num_batched_tokens": max(512, *options.batches),
        "kv_cache_tokens": tokens,
        "enable_prefix_caching": False,
        "tp_invariant": side == "invariant",
    }
    if side != "nccl":
        return LLM(folder, **settings)
    whole = build.build_engine
    with (
        patch.object(build, "is_cut", lambda config: True),
        patch.object(rank_checkpoint, "is_cut", lambda config: True),
        patch.object(engine_module, "build_engine", lambda c, k, _: whole(c, k, RankProcesses(c))),
    ):
        return LLM(folder, **settings)


def step_seconds(llm: LLM, batch: int, steps: int) -> float:
    """Return the seconds of a step in which `batch` requests decode."""
    prompts = [[3 + (i * 31 + j * 7) % 1000 for j in range(PROMPT_TOKENS)] for i in range(batch)]
    with decoding(llm.engine, prompts, params_of(batch, steps + SPARE_TOKENS)):
        return _seconds(llm.engine, steps)


def _seconds(engine: Any, count: int) -> float:
    for _ in range(5):
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def main() -> None:
    """Measure all sides and batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256]
    )
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["nccl", "invariant"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = write_shape(options.shape, Path(folder), options.layers)
        sides = {side: build_llm(shape, side, options) for side in ("plain", *options.sides)}
    figures: dict[str, dict[str, float]] = {}
    for batch in options.batches:
        warm_clock()
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, llm in sides.items():
                seconds[side].append(step_seconds(llm, batch, options.steps))
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        line = {f"{side} ms": round(1000 * value, 3) for side, value in medians.items()}
        line |= {f"{side} / plain": round(medians[side] / medians["plain"], 3) for side in options.sides}
        figures[f"batch {batch}"] = line
        print(f"batch {batch}", line, flush=True)
    for llm in sides.values():
        llm.close()
    finish(
        "tensor_parallel_cost", {"shape": options.shape, "layers": options.layers or "all", "steps": figures}
    )


if __name__ == "__main__":
    main()
