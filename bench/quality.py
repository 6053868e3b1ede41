"""Distance of quantised models from the model in floats, beside other implementations of the same scheme.

    python bench/quality.py TEXT.jsonl [--model smollm2-135m] [--weights gguf,gguf:float32,int8,fp8,FOLDER]
        [--kv int8,fp8] [--peer-weights int8,int4,FOLDER] [--llama PYTHON] [--tokens 20000] [--context 512]

Reads the texts of a JSON-lines file and joins them to contexts. For each format of the weights, and each
storage of K and V, prints the mean KL divergence over the whole vocabulary from the model in fp32 and in
bf16, and the share of tokens whose most likely successor differs from the one in fp32. Activations are bf16;
`:float32` after a format selects fp32. FOLDER is a quantised checkpoint of the same model.

`--peer-weights`: what transformers computes in fp32 too, formats from the folder that `draftproof quantize`
writes; needs the package compressed-tensors. `--llama`: what llama.cpp computes from the GGUF file of
`--model`, with the Python of an environment that has xllamacpp. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common.measure import finish
from common.peers.llama_logits import LlamaLogits
from torch import Tensor

from draftproof import LLM
from draftproof.cli.main import main as draftproof
from draftproof.models.hub import find_model
from draftproof.models.runner import Runner

PAGE_TOKENS = 16
CHUNK_TOKENS = 128
Logprobs = Callable[[Tensor], Tensor]  # token ids [T] of one context -> logprobs [T, vocab]


def texts_of(value: Any) -> list[str]:
    """Return all strings of a JSON value that have several words."""
    if isinstance(value, str):
        return [value] if " " in value else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in texts_of(part)]


def engine(model: str, dtype: str, quantization: str | None, context: int) -> LLM:
    """Return an engine that is used for its weights and ops alone."""
    return LLM(
        model, dtype=dtype, quantization=quantization, device="cpu", max_model_len=context, warm_up=False
    )


def ours(llm: LLM, context: int, kv_cache_dtype: str = "auto") -> Logprobs:
    """Return the forward pass of this engine's model over one context."""
    pages = -(-context // PAGE_TOKENS)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    loaded = llm.engine.runner
    runner = Runner(
        loaded.model,
        loaded.ops,
        loaded.dtype,
        num_pages=pages + 1,
        page_size=PAGE_TOKENS,
        max_rows=CHUNK_TOKENS,
        kv_cache_dtype=kv_cache_dtype,
    )

    def run(ids: Tensor) -> Tensor:
        chunks = []
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            positions = torch.arange(start, start + len(part))
            rows = runner.rows(part, positions, torch.zeros_like(part), table)
            chunks.append(runner.logits(runner.forward(rows)).log_softmax(-1))
        return torch.cat(chunks)

    return run


def is_folder(name: str) -> bool:
    """Return whether a format is given as the folder of a checkpoint."""
    return Path(name).is_dir()


def transformers_peer(model: str, form: str) -> Logprobs:
    """Return the forward pass of transformers over the folder of `draftproof quantize`."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = form
        if not is_folder(form):
            path = f"{folder}/out"
            assert draftproof(["quantize", model, path, "--format", form]) == 0
        peer: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def run(ids: Tensor) -> Tensor:
        return peer(ids[None]).logits[0].float().log_softmax(-1)

    return run


def llama_peer(peer: LlamaLogits) -> Logprobs:
    """Return the forward pass of llama.cpp."""

    def run(ids: Tensor) -> Tensor:
        logits = torch.frombuffer(peer.logits(ids.tolist()), dtype=torch.float32)  # [T * vocab]
        return logits.view(len(ids), peer.vocab).log_softmax(-1)

    return run


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Return the KL divergence of two tables of logprobs [T, vocab], summed over their rows."""
    return float((wanted.exp() * (wanted - found)).sum(dtype=torch.float64))


def main() -> None:
    """Run the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="gguf,int8,fp8,int4")
    parser.add_argument("--kv", default="int8,fp8")
    parser.add_argument("--peer-weights", default="")
    parser.add_argument("--llama", help="Python with xllamacpp")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    names = {
        key: [n for n in getattr(options, key).split(",") if n] for key in ("weights", "kv", "peer_weights")
    }
    exact_llm = engine(options.model, "float32", "none", options.context)
    bf16_llm = engine(options.model, "bfloat16", "none", options.context)
    exact = ours(exact_llm, options.context)
    rounded = ours(bf16_llm, options.context)
    models: dict[str, Logprobs] = {}
    for name in names["weights"]:
        weights, _, dtype = name.partition(":")
        where, form = (weights, None) if is_folder(weights) else (options.model, weights)
        models[name] = ours(engine(where, dtype or "bfloat16", form, options.context), options.context)
    for name in names["kv"]:
        models[f"kv {name}"] = ours(bf16_llm, options.context, name)
    for name in names["peer_weights"]:
        models[f"transformers {name}"] = transformers_peer(options.model, name)
    about: dict[str, Any] = {}
    llama: LlamaLogits | None = None
    if options.llama:
        gguf = find_model(options.model)
        llama = LlamaLogits(options.llama, gguf, options.context, torch.get_num_threads())
        models["llama.cpp"], about["llama.cpp about"] = llama_peer(llama), llama.about
    lines = [json.loads(line) for line in options.text.read_text().splitlines()]
    text = "\n\n".join(part for line in lines for part in texts_of(line))
    ids = torch.tensor(exact_llm.tokenizer.encode(text)[: options.tokens])
    total = dict.fromkeys(["bfloat16", *models], 0.0)
    total_bf16 = dict.fromkeys(total, 0.0)
    changed = dict.fromkeys(total, 0)
    for number, context in enumerate(ids.split(options.context)):
        print("context", number, file=sys.stderr, flush=True)
        wanted, bf16 = exact(context), rounded(context)
        for name in total:
            found = models[name](context) if name in models else bf16
            total[name] += divergence(wanted, found)
            total_bf16[name] += divergence(bf16, found)
            changed[name] += int((wanted.argmax(-1) != found.argmax(-1)).sum())
    if llama is not None:
        llama.close()
    figures: dict[str, Any] = {"tokens": len(ids), "context": options.context, **about}
    for name in total:
        figures[name] = {
            "mean_kl": total[name] / len(ids),
            "mean_kl_to_bf16": total_bf16[name] / len(ids),
            "changed_argmax": changed[name] / len(ids),
        }
        print(name, figures[name])
    finish("quality", figures)


if __name__ == "__main__":
    main()
