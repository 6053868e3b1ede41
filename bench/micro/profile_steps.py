"""Step time with drafts, round by round; the last line of stdout is JSON.

    python bench/micro/profile_steps.py --prompts spec_bench.jsonl [--device cuda] [--methods eagle3,hybrid]
        [--batches 1,8] [--rounds 6] [--count 8] [--tasks chat,qa]

Every round has the prompts of `head.py`, task by task. Figures of a round: microseconds of a step, tokens per
request and step, host time (median, 90 %), share of the steps that were ready before the host, share of the
steps with rounds of a draft model and their number, graphs captured and kernels compiled meanwhile, and the
longest steps. On a GPU the first and the last round run once more under a profiler: microseconds and calls of
each kernel a step, and the busy share of the device. A figure that grows from round to round shows what slows
the engine down.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import head
import numpy as np
import torch
from common.measure import finish

from draftproof import LLM

MAX_LISTED_KERNELS = 14
compiled: list[str] = []  # kernels compiled since `watch_compiling`; after a warm-up there should be none


def watch_compiling() -> None:
    """Add the kernels that are compiled from now on to `compiled`."""
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)


class Watch:
    """Recorder of an engine's steps: times of calls, host times, rounds of the draft model."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.loop = llm.engine, llm.engine.loop
        self._step, self._run = llm.engine.step, self.loop.device.run
        self.policy = self.loop.policy
        self.calls: list[float] = []
        self.rounds: list[int] = []
        self.host: list[tuple[float, bool]] = []  # seconds, and whether the step was ready before

    def __enter__(self) -> Watch:
        self.captured, self.compiled = len(self.loop.device.graphs.captured), len(compiled)
        self.engine.step, self.loop.device.run = self.step, self.run  # type: ignore[method-assign]
        self._observe, self.policy.observe = self.policy.observe, self.observe  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.step, self.loop.device.run = self._step, self._run  # type: ignore[method-assign]
        del self.policy.observe

    def observe(self, step: Any) -> Any:
        """Record the seconds of the host's part of a step."""
        times = step.times
        since = self.policy.run_ahead._last_read if times.is_queued_behind else times.started_at
        self.host.append((times.wait_began_at - since, times.was_ready))
        return self._observe(step)

    def step(self) -> Any:
        """Run a step and record its time."""
        begin = time.perf_counter()
        try:
            return self._step()
        finally:
            self.calls.append(time.perf_counter() - begin)

    def run(self, planned: Any, decision: Any, *more: Any) -> Any:
        """Queue a step and record the rounds of the draft model."""
        ran, drafting = self._run(planned, decision, *more), self.loop.device.drafting
        self.rounds.append(drafting.last_run(len(planned.slots), decision).rounds)
        return ran

    def figures(self, seconds: float, tokens: int, steps: int) -> dict[str, Any]:
        """Return the figures of a round."""
        longest = np.sort(self.calls)[::-1][:4]
        drafted = [rounds for rounds in self.rounds if rounds]
        return {
            "us a step": round(1e6 * seconds / len(self.calls), 1),
            "tokens a request and step": round(tokens / max(1, steps), 2),
            "host us": [round(1e6 * one) for one in np.quantile([s for s, _ in self.host], [0.5, 0.9])],
            "late": round(float(np.mean([late for _, late in self.host])), 3),
            "steps with rounds": round(len(drafted) / max(1, len(self.rounds)), 3),
            "rounds of these": round(float(np.mean(drafted)), 2) if drafted else 0,
            "captured": len(self.loop.device.graphs.captured) - self.captured,
            "compiled": compiled[self.compiled :],
            "longest, ms": [round(1e3 * one, 2) for one in longest.tolist()],
        }


def one_round(
    llm: LLM, prompts: Sequence[head.PromptCopy], batch: int, tokens: int, salt: str
) -> dict[str, Any]:
    """Return the figures of one round."""
    head.run(llm, prompts, batch, 1, salt)  # into the prefix cache
    with Watch(llm) as watch:
        spent, outputs, (steps, *_) = head.run(llm, prompts, batch, tokens, salt)
    return watch.figures(spent, sum(map(len, outputs.values())), steps)


def profiled(
    llm: LLM, prompts: Sequence[head.PromptCopy], batch: int, tokens: int, salt: str
) -> dict[str, Any]:
    """Return device time and kernels of one round."""
    from torch.profiler import ProfilerActivity, profile

    head.run(llm, prompts, batch, 1, salt)
    with profile(activities=[ProfilerActivity.CUDA]) as seen, Watch(llm) as watch:
        spent, *_ = head.run(llm, prompts, batch, tokens, salt)
        torch.cuda.synchronize()
    steps = len(watch.calls)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events)
    return {
        "device us a step": round(busy / steps, 1),
        "busy": round(busy / 1e6 / spent, 3),
        "kernels": {
            event.key[:50]: [round(event.self_device_time_total / steps, 1), round(event.count / steps, 2)]
            for event in events[:MAX_LISTED_KERNELS]
        },
    }


def some_of(options: argparse.Namespace) -> tuple[head.Engines, dict[str, list[head.PromptCopy]]]:
    """Return the engines and the prompts by task."""
    engines = head.Engines(options, head.read(options.prompts, options.each))
    if unknown := sorted(set(options.tasks) - set(engines.prompts)):
        raise SystemExit(f"--tasks: of {', '.join(engines.prompts)}, not {', '.join(unknown)}")
    return engines, {t: [(ids, 0) for ids in engines.prompts[t][: options.count]] for t in options.tasks}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods and batch sizes."""
    engines, prompts = some_of(options)
    found: dict[str, Any] = {}
    if options.device == "cuda":
        watch_compiling()
    for name in options.methods:
        llm = engines[name]
        for batch in options.batches:
            here: dict[str, Any] = found.setdefault(f"{name}, batch {batch}", {})
            for number, (task, mine) in product(range(options.rounds), prompts.items()):
                given = llm, mine, batch, options.tokens
                here.setdefault(task, []).append(one_round(*given, f"{batch} {number}"))
                label = f"{name}, batch {batch}, {task}"
                print(f"{label}, round {number}: {json.dumps(here[task][-1])}", flush=True)
                if options.device == "cuda" and number in (0, options.rounds - 1):
                    when = f"{task}, after the first round" if number == 0 else f"{task}, at the end"
                    here[when] = profiled(*given, f"{batch} {number} again")
                    print(f"{name}, batch {batch}, {when}: {json.dumps(here[when])}", flush=True)
    return found


USUAL = {"methods": "eagle3,hybrid", "batches": "1,8", "rounds": "6", "count": "8"}


def parsed(
    arguments: Sequence[str] | None = None, what: str | None = __doc__, usual: dict[str, str] = USUAL
) -> argparse.Namespace:
    """Return the options, with those of `head.py`."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["chat"])
    mine, rest = parser.parse_known_args(arguments)
    given = [text for name, value in usual.items() for text in (f"--{name}", value)]
    options = head.parsed(["--parts", "speed", *given, *rest])
    options.tasks = mine.tasks
    return options


if __name__ == "__main__":
    finish("profile_steps", measure(parsed()))
