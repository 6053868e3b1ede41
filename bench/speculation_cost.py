"""What speculation costs where no draft helps: drafting engines over an engine without a proposer, on a GPU.

    python bench/speculation_cost.py [--shape llama-3-8b] [--methods ngram,eagle3,hybrid,draft_model]
                                     [--draft-shape llama-3.2-1b] [--batches 1,8,64,256] [--rounds 5]

Weights are random, also those of the head and the draft model, and outputs are sampled at temperature 1, so
a draft is almost never accepted. Prompts are in the prefix cache: decoding is timed. The engines are in one
process and take turns; ratios are medians of the rounds, which have seeds of their own. Requests with
speculation switched off (`off`) are measured in every drafting engine too. The outputs of all engines must be
equal.
The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common.dummy_head import write_dummy_head
from common.gpu_engine import params_of, warm_clock
from common.measure import finish
from common.prompts import chat_prompts
from common.shapes import SHAPES, write_shape
from safetensors.torch import save_file

from draftproof import LLM, SamplingParams
from draftproof.models.draft_head.config import TargetIdentity
from draftproof.models.expected_tensors import dummy_tensors
from draftproof.models.load import load_config

METHODS = ("ngram", "suffix", "eagle3", "hybrid", "draft_model")
DRAFT_VOCAB_SIZE = 32000
NUM_DRAFTS = 4


def write_draft_model(shape: str, folder: Path) -> str:
    """Write a model of a shape with random weights; return its folder."""
    write_shape(shape, folder)
    config, _ = load_config(str(folder))
    tensors = dummy_tensors(config, torch.bfloat16, seed=2)  # some share memory
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def speculative_config(method: str, options: argparse.Namespace, target: str, folder: Path) -> dict[str, Any]:
    """Return the option of an engine; weights of its proposer are written to `folder`."""
    head, draft_model = folder / "head", folder / "draft_model"
    if method in ("eagle3", "hybrid") and not head.exists():
        config = load_config(target)[0]
        sizes = config.hidden_size, config.vocab_size, config.num_layers
        identity = TargetIdentity("", *sizes, digest="")  # dummy weights have none
        write_dummy_head(config, identity, DRAFT_VOCAB_SIZE, head, share_lm_head=False)
    if method == "draft_model":
        write_draft_model(options.draft_shape, draft_model)
    # With the noise of the target, drafts from flat distributions would often be accepted.
    eagle3 = {"method": "eagle3", "model": str(head), "draft_sampling": "argmax"}
    chosen: dict[str, dict[str, Any]] = {
        "eagle3": eagle3,
        "hybrid": {"method": "hybrid", "proposers": [eagle3, {"method": "suffix"}]},
        "draft_model": {"method": "draft_model", "model": str(draft_model), "draft_sampling": "argmax"},
    }
    return {"num_speculative_tokens": NUM_DRAFTS, **chosen.get(method, {"method": method})}


def build(options: argparse.Namespace, folder: Path, target: str, method: str | None) -> LLM:
    """Build an engine; `method` None: without a proposer."""
    begin, batch = time.monotonic(), max(options.batches)
    page = 16
    tokens_of_request = -(-(options.prompt_tokens + options.tokens) // page) * page
    llm = LLM(
        target,
        load_format="dummy",
        dtype="bfloat16",
        device=options.device,
        max_model_len=1024,
        max_num_seqs=batch,
        kv_cache_tokens=batch * tokens_of_request * 5 // 4,  # prompts stay in the prefix cache
        speculative_config=method and speculative_config(method, options, target, folder),
    )
    print(f"{method or 'plain'}: {time.monotonic() - begin:.1f} s to start", flush=True)
    return llm


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
    """Return tokens a second and the outputs."""
    begin = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    outputs = [list(each.outputs[0].token_ids) for each in done]
    return sum(map(len, outputs)) / (time.perf_counter() - begin), outputs


def measure(engines: dict[str, LLM], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines in turn."""
    vocab = engines["plain"].engine.limits.vocab_size
    prompts = [ids[: options.prompt_tokens] for ids in chat_prompts(batch, vocab, None)]
    params = params_of(batch, options.tokens, temperature=1.0)
    off = params_of(batch, options.tokens, temperature=1.0, speculative=False)
    sides = {name: (llm, params) for name, llm in engines.items()}
    sides |= {f"{name}, off": (llm, off) for name, llm in engines.items() if name != "plain"}
    want = timed(engines["plain"], prompts, params)[1]
    num_different = {name: 0 for name in sides}
    for name, (llm, given) in sides.items():
        for _ in range(2):
            outputs = timed(llm, prompts, given)[1]
            num_different[name] += sum(a != b for a, b in zip(outputs, want, strict=True))
    warm_clock(0.5)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            llm, given = sides[name]
            seeded = [replace(one, seed=(number + 1) * batch + i) for i, one in enumerate(given)]
            rates[name].append(timed(llm, prompts, seeded)[0])
    found: dict[str, Any] = {"plain tok/s": round(statistics.median(rates["plain"]), 1)}
    for name in names[1:]:
        ratios = sorted(a / b for a, b in zip(rates[name], rates["plain"], strict=True))
        found[name] = [round(x, 4) for x in (statistics.median(ratios), ratios[0], ratios[-1])]
    found["different outputs"] = sum(num_different.values())
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    several = {"type": lambda text: [part for part in text.split(",") if part]}
    parser.add_argument("--shape", default="llama-3-8b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--methods", default=list(METHODS), **several)
    parser.add_argument(
        "--batches", default=[1, 8, 64, 256], type=lambda text: list(map(int, text.split(",")))
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, help="at most")
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new batch after this")
    options = parser.parse_args()
    until, found = time.monotonic() + options.seconds, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_shape(options.shape, folder / "target")
        engines = {
            method or "plain": build(options, folder, target, method) for method in (None, *options.methods)
        }
        for batch in options.batches:
            if time.monotonic() < until:
                found[str(batch)] = measure(engines, batch, options)
                print(batch, found[str(batch)], flush=True)
    finish("speculation_cost", {"over an engine without a proposer": found})


if __name__ == "__main__":
    main()
