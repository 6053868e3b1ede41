"""`draftproof train`: options from the training plans, phases of a run."""

from __future__ import annotations

import argparse
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftproof.errors import ConfigError
from draftproof.frontend.progress import progress_bar
from draftproof.train.config import TextPlan, TrainPlan, digest_files
from draftproof.train.progress import ProgressReporter

PHASES = ("generate", "train", "eval")
STOPPED_EXIT_STATUS = 3  # the time limit was reached; the same command resumes the run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("model", help="a built-in name, a folder, a .gguf file or a hub id")
    text = "folder of the run: texts, checkpoints, head"
    add("--work", required=True, type=Path, metavar="FOLDER", help=text)
    text = "run one phase (default: generate, train, eval); write: export the head again"
    add("--phase", choices=(*PHASES, "all", "write"), default="all", help=text)
    add("--prompts", nargs="*", default=[], metavar="JSONL", help="files of prompts")
    add("--device", default="auto", help="cpu, cuda, cuda:1, … or auto")
    add("--seed", type=int, default=0)
    text = f"time limit: exit status {STOPPED_EXIT_STATUS}; the same command resumes the run"
    add("--stop-after", type=float, metavar="SECONDS", help=text)
    text = "choose --steps so that the phase `train` takes about this long on this machine"
    add("--seconds", type=float, metavar="SECONDS", help=text)
    add("--max-num-seqs", type=int, default=256, help="texts generated in one batch")
    add("--verifier", metavar="NAME", help="name of the target for other engines (hub id)")
    add("--aux-layers", metavar="I,J,K", help="target layers whose hidden states the head receives")
    for plan, title in ((TextPlan, "text"), (TrainPlan, "training")):
        group = parser.add_argument_group(title)
        for option in fields(plan):
            if "help" in option.metadata:
                name, default = "--" + option.name.replace("_", "-"), option.default
                text = f"{option.metadata['help']} (default: {default})"
                group.add_argument(name, type=type(default), default=default, help=text)
    parser.set_defaults(run=run)


def text_plan(options: argparse.Namespace) -> TextPlan:
    """Return the plan of the text."""
    prompts = tuple(options.prompts)
    return TextPlan(
        model=options.model,
        seed=options.seed,
        prompts=prompts,
        prompts_digest=digest_files(prompts),
        **_chosen(TextPlan, options),
    )


def train_plan(options: argparse.Namespace) -> TrainPlan:
    """Return the plan of the training; raise ConfigError for wrong options."""
    try:
        layers = tuple(int(layer) for layer in (options.aux_layers or "").split(",") if layer)
    except ValueError as error:
        text = f"--aux-layers must be numbers separated by commas, got {options.aux_layers!r}"
        raise ConfigError(text) from error
    if options.begin and not (Path(options.begin) / "config.json").is_file():
        raise ConfigError(f"--begin {options.begin}: not the folder of a head (no config.json)")
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
    """Run the phases; return the exit status."""
    from draftproof.train.pipeline import Run

    stop_at = None if options.stop_after is None else time.monotonic() + options.stop_after
    wanted = PHASES if options.phase == "all" else (options.phase,)
    plan = train_plan(options)  # refuses wrong options before hours of text are generated
    with progress_bar(console) as show:
        reporter = ProgressReporter(lambda line: console.print(Text(line)), show)
        work = Run(options.work, reporter, options.device)
        if "generate" in wanted:
            engine = {"max_num_seqs": options.max_num_seqs}
            if not work.generate(text_plan(options), stop_at, engine):
                return STOPPED_EXIT_STATUS
        if options.phase == "write":
            work.write(plan, options.verifier)
            return 0
        if options.seconds is not None and options.phase != "generate":
            plan = replace(plan, steps=work.steps_for(plan, options.seconds))
        if "train" in wanted and not work.train(plan, stop_at, options.verifier):
            return STOPPED_EXIT_STATUS
        if "eval" in wanted:
            work.evaluate(plan, options.verifier)
    return 0
