"""`draftproof simulate`: options, the table, and the same as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from draftproof.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from draftproof.simulate.replay import Costs, Outcome

# what a replay does: it takes what the record says, and always as many drafts as it may
_HERE = {"verify_strategy": "target_match", "accept_policy": "normal", "adaptive": False}


def add_options(parser: argparse.ArgumentParser, speculation: str) -> None:
    parser.add_argument(
        "records",
        type=Path,
        metavar="FILE",
        help="JSON lines: prompt_token_ids and token_ids, or prompt and text; task, cache_salt, prediction",
    )
    parser.add_argument(
        "--speculative-config",
        default=speculation,
        metavar="JSON",
        help=f"the proposer; its number of drafts is not used (default: {speculation})",
    )
    parser.add_argument("-k", default="1,2,3,4,6,8", help="numbers of drafts (default: 1,2,3,4,6,8)")
    parser.add_argument("--batch", type=int, default=1, help="requests side by side (default: 1)")
    parser.add_argument("--tokenizer", metavar="MODEL", help="cuts texts into tokens")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--costs", metavar="JSON", help='seconds of a step by its rows, such as {"1": 0.014, "8": 0.016}'
    )
    costs.add_argument("--measure", metavar="MODEL", help="times a model's steps here for that")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there too; - prints them"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    from draftproof.config import SpeculativeConfig, read_speculation
    from draftproof.simulate.records import read
    from draftproof.simulate.replay import replay

    wish = read_speculation(options.speculative_config)
    if wish is None:
        raise RequestError("--speculative-config off: a proposer is needed; speed-ups are over none already")
    for key, here in _HERE.items():
        if key in wish and wish[key] != here:
            raise RequestError(
                f"--speculative-config: {key} is no part of guessing, and only that is done here: drop it"
            )
    config = SpeculativeConfig.parse(wish)
    lengths = _lengths(options.k)
    if not 1 <= options.batch <= 1024:
        raise RequestError(f"--batch must lie in 1..1024, got {options.batch}")
    tokenizer = None
    if options.tokenizer:
        from draftproof.models.load import load_config
        from draftproof.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(load_config(options.tokenizer)[1])
    records = read(options.records, tokenizer)
    costs = _costs(options)
    outcomes = replay(records, config, lengths, options.batch, costs)
    told = {
        "records": len(records),
        "tokens": sum(len(r.output) for r in records),
        "speculative_config": {"method": config.method, **config.options},
        "batch": options.batch,
        "costs": None if costs is None else costs.told(),
        "outcomes": [outcome.told() for outcome in outcomes],
    }
    if options.json is not None and str(options.json) == "-":
        console.print_json(json.dumps(told))
        return 0
    title = f"{config.method}, {len(records)} requests, {told['tokens']:,} tokens, batch {options.batch}"
    console.print(table_of(outcomes, title))
    by_task = tasks_of(outcomes)
    if by_task is not None:
        console.print(by_task)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
        except OSError as error:
            raise RequestError(f"{options.json} cannot be written: {error.strerror}") from error
    return 0


def table_of(outcomes: Sequence[Outcome], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for head in ("k", "acceptance length", "accepted", "speed-up", "µs a step"):
        table.add_column(head, justify="right", min_width=len(head))
    table.add_column("stood, by place")  # in a narrow terminal this is what takes two lines
    for outcome in outcomes:
        stats, told = outcome.stats, outcome.told()
        table.add_row(
            str(outcome.k),
            f"{stats.acceptance_length:.2f}",
            f"{100 * stats.acceptance_rate:.0f} %",
            "" if outcome.speed_up is None else f"{outcome.speed_up:.2f}",
            f"{told['proposer_us_a_step']:.0f}",
            " ".join(f"{share:.2f}" for share in told["accepted_per_position"]),
        )
    return table


def tasks_of(outcomes: Sequence[Outcome]) -> Table | None:
    """Acceptance lengths by task; none if the records name no tasks."""
    tasks = [name for name in sorted(outcomes[0].tasks) if name]
    if not tasks:
        return None
    table = Table(box=None)
    table.add_column("acceptance length", no_wrap=True)
    for outcome in outcomes:
        table.add_column(f"k={outcome.k}", justify="right")
    for name in tasks:
        table.add_row(name, *(f"{o.tasks[name].acceptance_length:.2f}" for o in outcomes))
    return table


def _lengths(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise RequestError(f"-k must be numbers with commas between, got {text!r}") from error
    if any(not 1 <= k <= 64 for k in found):
        raise RequestError(f"-k must lie in 1..64, got {text!r}")
    return found


def _costs(options: argparse.Namespace) -> Costs | None:
    from draftproof.simulate.replay import Costs

    if options.measure:
        return Costs(_measured(options.measure, options.batch * (1 + max(_lengths(options.k)))))
    if not options.costs:
        return None
    try:
        return Costs({int(rows): float(s) for rows, s in json.loads(options.costs).items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestError(f"--costs must be seconds by rows: {error}") from error


def _measured(model: str, rows: int) -> dict[int, float]:
    """Step times of a model, as an engine takes them at its start."""
    from draftproof.engine.sizing import some_of
    from draftproof.llm import LLM

    spec = {"method": "ngram", "num_speculative_tokens": 1}
    seqs = max(1, -(-rows // 2))
    llm = LLM(model, max_num_seqs=seqs, max_num_batched_tokens=rows, speculative_config=spec)
    try:
        costs = llm.engine.loop.scheduler.budgets.costs
        return {size: costs.of(size) for size in some_of(rows)}
    finally:
        llm.close()
