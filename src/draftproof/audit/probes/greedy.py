"""Tests at temperature 0: the largest logprob, again, beside other requests, and without speculation."""

from __future__ import annotations

from typing import Any

from draftproof.audit.client.answer import Answer, Position
from draftproof.audit.client.endpoint import Call
from draftproof.audit.probes.replay import NO_SWITCH, known_switch, switched
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.prompts import COPIES, FREE

TIE_NATS = 0.01  # logprobs this close are a tie
MAX_FINDINGS = 5

LARGEST = "at temperature 0 each token has the largest reported logprob"
AGAIN = "at temperature 0 outputs are equal, alone and beside other requests"
SWITCHED = "at temperature 0 the output is the same without speculation"


def run(context: Context) -> list[Result]:
    """Send copy-friendly and free prompts alone, alone again, and all together."""
    plan = context.plan
    kinds = [prompt for pair in zip(COPIES, FREE, strict=False) for prompt in pair][: plan.greedy_prompts]
    rounds = []
    for name, width in (("alone", 1), ("again", 1), ("together", len(kinds))):
        rounds.append(context.send(_calls(context, name, kinds), width=width))
        context.on_progress("greedy", len(rounds) / 4)
    results = [_largest(context, rounds), _equal(rounds)]
    plain = context.plain_body or known_switch(rounds[0])
    if plain is None:
        return [*results, not_testable("switch_greedy", SWITCHED, NO_SWITCH)]
    other = context.send(_calls(context, "switched off", kinds, **plain), width=1)
    return [*results, switched("switch_greedy", SWITCHED, rounds[0], other)]


def _calls(context: Context, name: str, prompts: list[str], **options: Any) -> list[Call]:
    """Return a request at temperature 0 for each prompt."""
    return [
        context.call(f"greedy {name} {i}", prompt, context.plan.greedy_tokens, temperature=0, **options)
        for i, prompt in enumerate(prompts)
    ]


def gap_nats(position: Position) -> float:
    """Return how far the token's logprob is below the largest of its position."""
    return max((value for _, value in position.top), default=position.logprob) - position.logprob


def _largest(context: Context, rounds: list[list[Answer]]) -> Result:
    """Compare each token with the largest reported logprob."""
    if not context.dialect.top_count:
        return not_testable("greedy", LARGEST, "no logprobs")
    findings, tokens = [], 0
    for answer in (answer for group in rounds for answer in group):
        tokens += len(answer.positions)
        for number, position in enumerate(answer.positions):
            if gap_nats(position) > TIE_NATS:
                best = position.top[0]
                text = (
                    f"{answer.label}, token {number}: {position.token!r} at {position.logprob:.4f}, "
                    f"but {best[0]!r} at {best[1]:.4f}"
                )
                findings.append(Finding(text, [call_of(answer)]))
    if not tokens:
        return not_testable("greedy", LARGEST, "no tokens with logprobs")
    status = Status.VIOLATED if findings else Status.EXACT
    detail = f"{len(findings)} of {tokens} tokens are not the largest"
    return Result("greedy", LARGEST, status, detail, tokens=tokens, findings=findings[:MAX_FINDINGS])


def _equal(rounds: list[list[Answer]]) -> Result:
    """Compare the outputs of one prompt over the rounds."""
    findings, pairs, tokens = [], 0, 0
    for group in zip(*rounds, strict=True):
        first = group[0]
        for other in group[1:]:
            if not (first.is_ok and other.is_ok):
                continue
            pairs += 1
            tokens += other.token_count
            if not first.same_bits(other):
                what = "logprobs differ" if first.same_tokens(other) else "tokens differ"
                calls = [call_of(first), call_of(other)]
                findings.append(Finding(f"{first.label} and {other.label}: {what}", calls))
    if not pairs:
        return not_testable("greedy_repeat", AGAIN, "no answers")
    status = Status.DIFFERS if findings else Status.EXACT
    detail = f"{len(findings)} of {pairs} repeated outputs differ"
    return Result("greedy_repeat", AGAIN, status, detail, tokens=tokens, findings=findings[:MAX_FINDINGS])
