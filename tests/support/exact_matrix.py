"""Shared parts of test_exact and the tests that reuse them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import heads
import tiny
from covering import pairwise
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from draftproof.verify import STRATEGIES
from exact import NEIGHBOURS, OPTIONS, Batch, Case, Setup

MADE_UP = [f"proposers:{name}" for name in ("Junk", "Perfect", "Flaky", "SelfModel")]

# of proposers that share their code, the first: enough where options are tried out
UNLIKE = [*{heads.code_of(name): name for name in reversed(PROPOSERS)}.values(), *MADE_UP]

EXACT = [name for name in STRATEGIES if lookup(STRATEGIES, name, "strategy").seed_exact]

LENGTH = {16: 40, 64: 100, 512: 120}  # the prompt is longer than the chunk; at 512, seven together are

TRAFFIC: dict[str, dict[str, Any]] = {
    "together": {},
    "arriving": {"arrivals": [2, 0, 0, 1, 3, 5, 8]},
    "leaving": {"arrivals": [0, 0, 1, 0, 2, 0, 4], "aborts": {1: 4, 2: 6, 4: 3, 6: 5}},
}

FACTORS = {
    "option": list(OPTIONS),
    "grammar": ["none"],
    "arch": list(tiny.ARCHITECTURES),
    "method": UNLIKE,
    "k": [1, 3, 5, 8],
    "temperature": [0.0, 0.7, 1.3],
    "batch": [1, 2, 7],
    "chunk": [16, 64, 512],
    "traffic": list(TRAFFIC),
    "strategy": EXACT,
    "dtype": ["float32", "bfloat16"],
    "adaptive": [True, False],
    "overlap": [False, True],  # of a proposer on the host it changes nothing
    "prefix": ["miss", "hit", "other salts", "off"],
    "pages": [
        "many",
        "few",
        "preempted",
    ],  # few: requests are put aside; shaken: everybody is, again and again
    "priority": ["equal", "shuffled"],
}

MATRIX = pairwise(FACTORS)

SCRIPTED = [f"proposers:Device{name}" for name in ("Junk", "Perfect", "Flaky")]

# nothing in them keeps the host in the loop, so that steps do overlap
FREE = ["none", "top_p", "repetition", "frequency", "logit_bias", "allowed", "min_tokens", "max_tokens"]

FREE += ["eos", "stop_ids", "no_logprobs", "processed"]

# a grammar leaves little to choose, so it does not take the place of free text
GUIDED = pairwise(
    {
        **FACTORS,
        "option": [
            "none",
            "top_k",
            "min_p",
            "repetition",
            "bad_words",
            "min_tokens",
            "ignore_eos",
            "stop_ids",
        ]
        + ["processor", "draft_logprobs", "mix"],
        "grammar": ["json", "regex", "choice", "reasoning_token", "reasoning_text", "none"],
        "method": [*UNLIKE, *SCRIPTED],
    }
)


def named(levels: dict[str, Any]) -> str:
    return "-".join(str(level) for level in levels.values())


def check(levels: dict[str, Any], backend: str = "auto", threads: int = 1, device: str = "cpu") -> None:
    heat, judge, grammar = levels["temperature"], levels["strategy"], levels.get("grammar", "none")
    first = Case(0, levels["option"], heat, judge, LENGTH[levels["chunk"]], grammar=grammar)
    others = NEIGHBOURS[levels["k"] % 3 :] + NEIGHBOURS[: levels["k"] % 3]  # other pairs
    cases = [first, *others[: levels["batch"] - 1]]
    if levels["overlap"]:
        cases = [replace(case, prompt=False) for case in cases]
        if levels["option"] in FREE:  # then nobody else keeps the host in the loop either
            free = {"option": "eos", "grammar": "none"}
            cases = [replace(case, **free) if case.option == "mix" else case for case in cases]
    if levels["priority"] == "shuffled":
        cases = [replace(case, priority=case.index * 5 % 3 - 1) for case in cases]
    if levels["prefix"] == "other salts":
        cases = [replace(case, salt=f"tenant {case.index % 2}") for case in cases]
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": levels["prefix"] != "off"}
    if levels["pages"] != "many":
        longest = max(case.length for case in cases) + 14
        sizes["kv_cache_tokens"] = (longest + 15) // 8 * 8  # the longest just fits
    batch = Batch(
        cases,
        Setup(levels["arch"], levels["dtype"], backend, threads, device),
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
        **TRAFFIC[levels["traffic"]],
    )
    assert batch.differences() == []
    assert batch.engine is not None
    # A single request, or one with a grammar, may end before the third plan, the first that preempts.
    if levels["pages"] == "preempted" and levels.get("grammar", "none") == "none" and levels["batch"] > 1:
        assert batch.engine.stats().num_preemptions, "no request was preempted"
    if levels["prefix"] == "off":
        assert batch.engine.stats().num_cached_tokens == 0
