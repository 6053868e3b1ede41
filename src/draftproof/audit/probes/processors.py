"""Tests of options that change the distribution: penalties, logit_bias, top_p, top_k, min_p."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from draftproof.audit.client.answer import Answer, Position
from draftproof.audit.probes.greedy import TIE_NATS
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.prompts import COPIES, sampling_prompt
from draftproof.audit.stats.reported_distributions import is_end_token

BIAS = "a token with logit_bias -100 is not sampled"
PENALTY = "frequency_penalty applies to every position"
TRUNCATED = {
    "top_p": (0.5, "tokens outside top_p are not sampled"),
    "top_k": (2, "tokens outside top_k are not sampled"),
    "min_p": (0.3, "tokens below min_p are not sampled"),
}
PENALTY_STRENGTH = 2.0
FIRST_SEED = 13_000
IGNORED_SHARE = 0.5  # of the tokens that would be outside if the option had no effect
TRUNCATED_PROMPTS = 3
FULL_MASS = 0.999


def run(context: Context) -> list[Result]:
    """Run all tests of this file."""
    if not context.dialect.top_count:
        titles = {"logit_bias": BIAS, "penalty": PENALTY, **{k: v[1] for k, v in TRUNCATED.items()}}
        return [not_testable(test, title, "no logprobs") for test, title in titles.items()]
    length = context.plan.option_tokens
    base = context.one(context.call("option plain", COPIES[2], length, temperature=0))
    results = [_logit_bias(context, base), _penalty(context, base)]
    context.on_progress("options", 0.8)
    for name, (value, title) in TRUNCATED.items():
        results.append(_truncation(context, name, value, title))
    return results


def _logit_bias(context: Context, base: Answer) -> Result:
    """Forbid the most frequent token of the greedy output."""
    ids = Counter(p.token_id for p in base.positions if p.token_id is not None)
    if not ids:
        return not_testable("logit_bias", BIAS, "the endpoint reports no token ids")
    banned = ids.most_common(1)[0][0]
    options: dict[str, Any] = {"temperature": 0, "logit_bias": {str(banned): -100}}
    answer = context.one(context.call("option logit_bias", COPIES[2], context.plan.option_tokens, **options))
    if not answer.is_ok:
        return not_testable("logit_bias", BIAS, f"refused: {answer.error}")
    count = sum(position.token_id == banned for position in answer.positions)
    detail = f"token {banned}: {ids[banned]} times without the bias, {count} with it"
    findings = [Finding(detail, [call_of(answer)])] if count else []
    status = Status.VIOLATED if count else Status.EXACT
    return Result("logit_bias", BIAS, status, detail, len(answer.positions), findings=findings)


def _penalty(context: Context, base: Answer) -> Result:
    """Find tokens that the penalty must have excluded.

    Servers count the tokens of the output alone or of the prompt too. A token is a violation only if
    another one that neither prompt nor output holds is larger by more than the penalty explains. This
    needs logprobs before penalties; the comparison with the output without penalty shows their kind.
    """
    options = {"temperature": 0, "frequency_penalty": PENALTY_STRENGTH}
    answer = context.one(context.call("option penalty", COPIES[2], context.plan.option_tokens, **options))
    if not answer.is_ok:
        return not_testable("penalty", PENALTY, f"refused: {answer.error}")
    if not _is_raw(base, answer):
        return not_testable(
            "penalty", PENALTY, "the reported logprobs include penalties, or are not comparable"
        )
    findings, counts = [], Counter[str]()
    for number, position in enumerate(answer.positions):
        seen = COPIES[2] + "".join(counts)
        unseen = [value for token, value in position.top if token.strip() and token.strip() not in seen]
        # parts of characters have equal texts and are counted apart by the server
        count = 0 if position.has_bytes else counts[position.token]
        if unseen and count and max(unseen) > position.logprob - PENALTY_STRENGTH * count + TIE_NATS:
            text = f"token {number} {position.token!r} occurred {count} times before"
            findings.append(Finding(f"{text}: its penalty is missing", [call_of(answer)]))
        counts[position.token] += 1
    status = Status.VIOLATED if findings else Status.CONSISTENT
    detail = f"{len(findings)} of {len(answer.positions)} tokens contradict the penalty"
    return Result("penalty", PENALTY, status, detail, len(answer.positions), findings=findings[:3])


def _is_raw(base: Answer, answer: Answer) -> bool:
    """Return whether logprobs are those before penalties, by the common beginning of both outputs.

    A penalty changes the difference of a token that occurred before and one that did not.
    """
    seen: set[str] = set()
    for a, b in zip(base.positions, answer.positions, strict=False):
        without, listed = dict(a.top), dict(b.top)
        common = [token for token in without if token in listed and listed[token] > -math.inf]
        old = [token for token in common if token in seen]
        new = [t for t in common if t not in seen and t.strip() and t.strip() not in COPIES[2]]
        if old and new:
            moved = (listed[old[0]] - listed[new[0]]) - (without[old[0]] - without[new[0]])
            return abs(moved) < PENALTY_STRENGTH / 2
        if a.token != b.token:
            return False
        seen.add(a.token)
    return False


def _truncation(context: Context, name: str, value: float, title: str) -> Result:
    """Sample with a truncated distribution and count tokens outside of it."""
    outside, expected, tokens, calls = 0, 0.0, 0, []
    is_outside: Callable[[Position, float], bool] = _OUTSIDE[name]
    for i in range(TRUNCATED_PROMPTS):
        options = {name: value, "seed": FIRST_SEED + i}
        call = context.call(f"option {name} {i}", sampling_prompt(i), context.plan.option_tokens, **options)
        answer = context.one(call)
        if not answer.is_ok:
            return not_testable(name, title, f"refused: {answer.error}")
        for position in answer.positions:
            if not position.top or is_end_token(position.token):
                continue
            tokens += 1
            found = is_outside(position, value)
            outside += found
            if found:
                calls.append(call)
            expected += sum(
                math.exp(entry) for token, entry in position.top
                if is_outside(Position(token, entry, position.top), value)
            )  # fmt: skip
    if not tokens:
        return not_testable(name, title, "no tokens with logprobs")
    detail = f"{outside} of {tokens} tokens are outside; {expected:.0f} without the option"
    if outside and name != "top_p" and outside >= IGNORED_SHARE * expected:
        return not_testable(name, title, f"{name} has no effect: {detail}")
    status = Status.VIOLATED if outside else Status.EXACT
    findings = [Finding(f"{name}={value}: {detail}", calls[:1])] if outside else []
    return Result(name, title, status, detail, tokens, findings=findings)


def _outside_top_p(position: Position, top_p: float) -> bool:
    """Return whether the tokens above hold `top_p` of the mass; a list with the whole mass decides nothing.

    Such a list may be renormalised over the tokens inside, and then has no tokens outside.
    """
    above = sum(math.exp(value) for _, value in position.top if value > position.logprob + TIE_NATS)
    return above >= top_p + 1e-3 and sum(math.exp(value) for _, value in position.top) < FULL_MASS


def _outside_top_k(position: Position, top_k: float) -> bool:
    """Return whether at least `top_k` tokens are more likely."""
    return sum(value > position.logprob + TIE_NATS for _, value in position.top) >= top_k


def _outside_min_p(position: Position, min_p: float) -> bool:
    """Return whether the probability is below `min_p` times the largest."""
    return position.logprob < position.top[0][1] + math.log(min_p) - TIE_NATS


_OUTSIDE: dict[str, Callable[[Position, float], bool]] = {
    "top_p": _outside_top_p,
    "top_k": _outside_top_k,
    "min_p": _outside_min_p,
}
