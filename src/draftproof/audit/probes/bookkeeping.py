"""Passive test over all answers: counts, logprobs, text and finish reasons agree."""

from __future__ import annotations

from collections import Counter

from draftproof.audit.client.answer import Answer
from draftproof.audit.probes.replay import first_difference
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.stats.reported_distributions import is_end_token

TITLE = "tokens, logprobs, text, usage and finish reasons agree in every answer"
MAX_FINDINGS = 6


def run(context: Context) -> list[Result]:
    """Check all answers of the audit so far."""
    answers = [answer for answer in context.answers if answer.is_ok]
    if not answers:
        return [not_testable("agreement", TITLE, "no answers")]
    enders = end_tokens(answers)
    kinds: Counter[str] = Counter()
    findings: list[Finding] = []
    bad = 0
    for answer in answers:
        problems = dict.fromkeys(defects(answer, enders))
        bad += bool(problems)
        for problem in problems:
            kind = problem.partition(":")[0]
            kinds[kind] += 1
            if kinds[kind] == 1 and len(findings) < MAX_FINDINGS:
                findings.append(Finding(f"{answer.label}: {problem}", [call_of(answer)]))
    status = Status.VIOLATED if findings else Status.EXACT
    detail = f"{bad} of {len(answers)} answers have a defect"
    tokens = sum(answer.token_count for answer in answers)
    if placeholders := sum(p.is_placeholder for answer in answers for p in answer.positions):
        detail += f"; {placeholders:,} of {tokens:,} tokens have the logprob 0.0 and no list"
    return [Result("agreement", TITLE, status, detail, tokens=tokens, findings=findings)]


def end_tokens(answers: list[Answer]) -> set[str]:
    """Return the special tokens that ended an answer without a stop string."""
    last = [
        a.positions[-1].token
        for a in answers
        if a.positions and a.finish_reason == "stop" and not a.body.get("stop")
    ]
    return {token for token in last if token and is_end_token(token)}


def defects(answer: Answer, enders: set[str]) -> list[str]:
    """Return what does not agree inside one answer."""
    found = list(answer.problems)
    limit = answer.body.get("max_tokens")
    count = len(answer.positions)
    if isinstance(limit, int) and limit > 0 and max(count, answer.completion_tokens or 0) > limit:
        found.append(f"more tokens than max_tokens: {max(count, answer.completion_tokens or 0)} of {limit}")
    stops = answer.body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    # An end token may be counted and not shown. So may tokens of a stop string and parts of characters.
    if answer.has_logprobs and answer.completion_tokens is not None:
        hidden = answer.completion_tokens - count
        most = len(answer.text.encode(errors="replace")) - len(answer.text)
        most += max([1, *map(len, stops)]) if answer.finish_reason == "stop" else 0
        if hidden < 0 or hidden > most:
            found.append(f"usage and logprobs disagree: {answer.completion_tokens} and {count} tokens")
    first_end = next((i for i, p in enumerate(answer.positions) if p.token in enders), count - 1)
    if first_end < count - 1:
        found.append(f"tokens after the end token: {count - 1 - first_end}")
    # A server may leave the stop string in the text. Without tokens the test of the option decides.
    before_last = "".join(answer.tokens()[:-1])
    for stop in stops:
        if stop in answer.text and stop in before_last:
            found.append(f"the text holds the stop string: {stop!r}")
    if (
        answer.has_logprobs
        and not stops
        and not answer.body.get("stop_token_ids")  # a stop token is no part of the text
        and not any(p.has_bytes or is_end_token(p.token) for p in answer.positions)
    ):
        joined = "".join(answer.tokens())
        if joined.strip() != answer.text.strip() and not _is_spaced(joined, answer.text):
            found.append("text and tokens disagree: " + first_difference(joined, answer.text))
    return found


def _is_spaced(joined: str, text: str) -> bool:
    """Return whether texts differ in spaces alone, as tokenizers with a dummy prefix do."""
    return joined.replace("\u2581", "").replace(" ", "") == text.replace(" ", "")
