"""Distance of the distribution with a quantised KV cache from that with bf16 KV, on the CPU.

    python bench/micro/kv_quality.py TEXT.jsonl [--model smollm2-135m] [--tokens 20000] [--context 1024]

Reads the texts of a JSON-lines file, joins them to contexts of `--context` tokens, computes each once per
storage of K and V, and prints the mean KL divergence over the whole vocabulary, and the share of tokens whose
most likely successor differs. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common.measure import finish
from torch import Tensor

from draftproof import LLM
from draftproof.models.runner import Runner

PAGE_TOKENS = 16
CHUNK_TOKENS = 128
FORMATS = ("auto", "int8", "fp8")


def texts_of(value: Any) -> list[str]:
    """Return all strings of a JSON value that have several words."""
    if isinstance(value, str):
        return [value] if " " in value else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in texts_of(part)]


def logprobs(runner: Runner, ids: Tensor, start: int, table: Tensor) -> Tensor:
    """Return the logprobs [T, V] after the tokens `ids` at positions start, start + 1, and so on."""
    positions = torch.arange(start, start + len(ids))
    rows = runner.rows(ids, positions, torch.zeros_like(ids), table)
    return runner.logits(runner.forward(rows)).log_softmax(-1)


def main() -> None:
    """Run the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    llm = LLM(
        options.model,
        dtype="bfloat16",
        quantization="none",
        device="cpu",
        max_model_len=options.context,
        warm_up=False,
    )
    parts = llm.engine
    lines = [json.loads(line) for line in options.text.read_text().splitlines()]
    text = "\n\n".join(part for line in lines for part in texts_of(line))
    ids = torch.tensor(llm.tokenizer.encode(text)[: options.tokens])
    pages = -(-options.context // PAGE_TOKENS)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    sizes = {"num_pages": pages + 1, "page_size": PAGE_TOKENS, "max_rows": CHUNK_TOKENS}
    model, ops = parts.runner.model, parts.ops
    runners = {name: Runner(model, ops, torch.bfloat16, kv_cache_dtype=name, **sizes) for name in FORMATS}
    total: dict[str, float] = dict.fromkeys(FORMATS, 0.0)
    changed = dict.fromkeys(FORMATS, 0)
    for context in ids.split(options.context):
        for start in range(0, len(context), CHUNK_TOKENS):
            chunk = context[start : start + CHUNK_TOKENS]
            exact = logprobs(runners["auto"], chunk, start, table)
            for name in FORMATS[1:]:
                found = logprobs(runners[name], chunk, start, table)
                total[name] += float((exact.exp() * (exact - found)).sum())
                changed[name] += int((exact.argmax(-1) != found.argmax(-1)).sum())
    figures: dict[str, Any] = {"tokens": len(ids), "context": options.context}
    for name in FORMATS[1:]:
        figures[name] = {
            "mean_kl": total[name] / len(ids),
            "changed_argmax": changed[name] / len(ids),
            "cache_bytes": sum(cache.nbytes for cache in runners[name].caches),
        }
    figures["auto"] = {"cache_bytes": sum(cache.nbytes for cache in runners["auto"].caches)}
    finish("kv_quality", figures)


if __name__ == "__main__":
    main()
