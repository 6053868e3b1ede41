"""A dense model as a mixture of experts: the text of the dense one, and equal bits with drafts.

    python bench/exactness/moe.py --prompts spec_bench.jsonl [--model smollm2-135m] [--device cuda]
                        [--parts copies,drafts] [--tokens 100000] [--dtype bfloat16] [--seqs 64] [-k 4]

copies: each MLP is copied into all experts, of which a token selects two with normalised weights, so the
model is the dense one in exact arithmetic. Greedy texts of 100 prompts in fp32 are compared. Where one
differs, `gaps` has the difference of the two best logprobs there: a small one is a tie that rounding decides.
drafts: experts differ by noise. Requests at temperature 0 and 0.8 are served with drafts of n-grams and of a
suffix search, and without. Tokens and logprobs must be equal in every bit.

A line of the prompts has `turns` or `prompt`. The last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common.measure import finish
from common.upcycle import upcycle

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.models.hub import find_model
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.outputs import LogprobRow
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.text.tokenizer import load_tokenizer
from draftproof.train.data.generate_text import read_prompts
from draftproof.types import Request

COPIED_PROMPTS, COPIED_TOKENS = 100, 64
OUTPUT_TOKENS = 128  # of a request with drafts
NOISE = 0.1  # of experts that differ, relative to the standard deviation of a matrix; text stays text
SIDES = ("ngram", "suffix")
Output = tuple[list[int], list[LogprobRow]]


def encoded(options: argparse.Namespace) -> list[list[int]]:
    """Return the prompts that fit, in the model's chat format."""
    tokenizer, found = load_tokenizer(find_model(options.model)), []
    for prompt in read_prompts([options.prompts]):
        ids = tokenizer.encode_conversation(prompt)  # type: ignore[arg-type]
        if len(ids) + OUTPUT_TOKENS + options.k < options.max_len:
            found.append(ids)
    return found


def served(
    make: Callable[[], Checkpoint],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    options: argparse.Namespace,
    drafts: dict[str, Any] | None = None,
) -> tuple[list[Output], dict[str, Any]]:
    """Return tokens and logprobs of all requests, and the speed."""
    config = EngineConfig(
        model=options.model,
        device=options.device,
        max_model_len=options.max_len,
        max_num_seqs=options.seqs,
        kv_cache_tokens=options.max_len * options.seqs,
        enable_prefix_caching=False,
        speculative=SpeculativeConfig.parse(drafts) if drafts else None,
    )
    engine = Engine(config, make())
    print(engine.describe(), flush=True)
    outputs: list[Output] = [([], []) for _ in prompts]
    begin, num_drafts, num_accepted = time.perf_counter(), 0, 0
    for i, ids in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_token_ids=ids, params=params[i], seed=i))
    while engine.has_work:
        for out in engine.step():
            tokens, rows = outputs[int(out.request_id)]
            tokens += out.token_ids
            rows += out.logprobs or []
            num_drafts, num_accepted = num_drafts + out.num_draft, num_accepted + out.num_accepted
    seconds = time.perf_counter() - begin
    engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    speed = sum(len(tokens) for tokens, _ in outputs) / seconds
    return outputs, {"tok/s": round(speed, 1), "drafts": num_drafts, "accepted": num_accepted}


def copies(prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the greedy texts of the dense model and of one whose experts are copies of its MLP, in fp32."""
    chosen = prompts[: options.num_prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=COPIED_TOKENS, ignore_eos=True, logprobs=2) for _ in chosen
    ]
    dense = load_checkpoint(options.model, dtype="float32")
    want, _ = served(dense.copy, chosen, params, options)
    got, _ = served(lambda: upcycle(dense.copy(), options.num_experts), chosen, params, options)
    gaps = []
    for (tokens, rows), (others, _) in zip(want, got, strict=True):
        if tokens != others:
            at = next(i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1])
            best = sorted(set(rows[at].logprobs), reverse=True)
            gaps.append(round(best[0] - best[1], 7) if len(best) > 1 else 0.0)
    return {
        "prompts": len(chosen),
        "tokens": sum(len(tokens) for tokens, _ in want),
        "different texts": len(gaps),
        "gaps": gaps,
        "passes": not gaps and len(chosen) == options.num_prompts,
    }


def drafts(prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the outputs with and without drafts of a model whose experts differ."""
    count = -(-options.tokens // OUTPUT_TOKENS)
    requests = [prompts[i % len(prompts)] for i in range(count)]
    sizes = {"max_tokens": min(OUTPUT_TOKENS, options.tokens), "ignore_eos": True, "logprobs": 2}
    params = [SamplingParams(temperature=0.8 * (i % 2), **sizes) for i in range(count)]
    dense = load_checkpoint(options.model, dtype=options.dtype)
    mixture = upcycle(dense, options.num_experts, noise=NOISE)
    plain, speed = served(mixture.copy, requests, params, options)
    found: dict[str, Any] = {"tokens a side": sum(len(tokens) for tokens, _ in plain), "plain": speed}
    for name in SIDES:
        spec = {"method": name, "num_speculative_tokens": options.k, "adaptive": False}
        got, speed = served(mixture.copy, requests, params, options, spec)
        wrong = sum(a != b for a, b in zip(plain, got, strict=True))
        found[name] = {**speed, "different outputs": wrong}
        print(f"{name}: {found[name]}", flush=True)
    found["passes"] = all(not found[name]["different outputs"] and found[name]["accepted"] for name in SIDES)
    return found


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", required=True, help="JSON lines with `turns` or `prompt`")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", default="copies,drafts")
    parser.add_argument("--dtype", default="bfloat16", help="of the part drafts")
    parser.add_argument("--tokens", type=int, default=100_000, help="outputs of a side of the part drafts")
    parser.add_argument("--num-prompts", type=int, default=COPIED_PROMPTS, help="of the part copies")
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("-k", type=int, default=4, help="drafts")
    return parser.parse_args()


if __name__ == "__main__":
    chosen_options = parsed()
    parts = {"copies": copies, "drafts": drafts}
    names = chosen_options.parts.split(",")
    every = encoded(chosen_options)
    finish("moe", {name: parts[name](every, chosen_options) for name in names})
