"""Cost of logprobs in `LLM.generate`, plain and with drafts of each proposer.

Bars of `logprobs`: 0 and 5 within 3 % of none, 20 within 5 %. `drafters` measures n-gram drafts, a head, a
draft model and a hybrid, each in an engine of its own: 0, 5, 20, draft logprobs and 8 named ids within 3 % of
none, and as much where one request of the batch has all of them.

The speed of a machine varies by more than that, so sides are compared within short rounds only: every side
has its turn in each, in another order than in the one before, and its speed is divided by that of the side
without logprobs. Median, minimum and maximum are reported. The state of the draft policy is the same at the
start of every turn and does not change, so that all sides make the same drafts, which `alike` checks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from copy import deepcopy
from itertools import product
from typing import Any

import torch
from common.gpu_engine import SETTINGS, Bench, kernels_of, params_of, timed, warm_clock

from draftproof import LLM, SamplingParams

BARS = {"0": 0.97, "5": 0.97, "20": 0.95}
TOPS: dict[str, int | None] = {"none": None, "0": 0, "5": 5, "20": 20}
SIDES: dict[str, dict[str, Any]] = {name: {"logprobs": top} for name, top in TOPS.items()}
NAMED = {"logprob_token_ids": list(range(100, 900, 100))}
DRAFTS = {"logprobs": 0, "include_draft_logprobs": True}
DRAFTER_SIDES = {**SIDES, "drafts": DRAFTS, "named": NAMED}
ONE_REQUEST = "one request"  # side: the first request has everything, the others have no logprobs
DRAFTER_BARS = dict.fromkeys((*BARS, "drafts", "named", ONE_REQUEST), 0.97)
DRAFTER_TOKENS = 96  # of an output: short turns, since four engines share the time
MIN_ROUNDS = 4
WEIGHTS = {1: 1.0, 8: 1.0, 64: 1.7, 256: 2.6}  # of the time: a large batch takes longer for a round


class FrozenPolicy:
    """Draft policy whose state is restored before every turn; its cost model does not learn meanwhile."""

    def __init__(self, llm: LLM) -> None:
        self._policy = llm.engine.loop.policy
        self._learns = self._policy.cost.learns
        self._policy.cost.learns = False
        self._saved = deepcopy(self._policy)

    def restore(self) -> None:
        """Restore the state."""
        vars(self._policy).update(vars(deepcopy(self._saved)))

    def release(self) -> None:
        """Restore the state and let the cost model learn again."""
        self.restore()
        self._policy.cost.learns = self._learns


def logprobs(bench: Bench) -> dict[str, Any]:
    batches = bench.options.batches
    weights = {batch: WEIGHTS.get(batch, 1.0) for batch in batches}
    each = bench.options.logprob_seconds / len(SETTINGS) / sum(weights.values())
    out: dict[str, Any] = {}
    for batch, name in product(batches, SETTINGS):
        if not bench.is_time_up:
            found = out[f"{name} {batch}"] = cost(bench, batch, SETTINGS[name], each * weights[batch])
            print(f"logprobs, {name} {batch}:", found, flush=True)
    out["within bars"] = all(found["within bars"] for found in out.values())
    if torch.cuda.is_available() and not bench.is_time_up:
        out["kernels of a plain step, us"] = kernels(bench)
    return out


def cost(bench: Bench, batch: int, changes: dict[str, Any], seconds: float) -> dict[str, Any]:
    count = bench.options.tokens
    sides = {name: params_of(batch, count, **side, **changes) for name, side in SIDES.items()}
    return ratios_of(bench.llm(), bench.prompts("chat", batch), sides, BARS, seconds, MIN_ROUNDS)


def ratios_of(
    llm: LLM,
    prompts: list[list[int]],
    sides: dict[str, list[SamplingParams]],
    bars: dict[str, float],
    seconds: float,
    least: int,
) -> dict[str, Any]:
    """Measure all sides in turn, at least `least` rounds; return their speeds over that of "none"."""
    warm_clock()
    until, names = time.monotonic() + seconds, list(sides)
    for _ in range(2):
        timed(llm, prompts, sides["none"])  # the policy measures step costs
    policy, rounds = FrozenPolicy(llm), []
    for name in names:  # steps that are met for the first time are captured
        policy.restore()
        timed(llm, prompts, sides[name])
    while len(rounds) < least or time.monotonic() < until:
        first = len(rounds) % len(names)
        one = {}
        for name in names[first:] + names[:first]:
            policy.restore()
            one[name] = timed(llm, prompts, sides[name])
        rounds.append(one)
    policy.release()
    found: dict[str, Any] = {
        "rounds": len(rounds),
        "none": round(statistics.median(one["none"]["tok/s"] for one in rounds), 1),
        "alike": len({one[name]["acceptance length"] for one in rounds for name in names}) == 1,
        "acceptance length": round(rounds[0]["none"]["acceptance length"], 3),
    }
    for name in bars:
        ratios = sorted(one[name]["tok/s"] / one["none"]["tok/s"] for one in rounds)
        found[name] = [round(x, 4) for x in (statistics.median(ratios), ratios[0], ratios[-1])]
    found["within bars"] = all(found[name][0] >= bar for name, bar in bars.items())
    return found


def drafters(bench: Bench) -> dict[str, Any]:
    """Measure the cost of all logprobs beside each proposer; proposers without time left are named."""
    options, out = bench.options, {}
    until = time.monotonic() + options.drafter_seconds
    for number, (name, more) in enumerate(proposers_of(options).items()):
        if bench.is_time_up or time.monotonic() > until:
            out[name] = "no time left"
            continue
        llm = bench.llm(name, speculative_config={"num_speculative_tokens": 4, **more})
        share = (until - time.monotonic()) / (4 - number) / len(options.batches)
        for batch in options.batches:
            sides = {
                side: params_of(batch, DRAFTER_TOKENS, **changes) for side, changes in DRAFTER_SIDES.items()
            }
            one = params_of(1, DRAFTER_TOKENS, include_draft_logprobs=True, prompt_logprobs=0, **NAMED)
            sides[ONE_REQUEST] = one + sides["none"][1:]
            prompts = bench.prompts("chat", batch)
            found = out[f"{name} {batch}"] = ratios_of(llm, prompts, sides, DRAFTER_BARS, share, 2)
            print(f"drafters, {name} {batch}:", found, flush=True)
    bench.drop()
    cells = [found for found in out.values() if isinstance(found, dict)]
    out["within bars"] = bool(cells) and all(found["within bars"] for found in cells)
    return out


def proposers_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the speculative_config of each proposer; without --draft-model the model drafts for itself."""
    head = {"method": "eagle3", **({"model": options.head} if options.head else {})}
    return {
        "ngram": {"method": "ngram"},
        "head": head,
        "draft_model": {"method": "draft_model", "model": options.draft_model or options.model},
        "hybrid": {"method": "hybrid", "proposers": [head, {"method": "suffix"}]},
    }


def kernels(bench: Bench) -> dict[str, dict[str, float]]:
    """Microseconds of a step's kernels and copies, by number of requested logprobs."""
    llm, out = bench.llm(), {}
    for batch in bench.options.batches[-2:]:
        prompts = bench.prompts("chat", batch)
        for top in TOPS.values():
            found = kernels_of(llm, prompts, params_of(batch, 512, speculative=False, logprobs=top))
            out[f"{batch}, logprobs={top}"] = {
                "step us": found["step us"],
                "sum of kernels us": found["sum of kernels us"],
                **{name: us for name, (us, _) in found["kernels"].items() if is_extra(name)},
            }
    print("kernels", out, flush=True)
    return out


def is_extra(name: str) -> bool:
    """Return whether a kernel is for logprobs, packing or the copy of results."""
    return any(part in name for part in ("scan", "finish", "Cat", "cat", "Memcpy"))
