"""Adaptive drafts without a clock: what every side of bench/adaptive.py would take by a table of step times.

    python bench/adaptive_replay.py [--distinct 16] [--tokens 64] [--load build/said.json]

What the model says is recorded once (with `--load` it is kept there and read again). Then it is known of any
n-gram draft how far it stands, and a side is so many steps of so many rows. Prices are milliseconds by rows
and by key, roughly as they follow from rates that were measured; the adaptive side knows the table of empty
steps and learns the rest from its own steps, which it sees with noise. The oracle is given the drafts that
stand and no others, as many as make the most tokens a second in their step. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from adaptive import FIXED, TASKS, K
from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.engine.drafting.budget import DraftBudgets
from draftproof.engine.drafting.step_cost import RowCosts

CPU = {1: 12.5, 8: 13.8, 16: 15.5, 24: 21, 32: 24, 48: 33, 64: 42, 96: 62, 288: 170, 512: 300}
# as bench/micro/gpu/draft_rounds.py found it at 1, 8, 48, 64, 320 and 1536 rows; between them by hand
H200 = {1: 0.46, 8: 0.51, 16: 0.53, 24: 0.56, 32: 0.6, 48: 0.62, 64: 0.76, 80: 0.82, 96: 0.88, 128: 0.96}
H200 |= {160: 1.02, 192: 1.07, 256: 1.15, 320: 1.21, 384: 1.28, 512: 1.4, 1024: 1.9, 1536: 2.25, 2048: 2.7}
H200 |= {2560: 3.2, 3072: 3.7, 4096: 4.8}
MACHINES = {"cpu": (CPU, 0.0027, False), "h200": (H200, 3e-6, True)}  # rows, a key, padded and overlapped
CELLS = (("cpu", 1, 8), ("cpu", 8, 4), ("cpu", 32, 3), ("h200", 1, 8), ("h200", 64, 6), ("h200", 256, 3))
NOISE = 0.1


def followed(text: list[int]) -> list[int]:
    """What came after the latest of the longest matches of the last 5 to 2 tokens."""
    ids = np.array(text)
    for size in range(min(5, len(ids) - 1), 1, -1):
        places = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
        found = np.flatnonzero((places == ids[-size:]).all(1))
        if len(found):
            at = int(found[-1]) + size
            return text[at : at + K]
    return []


class Said:
    """[R, T] of every request and number of tokens it has said: drafts there are, and how many stand."""

    def __init__(self, recorded: list[list[list[int]]], tokens: int) -> None:
        self.tokens = tokens
        self.prompt = np.array([len(prompt) for prompt, _ in recorded])
        self.drafts, self.stands = np.zeros((2, len(recorded), tokens + 1), np.int64)
        for r, (prompt, said) in enumerate(recorded):
            for t in range(1, tokens):
                drafts = followed(prompt + said[:t])
                stood = [a == b for a, b in zip(drafts, said[t:], strict=False)]
                self.drafts[r, t] = min(len(drafts), tokens - t - 1)
                self.stands[r, t] = (stood + [False]).index(False)


class Fixed:
    def __init__(self, k: int) -> None:
        self.k = k

    def start(self, *_: Any) -> None: ...

    pay = record = start

    def take(self, _: Any, most: np.ndarray, *__: Any) -> np.ndarray:
        return np.minimum(most, self.k)

    def fit(self, _: Any, drafts: np.ndarray, __: int) -> np.ndarray:
        return drafts

    def again(self, _: Any) -> None: ...


def rate(policy: Any, machine: str, batch: int, turns: int, said: Said, seed: int = 0) -> dict[str, float]:
    """`turns` requests for each seat; counted from the first step to the one after which nobody waits."""
    table, each, padded = MACHINES[machine]
    true, oracle, draw = RowCosts(table, between=not padded), policy is None, np.random.default_rng(seed)
    policy = policy or Fixed(K)
    who, place, asked = np.arange(batch), np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    slots, waiting, heard = np.arange(batch), batch, ()
    total = {"tokens": 0.0, "milliseconds": 0.0, "steps": 0.0, "rows": 0.0, "drafted": 0.0, "accepted": 0.0}
    for slot in slots:
        policy.start(slot, K, True)
    while True:
        decodes, requests = place > 0, who % len(said.prompt)
        have = np.where(decodes, said.drafts[requests, place], 0)
        stands = np.minimum(said.stands[requests, place], have)
        prompts = int(((said.prompt[requests] - 1) % 16 + 1)[~decodes].sum())
        keys = int((said.prompt[requests] + place).sum())
        if oracle:
            drafts = chosen(
                stands, [true.of(batch + prompts + n) + each * keys for n in range(K * batch + 1)]
            )
        elif padded:  # asked for a step ahead, found or not
            drafts = np.where(decodes, np.minimum(asked, said.tokens - place - 1), 0)
            drafts = policy.fit(slots, drafts, batch + prompts) if prompts and drafts.any() else drafts
        else:
            drafts = np.zeros_like(place)
            drafts[decodes] = policy.take(slots[decodes], have[decodes], keys)
        policy.pay(slots[decodes], drafts[decodes], int(drafts.sum()))
        accepted = np.minimum(stands, drafts)
        num_rows = int(decodes.sum() + drafts.sum()) + prompts
        took = true.of(num_rows) + each * keys
        costs = getattr(policy, "costs", None)
        if costs and not prompts:
            costs.observe(num_rows, keys, took * (1 + NOISE * abs(draw.normal())))
        place += np.where(decodes, accepted + 1, 1)
        if padded and heard:  # read after the next was queued
            policy.record(*heard)
        heard = (slots[decodes], drafts[decodes], accepted[decodes])
        if not padded:
            policy.record(*heard)
        ended = place >= said.tokens
        for name, value in zip(
            total, (accepted.sum() + batch, took, 1, num_rows, drafts.sum(), accepted.sum()), strict=True
        ):
            total[name] += float(value)
        if padded:
            given = policy.again(slots)
            asked = policy.take(slots, np.full(batch, K), keys) if given is None else given
            asked = np.where(ended, 0, asked)
        for slot in np.flatnonzero(ended):
            if waiting == batch * turns:
                return {**total, "rate": total["tokens"] / total["milliseconds"]}
            who[slot], place[slot] = waiting, 0
            waiting += 1
            policy.start(slot, K, True)
        if ended.any():
            slots = slots.copy()  # as of a scheduler, when somebody comes
            here = ~ended[heard[0]]
            heard = tuple(column[here] for column in heard)


def chosen(stands: np.ndarray, price: list[float]) -> np.ndarray:
    """Of the drafts that stand those that pay, the longest windows first; `price` by their number."""
    count = max(range(int(stands.sum()) + 1), key=lambda n: (len(stands) + n) / price[n])
    order = np.argsort(-stands, kind="stable")
    given = np.diff(np.minimum(np.cumsum(stands[order]), count), prepend=0)
    back = np.zeros_like(stands)
    back[order] = given
    return back


def cell(machine: str, batch: int, turns: int, said: Said) -> dict[str, Any]:
    table, _, padded = MACHINES[machine]
    fixed = {f"k={k}": rate(Fixed(k), machine, batch, turns, said) for k in FIXED}
    best = max(fixed, key=lambda name: fixed[name]["rate"])
    policy = DraftBudgets(batch, RowCosts(table, between=not padded))
    runs = [rate(policy, machine, batch, turns, said, seed) for seed in range(4)]
    top = fixed[best]["rate"]
    found = {
        "best_fixed": best,
        "adaptive_at_first": round(runs[0]["rate"] / top, 3),
        "adaptive": round(sum(run["rate"] for run in runs[1:]) / 3 / top, 3),
        "oracle": round(rate(None, machine, batch, turns, said)["rate"] / top, 3),
        "fixed": {name: round(run["rate"] / top, 3) for name, run in fixed.items()},
        "steps": {"adaptive": runs[-1]["steps"], best: fixed[best]["steps"]},
        "rows_a_step": {
            name: round(run["rows"] / run["steps"], 1)
            for name, run in {"adaptive": runs[-1], best: fixed[best]}.items()
        },
    }
    print(f"{machine} at batch {batch}: {found}", flush=True)
    return found


def recorded(options: argparse.Namespace) -> list[list[list[int]]]:
    if options.load and options.load.exists():
        return json.loads(options.load.read_text())  # type: ignore[no-any-return]
    llm = LLM(options.model, dtype="bfloat16", speculative_config={"method": "ngram"}, max_model_len=2048)
    vocab, count = llm.engine.limits.vocab_size, options.distinct
    lists = [make(count, vocab, llm.tokenizer) for make in TASKS.values()]
    prompts = [prompts[i] for i in range(count) for prompts in lists]
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    made = [[ids, list(a.outputs[0].token_ids)] for ids, a in zip(prompts, answers, strict=True)]
    if options.load:
        options.load.write_text(json.dumps(made))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--distinct", type=int, default=16, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()
    said = Said(recorded(options), options.tokens)
    cells = {f"{machine} {batch}": cell(machine, batch, turns, said) for machine, batch, turns in CELLS}
    finish("adaptive_replay", {"model": options.model, "tokens": options.tokens, "cells": cells})


if __name__ == "__main__":
    main()
