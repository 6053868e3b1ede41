"""Engines and requests of `bits_between_commits.py`.

They vary proposers, verification strategies, request options and engine options.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from exactness.bits_models import FAMILIES, TINY_VOCAB, TinyModels, random_tensor

STRATEGIES = ("target_match", "greedy", "rejection", "topp")
PROPOSERS = ("ngram", "suffix", "given", "draft_model", "mtp", "eagle", "eagle3", "hybrid")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -20, "maximum": 300},
        "b": {"enum": ["x", "yz", True]},
    },
    "required": ["a", "b"],
}
JSON = {"structured_outputs": {"json": SCHEMA, "max_whitespace": 1}, "max_tokens": 24, "ignore_eos": False}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
TRUNCATION = {"top_p": 0.9, "top_k": 20, "min_p": 0.02}
# request options by name; every request has a seed of its own
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "greedy_no_logprobs": {"temperature": 0.0},
    "greedy_penalties": {"temperature": 0.0, "logprobs": 0, **PENALTIES},
    "sampled": {"logprobs": 0},
    "sampled_no_logprobs": {},
    "top_p": {"temperature": 0.8, "top_p": 0.8, "logprobs": 5},
    "top_k": {"top_k": 8, "logprobs": 5, "logprobs_mode": "processed"},
    "min_p": {"temperature": 1.5, "min_p": 0.05, "logprobs": 0, "logprobs_mode": "processed"},
    "penalties": {"logprobs": 5, **PENALTIES},
    "penalties_truncated": {"logprobs": 5, "logprobs_mode": "processed", **PENALTIES, **TRUNCATION},
    "logit_bias": {"logit_bias": {7: 4.0, 40: -3.0, 41: 2.0, 50: -math.inf}, "logprobs": 5},
    "allowed": {"allowed_token_ids": list(range(2, 60)), "logprobs": 3, "logprobs_mode": "processed"},
    "logprob_token_ids": {"temperature": 0.7, "logprob_token_ids": [3, 17, 44], "logprobs": 0},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 3, "logprobs": 2},
    "draft_logprobs": {"logprobs": 1, "include_draft_logprobs": True},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False, "logit_bias": {2: 6.0}, "logprobs": 2},
    "stop_token_ids": {"stop_token_ids": [9, 21, 33, 45, 57, 69, 81], "logprobs": 2},
    "stop": {"stop": ["a", "e", "q"], "include_stop_str_in_output": True, "logprobs": 1},
    "bad_words": {"bad_words": ["b", "ab", "x"], "logprobs": 1, "temperature": 0.0},
    "several": {"n": 3, "logprobs": 1},
}
# A grammar needs a process that compiles it, which takes seconds to start: only some engines serve these.
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {**JSON, "logprobs": 2},
    "json_greedy": {**JSON, "temperature": 0.0, "logprobs": 2, "logprobs_mode": "processed"},
    "regex": {"structured_outputs": {"regex": "[a-f]{2,5}(-[0-9]+)?"}, "logprobs": 0, "ignore_eos": False},
}
ALL_REQUESTS = {**REQUESTS, **(GRAMMARS if find_spec("xgrammar") else {})}
NEED_TOKENIZER = ("stop", "bad_words")
Requests = list[tuple[str, dict[str, Any]]]  # name and options of each request


@dataclass(frozen=True)
class EngineCase:
    """One engine to build, and the requests that it serves."""

    name: str
    model: str
    options: dict[str, Any]
    requests: Requests
    prompts: Sequence[Any]  # used in turn
    max_tokens: int = 12
    serves_all_alone: bool = False  # every request once more without others; else one in SINGLE_INTERVAL


def requests_of(
    proposer: str, shift: int, every_strategy: bool = False, names: Iterable[str] = REQUESTS
) -> Requests:
    """Return the named request options, each with one strategy in rotation from `shift` on, or with all."""
    found: Requests = []
    for i, name in enumerate(names):
        options = ALL_REQUESTS[name]
        if proposer == "none":
            found.append((f"plain/{name}", options))
            continue
        for strategy in STRATEGIES if every_strategy else (STRATEGIES[(i + shift) % len(STRATEGIES)],):
            found.append((f"{strategy}/{name}", {**options, "speculative": {"verify_strategy": strategy}}))
    return found


# --- the sets ---------------------------------------------------------------------------------------------


def fixed(speculation: Mapping[str, Any], num_drafts: int = 4) -> dict[str, Any]:
    """Return a speculative_config whose number of drafts is not adapted to measured times."""
    return {"num_speculative_tokens": num_drafts, "adaptive": False, **speculation}


def tiny(folder: Path, device: str, is_full: bool = False) -> Iterator[EngineCase]:
    """Yield engines of every family, dtype, backend and proposer."""
    models = TinyModels(folder)
    draw = (random_tensor("prompts", (512,), 0).long() % (TINY_VOCAB - 3) + 3).tolist()
    prompts: list[Any] = [draw[i : i + 6] * 3 + draw[i : i + 2] for i in range(0, 50, 10)]
    prompts += [draw[100 + 40 * i : 105 + 47 * i] for i in range(3)]
    prompts.append("the rain in the train")  # 9 prompts, 20 options: the pairs change with every engine
    backends = ("triton", "torch") if device == "cuda" else ("cpu", "torch", "reference")
    for i, (family, dtype, backend) in enumerate(product(FAMILIES, ("float32", "bfloat16"), backends)):
        if backend == "cpu" and find_spec("numba") is None:
            continue
        for j, proposer in enumerate(("none", *PROPOSERS)):
            spec = None if proposer == "none" else fixed(models.speculation(proposer, family))
            names = list(ALL_REQUESTS if is_full else REQUESTS)
            if backend != "cpu" and not is_full and device == "cpu":  # the others are slow
                interval = 6 if backend == "reference" else 2
                names = names[(i + j) % interval :: interval]
            yield EngineCase(
                f"{family}-{dtype}-{backend}/{proposer}",
                models.target(family),
                {"dtype": dtype, "backend": backend, "device": device, "speculative_config": spec},
                requests_of(proposer, i + j, is_full, names),
                prompts[j:] + prompts[:j],
                serves_all_alone=is_full,
                max_tokens={"reference": 6, "torch": 12}.get(backend, 20),
            )
    yield from tiny_variants(models, prompts, device)


# beginnings of the engines' names that the tests run
QUICK = (
    "llama-float32-cpu/",
    "qwen3-bfloat16-cpu/draft_model",
    "qwen3-bfloat16-cpu/eagle3",
    "qwen3-bfloat16-cpu/hybrid",
    "qwen3-bfloat16-cpu/suffix",
    "llama-bfloat16-torch/ngram",
    "qwen3-bfloat16-reference/draft_model",
    "variant/",
)
VARIANTS: dict[str, dict[str, Any]] = {  # proposer, and engine options or keys of speculative_config
    "chunked": {"method": "ngram", "max_num_batched_tokens": 16, "page_size": 8},
    "preempting": {"method": "draft_model", "kv_cache_tokens": 160, "page_size": 8},
    "uncached": {"method": "eagle3", "enable_prefix_caching": False},
    "overlapped": {"method": "ngram", "overlap": True},
    "adaptive": {"method": "hybrid", "adaptive": True},
    "argmax_drafts": {"method": "mtp", "draft_sampling": "argmax"},
    "engine_rejection": {"method": "draft_model", "verify_strategy": "rejection"},
    "engine_topp": {"method": "ngram", "verify_strategy": "topp", "max_candidate_len": 3, "verify_window": 1},
    "synthetic": {"method": "eagle", "accept_policy": "synthetic", "synthetic_acceptance_length": 2.5},
    "accept_all": {"method": "mtp", "accept_policy": "accept_all"},
    "reject_all": {"method": "suffix", "accept_policy": "reject_all"},
    "pool_off": {"method": "suffix", "pool_tokens": 0, "min_match": 2},
    "grammar": {"method": "suffix"},
    "sixteen_drafts": {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 3},
}
ENGINE_KEYS = ("max_num_batched_tokens", "page_size", "kv_cache_tokens", "enable_prefix_caching", "overlap")


def tiny_variants(models: TinyModels, prompts: Sequence[Any], device: str) -> Iterator[EngineCase]:
    """Yield engines that differ in one option from those of `tiny`."""
    backend = "triton" if device == "cuda" else "cpu" if find_spec("numba") else "torch"
    for i, (name, changes) in enumerate(VARIANTS.items()):
        engine = {key: value for key, value in changes.items() if key in ENGINE_KEYS}
        spec = {key: value for key, value in changes.items() if key not in ENGINE_KEYS}
        has_grammar = name.startswith("grammar")
        names = [what for what in GRAMMARS if what in ALL_REQUESTS] if has_grammar else REQUESTS
        requests = requests_of(spec["method"], i, has_grammar, names)
        if name.startswith("engine_"):  # the strategy of the engine serves all requests
            requests = [(what, {**o, "speculative": None}) for what, o in requests]
        if spec.get("adaptive"):
            requests = exact_only(requests)
        config = fixed({**models.speculation(spec["method"], "llama"), **spec})
        options = {
            "dtype": "float32",
            "backend": backend,
            "device": device,
            "speculative_config": config,
            **engine,
        }
        yield EngineCase(f"variant/{name}", models.target("llama"), options, requests, prompts)


def exact_only(requests: Requests) -> Requests:
    """Return the requests whose output does not depend on the number of drafts."""
    return [
        (
            f"{STRATEGIES[i % 2]}/{what.split('/')[1]}",
            {**o, "speculative": {"verify_strategy": STRATEGIES[i % 2]}},
        )
        for i, (what, o) in enumerate(requests)
        if not o.get("include_draft_logprobs")
    ]


TEXTS = (
    "".join(f"{i}. The cat sat on the mat and looked at the dog.\n" for i in range(1, 9)) + "9.",
    "The capital of France is",
    "def fibonacci(n):\n    if n",
    "Once upon a time there was a",
    "<|im_start|>user\nList five animals.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nRepeat: the rain in Spain stays in the plain.<|im_end|>\n<|im_start|>assistant\n",
    '{"name": "Ada", "age": 36}\n{"name": "Bob", "age":',
    "Water boils at 100 degrees. Water boils at 100 degrees. Water",
)


def smollm2(model: str, device: str) -> Iterator[EngineCase]:
    """Yield engines of the default model with every proposer that it has."""
    proposers: dict[str, Any] = {
        name: {"method": name} for name in ("none", "ngram", "eagle3", "suffix", "given")
    }
    members = [proposers[name] for name in ("suffix", "eagle3", "ngram")]
    proposers["hybrid"] = {"method": "hybrid", "proposers": members}
    repeat = 3 if device == "cuda" else 1
    for is_adaptive, (i, (name, spec)) in product((False, True), enumerate(proposers.items())):
        if is_adaptive and name not in ("ngram", "eagle3", "hybrid"):
            continue
        names = list(ALL_REQUESTS) if device == "cuda" else list(ALL_REQUESTS)[i % 3 :: 3]  # a CPU is slow
        requests = requests_of(name, i, False, names)
        if is_adaptive:
            requests = exact_only(requests)
        requests = [(f"{what}#{n}" if n else what, o) for n in range(repeat) for what, o in requests]
        config = None if name == "none" else fixed({**spec, "adaptive": is_adaptive}, 5)
        options = {"dtype": "bfloat16", "device": device, "speculative_config": config, "max_num_seqs": 64}
        options |= {"max_model_len": 512, "max_num_batched_tokens": 512, "kv_cache_tokens": 64 * 512}
        label = f"smollm2/{name}{'-adaptive' * is_adaptive}"
        yield EngineCase(label, model, options, requests, TEXTS, 32 if device == "cuda" else 8)


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "eos_token_id": 128001,
}  # fmt: skip


def llama8b(folder: Path, device: str, num_layers: int) -> Iterator[EngineCase]:
    """Yield engines in the shape of Llama-3-8B. With tied embeddings the text repeats, so drafts match."""
    ids = (random_tensor("llama8b", (2, 4000), 0).long() + 128).tolist()
    draw = [high * 256 + low for high, low in zip(*ids, strict=True)]
    prompts = [draw[200 * i : 200 * i + 20 + 10 * i] for i in range(16)]
    names = [name for name in REQUESTS if name not in NEED_TOKENIZER]
    for is_tied, proposer in ((False, "ngram"), (True, "ngram"), (False, "none"), (True, "adaptive")):
        made = folder / f"llama8b-{is_tied}"
        made.mkdir(parents=True, exist_ok=True)
        raw = {**LLAMA_8B, "tie_word_embeddings": is_tied, "num_hidden_layers": num_layers}
        (made / "config.json").write_text(json.dumps(raw))
        spec = fixed({"method": "ngram", "adaptive": proposer == "adaptive"}, 5)
        options = {"dtype": "bfloat16", "device": device, "load_format": "dummy", "max_num_seqs": 16}
        options |= {"max_model_len": 512, "max_num_batched_tokens": 1024, "kv_cache_tokens": 16 * 512}
        options["speculative_config"] = None if proposer == "none" else spec
        requests = requests_of(proposer, is_tied, False, names)
        if proposer == "adaptive":
            requests = exact_only(requests)
        yield EngineCase(f"llama8b{'-tied' * is_tied}/{proposer}", str(made), options, requests, prompts, 64)
