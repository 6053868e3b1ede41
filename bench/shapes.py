"""Speed of public model shapes with dummy weights on a GPU; the last line of stdout is JSON.

    python bench/shapes.py [--shape llama-3-8b] [--quantization int8] [--kv-cache-dtype fp8]
                           [--parts short] [--batches 1,8,64,256,512] [--contexts 16384]
                           [--long-batches 1,16] [--distinct-prompts 8] [--weights uniform]
                           [--equal-last-tokens 5]
    python bench/shapes.py --shape qwen2.5-7b,mistral-7b,gemma-3-4b,qwen3-8b --parts floor

short: tokens a second of `LLM.generate`, prefill included: prompts of 50 to 1000 tokens, 128 new tokens.
long: seconds of the prefill of all prompts of `--contexts` tokens, then tokens a second of decoding alone,
and its share of the limit by memory bandwidth (weights and KV).
floor: decoding of one request of 64 tokens alone, and its share of that limit.
--distinct-prompts: the batch repeats that many prompts. Rows of equal prompts select equal experts, so a step
of a mixture of experts reads fewer weights; with dummy weights, rows of different prompts select theirs
independently. --weights uniform: weights as vLLM draws dummy weights, see `common/uniform_weights.py`.
--equal-last-tokens: prompts end with that many equal tokens, as those of a chat template do. No proposer is
configured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common.gpu_engine import decoding, params_of, steps_of, timed, warm_clock
from common.measure import finish
from common.memory_floor import memory_floor
from common.prompts import chat_prompts
from common.shapes import SHAPES, write_shape
from common.uniform_weights import draw_uniform_weights

from draftproof import LLM

FLOOR_CONTEXT_TOKENS = 64
FIRST_EQUAL_TOKEN = 198  # id of the first of the tokens that all prompts share


def build(options: argparse.Namespace, shape: str, folder: Path, **sizes: Any) -> LLM:
    """Build an engine of the shape, without a proposer."""
    begin = time.monotonic()
    llm = LLM(
        write_shape(shape, folder),
        load_format="dummy",
        dtype="bfloat16",
        device=options.device,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        enable_prefix_caching=False,
        **sizes,
    )
    if options.weights == "uniform":
        draw_uniform_weights(llm)
    print(f"{llm.engine.describe()}: {time.monotonic() - begin:.1f} s to start", flush=True)
    return llm


def with_equal_end(prompt: list[int], options: argparse.Namespace) -> list[int]:
    """Replace the last tokens of a prompt by tokens that all prompts share."""
    count = options.equal_last_tokens
    return [*prompt[: len(prompt) - count], *range(FIRST_EQUAL_TOKEN, FIRST_EQUAL_TOKEN + count)]


def short(options: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """Measure `LLM.generate` by batch: median over rounds, the first round not counted."""
    found: dict[str, Any] = {}
    for batch in options.batches:
        distinct = chat_prompts(
            min(batch, options.distinct_prompts or batch), llm.engine.limits.vocab_size, None
        )
        prompts = [with_equal_end(distinct[i % len(distinct)], options) for i in range(batch)]
        for logprobs in options.logprobs:
            params = params_of(batch, options.tokens, logprobs=logprobs)
            timed(llm, prompts, params)
            warm_clock(0.5)
            rates = [timed(llm, prompts, params)["tok/s"] for _ in range(options.rounds)]
            name = str(batch) if logprobs is None else f"{batch}, logprobs={logprobs}"
            found[name] = round(statistics.median(rates), 1)
            print("short", name, found[name], [round(rate, 1) for rate in rates], flush=True)
    return found


def long(options: argparse.Namespace, llm: LLM, context: int, batch: int) -> dict[str, Any]:
    """Measure the prefill of `batch` prompts and the decoding after it."""
    engine, draw = llm.engine, random.Random(7)
    vocab = engine.limits.vocab_size
    prompts = [[draw.randrange(3, vocab) for _ in range(context)] for _ in range(batch)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with decoding(engine, prompts, params_of(batch, 600)):
        torch.cuda.synchronize()
        prefill = time.perf_counter() - begin
        seconds = statistics.median(steps_of(engine, 40) for _ in range(5))
    limit = memory_floor(llm, context, batch)
    share = round(batch / seconds / limit["tok/s"], 3)
    found = {"prefill_s": round(prefill, 3), "decode_tok_per_s": round(batch / seconds, 1)}
    found |= {"floor": limit, "of_floor": share}
    print("long", context, batch, found, flush=True)
    return found


def shape_names(text: str) -> list[str]:
    """Return the names of shapes, which are separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"unknown shapes {unknown}: there are {', '.join(SHAPES)}")
    return names


def measure(options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Run the chosen parts for a shape."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "short" in options.parts:
            sizes = {"max_model_len": 1280, "max_num_seqs": max(options.batches)}
            llm = build(options, shape, Path(folder), **sizes)
            found["short"] = short(options, llm)
            llm.close()
            del llm
        if "long" in options.parts:
            sizes = {"max_model_len": max(options.contexts) + 1024, "max_num_seqs": max(options.long_batches)}
            llm = build(options, shape, Path(folder), **sizes)
            for context in options.contexts:
                for batch in options.long_batches:
                    name = f"context {context}, batch {batch}"
                    long(options, llm, context=min(context, 2048), batch=batch)  # warm-up
                    found.setdefault("long", {})[name] = long(options, llm, context=context, batch=batch)
            llm.close()
            del llm
        if "floor" in options.parts:
            llm = build(options, shape, Path(folder), max_model_len=1280, max_num_seqs=1)
            found["floor"] = long(options, llm, context=FLOOR_CONTEXT_TOKENS, batch=1)
            llm.close()
    return found


def main() -> None:
    """Run the chosen parts."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--shape", type=shape_names, default=["llama-3-8b"], help=f"by commas: {', '.join(SHAPES)}"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization", default="none", help="none, int8, fp8 or int4, made on load")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["short", "long"])
    numbers = {"type": lambda text: [int(n) for n in text.split(",")]}
    parser.add_argument("--batches", **numbers, default=[1, 8, 64, 256, 512])
    parser.add_argument("--contexts", **numbers, default=[16384])
    parser.add_argument("--long-batches", **numbers, default=[1, 16])
    parser.add_argument(
        "--logprobs",
        type=lambda text: [None if n == "none" else int(n) for n in text.split(",")],
        default=[None],
    )
    parser.add_argument("--distinct-prompts", type=int, default=0, help="0: every prompt differs")
    parser.add_argument("--equal-last-tokens", type=int, default=0)
    parser.add_argument("--weights", choices=("normal", "uniform"), default="normal")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.weights == "uniform" and options.quantization != "none":
        parser.error("--weights uniform needs --quantization none")
    shared = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    shared |= {"distinct_prompts": options.distinct_prompts, "weights": options.weights}
    shared |= {"equal_last_tokens": options.equal_last_tokens}
    found = {shape: measure(options, shape) for shape in options.shape}
    if len(found) == 1:
        finish("shapes", {"shape": options.shape[0], **shared, **found[options.shape[0]]})
    else:
        finish("shapes", {**shared, "shapes": found})


if __name__ == "__main__":
    main()
