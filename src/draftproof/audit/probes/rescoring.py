"""Test of reported logprobs against a second computation of the same tokens as a prompt."""

from __future__ import annotations

import math
from typing import Any

from draftproof.audit.client.answer import Answer
from draftproof.audit.client.endpoint import Call
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.prompts import sampling_prompt

TITLE = "logprobs of an answer equal those of the same tokens as a prompt"
LARGE_NATS = 1.0  # bf16 logits differ by up to about a tenth between kernels
LARGE_SHARE = 0.02
MIN_LARGE = 3
FIRST_SEED = 5000


def run(context: Context) -> list[Result]:
    """Score answers by `echo` and compare."""
    if context.dialect.is_chat or not context.dialect.top_count:
        return [not_testable("rescoring", TITLE, "needs the completions route with echo and logprobs")]
    differences: list[float] = []
    compared, skipped, worst = 0, 0, (0.0, "", list[Call]())
    for number in range(context.plan.rescored_answers):
        prompt = sampling_prompt(2 * number + 1)
        call = context.call(
            f"scored {number}", prompt, context.plan.rescored_tokens, seed=FIRST_SEED + number
        )
        answer = context.one(call)
        if not answer.positions:
            continue
        echoed = _echo(context, answer, prompt, number)
        if echoed is None:
            return [not_testable("rescoring", TITLE, "echo with logprobs is refused")]
        pairs = _aligned(answer, echoed)
        if not pairs:
            skipped += 1
            continue
        compared += 1
        found = [abs(a - b) for a, b in pairs]
        differences += found
        if max(found) > worst[0]:
            worst = (max(found), answer.label, [call_of(answer), call_of(echoed)])
    if not differences:
        return [not_testable("rescoring", TITLE, f"{skipped} answers have other tokens as a prompt")]
    return [_result(differences, skipped, worst)]


def _echo(context: Context, answer: Answer, prompt: str, number: int) -> Answer | None:
    """Return the scored text; None if the endpoint refuses it.

    Token ids are sent where the endpoint reports them, so that the tokens are the same.
    """
    ids = [position.token_id for position in answer.positions]
    text: Any = [*answer.prompt_ids, *ids] if _has_ids(answer) else prompt + answer.text
    for max_tokens in (0, 1):
        options = {"echo": True, "temperature": 0}
        call = context.dialect.call(f"echo {number} {max_tokens}", text, max_tokens, **options)
        echoed = context.endpoint.send(call)
        if echoed.is_ok and len(echoed.positions) > len(answer.positions):
            if max_tokens:
                echoed.positions.pop()
            return echoed
    return None


def _has_ids(answer: Answer) -> bool:
    """Return whether the ids of all tokens are known."""
    return bool(answer.prompt_ids) and all(position.token_id is not None for position in answer.positions)


def _aligned(answer: Answer, echoed: Answer) -> list[tuple[float, float]]:
    """Return pairs of logprobs of the answer's tokens; empty if the tokens differ."""
    positions = answer.positions
    if not _has_ids(answer) and any(position.has_bytes for position in positions):
        return []  # parts of characters: other tokens may have the same text
    tail = echoed.positions[-len(positions) :]
    # with ids the tokens are the same, and parts of characters may have other names
    if not _has_ids(answer) and [p.token for p in tail] != [p.token for p in positions]:
        # an end token is not part of the text
        positions = positions[:-1]
        tail = echoed.positions[-len(positions) :] if positions else []
        if [p.token for p in tail] != [p.token for p in positions]:
            return []
    return [(a.logprob, b.logprob) for a, b in zip(positions, tail, strict=True)]


def _result(differences: list[float], skipped: int, worst: tuple[float, str, list[Call]]) -> Result:
    """Return the distribution of the differences and its status."""
    ordered = sorted(differences)
    large = sum(value > LARGE_NATS for value in differences)
    detail = (
        f"|difference| median {ordered[len(ordered) // 2]:.2g}, "
        f"99 % {ordered[math.ceil(0.99 * len(ordered)) - 1]:.2g}, max {ordered[-1]:.2g} nats"
    )
    if skipped:
        detail += f"; {skipped} answers have other tokens as a prompt"
    status, findings = Status.EXACT, []
    if ordered[-1] > 0:
        status = Status.DIFFERS
        findings = [Finding(f"{worst[1]}: a logprob differs by {worst[0]:.3g} nats", worst[2])]
    if large >= MIN_LARGE and large > LARGE_SHARE * len(differences):
        status = Status.VIOLATED
        findings[0].text += f"; {large} of {len(differences)} tokens differ by more than {LARGE_NATS} nat"
    return Result("rescoring", TITLE, status, detail, tokens=len(differences), findings=findings)
