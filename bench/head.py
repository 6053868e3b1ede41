"""What a draft head brings, task by task: acceptance, and speed against plain and other proposers.

    python bench/head.py --prompts spec_bench.jsonl [--device cuda] [--head FOLDER] [--parts acceptance,speed]
                         [--batches 1,8,64,256] [--methods eagle3,ngram,suffix,hybrid] [--tokens 256]

The last line of stdout is JSON. The prompts are lines with `task` and `turns` (or `prompt`), of which the
first turn is asked in the model's chat format; Spec-Bench has them. Without --head it is the shipped one.
acceptance: K drafts, always (adaptive off), temperature 0 and 1, the latter with shared noise and with argmax
drafts; per task, and the mean of the tasks.
speed: temperature 0, adaptive on. A batch is kept full, prompts are in the prefix cache, so decoding is what
is timed; batches up to 8 task by task. Sides take turns, ratios to plain are medians of the rounds. A
proposer that learns has heard nothing of earlier rounds (`cache_salt`). No token may differ from plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from measure import finish

from draftproof import LLM, SamplingParams
from draftproof.metrics import SpecStats
from draftproof.types import Request

BARS = {"greedy": 2.3, "shared": 2.0, "shared over argmax": 0.25}
SPEED_BARS = {"cuda": {1: 1.5, 8: 1.3, 64: 0.98, 256: 0.98}, "cpu": {1: 1.4}}
Prompts = dict[str, list[list[int]]]  # by task
Answers = dict[str, list[int]]


def read(path: Path, each: int | None) -> dict[str, list[str]]:
    """First turns by task, `each` of them at most."""
    if not path.is_file():
        raise SystemExit(f"{path}: no such file: give the prompts' path with --prompts")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    asked = [
        (str(row.get("task", "all")), row["turns"][0] if "turns" in row else row["prompt"]) for row in rows
    ]
    tasks = groupby(sorted(asked, key=lambda pair: pair[0]), key=lambda pair: pair[0])
    return {task: [text for _, text in pairs][:each] for task, pairs in tasks}


class Engines:
    """Built when they are first asked for, and kept: on a GPU that takes longer than what is measured."""

    def __init__(self, options: argparse.Namespace, asked: dict[str, list[str]]) -> None:
        self.options = options
        self.made: dict[str, LLM] = {}
        room = options.seqs * options.max_len
        if "speed" in options.parts:  # the prompts of every round stay in the prefix cache
            room += (options.rounds + 1) * sum(map(len, asked.values())) * 512
        self.room = min(room, options.kv_tokens or room)
        self.prompts: Prompts = encoded(self["eagle3"], asked, options.max_len - options.tokens)

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
            print(f"{name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
        return self.made[name]


def speculation(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    head = {"model": options.head} if options.head else {}
    if name == "plain":
        return None
    if name == "argmax":
        return {"method": "eagle3", "draft_sampling": "argmax", "num_speculative_tokens": options.k, **head}
    more: dict[str, Any] = {"eagle3": head}.get(name, {})
    if name == "hybrid":
        more = {"proposers": [{"method": "eagle3", **head}, {"method": "suffix"}]}
    return {"method": name, "num_speculative_tokens": options.k, **more}


def encoded(llm: LLM, asked: dict[str, list[str]], longest: int) -> Prompts:
    found: Prompts = {}
    for task, texts in asked.items():
        ids = [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
        found[task] = [prompt for prompt in ids if len(prompt) <= longest]
        if len(found[task]) < len(ids):
            print(f"{task}: {len(ids) - len(found[task])} prompts are too long and left out", flush=True)
    return found


# --- acceptance -----------------------------------------------------------------------------------------


def acceptance(options: argparse.Namespace, engines: Engines) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, side, temperature in (
        ("greedy", "eagle3", 0.0),
        ("shared", "eagle3", 1.0),
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
    passes = {name: means[name] >= bar for name, bar in BARS.items()}
    return {"by task": found, "means": means, "bars": BARS, "passes": passes}


def of_task(llm: LLM, prompts: list[list[int]], temperature: float, options: argparse.Namespace) -> Any:
    """Tokens a step that had drafts; the step of the prompt has none."""
    llm.jobs.stats = SpecStats()
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
        "stood": [round(count / max(1, stats.num_drafts), 3) for count in stats.accepted_per_position],
        "tokens": stats.num_emitted_tokens,
    }


# --- speed ----------------------------------------------------------------------------------------------


def run(llm: LLM, prompts: Sequence[list[int]], batch: int, tokens: int, salt: str) -> tuple[float, Answers]:
    """Seconds for these prompts, `batch` at a time, and what was said."""
    core, slots = llm.engine, llm.engine.loop.slots
    params = SamplingParams(temperature=0, max_tokens=tokens, cache_salt=salt)
    requests = [
        Request(id=f"{i}", prompt_token_ids=ids, params=params, seed=i) for i, ids in enumerate(prompts)
    ]
    held = [slots.take(requests[0]) for _ in range(slots.num_free - batch)]  # nobody else sits there
    said: Answers = {request.id: [] for request in requests}
    begin = time.perf_counter()
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            for out in core.step():
                said[out.request_id] += out.token_ids
        return time.perf_counter() - begin, said
    finally:
        for slot in held:
            slots.stand(slot)


def speed(options: argparse.Namespace, engines: Engines, until: float) -> dict[str, Any]:
    sides = {name: engines[name] for name in ("plain", *options.methods)}
    found: dict[str, Any] = {}
    for batch in options.batches:
        if time.monotonic() > until:
            found[f"{batch}"] = "no time left"
            continue
        found[f"{batch}"] = cell(sides, engines.prompts, batch, options, until)
        print(f"batch {batch}: {json.dumps(found[str(batch)])}", flush=True)
    return found


def chosen(prompts: Prompts, batch: int, options: argparse.Namespace) -> Prompts:
    """What a batch is measured on: task by task as long as a task fills it for a while."""
    if batch <= 8:
        count = options.count or (4 if batch == 1 else 16)
        return {task: ids[:count] for task, ids in prompts.items()}
    every = [ids for row in zip(*prompts.values(), strict=False) for ids in row]  # tasks in turn
    return {"all": (every * (1 + 2 * batch // len(every)))[: 2 * batch]}


def cell(
    sides: dict[str, LLM], prompts: Prompts, batch: int, options: argparse.Namespace, until: float
) -> Any:
    cells, names, differ = chosen(prompts, batch, options), list(sides), 0
    seconds: dict[str, dict[str, list[float]]] = {task: {name: [] for name in names} for task in cells}
    tokens = dict.fromkeys(cells, 0)
    for turn in range(-1, options.rounds):  # the first is not counted: prices are learned, kernels compiled
        if turn > 0 and time.monotonic() > until:
            break
        names = names[1:] + names[:1]
        for task, ids in cells.items():
            said: dict[str, Answers] = {}
            for name in names:
                salt = f"{batch} {turn}"
                run(sides[name], ids, batch, 1, salt)  # into the prefix cache
                spent, said[name] = run(sides[name], ids, batch, options.tokens, salt)
                if turn >= 0:
                    seconds[task][name].append(spent)
            differ += sum(answers != said["plain"] for answers in said.values())
            tokens[task] = sum(map(len, said["plain"].values()))
    rounds = range(len(seconds[next(iter(cells))]["plain"]))
    whole = {name: [sum(seconds[task][name][r] for task in cells) for r in rounds] for name in sides}
    every = dict(seconds)
    if len(cells) > 1:
        every["all"], tokens["all"] = whole, sum(tokens.values())
    found: dict[str, Any] = {"differing answers": differ, "rounds": len(rounds)}
    for task, times in every.items():
        plain = times["plain"]
        ratios = {
            name: round(statistics.median(p / t for p, t in zip(plain, times[name], strict=True)), 3)
            for name in times
            if name != "plain"
        }
        rate = round(tokens[task] / statistics.median(plain), 1)
        found[task] = {"plain tok/s": rate, "over plain": ratios}
        singles = [ratio for name, ratio in ratios.items() if name != "hybrid"]
        if "hybrid" in ratios and singles:
            found[task]["hybrid over the best other"] = round(ratios["hybrid"] / max(singles), 3)
    bar = SPEED_BARS[options.device].get(batch)
    if bar and "eagle3" in found["all"]["over plain"]:
        found["bar"], found["passes"] = bar, found["all"]["over plain"]["eagle3"] >= bar
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", required=True, type=Path, metavar="JSONL")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="a head's folder; default: the one shipped for the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["acceptance", "speed"])
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["eagle3", "ngram", "suffix", "hybrid"]
    )
    parser.add_argument("-k", type=int, default=4, help="drafts")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--each", type=int, help="prompts of a task, at most; default: all")
    parser.add_argument("--count", type=int, help="prompts of a task for batches up to 8; default: 4 and 16")
    parser.add_argument("--seqs", type=int, help="answers at a time while acceptance is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-len", type=int, default=2304)
    parser.add_argument("--kv-tokens", type=int, help="of each engine's cache; default: enough")
    parser.add_argument("--seconds", type=float, default=3600, help="stop measuring speed about then")
    options = parser.parse_args()
    options.batches = options.batches or ([1, 8, 64, 256] if options.device == "cuda" else [1])
    options.seqs = options.seqs or (64 if options.device == "cuda" else 8)
    if "speed" in options.parts:
        options.seqs = max(options.seqs, *options.batches)
    until = time.monotonic() + options.seconds
    asked = read(options.prompts, options.each)
    parts = {
        "acceptance": lambda engines: acceptance(options, engines),
        "speed": lambda engines: speed(options, engines, until),
    }
    if unknown := sorted(set(options.parts) - set(parts)):
        raise SystemExit(f"--parts has no {', '.join(unknown)}: {', '.join(parts)}")
    engines = Engines(options, asked)
    finish("head", {part: parts[part](engines) for part in options.parts})


if __name__ == "__main__":
    main()
