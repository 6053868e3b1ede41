"""Adaptive drafts against every fixed number of them, side by side; the last line of stdout is JSON.

    python bench/adaptive.py [--device cpu] [--batches 1,8,32] [--rounds 5] [--tasks mix] [--tokens 64]

A batch is always full: whoever ends makes room for the next, and the clock stops when nobody waits any more.
Copy, edit, chat and free-text prompts take turns (`mix`; or `copy`, `edit`, `chat`, `free` alone). They have
been served before, so that the prefix cache has them and what is timed is decoding. The same requests on all
sides, sides in turn, in another order each round; ratios are medians of the rounds' ratios. Bars: adaptive is
at least 0.97 of the best fixed number and 0.98 of none. Tokens are compared as well: none may differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from typing import Any

from measure import finish
from prompts import chat_prompts, copy_prompts, edit_prompts, free_prompts

from draftproof import LLM, SamplingParams
from draftproof.types import Request

K = 8
FIXED = (0, 1, 3, 5, 8)
SIDES: dict[str, Any] = {"adaptive": {"num_speculative_tokens": K, "adaptive": True}, "k=0": False} | {
    f"k={k}": {"num_speculative_tokens": k, "adaptive": False} for k in FIXED if k
}
TASKS = {"copy": copy_prompts, "edit": edit_prompts, "chat": chat_prompts, "free": free_prompts}


class Bench:
    """One engine; the sides differ by an option of their requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        most = max(options.batches)
        self.tokens = options.tokens
        self.llm = LLM(
            options.model,
            dtype="bfloat16",
            device=options.device,
            load_format=options.load_format,
            max_num_seqs=most,
            max_model_len=1024 + options.tokens,
            kv_cache_tokens=len(TASKS) * options.distinct * 512 + most * (512 + options.tokens),
            speculative_config={"method": "ngram", "num_speculative_tokens": K},
        )
        vocab = self.llm.engine.limits.vocab_size
        self.prompts = {
            task: make(options.distinct, vocab, self.llm.tokenizer) for task, make in TASKS.items()
        }

    def requests(self, task: str, count: int, first: int, side: str) -> list[Request]:
        tasks = list(TASKS) if task == "mix" else [task]
        made = []
        for i in range(first, first + count):
            prompts = self.prompts[tasks[i % len(tasks)]]
            params = SamplingParams(
                temperature=0, max_tokens=self.tokens, ignore_eos=True, speculative=SIDES[side]
            )
            ids = prompts[i // len(tasks) % len(prompts)]
            made.append(Request(id=f"{i}", prompt_token_ids=ids, params=params, seed=i))
        return made

    def run(self, requests: list[Request], batch: int) -> tuple[float, dict[str, list[int]]]:
        """Tokens a second while `batch` of them run, and what they said."""
        engine, slots = self.llm.engine, self.llm.engine.loop.slots
        held = [slots.take(requests[0]) for _ in range(slots.num_free - batch)]  # nobody else sits there
        said: dict[str, list[int]] = {request.id: [] for request in requests}
        try:
            for request in requests:
                engine.add(request)
            begin = total = counted = 0.0
            speaking: set[str] = set()
            while engine.stats().num_waiting or begin == 0.0:
                for out in engine.step():
                    total += len(out.token_ids)
                    said[out.request_id] += out.token_ids
                    if out.token_ids:
                        speaking.add(out.request_id)
                if begin == 0.0 and len(speaking) >= batch:
                    begin, counted = time.perf_counter(), total
            seconds = time.perf_counter() - begin
        finally:
            for request in requests:
                engine.abort(request.id)
            engine.step()  # what was under way
            for slot in held:
                slots.stand(slot)
        return (total - counted) / seconds, said


def differing(left: dict[str, list[int]], right: dict[str, list[int]]) -> int:
    """Tokens that both sides got to."""
    pairs = (zip(left[name], right[name], strict=False) for name in left)
    return sum(a != b for pair in pairs for a, b in pair)


def cell(bench: Bench, task: str, batch: int, options: argparse.Namespace, until: float) -> dict[str, Any]:
    count = batch * options.turns.get(batch, 3)
    for request in bench.requests(task, count, 0, "k=0"):  # into the prefix cache
        bench.llm.engine.add(request)
    while bench.llm.engine.has_work:
        bench.llm.engine.step()
    rounds: list[dict[str, float]] = []
    wrong, names = 0, list(SIDES)
    for turn in range(-1, options.rounds):  # the first is not counted: prices are learned
        if turn > 0 and time.monotonic() > until:
            break
        rates, said = {}, {}
        names = names[1:] + names[:1]
        for side in names:
            rates[side], said[side] = bench.run(bench.requests(task, count, 0, side), batch)
        wrong += sum(differing(said["k=0"], said[side]) for side in names)
        if turn >= 0:
            rounds.append(rates)
    rates = {side: statistics.median(r[side] for r in rounds) for side in SIDES}
    best = max((side for side in SIDES if side != "adaptive"), key=lambda side: rates[side])

    def ratio(side: str) -> float:
        return round(statistics.median(r["adaptive"] / r[side] for r in rounds), 4)

    spread = [r["adaptive"] / r[best] for r in rounds]
    found = {
        "tokens_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "best_fixed": best,
        "over_best": ratio(best),
        "over_none": ratio("k=0"),
        "over_best_lowest_and_highest_round": [round(min(spread), 4), round(max(spread), 4)],
        "rounds": len(rounds),
        "differing_tokens": wrong,
    }
    found["passes"] = found["over_best"] >= 0.97 and found["over_none"] >= 0.98 and not wrong
    print(f"{task} at batch {batch}: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["mix"])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=100.0, help="no new round after this, in all")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.batches = options.batches or ([1, 8, 32] if on_cpu else [1, 64, 256])
    options.tokens = options.tokens or (64 if on_cpu else 128)
    options.distinct = 16 if on_cpu else 64  # prompts of a task; more requests use them again
    options.turns = {1: 8, 8: 4} if on_cpu else {1: 8, 64: 6}  # requests for each seat; else 3
    bench = Bench(options)
    begin, cells = time.monotonic(), {}
    todo = list(product(options.tasks, options.batches))
    for n, (task, batch) in enumerate(todo):
        until = begin + options.seconds * (n + 1) / len(todo)
        cells[f"{task} {batch}"] = cell(bench, task, batch, options, until)
    passes = all(found["passes"] for found in cells.values())
    finish("adaptive", {"model": options.model, "tokens": options.tokens, "cells": cells, "passes": passes})


if __name__ == "__main__":
    main()
