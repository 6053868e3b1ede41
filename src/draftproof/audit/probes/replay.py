"""Tests with seeds: the same request again, beside neighbours, and without speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.audit.client.answer import Answer
from draftproof.audit.client.endpoint import Call
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.prompts import NEIGHBOURS, sampling_prompt

AGAIN = "the same seed gives the same output again"
BESIDE = "the same seed gives the same output beside neighbours"
SWITCHED = "the same seed gives the same output without speculation"
NO_SWITCH = "no switch known: give its fields with --without"
FIRST_SEED = 7000


def run(context: Context) -> list[Result]:
    """Replay seeded requests."""
    if not context.dialect.has_seed:
        return [
            not_testable("replay", AGAIN, "no seed"),
            not_testable("neighbours", BESIDE, "no seed"),
            not_testable("switch", SWITCHED, "no seed"),
        ]
    first = context.send(_calls(context, "alone"), width=1)
    context.on_progress("replay", 0.25)
    again = context.send(_calls(context, "again"), width=1)
    results = [compared("replay", AGAIN, first, again)]
    context.on_progress("replay", 0.5)
    results.append(_beside(context, first))
    context.on_progress("replay", 0.75)
    plain = context.plain_body or known_switch(first)
    if plain is None:
        results.append(not_testable("switch", SWITCHED, NO_SWITCH))
    else:
        other = context.send(_calls(context, "switched off", **plain), width=1)
        results.append(switched("switch", SWITCHED, first, other))
    return results


def switched(test: str, title: str, first: list[Answer], other: list[Answer]) -> Result:
    """Compare outputs with those without speculation; drafts that are still reported show no effect."""
    if any(answer.draft_tokens for answer in other):
        return not_testable(test, title, "the switch has no effect: drafts are still reported")
    return compared(test, title, first, other)


def known_switch(answers: list[Answer]) -> Mapping[str, Any] | None:
    """Return the fields that switch speculation off, where the form of an answer shows them."""
    return next((answer.switch for answer in answers if answer.switch is not None), None)


def _calls(context: Context, name: str, **options: Any) -> list[Call]:
    """Return the replayed requests: copies, where drafts are accepted, and free text."""
    plan = context.plan
    return [
        context.call(
            f"replay {name} {i}",
            sampling_prompt(i + 1),
            plan.replayed_tokens,
            **{"seed": FIRST_SEED + i, **options},
        )
        for i in range(plan.replayed_prompts)
    ]


def _beside(context: Context, first: list[Answer]) -> Result:
    """Replay the requests in the middle of many neighbours."""
    plan = context.plan
    neighbours = [
        context.call(
            f"neighbour {i}",
            NEIGHBOURS[i % len(NEIGHBOURS)],
            plan.neighbour_tokens,
            seed=FIRST_SEED + 100 + i,
        )
        for i in range(plan.neighbours)
    ]
    middle = len(neighbours) // 2
    calls = [*neighbours[:middle], *_calls(context, "beside"), *neighbours[middle:]]
    answers = context.send(calls, width=len(calls))
    beside = answers[middle : middle + len(first)]
    result = compared("neighbours", BESIDE, first, beside)
    result.detail += f", {plan.neighbours} neighbours"
    return result


def compared(test: str, title: str, first: list[Answer], second: list[Answer]) -> Result:
    """Compare answers pair by pair."""
    findings, pairs, tokens = [], 0, 0
    for a, b in zip(first, second, strict=True):
        if not (a.is_ok and b.is_ok):
            continue
        pairs += 1
        tokens += b.token_count
        if not a.same_bits(b):
            findings.append(Finding(f"{a.label} and {b.label}: {difference(a, b)}", [call_of(a), call_of(b)]))
    if not pairs:
        errors = [answer.error for answer in (*first, *second) if answer.error]
        return not_testable(test, title, errors[0] if errors else "no answers")
    status = Status.DIFFERS if findings else Status.EXACT
    detail = f"{pairs - len(findings)} of {pairs} outputs are equal"
    return Result(test, title, status, detail, tokens=tokens, findings=findings)


def difference(a: Answer, b: Answer) -> str:
    """Return where two outputs part: tokens, text, finish reason, else logprobs."""
    for number, (x, y) in enumerate(zip(a.tokens(), b.tokens(), strict=False)):
        if x != y:
            return f"token {number} is {x!r} and {y!r}"
    if len(a.positions) != len(b.positions):
        return f"the outputs have {len(a.positions)} and {len(b.positions)} tokens"
    if a.text != b.text:
        return "the texts differ: " + first_difference(a.text, b.text)
    if a.finish_reason != b.finish_reason:
        counts = f"{a.completion_tokens} and {b.completion_tokens} tokens in usage"
        return f"the finish reasons are {a.finish_reason!r} and {b.finish_reason!r}, with {counts}"
    return "only logprobs differ"


def first_difference(a: str, b: str) -> str:
    """Return the first place where two texts differ."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[at : at + 12]!r} and {b[at : at + 12]!r} at character {at}"
