"""Which sizes of steps n-gram drafts choose, what they take, and what they were thought to take.

    python bench/micro/step_sizes.py [--device cuda] [--batches 64,256,64] [--rounds 4] [--logprobs 5]
        [--tokens 256]

The last line of stdout is JSON. Chat prompts through `LLM.generate`, plain and with drafts in turn, batch
after batch with one engine, so that one batch may be looked at before and after another. With --logprobs each
side has a turn with so many too. Of each side's last round: steps by their rows, milliseconds of them, of the
host beside the device, and by the prices, and how many had come before the host was ready for them; and what
is left of the time, which is prompts, and the host alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from common.gpu_engine import SETTINGS, Bench, heat, params_of, timed
from common.measure import finish, python_us

from draftproof import LLM


class Watch:
    """Steps by the rows they have room for: seconds, the host's, and what the prices say."""

    def __init__(self, llm: LLM) -> None:
        self.policy = llm.engine.loop.policy
        self.cost = self.policy.cost
        self.seen: dict[int, list[tuple[float, float, float, bool]]] = defaultdict(list)

    def __enter__(self) -> Watch:
        self._observe = self.policy.observe
        self.policy.observe = self.observe  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.policy.observe

    def observe(self, step: Any) -> float | None:
        """Record the seconds of a step, of the host's part, and as predicted."""
        planned, times, ahead = step.plan, step.times, self.policy.run_ahead
        since = ahead._last_read if times.is_queued_behind else times.started
        seconds: float | None = self._observe(step)
        if not planned.has_prompts and seconds:
            rows = planned.num_rows
            predicted = self.cost.row_seconds(rows) + self.cost.context_seconds(step.num_keys)
            line = seconds, times.waited - since, predicted, times.was_ready
            self.seen[self.cost.size(rows)].append(line)
        return seconds

    def told(self, spent: float) -> dict[str, Any]:
        decoding = sum(one[0] for many in self.seen.values() for one in many)
        lines = {
            rows: {
                "steps": len(many),
                **dict(zip(("took", "host", "thought"), 1e3 * np.mean(many, 0)[:3].round(6), strict=True)),
                "late": sum(late for *_, late in many),
            }
            for rows, many in sorted(self.seen.items())
        }
        return {
            "ms": round(1e3 * spent, 1),
            "not decoding, ms": round(1e3 * (spent - decoding), 1),
            "by rows": lines,
        }


def turn(bench: Bench, batch: int, **changes: Any) -> tuple[float, dict[str, Any]]:
    llm, prompts = bench.llm(), bench.prompts("chat", batch)
    with Watch(llm) as watch:
        begin = time.perf_counter()
        found = timed(llm, prompts, params_of(batch, bench.options.tokens, **changes))
        told = watch.told(time.perf_counter() - begin)
    told["tokens a request and step"] = round(found["acceptance length"], 3)
    return found["tok/s"], told


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    bench, found = Bench(options), []
    sides = dict(SETTINGS)
    if options.logprobs is not None:
        sides |= {f"{name}, logprobs": {**mine, "logprobs": options.logprobs} for name, mine in sides.items()}
    for batch in options.batches:
        bench.llm(), heat()
        rates: dict[str, list[float]] = {name: [] for name in sides}
        speeds, steps = [], {}
        for number in range(options.rounds + 1):  # the first does not count
            for name, changes in sides.items():
                rate, steps[name] = turn(bench, batch, **changes)
                rates[name] += [round(rate)] * (number > 0)
            ratio = {name: round(each[-1] / rates["plain"][-1], 3) for name, each in rates.items() if each}
            speeds.append(python_us())
            print(f"batch {batch}, round {number}, {speeds[-1]}: {json.dumps(ratio)}", flush=True)
        found.append(
            {"batch": batch, "tok/s": rates, "us of a piece of Python": speeds, "steps of the last": steps}
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=2304)
    parser.add_argument("--logprobs", type=int)
    options = parser.parse_args(arguments)
    options.seconds = float("inf")
    return options


if __name__ == "__main__":
    finish("sizes", {"batches": measure(parsed())})
