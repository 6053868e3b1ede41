"""Tests of the sampled distribution against the reported one."""

from __future__ import annotations

import math

from draftproof.audit.client.endpoint import Call
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.probes.token_tests import TITLES, Statistic, TokenTests
from draftproof.audit.prompts import sampling_prompt
from draftproof.audit.stats.error_rate import log_threshold

MIN_EVENTS = {
    "top1": 200,
    "ranks": 200,
    "deciles": 200,
    "reuse": 200,
    "reuse_chunks": 30,
    "drafts": 30,
    "chunks": 30,
    "repeats": 10,
}
TRUNCATION_EVENTS = 10.0  # expected tokens outside the list, none of which was sampled
FIRST_SEED = 1000


def run(context: Context) -> list[Result]:
    """Sample until a test rejects or the tokens of the plan are used."""
    if not context.dialect.top_count:
        return [not_testable(test, title, "no logprobs") for test, title in TITLES.items()]
    tests = TokenTests(context.dialect.top_count)
    start, number, calls, placeholders = context.endpoint.total_tokens, 0, [], 0
    limit = context.plan.sampling_tokens
    if context.plan.budget_tokens is not None:
        limit = max(limit, context.plan.budget_tokens - start)
    while (used := context.endpoint.total_tokens - start) < limit and not tests.rejected():
        context.on_progress("sampling", used / limit)
        pairs = max(1, context.endpoint.concurrency // 2)
        answers = context.send([call for i in range(pairs) for call in _pair(context, number + i)])
        number += pairs
        placeholders += sum(p.is_placeholder for answer in answers for p in answer.positions)
        for first, second in zip(answers[::2], answers[1::2], strict=True):
            pair = [tests.add(answer, context.prompts[answer.label]) for answer in (first, second)]
            if first.is_ok and second.is_ok:
                tests.add_pair(first, second, pair[0], pair[1])
        calls = [call_of(answer) for answer in answers[:2]]
        if context.endpoint.total_tokens - start == used:
            break  # no answer has any token
    return _results(tests, calls, placeholders)


def _pair(context: Context, number: int) -> list[Call]:
    """Return two requests for one prompt with different seeds: streams where there are any.

    The first request of every other pair is a whole answer.
    """
    prompt, length = sampling_prompt(number), context.plan.answer_tokens
    seed, stream = FIRST_SEED + 2 * number, context.dialect.stream
    first_stream = stream if number // 2 % 2 else {}  # prompts alternate too
    return [
        context.call(f"sampling {number}a", prompt, length, seed=seed, **first_stream),
        context.call(f"sampling {number}b", prompt, length, seed=seed + 1, **stream),
    ]


def _results(tests: TokenTests, calls: list[Call], placeholders: int) -> list[Result]:
    """Return a result for each test."""
    found = {statistic.test: statistic for statistic in tests.statistics()}
    results = []
    for test, title in TITLES.items():
        statistic = found.get(test)
        if statistic is None or (statistic.events < MIN_EVENTS[test] and not statistic.is_rejected):
            results.append(not_testable(test, title, _why_not(test, statistic)))
            continue
        status = Status.VIOLATED if statistic.is_rejected else Status.CONSISTENT
        result = Result(
            test,
            title,
            status,
            _detail(tests, statistic),
            tokens=statistic.events,
            e_value=statistic.e_value,
            threshold=math.exp(log_threshold(test)),
            p_value=statistic.p_value,
            smallest_bias=statistic.smallest_bias,
        )
        if statistic.is_rejected:
            hint = _hint(tests, placeholders)
            text = f"sampled tokens do not follow the reported probabilities ({test}); {hint}"
            result.findings.append(Finding(text, calls))
        results.append(result)
    return results


def _why_not(test: str, statistic: Statistic | None) -> str:
    """Return why a test has too few events."""
    if test in ("chunks", "reuse_chunks") and statistic is None:
        return "stream events have one token each"
    if test in ("ranks", "deciles") and statistic is None:
        return "fewer than three logprobs for a position"
    return f"{statistic.events if statistic else 0} events are too few"


def _detail(tests: TokenTests, statistic: Statistic) -> str:
    """Return the figures of one test in words."""
    text = f"{statistic.events:,} events"
    if statistic.test == "ranks":
        category = tests.category("ranks")
        text += f", top-1 {category.observed[0]:.0f} of {category.expected[0]:.0f} expected"
        text += f", not listed {category.observed[-1]:.0f} of {category.expected[-1]:.0f}"
    if statistic.smallest_bias is not None:
        text += f", a bias of {100 * statistic.smallest_bias:.1f} points would be found"
    return text


def _hint(tests: TokenTests, placeholders: int) -> str:
    """Return the simplest explanation of a rejection that the counts allow."""
    if placeholders:
        return (
            f"{placeholders:,} tokens have no logprobs: if these are the accepted drafts alone, the others "
            "are a selection, which explains the rejection"
        )
    category = tests.category("ranks")
    if category.expected[-1] >= TRUNCATION_EVENTS and category.observed[-1] == 0:
        return (
            "no token outside the list was ever sampled, although "
            f"{category.expected[-1]:.0f} were expected: top_k, top_p or min_p may be on by default"
        )
    return "compare with speculation switched off before speculation is named as the cause"
