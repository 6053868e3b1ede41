"""Factors of the exactness matrix, its pairwise covering cases, and the check of one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import heads
import tiny
from covering import each_level, pairwise
from draftproof.ops.contract.kv_layout import KV_FORMATS
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from draftproof.verify import STRATEGIES
from exact import NEIGHBOURS, OPTIONS, Batch, Case, Setup
from grammars import BUDGETS

TEST_METHODS = [f"proposers:{name}" for name in ("Junk", "Perfect", "Flaky", "SelfModel")]
# Proposers with code of their own: of those that share code, the first.
DISTINCT_METHODS = [*{heads.code_of(name): name for name in reversed(PROPOSERS)}.values(), *TEST_METHODS]
EXACT = [name for name in STRATEGIES if lookup(STRATEGIES, name, "strategy").seed_exact]
MAX_TOKENS = {"many": 8, "few": 8, "preempted": 10}  # pages -> tokens; 8 may end before a preemption
LONG_MAX_TOKENS = 14  # where 8 tokens would end before a JSON answer, or before a second window of 8 drafts
# Chunk -> prompt length; 7 prompts exceed 512, and outputs of the longest pass the end of a span of 128 keys.
LENGTH = {16: 40, 64: 100, 512: 124}
SHORT_LENGTH = {16: 20, 64: 70, 512: 124}  # for a slow backend; past the end of a chunk and of two pages
TRAFFIC: dict[str, dict[str, Any]] = {
    "together": {},
    "arriving": {"arrivals": [2, 0, 0, 1, 3, 5, 8]},
    "leaving": {"arrivals": [0, 0, 1, 0, 2, 0, 4], "aborts": {1: 4, 2: 6, 4: 3, 6: 5}},
}
FACTORS = {
    "option": list(OPTIONS),
    "grammar": ["none"],
    "arch": list(tiny.ARCHITECTURES),
    "method": DISTINCT_METHODS,
    "k": [1, 3, 5, 8],
    "temperature": [0.0, 0.7, 1.3],
    "batch": [1, 2, 7],
    "chunk": [16, 64, 512],
    "traffic": list(TRAFFIC),
    "strategy": EXACT,
    "dtype": ["float32", "bfloat16"],
    "quantization": ["none", "int8", "fp8"],  # others need rows of whole groups: `test_gguf_blocks`
    "kv_cache_dtype": ["auto", *{form.dtype: name for name, form in KV_FORMATS.items()}.values()],
    "adaptive": [True, False],
    "overlap": [False, True],  # no effect with a proposer on the host
    "prefix": ["miss", "hit", "other salts", "off"],
    "pages": ["many", "few", "preempted"],  # few: some requests are preempted; preempted: all, many times
    "priority": ["equal", "shuffled"],
    "predictions": [False, True],  # every other request has one
}
# Most of the time of a case is that of the reference runs of its requests.
COSTS = {"batch": {1: 2, 2: 3, 7: 7}}
# An option changes logits rows, which every architecture computes alike.
MATRIX = pairwise(FACTORS, unrelated=[("option", "arch")], costs=COSTS)
# Factors of the kernels that threads share.
KERNEL_FACTORS = ("arch", "batch", "chunk", "dtype", "quantization", "kv_cache_dtype")


def num_rows(case: Mapping[str, Any]) -> int:
    """Return about how much a case computes."""
    found: int = case["batch"] * LENGTH[case["chunk"]]
    return found


# Cases of gpt-oss once more, with experts in mxfp4.
MXFP4_MATRIX = [
    {**case, "arch": "gpt_oss_mxfp4", "quantization": "none"}
    for case in each_level([c for c in MATRIX if c["arch"] == "gpt_oss"], num_rows, KERNEL_FACTORS)
]
DEVICE_TEST_METHODS = [f"proposers:Device{name}" for name in ("Junk", "Perfect", "Flaky")]
# Options with which steps can overlap.
OVERLAP_OPTIONS = ["none", "top_p", "repetition", "frequency", "logit_bias", "allowed", "min_tokens"]
OVERLAP_OPTIONS += ["max_tokens", "eos", "stop_ids", "no_logprobs", "processed", "sampled_logprob"]
OVERLAP_OPTIONS += ["named_logprobs", "all_logprobs", "draft_logprobs"]
# Grammars have a matrix of their own, since they leave few tokens to choose from.
GRAMMAR_OPTIONS = ["none", "top_k", "min_p", "repetition", "bad_words", "min_tokens", "ignore_eos"]
GRAMMAR_OPTIONS += ["stop_ids", "processor", "draft_logprobs", "mix"]
GRAMMAR_METHODS = [*DISTINCT_METHODS, *DEVICE_TEST_METHODS]
SCHEDULER_FACTORS = ("batch", "chunk", "traffic", "prefix", "pages", "priority")
# Factors of the forward pass, which has no part in grammars or overlap; all levels are in the matrix above.
ONE_MODEL = {"dtype": ["bfloat16"], "quantization": ["none"]}
GRAMMAR_MATRIX = pairwise(
    {
        **FACTORS,
        **ONE_MODEL,
        "arch": ["qwen3"],
        "kv_cache_dtype": ["auto"],
        "option": GRAMMAR_OPTIONS,
        "grammar": ["json", "regex", "choice", "reasoning_token", "reasoning_text", "none", *BUDGETS],
        # Drafts that are all right are among those of Flaky. Only Junk drafts ids outside the vocabulary.
        "method": [name for name in GRAMMAR_METHODS if not name.endswith("Perfect")],
    },
    # Options beside methods, and factors of the scheduler beside options, are in the matrix above.
    unrelated=[("option", other) for other in ("method", *SCHEDULER_FACTORS)],
    costs=COSTS,
)


def named(levels: dict[str, Any]) -> str:
    return "-".join(str(level) for level in levels.values())


def check(
    levels: dict[str, Any],
    backend: str = "auto",
    threads: int = 1,
    device: str = "cpu",
    lengths: Mapping[int, int] = LENGTH,
) -> None:
    grammar = levels.get("grammar", "none")
    first = Case(
        0,
        levels["option"],
        levels["temperature"],
        levels["strategy"],
        lengths[levels["chunk"]],
        grammar=grammar,
    )
    others = NEIGHBOURS[levels["k"] % 3 :] + NEIGHBOURS[: levels["k"] % 3]  # other pairs
    max_tokens = LONG_MAX_TOKENS if grammar != "none" or levels["k"] == 8 else MAX_TOKENS[levels["pages"]]
    cases = [replace(case, max_tokens=max_tokens) for case in (first, *others[: levels["batch"] - 1])]
    if levels["overlap"] and levels["option"] in OVERLAP_OPTIONS:  # the neighbours must allow overlap too
        free = {"option": "eos", "grammar": "none"}
        cases = [replace(case, **free) if case.option == "mix" else case for case in cases]
    if levels["priority"] == "shuffled":
        cases = [replace(case, priority=case.index * 5 % 3 - 1) for case in cases]
    if levels["prefix"] == "other salts":
        cases = [replace(case, salt=f"salt {case.index % 2}") for case in cases]
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": levels["prefix"] != "off"}
    if levels["pages"] != "many":
        longest = max(case.length for case in cases) + max_tokens
        sizes["kv_cache_tokens"] = (longest + 15) // 8 * 8  # the longest just fits
    kv_cache_dtype = levels.get("kv_cache_dtype", "auto")
    if tiny.model_config(levels["arch"]).latent is not None:  # refused: see `test_latent`
        kv_cache_dtype = "auto"
    batch = Batch(
        cases,
        Setup(
            levels["arch"],
            levels["dtype"],
            backend,
            threads,
            device,
            levels.get("quantization", "none"),
            kv_cache_dtype,
        ),
        {
            "method": levels["method"],
            "num_speculative_tokens": levels["k"],
            "verify_strategy": levels["strategy"],
            "adaptive": levels["adaptive"],
        },
        chunk=levels["chunk"],
        overlap=levels["overlap"],
        sizes=sizes,
        warm=levels["prefix"] != "miss",
        preempts_all=levels["pages"] == "preempted",
        has_predictions=levels.get("predictions", False),
        **TRAFFIC[levels["traffic"]],
    )
    assert batch.differences() == []
    assert batch.engine is not None
    # A single request, or one with a grammar, may end before the third plan, the first that preempts.
    if levels["pages"] == "preempted" and grammar == "none" and levels["batch"] > 1:
        assert batch.engine.stats().num_preemptions, "no request was preempted"
    if levels["prefix"] == "off":
        assert batch.engine.stats().num_cached_tokens == 0
