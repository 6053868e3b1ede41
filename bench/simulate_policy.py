"""Draft policy without a clock: step times come from a table, so the load of the machine does not matter.

    python bench/simulate_policy.py adaptive [--distinct 16] [--tokens 64] [--load build/outputs.json]
    python bench/simulate_policy.py closed --prompts spec_bench.jsonl [--distinct 16] [--tokens 128]
    python bench/simulate_policy.py hybrid --prompts spec_bench.jsonl [--machine cpu,h200,eight] [--count 4]

adaptive: n-gram drafts. Outputs of the model are recorded once (--load keeps them), so the acceptance of any
draft is known. A side is a number of steps of known rows. The adaptive side has the table of empty steps and
learns the cost of context from its own steps, observed with noise. The oracle verifies accepted drafts only.
closed: n-gram drafts in batches without arrivals, with step times of an H200 (common/closed_batch_replay.py).
hybrid: the engine runs on the CPU, and its own policy decides by the table. On `h200` and `eight` the rounds
of the model are decided before a step, on `cpu` behind it. Each task runs once before it counts.
The last line of stdout is JSON with command, hardware and commit.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import head
import numpy as np
from adaptive import FIXED, TASKS, K
from common.closed_batch_replay import BATCHES, closed_batches
from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.engine.drafting.budget import DraftBudget
from draftproof.engine.drafting.policy import DraftRun
from draftproof.engine.drafting.step_cost import StepCost

CPU = {1: 12.5, 8: 13.8, 16: 15.5, 24: 21, 32: 24, 48: 33, 64: 42, 96: 62, 288: 170, 512: 300}
# as measured by bench/micro/gpu/draft_rounds.py at 1, 8, 48, 64, 320 and 1536 rows;
# values between these rows are interpolated by hand
H200 = {1: 0.46, 8: 0.51, 16: 0.53, 24: 0.56, 32: 0.6, 48: 0.62, 64: 0.76, 80: 0.82, 96: 0.88, 128: 0.96}
H200 |= {160: 1.02, 192: 1.07, 256: 1.15, 320: 1.21, 384: 1.28, 512: 1.4, 1024: 1.9, 1536: 2.25, 2048: 2.7}
H200 |= {2560: 3.2, 3072: 3.7, 4096: 4.8}
MACHINES = {"cpu": (CPU, 0.0027, False), "h200": (H200, 3e-6, True)}  # rows, a key, padded and overlapped
CELLS = (("cpu", 1, 8), ("cpu", 8, 4), ("cpu", 32, 3), ("h200", 1, 8), ("h200", 64, 6), ("h200", 256, 3))
NOISE = 0.1
MAX_LEN = 2048  # tokens of a recorded request


def followed(text: list[int]) -> list[int]:
    """Return the tokens behind the latest of the longest matches of the last 5 to 2 tokens."""
    ids = np.array(text)
    for size in range(min(5, len(ids) - 1), 1, -1):
        places = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
        found = np.flatnonzero((places == ids[-size:]).all(1))
        if len(found):
            at = int(found[-1]) + size
            return text[at : at + K]
    return []


class RecordedDrafts:
    """Drafts [R, T] and accepted drafts [R, T] of every request after every number of output tokens."""

    def __init__(self, recorded: list[list[list[int]]], tokens: int) -> None:
        self.tokens = tokens
        self.prompt = np.array([len(prompt) for prompt, _ in recorded])
        self.drafts, self.accepted = np.zeros((2, len(recorded), tokens + 1), np.int64)
        for r, (prompt, output) in enumerate(recorded):
            for t in range(1, tokens):
                drafts = followed(prompt + output[:t])
                is_equal = [a == b for a, b in zip(drafts, output[t:], strict=False)]
                self.drafts[r, t] = min(len(drafts), tokens - t - 1)
                self.accepted[r, t] = (is_equal + [False]).index(False)


class Fixed:
    """Draft budget with a fixed number of drafts."""

    def __init__(self, k: int) -> None:
        self.k = k

    def start(self, *_: Any) -> None: ...

    record = start

    def choose(self, _: Any, most: np.ndarray, *__: Any) -> np.ndarray:
        return np.minimum(most, self.k)

    def refit(self, _: Any, drafts: np.ndarray, __: int) -> np.ndarray:
        return drafts

    def held(self, _: Any) -> None: ...


def rate(
    policy: Any, machine: str, batch: int, turns: int, recorded: RecordedDrafts, seed: int = 0
) -> dict[str, float]:
    """Serve `turns` requests for each slot, up to the step after which no request waits."""
    table, each, padded = MACHINES[machine]
    true, oracle, draw = StepCost(table, interpolate=not padded), policy is None, np.random.default_rng(seed)
    policy = policy or Fixed(K)
    who, place, requested = np.arange(batch), np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    slots, waiting, results = np.arange(batch), batch, ()
    total = {"tokens": 0.0, "milliseconds": 0.0, "steps": 0.0, "rows": 0.0, "drafted": 0.0, "accepted": 0.0}
    for slot in slots:
        policy.start(slot, K, True)
    while True:
        decodes, requests = place > 0, who % len(recorded.prompt)
        have = np.where(decodes, recorded.drafts[requests, place], 0)
        acceptable = np.minimum(recorded.accepted[requests, place], have)
        prompts = int(((recorded.prompt[requests] - 1) % 16 + 1)[~decodes].sum())
        keys = int((recorded.prompt[requests] + place).sum())
        if oracle:
            rows = range(batch + prompts, batch + prompts + K * batch + 1)
            drafts = chosen(acceptable, [true.row_seconds(n) + each * keys for n in rows])
        elif padded:  # requested one step ahead, found or not
            drafts = np.where(decodes, np.minimum(requested, recorded.tokens - place - 1), 0)
            drafts = policy.refit(slots, drafts, batch + prompts) if prompts and drafts.any() else drafts
        else:
            drafts = np.zeros_like(place)
            drafts[decodes] = policy.choose(slots[decodes], have[decodes], keys)
        accepted = np.minimum(acceptable, drafts)
        num_rows = int(decodes.sum() + drafts.sum()) + prompts
        took = true.row_seconds(num_rows) + each * keys
        costs = getattr(policy, "_cost", None)
        if costs and not prompts:
            noisy = took * (1 + NOISE * abs(draw.normal()))
            costs.observe(num_rows, keys, noisy, num_drafts=int(drafts.sum()))
        place += np.where(decodes, accepted + 1, 1)
        if padded and results:  # read after the next step was queued
            policy.record(*results)
        results = (slots[decodes], drafts[decodes], accepted[decodes])
        if not padded:
            policy.record(*results)
        ended = place >= recorded.tokens
        for name, value in zip(
            total, (accepted.sum() + batch, took, 1, num_rows, drafts.sum(), accepted.sum()), strict=True
        ):
            total[name] += float(value)
        if padded:
            given = policy.held(slots)
            requested = policy.choose(slots, np.full(batch, K), keys) if given is None else given
            requested = np.where(ended, 0, requested)
        for slot in np.flatnonzero(ended):
            if waiting == batch * turns:
                return {**total, "rate": total["tokens"] / total["milliseconds"]}
            who[slot], place[slot] = waiting, 0
            waiting += 1
            policy.start(slot, K, True)
        if ended.any():
            slots = slots.copy()  # as a scheduler does when a request starts
            is_current = ~ended[results[0]]
            results = tuple(column[is_current] for column in results)


def chosen(accepted: np.ndarray, cost: list[float]) -> np.ndarray:
    """Return the number of accepted drafts with the best rate, longest windows first; `cost` by number."""
    count = max(range(int(accepted.sum()) + 1), key=lambda n: (len(accepted) + n) / cost[n])
    order = np.argsort(-accepted, kind="stable")
    given = np.diff(np.minimum(np.cumsum(accepted[order]), count), prepend=0)
    back = np.zeros_like(accepted)
    back[order] = given
    return back


def cell(machine: str, batch: int, turns: int, recorded: RecordedDrafts) -> dict[str, Any]:
    """Compare the adaptive budget with fixed ones and the oracle."""
    table, _, padded = MACHINES[machine]
    fixed = {f"k={k}": rate(Fixed(k), machine, batch, turns, recorded) for k in FIXED}
    best = max(fixed, key=lambda name: fixed[name]["rate"])
    policy = DraftBudget(batch, StepCost(table, interpolate=not padded))
    runs = [rate(policy, machine, batch, turns, recorded, seed) for seed in range(4)]
    top = fixed[best]["rate"]
    found = {
        "best_fixed": best,
        "adaptive_at_first": round(runs[0]["rate"] / top, 3),
        "adaptive": round(sum(run["rate"] for run in runs[1:]) / 3 / top, 3),
        "oracle": round(rate(None, machine, batch, turns, recorded)["rate"] / top, 3),
        "fixed": {name: round(run["rate"] / top, 3) for name, run in fixed.items()},
        "steps": {"adaptive": runs[-1]["steps"], best: fixed[best]["steps"]},
        "rows_a_step": {
            name: round(run["rows"] / run["steps"], 1)
            for name, run in {"adaptive": runs[-1], best: fixed[best]}.items()
        },
    }
    print(f"{machine} at batch {batch}: {found}", flush=True)
    return found


def record_outputs(options: argparse.Namespace) -> list[list[list[int]]]:
    """Return prompts and outputs of the model, from the file of --load if it exists."""
    if options.load and options.load.exists():
        return json.loads(options.load.read_text())  # type: ignore[no-any-return]
    llm = LLM(options.model, dtype="bfloat16", speculative_config={"method": "ngram"}, max_model_len=MAX_LEN)
    vocab, count = llm.engine.limits.vocab_size, options.distinct
    if options.prompts:
        texts = [text for texts in head.read(options.prompts, count).values() for text in texts]
        encoded = [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
        prompts = [ids for ids in encoded if len(ids) + options.tokens < MAX_LEN]
    else:
        lists = [make(count, vocab, llm.tokenizer) for make in TASKS.values()]
        prompts = [prompts[i] for i in range(count) for prompts in lists]
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    made = [[ids, list(a.outputs[0].token_ids)] for ids, a in zip(prompts, results, strict=True)]
    if options.load:
        options.load.write_text(json.dumps(made))
    return made


TIMED_DRAFT_SHARE = 0.5  # seconds of drafts as timed at start-up on a GPU, over those of the table
STEP_NOISE = 0.05


@dataclass(frozen=True)
class Machine:
    """Milliseconds of steps and drafts."""

    steps: dict[int, float]  # by rows
    drafts: float  # all rounds of a head
    storing: float  # a head that only stores KV
    overlaps: bool  # steps are queued ahead, and padded
    batch: int = 1

    @property
    def cost(self) -> StepCost:
        """Return the table as a cost model."""
        return StepCost(self.steps, interpolate=not self.overlaps, learns=False)


HYBRID_MACHINES = {
    "cpu": Machine({1: 13.2, 5: 14.0, 16: 16.2}, 4.8, 0.45, overlaps=False),
    "h200": Machine({1: 0.463, 8: 0.524, 16: 0.56}, 0.165, 0.006, overlaps=True),
    "eight": Machine(
        {1: 0.463, 2: 0.472, 4: 0.487, 8: 0.524, 16: 0.56, 24: 0.578, 32: 0.597, 48: 0.634},
        0.242,
        0.018,
        overlaps=True,
        batch=8,
    ),
}


class SimulatedClock:
    """Clock of one engine: it adds up the table's milliseconds of each step, which the policy observes."""

    def __init__(self, llm: LLM, machine: Machine, k: int) -> None:
        """Replace the cost model and the clock of the engine's policy."""
        self.machine, self.k, self.loop = machine, k, llm.engine.loop
        self.policy, self.drafting = self.loop.policy, self.loop.device.drafting
        self.clock = self.spent = self.steps = self.rounds = 0.0
        self._draw = np.random.default_rng(5)
        self._pending: list[tuple[Any, float]] = []
        drafts = {machine.batch: machine.drafts} if self.drafting.runs_behind_steps else {}
        model = self.policy._model
        if machine.overlaps and model is not None:
            self.policy._model = model = model._replace(rounds=(k + 1) // 2 if model.is_member else k)
            share = TIMED_DRAFT_SHARE * model.rounds / k
            drafts = {requests: share * seconds for requests, seconds in drafts.items()}
        learns = machine.overlaps and not self.policy.drafts_before_plan
        rounds = model.rounds if learns and model is not None else 1
        cost = StepCost(machine.steps, not machine.overlaps, learns, drafts if learns else {}, rounds)
        self.policy.set_cost(cost, adaptive=True)
        self.policy.run_ahead.asynchronous = machine.overlaps
        self.policy._round_costs._clock = lambda: self.clock
        self._run, self.loop.device.run = self.loop.device.run, self.run
        self._last_run, self.drafting.last_run = self.drafting.last_run, self.last_run
        self._observe, self.policy.observe = self.policy.observe, self.observe

    def _num_rounds(self, planned: Any, decision: Any) -> int:
        if not self.drafting.runs_behind_steps or not decision.rounds:
            return 0
        if not self.machine.overlaps:
            return min(decision.rounds, self.drafting.proposer.num_rounds_run)
        return int(self.drafting.captured_rounds(len(planned.slots), decision.rounds, planned.has_prompts))

    def run(self, planned: Any, decision: Any, *more: Any) -> Any:
        """Run a step and add up its milliseconds."""
        ran = self._run(planned, decision, *more)
        self._step = planned, self._num_rounds(planned, decision)
        drafts = 0.0
        if self.drafting.runs_behind_steps:
            drafts = self.machine.storing + self.machine.drafts * self._step[1] / self.k
        self._drafts = drafts
        if not planned.has_prompts:
            seconds = self.machine.cost.row_seconds(planned.num_rows) + drafts
            self.clock, self.spent, self.steps = self.clock + seconds, self.spent + seconds, self.steps + 1
            self.rounds += self._step[1]
            self._pending.append((planned, seconds))
        return ran

    def last_run(self, num_requests: int, decision: Any) -> DraftRun:
        """Return the draft model's run by the table."""
        rounds = self._step[1]
        return DraftRun(num_requests if rounds else 0, rounds, 0.0 if self.machine.overlaps else self._drafts)

    def observe(self, step: Any) -> Any:
        """Let the cost model observe the table's milliseconds, and the policy the results."""
        cost, self.policy.cost = self.policy.cost, StepCost.unmeasured(8)
        try:
            found = self._observe(step)
        finally:
            self.policy.cost = cost
        seconds = [each for planned, each in self._pending if planned is step.plan]
        self._pending = [pair for pair in self._pending if pair[0] is not step.plan]
        if seconds and cost.learns:
            noisy = seconds[0] * (1 + STEP_NOISE * abs(self._draw.normal()))
            plan, run = step.plan, step.draft_run
            cost.observe(plan.num_rows, step.num_keys, noisy, run.requests, plan.num_drafts, run.rounds)
        return found

    def read(self) -> tuple[float, float, float]:
        """Return milliseconds, steps and rounds since the last call."""
        found, self.spent, self.steps, self.rounds = (self.spent, self.steps, self.rounds), 0.0, 0.0, 0.0
        return found


def replay(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per millisecond of each side and task on one machine."""
    machine = HYBRID_MACHINES[name]
    options.seqs = batch = machine.batch
    options.batches = [batch]
    head.LLM = partial(LLM, overlap=machine.overlaps)
    engines = head.Engines(options, head.read(options.prompts, options.count))
    sides = engines.some_of(options.methods, float("inf"))
    clocks = {side: SimulatedClock(llm, machine, options.k) for side, llm in sides.items()}
    found: dict[str, Any] = {}
    for task, prompts in head.chosen(engines.prompts, batch, options).items():
        rates, lines = {}, {}
        for side, llm in sides.items():
            head.run(llm, prompts, batch, options.tokens // 2, "before")  # learns costs and acceptance
            head.run(llm, prompts, batch, 1, "")  # fills the prefix cache
            clocks[side].read()
            _, outputs, _ = head.run(llm, prompts, batch, options.tokens, "")
            tokens, (spent, steps, rounds) = sum(map(len, outputs.values())), clocks[side].read()
            rates[side] = tokens / spent
            over_plain = tokens / spent / batch * machine.cost.row_seconds(batch)
            lines[side] = {"over plain": round(over_plain, 3), "tokens a step": round(tokens / steps, 2)}
            lines[side]["rounds"] = round(rounds / steps, 2)
        best = max(rate for side, rate in rates.items() if side != "hybrid")
        found[task] = {"hybrid over the best other": round(rates["hybrid"] / best, 3), **lines}
        print(f"{name}, {task}: {json.dumps(found[task])}", flush=True)
    return found


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of either replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["adaptive", "closed", "hybrid"])
    parser.add_argument("--machine", type=lambda text: text.split(","), default=list(HYBRID_MACHINES))
    parser.add_argument("--distinct", type=int, default=16, help="prompts of each task")
    parser.add_argument("--load", type=Path)
    mine, rest = parser.parse_known_args(arguments)
    if mine.part == "hybrid":
        options = head.parsed(["--parts", "speed", "--count", "4", "--tokens", "96", *rest])
    else:
        simple = argparse.ArgumentParser()
        simple.add_argument("--model", default="smollm2-135m")
        simple.add_argument("--tokens", type=int, default=64)
        simple.add_argument("--prompts", type=Path)
        options = simple.parse_args(rest)
    for name, value in vars(mine).items():
        setattr(options, name, value)
    return options


def main() -> None:
    """Run one part and print its figures."""
    options = parsed()
    if options.part == "hybrid":
        finish(
            "simulate_policy", {"part": "hybrid"} | {name: replay(name, options) for name in options.machine}
        )
        return
    outputs = RecordedDrafts(record_outputs(options), options.tokens)
    if options.part == "closed":
        found: dict[str, Any] = {"batches": BATCHES, "over plain": closed_batches(outputs, K)}
    else:
        found = {
            f"{machine} {batch}": cell(machine, batch, turns, outputs) for machine, batch, turns in CELLS
        }
    described = {"part": options.part, "model": options.model, "tokens": options.tokens}
    finish("simulate_policy", described | {"cells": found})


if __name__ == "__main__":
    main()
