"""Speed of two checkouts, interleaved in one run; the last line of stdout is JSON.

    python bench/versions.py --old ../draftproof-before --prompts spec_bench.jsonl [--device cuda] [--pairs 3]
                             [--engines plain,ngram,eagle3,hybrid] [--batches 1,8,64] [--logprobs none,5]

Each engine of each checkout runs in a process of its own. Both build the same engine, then take turns of one
`generate` call with the same requests, so that a slow phase of the machine affects both. A cell is engine,
batch, task and logprobs; its ratio is the median over rounds of the new checkout's tokens per second over the
old one's, with the quartiles. Digests of tokens and logprobs are compared as well. `plain` has no proposer
configured; its rates give the last table: each engine over one without speculation.

Two processes with the same code differ by up to 2 % for as long as they live. `--pairs` repeats the rounds
with as many pairs of processes; `pairs` has the median ratio of each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from common.checkouts.checkout_process import CheckoutProcess
from common.measure import finish

ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 5},
    "hybrid": {
        "method": "hybrid",
        "num_speculative_tokens": 5,
        "proposers": [{"method": "eagle3"}, {"method": "suffix"}],
    },
}
WORKER = Path(__file__).parent / "common" / "checkouts" / "version_worker.py"


def read_tasks(path: Path | None, names: list[str]) -> dict[str, list[str]]:
    """Return the prompts of each task; `path` has lines with `task` and `turns` or `prompt`."""
    if path is None:
        from common.prompts import PASSAGES, TASKS

        copies = [f"Repeat this text word for word, twice: {text}" for text in PASSAGES]
        return {"chat": [f"{task} {text}" for text in PASSAGES for task in TASKS[:2]], "copy": copies}
    tasks: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        tasks[entry.get("task", "all")].append(entry["turns"][0] if "turns" in entry else entry["prompt"])
    return {name: prompts for name, prompts in tasks.items() if not names or name in names}


class Cell:
    """Rates and counts of both sides, by round, over all pairs of processes."""

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {"old": [], "new": []}
        self._counts: dict[str, list[tuple[int, ...]]] = {"old": [], "new": []}
        self._pair_starts: list[int] = []  # the first round of each pair
        self._num_different = 0

    def measure(
        self, sides: dict[str, CheckoutProcess], batches: list[list[list[int]]], params: dict[str, Any]
    ) -> None:
        """Measure a round for each batch, after one that is not counted."""
        for side in sides.values():
            side.call(prompts=batches[0], params=params)
        self._pair_starts.append(len(self._rates["new"]))
        for number, prompts in enumerate(batches):
            digests = set()
            for name in list(sides) if number % 2 else reversed(list(sides)):
                reply = sides[name].call(prompts=prompts, params=params)
                self._rates[name].append(reply["tokens"] / reply["seconds"])
                self._counts[name].append((reply["steps"], reply["drafts"], reply["accepted"]))
                digests.add(reply["digest"])
            self._num_different += len(digests) > 1

    def summary(self) -> dict[str, Any]:
        """Return medians of both sides, ratios with median and quartiles, and mean counts of a round.

        Counts: steps of the request with the most, drafts and accepted drafts of all requests.
        """
        rates = self._rates
        by_round = [new / old for new, old in zip(rates["new"], rates["old"], strict=True)]
        ratios, count, starts = sorted(by_round), len(by_round), [*self._pair_starts, len(by_round)]
        return {
            "old": round(statistics.median(rates["old"]), 1),
            "new": round(statistics.median(rates["new"]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(ratios[count // 4], 3), round(ratios[(3 * count) // 4], 3)],
            "pairs": [round(statistics.median(by_round[a:b]), 3) for a, b in pairwise(starts)],
            "rounds": count,
            "ratios": [round(ratio, 3) for ratio in by_round],
            "different": self._num_different,
            "steps, drafts, accepted": {
                name: [round(statistics.mean(column)) for column in zip(*rows, strict=True)]
                for name, rows in self._counts.items()
            },
        }


def draw_batches(prompts: list[list[int]], batch: int, rounds: int) -> list[list[list[int]]]:
    """Return a batch of prompts for each round, each prompt as often as any other."""
    order, draw = [], random.Random(7)
    while len(order) < batch * rounds:
        order += draw.sample(prompts, len(prompts))
    return [order[i * batch : (i + 1) * batch] for i in range(rounds)]


def main() -> None:
    """Measure all cells and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, required=True, help="the other checkout")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `task` and `turns`")
    parser.add_argument("--tasks", default="")
    parser.add_argument("--engines", default="plain,ngram,eagle3,hybrid")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--logprobs", default="none", help="numbers of logprobs, or none")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7, help="of each pair; half of them from batch 9 on")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of processes of an engine")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after this")
    parser.add_argument("--out", type=Path, help="JSON after every cell")
    options = parser.parse_args()
    batches = [int(n) for n in options.batches.split(",")]
    deadline = time.monotonic() + options.seconds
    cells: dict[str, Cell] = defaultdict(Cell)
    starts: dict[str, list[Any]] = defaultdict(list)
    tasks = read_tasks(options.prompts, [name for name in options.tasks.split(",") if name])
    ids: dict[str, list[list[int]]] = {}
    for pair, engine in product(range(options.pairs), options.engines.split(",")):
        if time.monotonic() > deadline:
            continue
        sides = {"old": CheckoutProcess(options.old, WORKER), "new": CheckoutProcess(options.new, WORKER)}
        settings = dict(
            model=options.model, device=options.device, max_num_seqs=max(batches), max_model_len=2048
        )
        settings["kv_cache_tokens"] = 2048 * max(batches)
        if ENGINES[engine] is not None:
            settings["speculative_config"] = ENGINES[engine]
        for side in sides.values():  # both at a time: a start compiles for long
            side.send(engine=settings)
        starts[engine].append({name: round(side.receive()["seconds"], 1) for name, side in sides.items()})
        for name, texts in tasks.items() if not ids else ():
            encoded = sides["new"].call(chat=texts)["ids"]
            ids[name] = [prompt for prompt in encoded if len(prompt) < 2048 - options.tokens]
        for batch, top in product(batches, options.logprobs.split(",")):
            for task in ids if batch <= 8 else ("all",):
                if time.monotonic() > deadline:
                    continue
                prompts = ids[task] if task in ids else [one for group in ids.values() for one in group]
                params = dict(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
                params |= {} if top == "none" else {"logprobs": int(top)}
                key = f"{engine}, batch {batch}, {task}" + ("" if top == "none" else f", logprobs={top}")
                rounds = options.rounds if batch <= 8 else options.rounds // 2
                drawn = draw_batches(prompts, batch, rounds * options.pairs)
                cells[key].measure(sides, drawn[pair * rounds :][:rounds], params)
                print(key, cells[key].summary(), file=sys.stderr, flush=True)
                if options.out:
                    found = {key: cell.summary() for key, cell in cells.items()}
                    options.out.write_text(json.dumps({"start_seconds": starts, "cells": found}))
        for side in sides.values():
            side.close()
    summaries = {key: cell.summary() for key, cell in cells.items()}
    over_plain: dict[str, dict[str, float]] = {"old": {}, "new": {}}
    for key, cell in summaries.items():
        engine, _, rest = key.partition(", ")
        if engine != "plain" and (plain := summaries.get(f"plain, {rest}")):
            for name, found in over_plain.items():
                found[key] = round(cell[name] / plain[name], 3)
    lowest = min((cell["ratio"] for cell in summaries.values()), default=None)
    found = {"start_seconds": starts, "cells": summaries, "over_plain": over_plain, "lowest_ratio": lowest}
    finish("versions", found)


if __name__ == "__main__":
    main()
