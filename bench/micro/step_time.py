"""Where a step's time goes while proposers draft, round by round; the last line of stdout is JSON.

    python bench/micro/step_time.py --prompts spec_bench.jsonl [--device cuda] [--methods eagle3,hybrid]
        [--batches 1,8]
                          [--rounds 6] [--count 8] [--tasks chat,qa]

The same prompts in every round, task by task, as `head.py` asks them. Of each round: microseconds of a step,
tokens that it commits, what the host takes of it (median, 90 %) and how often the device was done before it,
for which share of the steps a model was asked and for how many rounds, steps that were captured and kernels
that were compiled meanwhile, and the longest ones. On a GPU the first and the last round are run once more
under a profiler: microseconds of each kernel a step, how often it runs, and how long the device was busy.
What grows from the first to the last is what slows an engine down.
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

KERNELS = 14  # that are named
compiled: list[str] = []  # kernels, since the program began: after an engine's start it should be none


def watch_compiling() -> None:
    """From now on `compiled` tells which kernels are compiled."""
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told["fn"].name)


class Watch:
    """Steps of an engine as they are queued, and how long each call of `step` takes."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.loop = llm.engine, llm.engine.loop
        self._step, self._run = llm.engine.step, self.loop.device.run
        self.policy = self.loop.policy
        self.calls: list[float] = []
        self.rounds: list[int] = []
        self.host: list[tuple[float, bool]] = []  # seconds, and whether the device was the first

    def __enter__(self) -> Watch:
        self.captured, self.compiled = len(self.loop.device.graphs), len(compiled)
        self.engine.step, self.loop.device.run = self.step, self.run  # type: ignore[method-assign]
        self._observe, self.policy.observe = self.policy.observe, self.observe  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.step, self.loop.device.run = self._step, self._run  # type: ignore[method-assign]
        del self.policy.observe

    def observe(self, step: Any) -> Any:
        """Record the seconds of the host's part of a step."""
        times = step.times
        since = self.policy.run_ahead._last_read if times.is_queued_behind else times.started
        self.host.append((times.waited - since, times.was_ready))
        return self._observe(step)

    def step(self) -> Any:
        begin = time.perf_counter()
        try:
            return self._step()
        finally:
            self.calls.append(time.perf_counter() - begin)

    def run(self, planned: Any, decision: Any, *more: Any) -> Any:
        ran, drafting = self._run(planned, decision, *more), self.loop.device.drafting
        self.rounds.append(drafting.last_run(len(planned.slots), decision).rounds)
        return ran

    def told(self, seconds: float, tokens: int, steps: int) -> dict[str, Any]:
        longest = np.sort(self.calls)[::-1][:4]
        asked = [rounds for rounds in self.rounds if rounds]
        return {
            "us a step": round(1e6 * seconds / len(self.calls), 1),
            "tokens a request and step": round(tokens / max(1, steps), 2),
            "host us": [round(1e6 * one) for one in np.quantile([s for s, _ in self.host], [0.5, 0.9])],
            "late": round(float(np.mean([late for _, late in self.host])), 3),
            "asked": round(len(asked) / max(1, len(self.rounds)), 3),
            "rounds when asked": round(float(np.mean(asked)), 2) if asked else 0,
            "captured": len(self.loop.device.graphs) - self.captured,
            "compiled": compiled[self.compiled :],
            "longest, ms": [round(1e3 * one, 2) for one in longest.tolist()],
        }


def one_round(llm: LLM, asked: Sequence[head.Asked], batch: int, tokens: int, salt: str) -> dict[str, Any]:
    head.run(llm, asked, batch, 1, salt)  # into the prefix cache
    with Watch(llm) as watch:
        spent, answers, (steps, *_) = head.run(llm, asked, batch, tokens, salt)
    return watch.told(spent, sum(map(len, answers.values())), steps)


def profiled(llm: LLM, asked: Sequence[head.Asked], batch: int, tokens: int, salt: str) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    head.run(llm, asked, batch, 1, salt)
    with profile(activities=[ProfilerActivity.CUDA]) as seen, Watch(llm) as watch:
        spent, *_ = head.run(llm, asked, batch, tokens, salt)
        torch.cuda.synchronize()
    steps = len(watch.calls)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events)
    return {
        "device us a step": round(busy / steps, 1),
        "busy": round(busy / 1e6 / spent, 3),
        "kernels": {
            event.key[:50]: [round(event.self_device_time_total / steps, 1), round(event.count / steps, 2)]
            for event in events[:KERNELS]
        },
    }


def some_of(options: argparse.Namespace) -> tuple[head.Engines, dict[str, list[head.Asked]]]:
    """Engines, and what they are asked, task by task."""
    engines = head.Engines(options, head.read(options.prompts, options.each))
    if unknown := sorted(set(options.tasks) - set(engines.prompts)):
        raise SystemExit(f"--tasks: of {', '.join(engines.prompts)}, not {', '.join(unknown)}")
    return engines, {t: [(ids, 0) for ids in engines.prompts[t][: options.count]] for t in options.tasks}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    engines, prompts = some_of(options)
    found: dict[str, Any] = {}
    if options.device == "cuda":
        watch_compiling()
    for name in options.methods:
        llm = engines[name]
        for batch in options.batches:
            here: dict[str, Any] = found.setdefault(f"{name}, batch {batch}", {})
            for number, (task, asked) in product(range(options.rounds), prompts.items()):
                given = llm, asked, batch, options.tokens
                here.setdefault(task, []).append(one_round(*given, f"{batch} {number}"))
                said = f"{name}, batch {batch}, {task}"
                print(f"{said}, round {number}: {json.dumps(here[task][-1])}", flush=True)
                if options.device == "cuda" and number in (0, options.rounds - 1):
                    when = f"{task}, after the first round" if number == 0 else f"{task}, at the end"
                    here[when] = profiled(*given, f"{batch} {number} again")
                    print(f"{name}, batch {batch}, {when}: {json.dumps(here[when])}", flush=True)
    return found


USUAL = {"methods": "eagle3,hybrid", "batches": "1,8", "rounds": "6", "count": "8"}


def parsed(
    arguments: Sequence[str] | None = None, what: str | None = __doc__, usual: dict[str, str] = USUAL
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["chat"])
    mine, rest = parser.parse_known_args(arguments)
    given = [text for name, value in usual.items() for text in (f"--{name}", value)]
    options = head.parsed(["--parts", "speed", *given, *rest])
    options.tasks = mine.tasks
    return options


if __name__ == "__main__":
    finish("steps", measure(parsed()))
