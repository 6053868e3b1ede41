"""Sizes of the steps with n-gram drafts, with their measured and predicted times.

    python bench/micro/step_sizes.py [--device cuda] [--batches 64,256,64] [--rounds 4] [--logprobs 5]
        [--tokens 256]

The last line of stdout is JSON. Chat prompts through `LLM.generate`, plain and with drafts in turn, all batch
sizes with one engine, so that a batch size can be measured before and after another one. With --logprobs N
each side has a turn with N logprobs too. Figures of each side's last round: steps by their rows, their
milliseconds, those of the host and as predicted by the cost model, and how many steps were ready before the
host waited for them; and the time outside of decode steps.
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
from common.gpu_engine import SETTINGS, Bench, params_of, timed, warm_clock
from common.measure import finish, python_us

from draftproof import LLM


class Watch:
    """Steps by padded rows: seconds, of the host, and predicted by the cost model."""

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
        since = ahead._last_read if times.is_queued_behind else times.started_at
        seconds: float | None = self._observe(step)
        if not planned.has_prompts and seconds:
            rows = planned.num_rows
            context = self.cost.context_seconds(step.num_keys, len(planned.slots))
            predicted = self.cost.row_seconds(rows) + context
            line = seconds, times.wait_began_at - since, predicted, times.was_ready
            self.seen[self.cost.size(rows)].append(line)
        return seconds

    def figures(self, spent: float) -> dict[str, Any]:
        """Return the figures of a run of `spent` seconds."""
        decoding = sum(one[0] for many in self.seen.values() for one in many)
        lines = {
            rows: {
                "steps": len(many),
                **dict(
                    zip(("measured", "host", "predicted"), 1e3 * np.mean(many, 0)[:3].round(6), strict=True)
                ),
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
    """Run one batch; return tokens a second and the figures of its steps."""
    llm, prompts = bench.llm(), bench.prompts("chat", batch)
    with Watch(llm) as watch:
        begin = time.perf_counter()
        found = timed(llm, prompts, params_of(batch, bench.options.tokens, **changes))
        figures = watch.figures(time.perf_counter() - begin)
    figures["tokens a request and step"] = round(found["acceptance length"], 3)
    return found["tok/s"], figures


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all batch sizes."""
    bench, found = Bench(options), []
    sides = dict(SETTINGS)
    if options.logprobs is not None:
        sides |= {f"{name}, logprobs": {**mine, "logprobs": options.logprobs} for name, mine in sides.items()}
    for batch in options.batches:
        bench.llm(), warm_clock()
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
            {"batch": batch, "tok/s": rates, "python_loop_microseconds": speeds, "steps of the last": steps}
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=2304)
    parser.add_argument("--logprobs", type=int)
    options = parser.parse_args(arguments)
    options.seconds = float("inf")
    return options


if __name__ == "__main__":
    finish("step_sizes", {"batches": measure(parsed())})
