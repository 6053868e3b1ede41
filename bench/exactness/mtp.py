"""MTP drafts with prefix cache, preemption and n-gram hybrid against plain decoding, bit by bit.

    python bench/exactness/mtp.py [--model smollm2-135m] [--device cuda] [--tokens 100000] [--seqs 64] [-k 3]
                        [--dtype bfloat16]

Requests with shared prefixes, at temperature 0 and 0.8, are served twice by an engine without drafts, cache
and shortage of pages, and by engines that draft with the MTP layer of the model's checkpoint, alone and with
n-grams, and have room for a quarter of the tokens: requests are preempted, and their prefixes are found in
the cache. Tokens and logprobs must be equal. A model without an MTP layer gets an untrained one in a copy.
The last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import tempfile
from typing import Any

import torch
from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.models.draft_head.checkpoint_mtp import has_mtp_tensors
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.train.checkpoint_copy import write_checkpoint
from draftproof.train.config import TrainPlan
from draftproof.train.model.head_module import new_weights
from draftproof.train.trainer import head_config

PREFIX_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 96, 64, 128
WAVES = 2  # the second finds the prompts of the first in the cache
ROOM_SHARE = 0.25  # of the tokens of all running requests that fit into the pages
SIDES: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp"},
    "mtp and ngram": {"method": "hybrid", "proposers": [{"method": "mtp"}, {"method": "ngram"}]},
}


def with_mtp_layer(checkpoint: Checkpoint, name: str, folder: Path) -> str:
    """Return a folder with an MTP layer: the model itself, or a copy with an untrained layer."""
    if checkpoint.source is not None and has_mtp_tensors(checkpoint.source):
        return name
    config = head_config(TrainPlan(model=name, kind="mtp"), checkpoint, checkpoint.config.vocab_size)
    norm = checkpoint.tensors["model.norm.weight"]
    write_checkpoint(folder, checkpoint, new_weights(config, torch.ones(1), norm, seed=0))
    return str(folder)


def prompts(vocab: int, count: int) -> list[list[int]]:
    """Return prompts of which every eight share a prefix."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        found: list[int] = torch.randint(3, vocab, (length,), generator=generator).tolist()
        return found

    shared = [ids(PREFIX_TOKENS) for _ in range(-(-count // 8))]
    return [shared[i // 8] + ids(1 + (i * 7) % PROMPT_TOKENS) for i in range(count)]


def served(llm: LLM, requests: list[list[int]]) -> list[tuple[Any, ...]]:
    """Return tokens and logprobs of all outputs."""
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2
        )
        for i in range(len(requests))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in requests], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, repr(output.outputs[0].logprobs)) for output in outputs]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests by all engines and compare."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = load_checkpoint(options.model)
        count = -(-options.tokens // (WAVES * OUTPUT_TOKENS))
        requests = prompts(checkpoint.config.vocab_size, count)
        model = with_mtp_layer(checkpoint, options.model, Path(folder) / "model")
        room = PREFIX_TOKENS + PROMPT_TOKENS + OUTPUT_TOKENS + options.k + 1
        sizes = {"device": options.device, "dtype": options.dtype, "max_model_len": room}
        sizes |= {"max_num_seqs": options.seqs}
        plain_llm = LLM(model, enable_prefix_caching=False, kv_cache_tokens=room * options.seqs, **sizes)
        plain = served(plain_llm, requests)
        plain_llm.close()
        found: dict[str, Any] = {"tokens a side": WAVES * count * OUTPUT_TOKENS}
        for name, method in SIDES.items():
            spec = {**method, "num_speculative_tokens": options.k, "adaptive": False}
            few = int(ROOM_SHARE * room * options.seqs)
            llm = LLM(model, speculative_config=spec, kv_cache_tokens=few, **sizes)
            waves = [served(llm, requests) for _ in range(WAVES)]
            stats = llm.engine.stats()
            found[name] = {
                "different outputs": sum(a != b for wave in waves for a, b in zip(plain, wave, strict=True)),
                "preemptions": stats.num_preemptions,
                "cached tokens": stats.num_cached_tokens,
                "acceptance length": round(llm.stats.acceptance_length, 3),
            }
            print(f"{name}: {found[name]}", flush=True)
            llm.close()
    sides = [found[name] for name in SIDES]
    found["passes"] = all(
        not side["different outputs"] and side["preemptions"] and side["cached tokens"] for side in sides
    )
    return found


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=100_000, help="outputs of a side, in tokens")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("-k", type=int, default=3, help="drafts")
    return parser.parse_args()


if __name__ == "__main__":
    finish("mtp", measure(parsed()))
