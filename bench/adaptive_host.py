"""The sides of bench/adaptive.py with all of the host's work and a pretended H200; the last line is JSON.

    python bench/adaptive_host.py [--batches 64,256] [--windows 8] [--slower 2] [--load build/said.json]

What the model says was recorded by bench/adaptive_replay.py (`--load`), so it is known of any draft if it
stands. The engine's own loop serves it, newcomers and all, on a device whose steps take what a table says, on
a clock that adds the host's thread time, `--slower` times, and the time it had to wait. What the driver's
calls cost is not in it: that is why the host is taken to be slower than it is here. `host` is the least of
the windows, milliseconds a step: a busy machine disturbs it least. `expected` is made of that: tokens a step
over what the slower of host and device takes, adaptive over each side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from adaptive import SIDES, TASKS, Bench, K, Side
from adaptive_replay import H200, MACHINES, Said
from common.fake_device import Pretence
from common.measure import finish
from host import CONFIG

from draftproof import LLM
from draftproof.engine import loop
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.ops import PendingCopy

KEY = MACHINES["h200"][1]  # milliseconds
APART = 0.05  # milliseconds that a step with prompts takes longer: it is not one graph


class Timed(Pretence):
    """It takes its time, by a clock of its own, and knows what requests will say."""

    def __init__(self, engine: Any, said: Said, slower: float) -> None:
        super().__init__(engine, 0.0)
        self.said, self.slower = said, slower
        self.table = StepCost({rows: ms / 1e3 for rows, ms in H200.items()})
        cost = StepCost({rows: ms / 1e3 for rows, ms in H200.items()})
        engine.loop.policy.set_cost(cost, adaptive=True)
        self.waited = self.free = self.busy = 0.0  # how long it was waited for, when it is free, all its work
        self._fetched, self.ops.runtime.fetch = self.ops.runtime.fetch, self._fetch

    def clock(self) -> float:
        return self.slower * (time.thread_time() - self.spent) + self.waited

    def _fetch(self, tensor: torch.Tensor) -> PendingCopy:
        read, ready = self._fetched(tensor), self.free

        def wait() -> torch.Tensor:
            self.waited += max(0.0, ready - self.clock())
            return read()

        return PendingCopy(wait, lambda: ready <= self.clock())

    def _remember(self, planned: Any, *rest: Any) -> Any:
        begin, rows = self.clock(), self.ops.runtime.bucket(planned.num_rows)
        ran = super()._remember(planned, *rest)
        keys = int(self._length[planned.slots].sum())
        took = self.table.row_seconds(rows) + (KEY * keys + APART * planned.has_prompts) / 1e3
        self.free, self.busy = max(self.free, begin) + took, self.busy + took
        return ran

    def _guessed(self, planned: Any) -> tuple[np.ndarray, np.ndarray]:
        names = [request.id.split() for request in planned.requests]
        who = np.array([int(at) * len(TASKS) + list(TASKS).index(task) for task, at, *_ in names])
        prompts = np.array([len(request.prompt_token_ids) for request in planned.requests])
        place = np.clip(self._length[planned.slots] - prompts, 0, self.said.tokens)
        found = np.minimum(self.said.drafts[who, place], planned.drafts)
        return found, np.minimum(self.said.stands[who, place], found)


def built(recorded: list[Any], tokens: int, most: int, slower: float) -> tuple[Bench, Timed]:
    with tempfile.TemporaryDirectory() as folder:
        config = CONFIG | {"vocab_size": 1 + max(max(ids + said) for ids, said in recorded)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder,
            load_format="dummy",
            device="cpu",
            max_num_seqs=most,
            max_num_batched_tokens=4096,
            max_model_len=1024 + tokens,
            kv_cache_tokens=len(recorded) * 512 + most * (512 + tokens),
            overlap=True,
            warm_up=False,
            speculative_config={"method": "ngram", "num_speculative_tokens": K},
        )
    device = Timed(llm.engine, Said(recorded, tokens + 8), slower)
    loop.time = SimpleNamespace(perf_counter=device.clock)  # type: ignore[assignment]
    prompts = {task: [ids for ids, _ in recorded[i :: len(TASKS)]] for i, task in enumerate(TASKS)}
    return Bench(llm, prompts, tokens, device.clock), device


def cell(bench: Bench, device: Timed, batch: int, windows: int) -> dict[str, Any]:
    sides = {name: Side(bench, name, "mix", batch) for name in SIDES}
    host: dict[str, float] = {}
    work = {name: (0.0, 0) for name in sides}
    rates: list[dict[str, float]] = []
    for window in range(-1, windows):  # the first is not counted
        rates.append({})
        for name, side in sides.items():
            before, busy = (side.tokens, side.seconds, side.steps, side.waited), device.busy
            side.turn(64 * batch)
            tokens, seconds, steps, waited = (
                now - was
                for now, was in zip((side.tokens, side.seconds, side.steps, side.waited), before, strict=True)
            )
            rates[-1][name] = tokens / seconds
            if window >= 0:
                host[name] = min(host.get(name, 1e9), 1e3 * (seconds - waited) / steps)
                work[name] = work[name][0] + 1e3 * (device.busy - busy), work[name][1] + steps
    takes = {name: max(host[name], spent / steps) for name, (spent, steps) in work.items()}
    expected = {name: side.told()["tokens"] / takes[name] for name, side in sides.items()}
    found = {
        "host": {name: round(ms, 3) for name, ms in host.items()},
        "device": {name: round(spent / steps, 3) for name, (spent, steps) in work.items()},
        "a_step": {name: side.told() for name, side in sides.items()},
        "expected": {name: round(expected["adaptive"] / rate, 3) for name, rate in expected.items()},
        "adaptive_over": {
            name: round(statistics.median(w["adaptive"] / w[name] for w in rates[1:]), 3) for name in sides
        },
    }
    for side in sides.values():
        side.leave()
    print(f"batch {batch}: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[64, 256])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--slower", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--load", type=Path, default=Path("build/said.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorded = json.loads(options.load.read_text())
    bench, device = built(recorded, options.tokens, max(options.batches) * len(SIDES), options.slower)
    cells = {str(batch): cell(bench, device, batch, options.windows) for batch in options.batches}
    finish("adaptive_host", {"slower": options.slower, "tokens": options.tokens, "cells": cells})


if __name__ == "__main__":
    main()
