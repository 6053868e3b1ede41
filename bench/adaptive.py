"""Adaptive drafts against every fixed number of them, side by side; the last line of stdout is JSON.

    python bench/adaptive.py [--device cpu] [--batches 1,8,32] [--tasks mix] [--tokens 64] [--seconds 100]

Every side has a scheduler of its own on one engine, whose batch is always full. All sides serve the same
requests in the same order. They take turns of equal numbers of tokens (`turn_sizes`), fractions of a second
each, so a slow minute of the machine affects all of them alike. In a window every side serves as many tokens.
Copy, edit, chat and free-text prompts alternate (`mix`; or `copy`, `edit`, `chat`, `free` alone). The prefix
cache holds all prompts, so decoding is timed.

A ratio is the median over windows of adaptive's tokens a second over a fixed number's in the same window,
with its 90 % confidence interval (of fewer than five windows: their range). Sides below
MIN_SHARE_OF_BEST of the best fixed number are dropped after MIN_WINDOWS windows. Bars: adaptive is at least
0.97 of every fixed number and 0.98 of none. Tokens are compared as well: none may differ.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from math import comb
from typing import Any

import torch
from common.measure import finish
from common.prompts import chat_prompts, copy_prompts, edit_prompts, free_prompts

from draftproof import LLM, SamplingParams
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import StepPlan
from draftproof.engine.step.step_results import StepResults
from draftproof.ops import PendingCopy
from draftproof.types import NUM_DRAFT, NUM_OUT, Request

K = 8
FIXED = (0, 1, 3, 5, 8)
SIDES: dict[str, Any] = {"adaptive": {"num_speculative_tokens": K, "adaptive": True}, "k=0": False} | {
    f"k={k}": {"num_speculative_tokens": k, "adaptive": False} for k in FIXED if k
}
TASKS = {"copy": copy_prompts, "edit": edit_prompts, "chat": chat_prompts, "free": free_prompts}
MIN_WINDOWS = 3  # of every side; slow sides are dropped after them
MIN_SHARE_OF_BEST = 0.85  # of the speed of the best fixed number


class SideScheduler(Scheduler):
    """Scheduler of one side. While paused, it plans no step."""

    is_paused = False

    @classmethod
    def like(cls, other: Scheduler) -> SideScheduler:
        """Return a side scheduler with the settings of another scheduler."""
        caching, sizes = other.prefix_cache.enabled, (other.page_size, other.max_rows)
        return cls(
            other.slots,
            other.pages,
            *sizes,
            copy.deepcopy(other.policy),
            caching,
            other.lookahead,
        )

    def plan(self, is_idle: bool = True, has_exact_drafts: bool = False) -> StepPlan | None:
        """Return the next step; None while paused."""
        return None if self.is_paused else super().plan(is_idle, has_exact_drafts)


class Side:
    """Scheduler and clock of one number of drafts."""

    def __init__(self, bench: Bench, name: str, task: str, batch: int) -> None:
        self.bench, self.name, self.task = bench, name, task
        self.scheduler = SideScheduler.like(bench.plain)
        self.num_requests = self.tokens = self.goal = self.steps = self.drafts = 0
        self.seconds = self.waited = 0.0
        self.outputs: dict[str, list[int]] = {}
        self._unread: list[StepResults] = []
        with bench.use_scheduler(self.scheduler):
            for i in range(batch):  # of different lengths, so that they do not end in one step
                self._add(self.bench.tokens * (i + 1) // batch)

    def _add(self, tokens: int) -> None:
        request = self.bench.request(self.task, self.num_requests, self.name, max(tokens, 2))
        self.num_requests += 1
        self.outputs[request.id] = []
        self.bench.llm.engine.add(request)

    def turn(self, tokens: int) -> None:
        """Decode `tokens` more tokens, then wait for the steps in flight."""
        engine, scheduler = self.bench.llm.engine, self.scheduler
        self.goal += tokens
        waited = self.bench.waited
        with self.bench.use_scheduler(scheduler):
            begin = self.bench.clock()
            while self.tokens < self.goal or engine.loop.pending:
                scheduler.is_paused = self.tokens >= self.goal
                results = engine.step()
                if len(results):
                    self.tokens += int(results.table[:, NUM_OUT].sum())
                    self._unread.append(results)
                    self.steps += 1
                    self.drafts += int(results.table[:, NUM_DRAFT].sum())
                for _ in results.finishes:
                    self._add(self.bench.tokens)
            scheduler.is_paused = False
            self.seconds += self.bench.clock() - begin
        self.waited += self.bench.waited - waited
        self._read()

    def _read(self) -> None:
        """Collect the outputs; called while the clock is off."""
        for results in self._unread:
            for i, request in enumerate(results.requests):
                self.outputs[request.id] += results.tokens(i)
                if i in results.finishes:
                    self.bench.compare(request.id, self.outputs.pop(request.id))
        self._unread.clear()

    def step_means(self) -> dict[str, float]:
        """Return means per step; `waited`: share of the time in which the host waited for the device."""
        steps, seconds = max(1, self.steps), max(1e-9, self.seconds)
        found = {"ms": 1e3 * seconds / steps, "drafts": self.drafts / steps, "tokens": self.tokens / steps}
        return {name: round(x, 2) for name, x in {**found, "waited": self.waited / seconds}.items()}

    def abort_all(self) -> None:
        """Abort all requests."""
        with self.bench.use_scheduler(self.scheduler):
            for name in self.outputs:
                self.bench.llm.engine.abort(name)
            self.bench.llm.engine.step()


class Bench:
    """One engine for all sides, which differ by an option of their requests."""

    def __init__(
        self,
        llm: LLM,
        prompts: dict[str, list[list[int]]],
        tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.llm, self.prompts, self.tokens, self.clock = llm, prompts, tokens, clock
        self.plain = self.llm.engine.loop.scheduler
        self.waited = 0.0  # for the device, in all
        self._fetch, self.llm.engine.ops.runtime.fetch = self.llm.engine.ops.runtime.fetch, self._timed  # type: ignore[method-assign]
        self.known: dict[str, list[int]] = {}
        self.wrong = 0
        for request in (self.request("mix", i, "k=0", 1) for i in range(sum(map(len, prompts.values())))):
            self.llm.engine.add(request)  # into the prefix cache
        while self.llm.engine.has_work:
            self.llm.engine.step()

    def request(self, task: str, i: int, side: str, tokens: int) -> Request:
        """Return request number i of a side."""
        tasks = list(TASKS) if task == "mix" else [task]
        name, prompts = tasks[i % len(tasks)], self.prompts[tasks[i % len(tasks)]]
        at = i // len(tasks) % len(prompts)
        ids, params = prompts[at], self._params(side, tokens)
        return Request(id=f"{name} {at} {side} {i}", prompt_token_ids=ids, params=params, seed=at)

    def _timed(self, tensor: torch.Tensor) -> PendingCopy:
        read = self._fetch(tensor)

        def timed() -> torch.Tensor:
            begin = self.clock()
            found = read()
            self.waited += self.clock() - begin
            return found

        return PendingCopy(timed, read.is_ready)

    @cache  # noqa: B019  # one bench lives as long as the program
    def _params(self, side: str, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculative=SIDES[side])

    def compare(self, name: str, output: list[int]) -> None:
        """Count the tokens that differ from an earlier output for the same prompt."""
        task, at, *_ = name.split()
        want = self.known.get(f"{task} {at}", [])
        self.wrong += sum(a != b for a, b in zip(output, want, strict=False))
        self.known[f"{task} {at}"] = max(output, want, key=len)

    def use_scheduler(self, scheduler: Scheduler) -> Any:
        """Return a context in which the engine uses this scheduler."""
        return SchedulerSwap(self.llm.engine.loop, scheduler)


class SchedulerSwap:
    """Context in which the engine has another scheduler. No step may be in flight at either end."""

    def __init__(self, loop: Any, scheduler: Scheduler) -> None:
        self.loop, self.scheduler = loop, scheduler

    def __enter__(self) -> None:
        self.before = self.loop.scheduler
        self._use(self.scheduler)

    def __exit__(self, *_: object) -> None:
        self._use(self.before)

    def _use(self, scheduler: Scheduler) -> None:
        self.loop.scheduler = self.loop.release._scheduler = scheduler
        self.loop._features = None


def build(options: argparse.Namespace) -> Bench:
    """Build the engine and its prompts."""
    most = max(options.batches) * len(SIDES)
    llm = LLM(
        options.model,
        dtype="bfloat16",
        device=options.device,
        load_format=options.load_format,
        max_num_seqs=most,
        max_num_batched_tokens=None if options.device == "cpu" else 4096,
        max_model_len=1024 + options.tokens,
        kv_cache_tokens=len(TASKS) * options.distinct * 512 + most * (512 + options.tokens),
        speculative_config={"method": "ngram", "num_speculative_tokens": K},
    )
    vocab = llm.engine.limits.vocab_size
    prompts = {task: make(options.distinct, vocab, llm.tokenizer) for task, make in TASKS.items()}
    return Bench(llm, prompts, options.tokens)


def interval(values: list[float]) -> list[float]:
    """Return the 90 % confidence interval of the median, from binomial ranks."""
    n, low, tail = len(values), 0, 0.5 ** len(values)
    while low + 1 <= (n - 1) // 2 and tail + comb(n, low + 1) * 0.5**n <= 0.05:
        low += 1
        tail += comb(n, low) * 0.5**n
    ordered = sorted(values)
    return [round(ordered[low], 4), round(ordered[n - 1 - low], 4)]


def window(sides: dict[str, Side], tokens: int, turns: int, first: int) -> dict[str, float]:
    """Return the tokens a second of each side."""
    before = {name: (side.tokens, side.seconds) for name, side in sides.items()}
    gc.collect()
    gc.disable()
    names = list(sides)
    for turn in range(first, first + turns):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            sides[name].turn(tokens)
    gc.enable()
    return {
        name: (side.tokens - before[name][0]) / (side.seconds - before[name][1])
        for name, side in sides.items()
    }


def cell(bench: Bench, task: str, batch: int, options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Measure one task at one batch size."""
    tokens, turns = options.turn_sizes.get(batch, options.turn_sizes[0])
    sides = {name: Side(bench, name, task, batch) for name in SIDES}
    all_sides = dict(sides)
    windows: list[dict[str, float]] = []
    bench.wrong, number = 0, -1
    while number < MIN_WINDOWS or time.monotonic() < until:
        rates = window(sides, tokens, turns, number * turns)
        if number >= 0:  # the first is not counted: batches fill, costs are learned
            windows.append(rates)
        number += 1
        if number == MIN_WINDOWS:
            best = max(statistics.median(w[name] for w in windows) for name in sides if name != "adaptive")
            for name in [name for name in sides if name != "adaptive"]:
                if statistics.median(w[name] for w in windows) < MIN_SHARE_OF_BEST * best:
                    sides.pop(name).abort_all()
    for side in sides.values():
        side.abort_all()
    over = {name: [w["adaptive"] / w[name] for w in windows if name in w] for name in SIDES}
    ratios = {name: round(statistics.median(values), 4) for name, values in over.items()}
    best_side = min((name for name in sides if name != "adaptive"), key=lambda name: ratios[name])
    found = {
        "tokens_per_second": {name: round(statistics.median(w[name] for w in windows), 1) for name in sides},
        "adaptive_over": ratios,
        "a_step": {name: side.step_means() for name, side in all_sides.items()},
        "best_fixed": best_side,
        "over_best": ratios[best_side],
        "over_best_90": interval(over[best_side]),
        "over_none": ratios["k=0"],
        "over_none_90": interval(over["k=0"]),
        "windows": {name: len(values) for name, values in over.items()},
        "differing_tokens": bench.wrong,
    }
    found["passes"] = ratios[best_side] >= 0.97 and ratios["k=0"] >= 0.98 and not bench.wrong
    print(f"{task} at batch {batch}: {found}", flush=True)
    return found


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["mix"])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--seconds", type=float, help="no new window after this, start and all")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.batches = options.batches or ([1, 8, 32] if on_cpu else [1, 64, 256])
    options.tokens = options.tokens or (64 if on_cpu else 128)
    options.seconds = options.seconds or (300.0 if on_cpu else 95.0)
    options.distinct = 8 if on_cpu else 32  # prompts of a task; more requests use them again
    # tokens of a turn, and turns of a window; 0: of other batches
    sizes = {1: (16, 16), 8: (64, 8), 0: (256, 4)} if on_cpu else {1: (512, 2), 0: (128 * 128, 2)}
    options.turn_sizes = sizes | {64: sizes[0] if on_cpu else (64 * 128, 2)}
    end, cells = time.monotonic() + options.seconds, {}
    bench = build(options)
    todo = list(product(options.tasks, options.batches))
    for n, (task, batch) in enumerate(todo):
        now = time.monotonic()
        until = now + (end - now) / (len(todo) - n)
        cells[f"{task} {batch}"] = cell(bench, task, batch, options, until)
    passes = all(found["passes"] for found in cells.values())
    finish("adaptive", {"model": options.model, "tokens": options.tokens, "cells": cells, "passes": passes})


if __name__ == "__main__":
    main()
