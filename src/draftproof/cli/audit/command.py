"""`draftproof audit`: test whether the speculation of an endpoint is lossless."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from draftproof.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from draftproof.audit.report.verdict import Report
    from draftproof.audit.self_test import Tally

EXIT_LOSSY, EXIT_INCONCLUSIVE = 1, 3
REPORTS = {"json": "JSON", "markdown": "Markdown", "html": "HTML"}
STYLES = {
    "exact": "green",
    "consistent": "green",
    "differs": "yellow",
    "violated": "red",
    "not testable": "dim",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "url",
        nargs="?",
        metavar="URL",
        help="base URL of an OpenAI-compatible endpoint, such as http://HOST:PORT/v1",
    )
    add("--against", metavar="URL", help="a second endpoint that must return the same outputs")
    add("--model", metavar="NAME", help="name of the model (default: the first that the endpoint lists)")
    add("--against-model", metavar="NAME", help="its name at the second endpoint (default: that of --model)")
    add("--key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--suite", choices=("quick", "full"), default="quick", help="size of the audit (default: quick)")
    add("--budget", type=int, metavar="TOKENS", help="tokens of prompts and outputs together, about")
    add("--api", choices=("auto", "completions", "chat"), default="auto", help="route (default: auto)")
    add(
        "--only",
        metavar="STAGES",
        help="some of greedy,replay,rescoring,options,against,sampling (default: all)",
    )
    add("--body", metavar="JSON", help="fields that are added to every request")
    add("--without", metavar="JSON", help="fields that switch speculation off for one request")
    add("--concurrency", type=int, default=4, metavar="N", help="requests at a time (default: 4)")
    add(
        "--neighbours", type=int, default=64, metavar="N", help="requests beside a replayed one (default: 64)"
    )
    add("--rate", type=float, metavar="N", help="requests a second, at most")
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="limit of one request (default: 120)")
    add("--resume", type=Path, metavar="FILE", help="keep answers there; a stopped audit continues")
    for name, title in REPORTS.items():
        add(f"--{name}", type=Path, metavar="FILE", help=f"write the report there as {title}")
    add("--self-test", action="store_true", help="audit stub servers: power and false alarms of the audit")
    add("--repetitions", type=int, default=3, metavar="N", help="audits of each stub (default: 3)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the audit, print and write the report."""
    if options.self_test:
        return _self_test(options.repetitions, console)
    if options.url is None:
        raise RequestError("URL is missing: give the address of an endpoint, or --self-test")
    if options.concurrency < 1 or options.neighbours < 1:
        raise RequestError("--concurrency and --neighbours must be at least 1")
    for flag in ("rate", "timeout"):
        if getattr(options, flag) is not None and not getattr(options, flag) > 0:  # NaN is not
            raise RequestError(f"--{flag} must be larger than 0")
    for name in REPORTS:
        _refuse_unwritable(getattr(options, name))
    report = _audited(options, console)
    console.print(results_table(report))
    for result in report.results:
        for finding in result.findings:
            console.print(f"[red]{result.test}[/red]: ", end="")
            console.print(finding.text, markup=False)
    console.print(report.statement(), markup=False, style="bold")
    if report.violations and not any(getattr(options, name) for name in REPORTS):
        console.print("--html FILE, --markdown FILE or --json FILE writes the report.", markup=False)
    _write(options, report)
    verdict = str(report.verdict)
    return {"lossy": EXIT_LOSSY, "inconclusive": EXIT_INCONCLUSIVE}.get(verdict, 0)


def _audited(options: argparse.Namespace, console: Console) -> Report:
    """Run the audit with a progress bar."""
    from draftproof.audit.runner import audit

    key = None
    if options.key_env is not None:
        key = os.environ.get(options.key_env)
        if not key:
            raise RequestError(f"--key-env: the environment has no {options.key_env}")
    columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("start", total=1.0)

        def show(stage: str, share: float) -> None:
            progress.update(task, description=stage, completed=share)

        return audit(
            options.url,
            against=options.against,
            model=options.model,
            against_model=options.against_model,
            api=options.api,
            key=key,
            suite=options.suite,
            budget_tokens=options.budget,
            only=options.only.split(",") if options.only else None,
            body=_fields(options.body, "--body"),
            without=_fields(options.without, "--without"),
            concurrency=options.concurrency,
            neighbours=options.neighbours,
            requests_per_second=options.rate,
            timeout_seconds=options.timeout,
            resume=options.resume,
            on_progress=show,
        )


def results_table(report: Report) -> Table:
    """Return the table of all tests."""
    from draftproof.audit.report.markdown import figures, summary

    table = Table(box=None, title=f"{report.url}, {report.model}", title_justify="left")
    table.add_column("test", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("result")
    for name, value in summary(report)[2:]:
        table.add_row(name, "", value, style="dim")
    for result in report.results:
        extra = figures(result)
        text = f"{result.detail}; {extra}" if extra else result.detail
        status = str(result.status)
        table.add_row(result.test, f"[{STYLES[status]}]{status}[/]", text.replace("[", "\\["))
    return table


def _write(options: argparse.Namespace, report: Report) -> None:
    """Write the files that were requested."""
    from draftproof.audit.report.html import html
    from draftproof.audit.report.markdown import markdown

    texts = (
        (options.json, lambda: json.dumps(report.as_json(), indent=1) + "\n"),
        (options.markdown, lambda: markdown(report)),
        (options.html, lambda: html(report)),
    )
    for path, text in texts:
        if path is None:
            continue
        try:
            path.write_text(text())
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error


def _refuse_unwritable(path: Path | None) -> None:
    """Raise an error for a report that cannot be written, before any token is paid for."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise RequestError(f"{path} cannot be written: it must be a file in a folder that exists")


def _fields(text: str | None, flag: str) -> dict[str, Any] | None:
    """Return the JSON object of an option."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{flag} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{flag} must be a JSON object, got {text!r}")
    return value


def _self_test(repetitions: int, console: Console) -> int:
    """Audit the stubs and print power and false alarms."""
    from draftproof.audit.self_test import self_test

    if repetitions < 1:
        raise RequestError("--repetitions must be at least 1")
    with console.status("self-test") as status:
        tallies = self_test(repetitions, lambda name: status.update(f"self-test: {name}"))
    console.print(_tally_table(tallies))
    return 0 if all(tally.is_met for tally in tallies) else EXIT_LOSSY


def _tally_table(tallies: list[Tally]) -> Table:
    """Return one row for each stub."""
    table = Table(box=None)
    for head in ("stub", "flagged", "of", "median tokens", ""):
        table.add_column(head, justify="right" if head in ("flagged", "of", "median tokens") else "left")
    for tally in tallies:
        middle = sorted(tally.tokens)[len(tally.tokens) // 2]
        mark = "[green]as required[/]" if tally.is_met else "[red]not as required[/]"
        table.add_row(
            tally.name, str(tally.flagged), str(tally.audits), f"{middle:,}", f"{mark} {tally.title}"
        )
    return table
