"""Acceptance of a draft head, and its speed against plain decoding and other proposers, task by task.

    python bench/head.py --prompts spec_bench.jsonl [--device cuda] [--head FOLDER] [--parts acceptance,speed]
                         [--batches 1,8,64,256] [--methods eagle3,ngram,suffix,hybrid] [--tokens 256]
                         [--tasks chat] [--ends natural,forced]
                         [--kind mtp --model FOLDER -k 3]

The last line of stdout is JSON. The prompts are lines with `task` and `turns` (or `prompt`), as in
Spec-Bench; the first turn is sent in the model's chat format. Without --head the bundled head is used,
or with --kind mtp the MTP layer of the model's own checkpoint.
acceptance: always K drafts (adaptive off), temperature 0 and 1, the latter with shared noise and with argmax
drafts; per task, and the mean of the tasks.
speed: temperature 0, adaptive on. A batch is kept full and its prompts are in the prefix cache, so decoding
is timed; batches up to 8 task by task. Sides take turns, ratios to plain are medians of the rounds. Rounds
have a `cache_salt` each, so a proposer that learns starts anew. Ends: outputs end where the model ends them,
or all have --tokens tokens (`ignore_eos`). No token may differ from plain. A turn during
which other processes had more than 3 % of the processors is repeated, up to --tries times. Batches share the
time that --seconds leaves after the start of the engines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.measure import finish, others_seconds, python_us

from draftproof import LLM, SamplingParams
from draftproof.errors import DraftproofError
from draftproof.models.hub import find_model
from draftproof.text.tokenizer import load_tokenizer
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, Request

BARS = {"eagle3": {"greedy": 2.3, "shared": 2.0, "shared over argmax": 0.25}, "mtp": {"greedy": 2.2}}
SPEED_BARS = {"cuda": {1: 1.5, 8: 1.3, 64: 0.98, 256: 0.98}, "cpu": {1: 1.4}}
MAX_OTHER_CPU_SHARE = 0.03  # of the processors, that other processes may have
Prompts = dict[str, list[list[int]]]  # by task
PromptCopy = tuple[list[int], int]  # a prompt and the number of its copy; copies share no cache
Outputs = dict[str, list[int]]


def read(path: Path, each: int | None) -> dict[str, list[str]]:
    """Return first turns by task, at most `each` of them."""
    if not path.is_file():
        raise SystemExit(f"{path}: no such file: give the prompts' path with --prompts")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    pairs = [
        (str(row.get("task", "all")), row["turns"][0] if "turns" in row else row["prompt"]) for row in rows
    ]
    tasks = groupby(sorted(pairs, key=lambda pair: pair[0]), key=lambda pair: pair[0])
    return {task: [text for _, text in group][:each] for task, group in tasks}


class Engines:
    """Engines by method, built on first use and kept: a start takes longer than a measurement."""

    def __init__(self, options: argparse.Namespace, texts: dict[str, list[str]]) -> None:
        self.options = options
        self.made: dict[str, LLM] = {}
        self.failed: dict[str, str] = {}
        self.prompts: Prompts = encoded(options, texts)
        self.room = options.kv_tokens or max(
            room_for(
                options, [prompts for cell in cells(options, self.prompts) for prompts in cell.values()]
            ),
            options.max_len,
        )

    def __getitem__(self, name: str) -> LLM:
        if name not in self.made:
            begin, options = time.monotonic(), self.options
            self.made[name] = LLM(
                options.model,
                device=options.device,
                dtype="bfloat16",
                max_model_len=options.max_len,
                max_num_seqs=options.seqs,
                kv_cache_tokens=self.room,
                speculative_config=speculation(options, name),
            )
            print(f"{name}: ready after {time.monotonic() - begin:.0f} s, {memory(options)}", flush=True)
        return self.made[name]

    def some_of(self, names: Sequence[str], until: float) -> dict[str, LLM]:
        """Return the engines that start before `until`; failures are recorded."""
        sides = {}
        for name in names:
            if time.monotonic() > until:
                self.failed[name] = "no time left"
                continue
            try:
                sides[name] = self[name]
            except (RuntimeError, DraftproofError) as error:
                self.failed[name] = f"{type(error).__name__}: {error}"
                print(f"{name} does not start: {self.failed[name]}", flush=True)
        return sides


def memory(options: argparse.Namespace) -> str:
    if options.device == "cpu":
        return "on the CPU"
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    return f"{total - free:.0f} of {total:.0f} GiB are used"


def room_for(options: argparse.Namespace, cells: Sequence[list[PromptCopy]]) -> int:
    """Return the tokens that an engine stores: all prompts of a cell with their outputs."""
    page = 16
    each = [5 * sum(len(ids) + options.tokens + 2 * page for ids, _ in cell) // 4 for cell in cells]
    longest = max((len(ids) for cell in cells for ids, _ in cell), default=0) + options.tokens
    acceptance = options.seqs * min(longest, options.max_len) if "acceptance" in options.parts else 0
    return max([*each, acceptance])


def speculation(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    head = {"model": options.head} if options.head else {}
    if name == "plain":
        return None
    if name == "argmax":
        drafts = {"draft_sampling": "argmax", "num_speculative_tokens": options.k}
        return {"method": options.kind, **drafts, **head}
    more: dict[str, Any] = head if name == options.kind else {}
    if name == "hybrid":
        more = {"proposers": [{"method": options.kind, **head}, {"method": "suffix"}]}
    return {"method": name, "num_speculative_tokens": options.k, **more}


def encoded(options: argparse.Namespace, texts: dict[str, list[str]]) -> Prompts:
    """Return the prompts in the model's chat format."""
    tokenizer, found = load_tokenizer(find_model(options.model)), {}
    for task, turns in texts.items():
        chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in turns]
        ids = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
        found[task] = [prompt for prompt in ids if len(prompt) <= options.max_len - options.tokens]
        if len(found[task]) < len(ids):
            print(f"{task}: {len(ids) - len(found[task])} prompts are too long and left out", flush=True)
    return found


