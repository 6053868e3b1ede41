"""`draftproof simulate`: replay recorded outputs through a proposer; table and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from draftproof.cli.engine_options import DEFAULT_SPECULATION
from draftproof.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from draftproof.simulate.replay import Costs, Outcome

# A replay verifies against the recorded tokens, always with the full number of drafts.
_REPLAY_VALUES = {"verify_strategy": "target_match", "accept_policy": "normal", "adaptive": False}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add, costs = parser.add_argument, parser.add_mutually_exclusive_group()
    text = "JSON lines: prompt_token_ids and token_ids, or prompt and text; task, cache_salt, prediction"
    add("records", type=Path, metavar="FILE", help=text)
    text = "the proposer; its number of drafts is not used (default: %(default)s)"
    add("--speculative-config", default=DEFAULT_SPECULATION, metavar="JSON", help=text)
    add("-k", default="1,2,3,4,6,8", help="numbers of drafts (default: 1,2,3,4,6,8)")
    add("--batch", type=int, default=1, help="requests per step (default: 1)")
    add("--tokenizer", metavar="MODEL", help="tokenizer for records that hold text")
    text = 'seconds of a step by its rows, such as {"1": 0.014, "8": 0.016}'
    costs.add_argument("--costs", metavar="JSON", help=text)
    costs.add_argument("--measure", metavar="MODEL", help="measure the step times of this model here")
    add("--json", type=Path, metavar="FILE", help="write the figures there too; - prints them")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Replay the records and print the figures."""
    from draftproof.simulate.records import read_records
    from draftproof.simulate.replay import replay
    from draftproof.speculative_config import SpeculativeConfig, read_speculation

    speculation = read_speculation(options.speculative_config)
    if speculation is None:
        raise RequestError("--speculative-config off: simulate compares a proposer with plain decoding")
    for key, value in _REPLAY_VALUES.items():
        if key in speculation and speculation[key] != value:
            raise RequestError(f"--speculative-config: {key} does not affect a replay: leave it out")
    config = SpeculativeConfig.parse(speculation)
    if config is None:
        raise RequestError("--speculative-config names no proposer: simulate needs one")
    lengths = _draft_counts(options.k)
    if not 1 <= options.batch <= 1024:
        raise RequestError(f"--batch must lie in 1..1024, got {options.batch}")
    tokenizer = None
    if options.tokenizer:
        from draftproof.models.load import load_config
        from draftproof.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(load_config(options.tokenizer)[1])
    records = read_records(options.records, tokenizer)
    costs = _costs(options)
    outcomes = replay(records, config, lengths, options.batch, costs)
    report = {
        "records": len(records),
        "tokens": sum(len(r.output) for r in records),
        "speculative_config": {"method": config.method, **config.options},
        "batch": options.batch,
        "costs": None if costs is None else costs.as_json(),
        "outcomes": [outcome.as_json() for outcome in outcomes],
    }
    if options.json is not None and str(options.json) == "-":
        console.print_json(json.dumps(report))
        return 0
    title = f"{config.method}, {len(records)} requests, {report['tokens']:,} tokens, batch {options.batch}"
    console.print(results_table(outcomes, title))
    by_task = task_table(outcomes)
    if by_task is not None:
        console.print(by_task)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise RequestError(f"{options.json} cannot be written: {error.strerror}") from error
    return 0


def results_table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Return one row for each number of drafts."""
    table = Table(title=title, title_justify="left", box=None)
    for head in ("k", "acceptance length", "accepted", "speed-up", "µs per step"):
        table.add_column(head, justify="right", min_width=len(head))
    table.add_column("accepted by position")  # wraps in a narrow terminal
    for outcome in outcomes:
        stats, figures = outcome.stats, outcome.as_json()
        table.add_row(
            str(outcome.k),
            f"{stats.acceptance_length:.2f}",
            f"{100 * stats.acceptance_rate:.0f} %",
            "" if outcome.speed_up is None else f"{outcome.speed_up:.2f}",
            f"{figures['proposer_us_a_step']:.0f}",
            " ".join(f"{share:.2f}" for share in figures["accepted_per_position"]),
        )
    return table


def task_table(outcomes: Sequence[Outcome]) -> Table | None:
    """Return acceptance lengths by task; None if the records name no tasks."""
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


def _draft_counts(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise RequestError(f"-k must be numbers separated by commas, got {text!r}") from error
    if any(not 1 <= k <= 64 for k in found):
        raise RequestError(f"-k must lie in 1..64, got {text!r}")
    return found


def _costs(options: argparse.Namespace) -> Costs | None:
    from draftproof.simulate.replay import Costs

    if options.measure:
        return Costs(_measured(options.measure, options.batch * (1 + max(_draft_counts(options.k)))))
    if not options.costs:
        return None
    try:
        return Costs({int(rows): float(s) for rows, s in json.loads(options.costs).items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestError(f"--costs must be seconds by rows: {error}") from error


def _measured(model: str, rows: int) -> dict[int, float]:
    """Return the step times by rows that an engine measures at start-up."""
    from draftproof.engine.sizing import sample_row_counts
    from draftproof.llm import LLM

    spec = {"method": "ngram", "num_speculative_tokens": 1}
    seqs = max(1, -(-rows // 2))
    llm = LLM(model, max_num_seqs=seqs, max_num_batched_tokens=rows, speculative_config=spec)
    try:
        cost = llm.engine.loop.policy.cost
        return {size: cost.row_seconds(size) for size in sample_row_counts(rows)}
    finally:
        llm.close()
