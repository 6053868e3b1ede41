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
from exact import NEIGHBOURS, OPTIONS, Ask, Company, Where

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
    "pages": ["many", "few", "shaken"],  # few: requests are put aside; shaken: everybody is, again and again
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


def named(case: dict[str, Any]) -> str:
    return "-".join(str(level) for level in case.values())


def check(case: dict[str, Any], backend: str = "auto", threads: int = 1, device: str = "cpu") -> None:
    heat, judge, grammar = case["temperature"], case["strategy"], case.get("grammar", "none")
    first = Ask(0, case["option"], heat, judge, LENGTH[case["chunk"]], grammar=grammar)
    others = NEIGHBOURS[case["k"] % 3 :] + NEIGHBOURS[: case["k"] % 3]  # a pair is not always the same two
    asks = [first, *others[: case["batch"] - 1]]
    if case["overlap"]:
        asks = [replace(ask, prompt=False) for ask in asks]
        if case["option"] in FREE:  # then nobody else keeps the host in the loop either
            free = {"option": "eos", "grammar": "none"}
            asks = [replace(ask, **free) if ask.option == "mix" else ask for ask in asks]
    if case["priority"] == "shuffled":
        asks = [replace(ask, priority=ask.index * 5 % 3 - 1) for ask in asks]
    if case["prefix"] == "other salts":
        asks = [replace(ask, salt=f"tenant {ask.index % 2}") for ask in asks]
    sizes: dict[str, Any] = {"page_size": 8, "enable_prefix_caching": case["prefix"] != "off"}
    if case["pages"] != "many":
        longest = max(ask.length for ask in asks) + 14
        sizes["kv_cache_tokens"] = (longest + 15) // 8 * 8  # the longest just fits
    company = Company(
        asks,
        Where(case["arch"], case["dtype"], backend, threads, device),
        {
            "method": case["method"],
            "num_speculative_tokens": case["k"],
            "verify_strategy": case["strategy"],
            "adaptive": case["adaptive"],
        },
        chunk=case["chunk"],
        overlap=case["overlap"],
        sizes=sizes,
        warm=case["prefix"] != "miss",
        shaken=case["pages"] == "shaken",
        **TRAFFIC[case["traffic"]],
    )
    assert company.differences() == []
    assert company.engine is not None
    # A single request, or one with a grammar, may end before the third plan, the first that preempts.
    if case["pages"] == "shaken" and case.get("grammar", "none") == "none" and case["batch"] > 1:
        assert company.engine.stats().num_preemptions, "no request was preempted"
    if case["prefix"] == "off":
        assert company.engine.stats().num_cached_tokens == 0
