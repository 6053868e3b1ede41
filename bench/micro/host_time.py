"""Host time of a step by function; the last line of stdout is JSON.

    python bench/micro/host_time.py --prompts spec_bench.jsonl [--device cuda]
        [--methods eagle3,suffix,hybrid] [--batches 8] [--rounds 4] [--count 16] [--tasks chat,qa]

Every round has the prompts of `head.py`, task by task, after a round that is not timed. Figures: microseconds
a step of each function without those that it calls, and of waiting for the device; the time of a step in
which a request was admitted or finished, or the suffix pool stored outputs; and how often the device was idle
when a step was queued. Timing adds some tenths of a microsecond to every function.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import head
import numpy as np
import profile_steps as steps
from common.measure import finish, python_us

from draftproof import LLM
from draftproof.ops.contract.types import PendingCopy

WAITS = "wait"
MAX_LISTED_FUNCTIONS = 24
USUAL = {"methods": "eagle3,suffix,hybrid", "batches": "8", "rounds": "4", "count": "16"}
EVENTS = {"admit": "admitted", "finish": "finished", "pool inserts": "pool stored"}


class Clocks:
    """Seconds of named calls, without the calls that they make."""

    def __init__(self) -> None:
        self._inner: list[float] = []
        self.on = False
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.steps: list[tuple[frozenset[str], float]] = []  # events in the step, and host seconds
        self.idle = self.queued = 0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time added to `name`."""

        def clocked(*given: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                took, inner = time.perf_counter() - begin, self._inner.pop()
                if self.on:
                    self.spent[name] += took - inner
                    self.calls[name] += 1
                if self._inner:
                    self._inner[-1] += took

        return clocked

    def step(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return `call` with the time and the events of each step recorded."""

        def stepped() -> Any:
            before, waited = dict(self.calls), self.spent[WAITS]
            begin = time.perf_counter()
            result = call()
            took = time.perf_counter() - begin - (self.spent[WAITS] - waited)
            had = frozenset(event for event in EVENTS if self.calls[event] > before.get(event, 0))
            if self.on:
                self.steps.append((had, took))
            return result

        return stepped

    def figures(self) -> dict[str, Any]:
        """Return the figures since the last reset."""
        steps = max(1, len(self.steps))
        pieces = sorted(self.spent.items(), key=lambda piece: -piece[1])[:MAX_LISTED_FUNCTIONS]
        kinds: dict[str, list[float]] = defaultdict(list)
        for had, took in self.steps:
            kinds[", ".join(EVENTS[event] for event in EVENTS if event in had) or "nothing"].append(took)
        return {
            "steps": steps,
            "host us a step": round(1e6 * float(np.mean([took for _, took in self.steps])), 1),
            "waits us a step": round(1e6 * self.spent[WAITS] / steps, 1),
            "device had nothing left": round(self.idle / max(1, self.queued), 3),
            "us by what happened": {
                kind: [len(took), *(round(1e6 * one) for one in np.quantile(took, [0.5, 0.9]))]
                for kind, took in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
            },
            "pieces": {
                name: [round(1e6 * spent / steps, 1), round(self.calls[name] / steps, 2)]
                for name, spent in pieces
                if name != WAITS
            },
        }


def watched(llm: LLM) -> Clocks:
    """Time the functions of this engine's steps from now on."""
    from draftproof.ops.triton.graphs import Stage  # needs triton

    clocks, core = Clocks(), llm.engine
    loop, ops, proposer = core.loop, core.loop.device.ops, core.loop.proposer
    pool = next((m.pool for m in (proposer, *getattr(proposer, "members", ())) if hasattr(m, "pool")), None)
    pieces: list[tuple[str, Any, str]] = [
        *(("engine", core, "step"), ("launch", loop, "_launch"), ("plan", loop.scheduler, "plan")),
        *(("queue", loop, "_queue"), ("grow", loop.slots, "grow"), ("fill", loop.slots, "fill")),
        *(("start", loop.hooks, "start"), ("decide", loop.policy, "decide"), ("run", loop.device, "run")),
        *(
            ("load", loop.device.plan_buffer, "load"),
            ("draft", loop.device, "_draft_after"),
            ("send", ops.runtime, "send"),
        ),
        *(("loop settles", loop, "_read_step"), ("settle", loop.scheduler, "settle")),
        *(
            ("observe", loop.policy, "observe"),
            ("release", loop.release, "release_finished"),
            ("finish", loop, "_finish_requests"),
        ),
        *(("finish", loop.scheduler, "remove_running"), ("release", loop.scheduler, "release_pages")),
        *(("pool inserts", pool, "_insert"), ("pool adds", pool, "add"), ("pool sends", pool, "send")),
        ("meanwhile", loop.scheduler, "meanwhile"),
        *(("proposer start", proposer, "start"), ("proposer idle work", proposer, "do_idle_work")),
        *(("admit", loop.scheduler, "_admit"), ("choose drafts", loop.policy._budget, "choose")),
    ]
    for name, owner, attribute in pieces:
        if owner is not None and hasattr(owner, attribute):
            setattr(owner, attribute, clocks.timed(name, getattr(owner, attribute)))
    core.step = clocks.step(core.step)
    fetch = clocks.timed("fetch", ops.runtime.fetch)

    def fetched(tensor: Any) -> PendingCopy:
        read = fetch(tensor)
        return PendingCopy(clocks.timed(WAITS, read.read), read.is_ready)

    ops.runtime.fetch = fetched
    run = loop.device.run

    def ran(*given: Any, **named: Any) -> Any:
        clocks.queued += clocks.on
        clocks.idle += clocks.on and (not loop.pending or loop.pending[-1].read.is_ready())
        return run(*given, **named)

    loop.device.run = ran
    captured = loop.device.graphs.captured
    for key, replay in list(captured.items()):
        captured[key] = clocks.timed(f"replay {key.kind}", replay)
    Stage.__init__ = clocks.timed("new stage", Stage.__init__)  # type: ignore[method-assign]
    return clocks


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods, batch sizes and tasks."""
    engines, tasks = steps.some_of(options)
    found: dict[str, Any] = {}
    for name in options.methods:
        llm = engines[name]
        clocks = watched(llm)
        for batch, (task, prompts) in product(options.batches, tasks.items()):
            seconds, tokens = [], 0
            clocks.reset()
            for number in range(-1, options.rounds):
                salt = f"{batch} {number}"
                head.run(llm, prompts, batch, 1, salt)  # into the prefix cache
                clocks.on = number >= 0
                spent, outputs, _ = head.run(llm, prompts, batch, options.tokens, salt)
                clocks.on = False
                seconds += [spent] * (number >= 0)
                tokens = sum(map(len, outputs.values()))
            rate = round(tokens / float(np.median(seconds)))
            here = {"tok/s": rate, "python_loop_microseconds": python_us(), **clocks.figures()}
            found[f"{name}, batch {batch}, {task}"] = here
            print(f"{name}, batch {batch}, {task}: {json.dumps(here)}", flush=True)
    return found


if __name__ == "__main__":
    finish("host_time", measure(steps.parsed(what=__doc__, usual=USUAL)))
