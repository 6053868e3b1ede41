"""A hybrid beside its members without a clock: the engine's own choices, its time by a table of prices.

    python bench/hybrid_replay.py --prompts spec_bench.jsonl [--machine cpu,h200,eight] [--count 4]
                                  [--tokens 96]

The model runs, on the CPU, one request at a time (`eight`: as many), and what it says decides what stands;
but what the engine believes that steps and drafts take, and what is added up, are milliseconds of this table,
roughly as they were measured. So it says what the policy is worth where a clock would say what else the
machine did. For a GPU steps overlap and the model is asked or not before a step, as there, and what that
costs is learned from the steps, which are seen with noise: at start it was timed too cheap. For a CPU it is
asked behind the step. Every task was asked before, with half as many tokens, which is not counted.
Ratios are to the best other side of each task. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import head
import numpy as np
from common.measure import finish

from draftproof import LLM
from draftproof.engine.drafting import draft_gate
from draftproof.engine.drafting.step_cost import RowCosts

CHEAP = 0.5  # of what drafts take, as it was timed at start on a GPU
NOISE = 0.05


@dataclass(frozen=True)
class Machine:
    """Milliseconds."""

    steps: dict[int, float]  # by rows
    drafts: float  # of all rounds of a head
    keeps: float  # of a head that is not asked
    idle: float  # of all rounds of a head if they are for nobody
    ahead: bool  # steps are queued ahead, and padded
    batch: int = 1

    @property
    def costs(self) -> RowCosts:
        return RowCosts(self.steps, between=not self.ahead, learns=False)


MACHINES = {
    "cpu": Machine({1: 13.2, 5: 14.0, 16: 16.2}, 4.8, 0.45, 4.8, ahead=False),
    "h200": Machine({1: 0.463, 8: 0.524, 16: 0.56}, 0.165, 0.006, 0.056, ahead=True),
    "eight": Machine(
        {1: 0.463, 2: 0.472, 4: 0.487, 8: 0.524, 16: 0.56, 24: 0.578, 32: 0.597, 48: 0.634},
        *(0.242, 0.018, 0.242),  # it is not looked at who would lose
        ahead=True,
        batch=8,
    ),
}


class Meter:
    """Of one engine: what its steps take by the table, and which of them had the model asked."""

    def __init__(self, llm: LLM, machine: Machine, k: int) -> None:
        self.machine, self.k, loop = machine, k, llm.engine.loop
        self.drafting, self.scheduler = loop.device.drafting, loop.scheduler
        self.clock = self.spent = self.steps = self.rounds = 0.0
        each = {machine.batch: machine.drafts} if self.drafting.runs_every_step else {}
        self._draw = np.random.default_rng(5)
        self._took: dict[int, float] = {}  # by what ran, until it is read
        if machine.ahead:
            each = {requests: CHEAP * drafts for requests, drafts in each.items()}
            loop.pacing.read, self.drafting.asked_for = self.tell, self.asked_for
        rounds = {requests: drafts / k for requests, drafts in each.items()}
        dear = RowCosts(machine.steps, not machine.ahead, learns=machine.ahead, asking=each, rounds=rounds)
        sunk = loop.scheduler.drafts_before_plan
        loop.scheduler.budgets.costs = machine.costs if sunk else dear
        self.weighs = llm.engine.loop.proposer is not None and llm.engine.loop.proposer.model_source >= 0
        if machine.ahead and not self.weighs:
            loop.asking = None  # a head alone is asked by the budgets there
        if loop.asking is not None:
            loop.asking.priced, loop.asking._ahead = True, machine.ahead
        if self.weighs:
            self._unbeaten = self.drafting.proposer._unbeaten
            self.drafting.proposer._unbeaten = self.unbeaten
        self.idle = False
        self._run, loop.device.run = loop.device.run, self.run

    def unbeaten(self, *given: Any) -> Any:
        budget = self._unbeaten(*given)
        self.idle = not bool(budget.any())
        return budget

    def asked_for(self, planned: Any, budget: Any) -> tuple[int, int]:
        rounds = self._asked(planned, budget)
        return (len(planned.slots), self.k - rounds) if rounds else (0, 0)

    def _asked(self, planned: Any, budget: Any) -> int:
        drafting = self.drafting
        if not self.machine.ahead:
            return min(int(budget.max(initial=0)), drafting.rounds) if drafting.asks else 0
        rounds = min(int(budget.max(initial=0)), drafting.most) if drafting.asks else 0
        return int(drafting.captured(len(planned.slots), rounds, planned.has_prompts))

    def run(self, planned: Any, budget: Any, *more: Any) -> Any:
        self.idle = False
        ran = self._run(planned, budget, *more)
        drafts = 0.0
        if self.drafting.runs_every_step:
            asked = self._asked(planned, budget)
            each = self.machine.idle if self.idle else self.machine.drafts
            drafts = self.machine.keeps + each * asked / self.k
            self.rounds += asked
        self.drafting.took = drafts
        if not planned.has_prompts:
            took = self.machine.costs.of(planned.num_rows) + drafts
            self.clock, self.spent, self.steps = self.clock + took, self.spent + took, self.steps + 1
            self._took[id(ran)] = took
        return ran

    def tell(self, flight: Any, *_: float) -> None:
        """As the loop does, by the table instead of the clock: a step is read when its drafts are made."""
        took = self._took.pop(id(flight.ran), None)
        if took is not None:
            keys = int(self.scheduler.mirror.length[flight.planned.slots].sum())
            seen = took * (1 + NOISE * abs(self._draw.normal()))
            costs = self.scheduler.budgets.costs
            costs.observe(flight.planned.num_rows, keys, seen, flight.asked, flight.fewer)

    def read(self) -> tuple[float, float, float]:
        found, self.spent, self.steps, self.rounds = (self.spent, self.steps, self.rounds), 0.0, 0.0, 0.0
        return found


def replay(name: str, options: argparse.Namespace) -> dict[str, Any]:
    machine = MACHINES[name]
    options.seqs = batch = machine.batch
    options.batches = [batch]
    head.LLM = partial(LLM, overlap=machine.ahead)
    engines = head.Engines(options, head.read(options.prompts, options.count))
    sides = engines.some_of(options.methods, float("inf"))
    meters = {side: Meter(llm, machine, options.k) for side, llm in sides.items()}
    now = {"side": ""}
    draft_gate.time = SimpleNamespace(perf_counter=lambda: meters[now["side"]].clock)  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for task, asked in head.chosen(engines.prompts, batch, options).items():
        rates, said = {}, {}
        for side, llm in sides.items():
            now["side"] = side
            head.run(llm, asked, batch, options.tokens // 2, "before")  # learns prices, and what is usual
            head.run(llm, asked, batch, 1, "")  # into the prefix cache
            meters[side].read()
            _, answers, _ = head.run(llm, asked, batch, options.tokens, "")
            tokens, (spent, steps, rounds) = sum(map(len, answers.values())), meters[side].read()
            rates[side] = tokens / spent
            said[side] = {"over plain": round(tokens / spent / batch * machine.costs.of(batch), 3)}
            said[side] |= {"tokens a step": round(tokens / steps, 2), "rounds": round(rounds / steps, 2)}
        best = max(rate for side, rate in rates.items() if side != "hybrid")
        found[task] = {"hybrid over the best other": round(rates["hybrid"] / best, 3), **said}
        print(f"{name}, {task}: {json.dumps(found[task])}", flush=True)
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machine", type=lambda text: text.split(","), default=list(MACHINES))
    mine, rest = parser.parse_known_args(arguments)
    options = head.parsed(["--parts", "speed", "--count", "4", "--tokens", "96", *rest])
    options.machine = mine.machine
    return options


if __name__ == "__main__":
    chosen = parsed()
    finish("hybrid_replay", {name: replay(name, chosen) for name in chosen.machine})
