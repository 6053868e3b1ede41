"""Comparison of two endpoints: same prompts and seeds."""

from __future__ import annotations

from draftproof.audit.client.answer import Answer
from draftproof.audit.probes.replay import compared
from draftproof.audit.probes.rescoring import LARGE_NATS, LARGE_SHARE, MIN_LARGE
from draftproof.audit.probes.result import Context, Result, Status
from draftproof.audit.prompts import sampling_prompt

GREEDY = "both endpoints return the same output at temperature 0"
SEEDED = "both endpoints return the same output for the same seed"
FIRST_SEED = 9000


def run(context: Context) -> list[Result]:
    """Send the same requests to both endpoints. No second endpoint: no results."""
    if context.other is None or context.other_dialect is None:
        return []
    results = []
    for test, title, temperature in (("against_greedy", GREEDY, 0.0), ("against_seeded", SEEDED, 1.0)):
        first: list[Answer] = []
        second: list[Answer] = []
        for i in range(2 * context.plan.replayed_prompts):
            label, prompt = f"{test} {i}", sampling_prompt(i)
            options = {"temperature": temperature, "seed": FIRST_SEED + i}
            first.append(context.one(context.call(label, prompt, context.plan.replayed_tokens, **options)))
            call = context.other_dialect.call(label, prompt, context.plan.replayed_tokens, **options)
            second.append(context.other.send(call))
        result = compared(test, title, first, second)
        _add_logprobs(result, first, second)
        results.append(result)
    return results


def _add_logprobs(result: Result, first: list[Answer], second: list[Answer]) -> None:
    """Compare the logprobs of the common tokens; a large difference is another distribution."""
    values = []
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.positions, b.positions, strict=False):
            if x.token != y.token:
                break
            if not (x.is_placeholder or y.is_placeholder):
                values.append(abs(x.logprob - y.logprob))
    if not values:
        return
    result.detail += f", logprobs differ by up to {max(values):.2g} nats over {len(values)} common tokens"
    large = sum(value > LARGE_NATS for value in values)
    if large >= MIN_LARGE and large > LARGE_SHARE * len(values):
        result.status = Status.VIOLATED
