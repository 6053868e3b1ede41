"""Cost of logprobs in `LLM.generate`, plain and with drafts.

Bars: 0 and 5 within 3 % of none, 20 within 5 %. The speed of a machine varies by more than that, so sides are
compared within short rounds only: every side has its turn in each, in another order than in the one before,
and its speed is divided by that of the side without logprobs. Median, minimum and maximum are reported. The
state of the draft policy is the same at the start of every turn and does not change, so that all sides make
the same drafts, which `alike` checks.
"""

from __future__ import annotations

import statistics
import time
from copy import deepcopy
from itertools import product
from typing import Any

import torch
from common.gpu_engine import SETTINGS, Bench, heat, kernels_of, params_of, timed

from draftproof import LLM

BARS = {0: 0.97, 5: 0.97, 20: 0.95}
SIDES = (None, *BARS)
LEAST = 4  # rounds
WEIGHTS = {1: 1.0, 8: 1.0, 64: 1.7, 256: 2.6}  # of the time: a large batch takes longer for a round


class Held:
    """State of a draft policy, restored before every turn; meanwhile its cost model does not learn."""

    def __init__(self, llm: LLM) -> None:
        self._policy = llm.engine.loop.policy
        self._learns = self._policy.cost.learns
        self._policy.cost.learns = False
        self._saved = deepcopy(self._policy)

    def put_back(self) -> None:
        """Restore the state."""
        vars(self._policy).update(vars(deepcopy(self._saved)))

    def release(self) -> None:
        """Restore the state and let the cost model learn again."""
        self.put_back()
        self._policy.cost.learns = self._learns


def logprobs(bench: Bench) -> dict[str, Any]:
    batches = bench.options.batches
    weights = {batch: WEIGHTS.get(batch, 1.0) for batch in batches}
    each = bench.options.logprob_seconds / len(SETTINGS) / sum(weights.values())
    out: dict[str, Any] = {}
    for batch, name in product(batches, SETTINGS):
        if not bench.late:
            found = out[f"{name} {batch}"] = cost(bench, batch, SETTINGS[name], each * weights[batch])
            print(f"logprobs, {name} {batch}:", found, flush=True)
    out["within bars"] = all(found["within bars"] for found in out.values())
    if torch.cuda.is_available() and not bench.late:
        out["kernels of a plain step, us"] = kernels(bench)
    return out


def cost(bench: Bench, batch: int, changes: dict[str, Any], seconds: float) -> dict[str, Any]:
    llm, prompts = bench.llm(), bench.prompts("chat", batch)
    heat()
    until = time.monotonic() + seconds

    def turn(top: int | None) -> dict[str, float]:
        params = params_of(batch, bench.options.tokens, logprobs=top, **changes)
        return timed(llm, prompts, params)

    for _ in range(2):
        turn(None)  # it learns what steps cost
    held, rounds = Held(llm), []
    for top in SIDES:  # steps that are met for the first time are captured
        held.put_back()
        turn(top)
    while len(rounds) < LEAST or time.monotonic() < until:
        first = len(rounds) % len(SIDES)
        one = {}
        for top in SIDES[first:] + SIDES[:first]:
            held.put_back()
            one[top] = turn(top)
        rounds.append(one)
    held.release()
    found: dict[str, Any] = {
        "rounds": len(rounds),
        "none": round(statistics.median(one[None]["tok/s"] for one in rounds), 1),
        "alike": len({one[top]["acceptance length"] for one in rounds for top in SIDES}) == 1,
        "acceptance length": round(rounds[0][None]["acceptance length"], 3),
    }
    for top in BARS:
        ratios = sorted(one[top]["tok/s"] / one[None]["tok/s"] for one in rounds)
        found[str(top)] = [round(x, 4) for x in (statistics.median(ratios), ratios[0], ratios[-1])]
    found["within bars"] = all(found[str(top)][0] >= bar for top, bar in BARS.items())
    return found


def kernels(bench: Bench) -> dict[str, dict[str, float]]:
    """Microseconds of a step's kernels and copies, by how many logprobs are asked for."""
    llm, out = bench.llm(), {}
    for batch in bench.options.batches[-2:]:
        prompts = bench.prompts("chat", batch)
        for top in SIDES:
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
