"""The audit of one endpoint: all tests in order, stopped early without losing what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from draftproof import __version__
from draftproof.audit.client.discovery import discover
from draftproof.audit.client.endpoint import Endpoint
from draftproof.audit.client.exchange import ExchangeFile
from draftproof.audit.probes import (
    against as against_probe,
)
from draftproof.audit.probes import (
    bookkeeping,
    cross_scoring,
    greedy,
    output_options,
    processors,
    replay,
    rescoring,
    sampling,
)
from draftproof.audit.probes.result import Context, Plan, Result
from draftproof.audit.report.verdict import Report
from draftproof.errors import ConfigError, DraftproofError, RequestError, nearest

Probe = Callable[[Context], list[Result]]

STAGES: Mapping[str, tuple[Probe, ...]] = {
    "greedy": (greedy.run,),
    "replay": (replay.run,),
    "rescoring": (rescoring.run,),
    "options": (output_options.run, processors.run),
    "against": (against_probe.run, cross_scoring.run),
    "sampling": (sampling.run,),
}
SUITES = {
    "quick": Plan(),
    "full": Plan(
        sampling_tokens=120_000,
        answer_tokens=384,
        greedy_prompts=12,
        greedy_tokens=128,
        rescored_answers=12,
        rescored_tokens=200,
        replayed_prompts=8,
        replayed_tokens=128,
        neighbour_tokens=32,
        option_tokens=48,
        cross_scored_answers=120,
    ),
}
FIXED_TOKENS = {"quick": 8_000, "full": 40_000}  # of all tests but sampling, about
SMALLEST_SAMPLING_TOKENS = 2_000


def plan_for(suite: str, budget_tokens: int | None) -> Plan:
    """Return the sizes of a suite, with the sampling test cut or extended to the budget."""
    if suite not in SUITES:
        raise RequestError(f"unknown suite {suite!r}: {nearest(suite, SUITES, 'quick or full')}")
    if budget_tokens is None:
        return SUITES[suite]
    smallest = FIXED_TOKENS[suite] + SMALLEST_SAMPLING_TOKENS
    if budget_tokens < smallest:
        raise RequestError(f"a budget of {budget_tokens} tokens is too small: {suite} needs {smallest}")
    return replace(SUITES[suite], sampling_tokens=SMALLEST_SAMPLING_TOKENS, budget_tokens=budget_tokens)


def audit(
    url: str,
    *,
    against: str | None = None,
    model: str | None = None,
    against_model: str | None = None,
    api: str = "auto",
    key: str | None = None,
    suite: str = "quick",
    budget_tokens: int | None = None,
    only: Collection[str] | None = None,
    body: Mapping[str, Any] | None = None,
    without: Mapping[str, Any] | None = None,
    concurrency: int = 4,
    neighbours: int = 64,
    requests_per_second: float | None = None,
    timeout_seconds: float = 120.0,
    resume: Path | None = None,
    plan: Plan | None = None,
    transport: httpx.BaseTransport | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Audit an OpenAI-compatible endpoint.

    `model` is the name at both endpoints, `against_model` another one at the second; default: the first that
    an endpoint lists. `only` names stages to run. `body` is added to every request. `without` holds the
    fields that switch speculation off. `resume` is a file that keeps answers, so that a stopped audit
    continues.
    """
    unknown = [name for name in only or () if name not in STAGES]
    if unknown:
        raise RequestError(f"unknown stage {unknown[0]!r}: {nearest(unknown[0], STAGES, ', '.join(STAGES))}")
    if against_model is not None and against is None:
        raise ConfigError(
            "--against-model names the model of a second endpoint: give its URL with --against too, or leave "
            "it out; --model names the model of the first"
        )
    plan = plan or replace(plan_for(suite, budget_tokens), neighbours=neighbours)
    stored = ExchangeFile(resume) if resume else None
    limits: dict[str, Any] = {
        "key": key,
        "concurrency": concurrency,
        "requests_per_second": requests_per_second,
        "timeout_seconds": timeout_seconds,
        "stored": stored,
    }
    endpoint = Endpoint(url, transport=transport, **limits)
    other = Endpoint(against, transport=transport, **limits) if against else None
    report = Report(endpoint.url, suite=suite, version=__version__)
    report.started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    started = time.monotonic()
    try:
        _run(report, endpoint, other, plan, discover_as=(model, api, body or {}), only=only, without=without,
             other_model=against_model or model, on_progress=on_progress)  # fmt: skip
    finally:
        endpoint.close()
        if other is not None:
            other.close()
        if stored is not None:
            stored.close()
    report.seconds = time.monotonic() - started
    report.generated_tokens, report.prompt_tokens = endpoint.generated_tokens, endpoint.prompt_tokens
    report.requests = endpoint.requests
    return report


def _run(
    report: Report,
    endpoint: Endpoint,
    other: Endpoint | None,
    plan: Plan,
    *,
    discover_as: tuple[str | None, str, Mapping[str, Any]],
    other_model: str | None,
    only: Collection[str] | None,
    without: Mapping[str, Any] | None,
    on_progress: Callable[[str, float], None] | None,
) -> None:
    """Run the stages and fill the report; an endpoint that stops answering ends them."""
    context: Context | None = None
    try:
        dialect = discover(endpoint, *discover_as)
        report.model, report.missing = dialect.model, dialect.missing
        context = Context(endpoint, dialect, plan, plain_body=without)
        if other is not None:
            api = "chat" if dialect.is_chat else "completions"  # the same route
            context.other, context.other_dialect = other, discover(other, other_model, api, dialect.extra)
        if on_progress is not None:
            context.on_progress = on_progress
        for name, probes in STAGES.items():
            if only is None or name in only:
                context.on_progress(name, 0.0)
                for probe in probes:
                    report.results.extend(probe(context))
    except DraftproofError as error:
        report.stop_reason = str(error)
    if context is not None:
        report.results.extend(bookkeeping.run(context))
        _add_drafts(report, context)


def _add_drafts(report: Report, context: Context) -> None:
    """Add the drafts that the endpoint reports."""
    counted = [answer for answer in context.answers if answer.draft_tokens is not None]
    if counted:
        report.draft_tokens = sum(answer.draft_tokens or 0 for answer in counted)
        report.accepted_tokens = sum(answer.accepted_tokens or 0 for answer in counted)