# --- acceptance -----------------------------------------------------------------------------------------


def acceptance(options: argparse.Namespace, engines: Engines) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, side, temperature in (
        ("greedy", options.kind, 0.0),
        ("shared", options.kind, 1.0),
        ("argmax", "argmax", 1.0),
    ):
        cells = {
            task: of_task(engines[side], ids, temperature, options) for task, ids in engines.prompts.items()
        }
        mean = statistics.fmean(cell["acceptance length"] for cell in cells.values())
        found[name] = {**cells, "mean": {"acceptance length": round(mean, 3)}}
        print(f"temperature {temperature:g}, {name}: {json.dumps(found[name])}", flush=True)
    means = {name: cells["mean"]["acceptance length"] for name, cells in found.items()}
    means["shared over argmax"] = round(means["shared"] - means["argmax"], 3)
    bars = BARS[options.kind]
    passes = {name: means[name] >= bar for name, bar in bars.items()}
    return {"by task": found, "means": means, "bars": bars, "passes": passes}


def of_task(llm: LLM, prompts: list[list[int]], temperature: float, options: argparse.Namespace) -> Any:
    """Return the tokens per step with drafts; the step of a prompt has none."""
    llm.tracker.reset_stats()
    always = {"num_speculative_tokens": options.k, "adaptive": False}
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=options.tokens, speculative=always)
        for seed in range(len(prompts))
    ]
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    stats = llm.stats
    return {
        "acceptance length": round(1 + stats.num_accepted_tokens / max(1, stats.num_drafts), 3),
        "tokens of any step": round(stats.acceptance_length, 3),
        "accepted": [round(count / max(1, stats.num_drafts), 3) for count in stats.accepted_per_position],
        "tokens": stats.num_emitted_tokens,
    }


# --- speed ----------------------------------------------------------------------------------------------


def run(
    llm: LLM, prompts: Sequence[PromptCopy], batch: int, tokens: int, salt: str, ignore_eos: bool = False
) -> tuple[float, Outputs, list[int]]:
    """Return the seconds for these prompts, `batch` at a time, the outputs, and steps, drafts, accepted."""
    core, slots, results = llm.engine, llm.engine.loop.slots, []
    requests = [
        Request(
            id=f"{i}",
            prompt_token_ids=ids,
            params=SamplingParams(
                temperature=0, max_tokens=tokens, cache_salt=f"{salt} {copy}", ignore_eos=ignore_eos
            ),
            seed=i,
            eos_token_ids=tuple(core.eos_token_ids),
        )
        for i, (ids, copy) in enumerate(prompts)
    ]
    held = [slots.take(requests[0]) for _ in range(slots.num_free - batch)]  # these stay unused
    begin = time.perf_counter()
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            results.append(core.step())  # read later: that takes longer than a step
        spent = time.perf_counter() - begin
    finally:
        for slot in held:
            slots.free(slot)
    outputs: Outputs = {request.id: [] for request in requests}
    for step in results:
        for i, request in enumerate(step.requests):
            outputs[request.id] += step.tokens(i)
    columns = [NUM_DRAFT, NUM_ACCEPTED]
    counts = [step.table[:, columns].sum(0) for step in results if len(step)]
    return spent, outputs, [sum(map(len, results)), *np.sum(counts, axis=0).tolist()]


