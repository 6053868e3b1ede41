"""`draftproof train`: its options, from the plans, and its phases one after the other."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from draftproof.errors import ConfigError
from draftproof.train.config import TextPlan, TrainPlan, digest_files
from draftproof.train.progress import Telling

PHASES = ("generate", "train", "eval")
CUT = 3  # exit status of a run that ran out of time and can be gone on with


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a built-in name, a folder, a .gguf file or a hub id")
    parser.add_argument("--work", required=True, type=Path, metavar="FOLDER", help="everything is kept here")
    parser.add_argument(
        "--phase",
        choices=(*PHASES, "all", "write"),
        default="all",
        help="do this one alone (default: the first three); write: the head for other engines once more",
    )
    parser.add_argument("--prompts", nargs="*", default=[], metavar="JSONL", help="prompts to be answered")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, … or auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help=f"stop about then, with exit status {CUT}; the same command again goes on",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="SECONDS",
        help="choose --steps so that all of the phase `train` takes about so long here, and say how many",
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="texts that are written side by side")
    parser.add_argument("--verifier", metavar="NAME", help="the model's name for other engines (hub id)")
    parser.add_argument("--aux-layers", metavar="I,J,K", help="layers whose rows the head is given")
    for plan, title in ((TextPlan, "text"), (TrainPlan, "training")):
        group = parser.add_argument_group(title)
        for option in fields(plan):
            if words := option.metadata.get("help"):
                name, default = "--" + option.name.replace("_", "-"), option.default
                group.add_argument(
                    name, type=type(default), default=default, help=f"{words} (default: {default})"
                )


def text_plan(options: argparse.Namespace) -> TextPlan:
    prompts = tuple(options.prompts)
    return TextPlan(
        model=options.model,
        seed=options.seed,
        prompts=prompts,
        prompts_digest=digest_files(prompts),
        **_chosen(TextPlan, options),
    )


def train_plan(options: argparse.Namespace) -> TrainPlan:
    try:
        layers = tuple(int(layer) for layer in (options.aux_layers or "").split(",") if layer)
    except ValueError as error:
        raise ConfigError(f"--aux-layers wants numbers with commas, got {options.aux_layers!r}") from error
    if options.begin and not (Path(options.begin) / "config.json").is_file():
        raise ConfigError(f"--begin {options.begin}: no head is there, which is a folder with config.json")
    if layers:
        from draftproof.models.load import load_config

        last = load_config(options.model)[0].num_layers - 1
        if not all(0 <= layer <= last for layer in layers):
            raise ConfigError(f"--aux-layers {options.aux_layers}: {options.model} has layers 0..{last}")
    if options.seconds is not None and (options.steps or not options.seconds > 0):
        raise ConfigError("--seconds is a time above 0, and chooses --steps: give one of them")
    return TrainPlan(model=options.model, seed=options.seed, aux_layers=layers, **_chosen(TrainPlan, options))


def _chosen(plan: type[TextPlan] | type[TrainPlan], options: argparse.Namespace) -> dict[str, Any]:
    return {o.name: getattr(options, o.name) for o in fields(plan) if "help" in o.metadata}


def run(options: argparse.Namespace, console: Console) -> int:
    """The exit status."""
    from draftproof.train.pipeline import Run

    stop_at = None if options.stop_after is None else time.monotonic() + options.stop_after
    wanted = PHASES if options.phase == "all" else (options.phase,)
    plan = train_plan(options)  # what is wrong with it is said before hours of text are written
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console) if console.is_terminal else None
    with bars or nullcontext():
        work = Run(options.work, telling(console, bars), options.device)
        if "generate" in wanted:
            engine = {"max_num_seqs": options.max_num_seqs}
            if not work.generate(text_plan(options), stop_at, engine):
                return CUT
        if options.phase == "write":
            work.write(plan, options.verifier)
            return 0
        if options.seconds is not None and options.phase != "generate":
            plan = replace(plan, steps=work.steps_for(plan, options.seconds))
        if "train" in wanted and not work.train(plan, stop_at, options.verifier):
            return CUT
        if "eval" in wanted:
            work.evaluate(plan, options.verifier)
    return 0


def telling(console: Console, bars: Progress | None) -> Telling:
    """Lines always; bars where somebody is looking."""

    def say(line: str) -> None:
        console.print(Text(line))

    tasks: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        if bars is not None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

    return Telling(say, show)