def speed(options: argparse.Namespace, engines: Engines, until: float) -> dict[str, Any]:
    sides = engines.some_of(("plain", *options.methods), until)
    found: dict[str, Any] = {"does not start": engines.failed} if engines.failed else {}
    if "plain" not in sides:
        return found
    for number, (ends, batch) in enumerate(pairs := list(product(options.ends, options.batches))):
        now, key = time.monotonic(), f"{batch}" if ends == "natural" else f"{batch}, {ends} ends"
        share, prompts = now + (until - now) / (len(pairs) - number), chosen(engines.prompts, batch, options)
        found[key] = cell(sides, prompts, batch, ends == "forced", options, share, until)
        print(f"batch {key}: {json.dumps(found[key])}", flush=True)
    return found


def chosen(prompts: Prompts, batch: int, options: argparse.Namespace) -> dict[str, list[PromptCopy]]:
    """Return the prompts of a batch size: task by task while one task fills the batch."""
    if batch <= 8:
        count = options.count or (12 if batch == 1 else 16)
        return {task: [(ids, 0) for ids in some[:count]] for task, some in prompts.items()}
    every = [ids for row in zip_longest(*prompts.values()) for ids in row if ids]  # tasks in turn
    return {"all": [(every[i % len(every)], i // len(every)) for i in range(2 * batch)]}


def cells(options: argparse.Namespace, prompts: Prompts) -> list[dict[str, list[PromptCopy]]]:
    return [chosen(prompts, batch, options) for batch in options.batches if "speed" in options.parts]


@dataclass
class Turn:
    """Figures of one task on every side."""

    seconds: dict[str, float]
    counts: dict[str, list[int]]  # steps, drafts, accepted drafts
    tokens: int
    differ: int
    others: dict[str, float]  # share of the processors that other processes had


def turn_of(
    sides: dict[str, LLM],
    names: list[str],
    prompts: list[PromptCopy],
    batch: int,
    tokens: int,
    ignore_eos: bool,
    salt: str,
    tries: int,
) -> Turn:
    seconds, counts, outputs, others = {}, {}, {}, dict.fromkeys(names, math.inf)
    for name, number in product(names, range(tries)):
        if others[name] <= MAX_OTHER_CPU_SHARE:
            continue
        mine = f"{salt} {number}"
        run(sides[name], prompts, batch, 1, mine)  # into the prefix cache
        before = others_seconds()
        spent, found, counted = run(sides[name], prompts, batch, tokens, mine, ignore_eos)
        share = max(0.0, others_seconds() - before) / spent / (os.cpu_count() or 1)
        if share < others[name]:
            seconds[name], outputs[name], counts[name], others[name] = spent, found, counted, share
    plain = outputs["plain"]
    differ = sum(found[i] != plain[i] for found in outputs.values() for i in found)
    return Turn(seconds, counts, sum(map(len, plain.values())), differ, others)


def cell(
    sides: dict[str, LLM],
    tasks: dict[str, list[PromptCopy]],
    batch: int,
    ignore_eos: bool,
    options: argparse.Namespace,
    share: float,
    until: float,
) -> Any:
    """Run rounds until `share`, at least one; a round that is incomplete at `until` does not count."""
    names, rounds, longest, differ = list(sides), [], 0.0, 0
    speeds: list[float] = []
    for number in range(-1, options.rounds):  # the first is not counted: costs are learned, graphs captured
        begin = time.monotonic()
        if begin > until or (rounds and begin + longest > share):
            break
        names = names[1:] + names[:1]
        tokens = options.tokens if number >= 0 else options.tokens // 2
        one = {}
        for task, prompts in tasks.items():
            if time.monotonic() > until:
                break
            salt = f"{batch} {number} {ignore_eos}"
            one[task] = turn_of(sides, names, prompts, batch, tokens, ignore_eos, salt, options.tries)
            differ += one[task].differ
        longest = max(longest, time.monotonic() - begin)
        if number >= 0 and len(one) == len(tasks):
            rounds.append(one)
        seconds = {task: {n: round(s, 2) for n, s in turn.seconds.items()} for task, turn in one.items()}
        speeds.append(python_us())
        print(f"batch {batch}, round {number + 1}, {speeds[-1]}: {json.dumps(seconds)}", flush=True)
    if not rounds:
        return {"differing answers": differ, "rounds": "no time left"}
    shares = [share for one in rounds for turn in one.values() for share in turn.others.values()]
    found = {"differing answers": differ, "rounds": len(rounds)}
    found["other_processes_cpu_share"] = round(statistics.fmean(shares), 3)
    found["python_loop_microseconds"] = speeds
    return with_ratios(found, rounds, list(sides), batch, options)


def with_ratios(
    found: dict[str, Any],
    rounds: list[dict[str, Turn]],
    names: list[str],
    batch: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    groups = {task: [task] for task in rounds[0]}
    if len(groups) > 1:
        groups["all"] = list(rounds[0])
    for group, tasks in groups.items():
        times = {name: [sum(one[task].seconds[name] for task in tasks) for one in rounds] for name in names}
        tokens = sum(rounds[0][task].tokens for task in tasks)
        plain = times.pop("plain")
        ratios = {
            name: round(statistics.median(p / t for p, t in zip(plain, its, strict=True)), 3)
            for name, its in times.items()
        }
        length = {
            name: round(tokens / sum(rounds[-1][task].counts[name][0] for task in tasks), 2) for name in times
        }
        rate = round(tokens / statistics.median(plain), 1)
        found[group] = {"plain tok/s": rate, "over plain": ratios, "tokens a step": length}
        singles = [its for name, its in times.items() if name != "hybrid"]
        if "hybrid" in times and singles:  # over the best of the whole run, not of each round
            best = min(singles, key=statistics.median)
            pairs = zip(best, times["hybrid"], strict=True)
            found[group]["hybrid over the best other"] = round(statistics.median(s / h for s, h in pairs), 3)
    bar = SPEED_BARS[options.device].get(batch)
    whole = found["all" if "all" in groups else next(iter(groups))]["over plain"]
    if bar and options.kind in whole:
        found["bar"], found["passes"] = bar, whole[options.kind] >= bar
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", required=True, type=Path, metavar="JSONL")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="a head's folder; default: the one shipped for the model")
    parser.add_argument("--kind", choices=tuple(BARS), default="eagle3", help="method of the head")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["acceptance", "speed"])
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--methods", type=lambda text: text.split(","), help="default: all four")
    parser.add_argument("-k", type=int, default=4, help="drafts")
    parser.add_argument("--tokens", type=int, default=256, help="of an output, at most")
    parser.add_argument("--each", type=int, help="prompts of a task, at most; default: all")
    parser.add_argument("--tasks", type=lambda text: text.split(","), help="default: all")
    parser.add_argument("--ends", type=lambda text: text.split(","), default=["natural"])
    parser.add_argument("--count", type=int, help="prompts of a task for batches up to 8; default: 12 and 16")
    parser.add_argument("--seqs", type=int, help="requests at a time while acceptance is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=1, help="of a turn, while other processes are busy")
    parser.add_argument("--max-len", type=int, default=2304)
    parser.add_argument("--kv-tokens", type=int, help="of each engine's cache; default: enough")
    parser.add_argument("--seconds", type=float, default=3600, help="in all; the rest is skipped")
    options = parser.parse_args(arguments)
    options.methods = options.methods or [options.kind, "ngram", "suffix", "hybrid"]
    options.batches = options.batches or ([1, 8, 64, 256] if options.device == "cuda" else [1])
    options.seqs = options.seqs or (64 if options.device == "cuda" else 8)
    if "speed" in options.parts:
        options.seqs = max(options.seqs, *options.batches)
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    until = time.monotonic() + options.seconds
    texts = read(options.prompts, options.each)
    texts = {task: some for task, some in texts.items() if task in (options.tasks or texts)}
    parts = {
        "acceptance": lambda engines: acceptance(options, engines),
        "speed": lambda engines: speed(options, engines, until),
    }
    if unknown := sorted(set(options.parts) - set(parts)):
        raise SystemExit(f"--parts has no {', '.join(unknown)}: {', '.join(parts)}")
    engines = Engines(options, texts)
    return {part: parts[part](engines) for part in options.parts}


if __name__ == "__main__":
    finish("head", measure(parsed()))
