"""Test of the tokens that one endpoint samples against the probabilities that another one reports.

An endpoint that reports no logprobs for accepted drafts cannot be tested by its own report. A second
endpoint of the same weights without speculation has the reference: each prefix of an answer is sent to it
as token ids, with one token of output. The list of that token is the distribution of the next one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from draftproof.audit.client.answer import Answer, Position
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.prompts import sampling_prompt
from draftproof.audit.stats.bernoulli import TOP1_ALTERNATIVES, BernoulliTest
from draftproof.audit.stats.detectable import smallest_bias
from draftproof.audit.stats.error_rate import ERROR_RATE
from draftproof.audit.stats.reported_distributions import listed
from draftproof.audit.stats.rows import rows

TITLE = "the first endpoint samples the top-1 token with the probability that the second one reports"
TEST = "against_top1"
LOG_THRESHOLD = -math.log(ERROR_RATE)  # an error rate of its own: it replaces the tests that cannot run
ANSWER_TOKENS = 64
FIRST_SEED = 15_000


def run(context: Context) -> list[Result]:
    """Sample from one endpoint and score every token with the other.

    No results without a second endpoint, or if the first reports logprobs for all tokens.
    """
    dialect = context.other_dialect
    if dialect is None or not any(p.is_placeholder for answer in context.answers for p in answer.positions):
        return []
    if context.dialect.is_chat or not dialect.top_count:
        return [not_testable(TEST, TITLE, "needs the completions route and logprobs of the second endpoint")]
    test = BernoulliTest(TOP1_ALTERNATIVES)
    probs: list[float] = []
    answers: list[Answer] = []
    for number in range(context.plan.cross_scored_answers):
        prompt = sampling_prompt(number)
        call = context.call(f"cross {number}", prompt, ANSWER_TOKENS, seed=FIRST_SEED + number)
        answer = context.one(call)
        if not answer.positions or any(p.token_id is None for p in answer.positions):
            return [not_testable(TEST, TITLE, "the first endpoint reports no token ids")]
        scored = _scored(context, answer, prompt)
        if scored is None:
            return [not_testable(TEST, TITLE, "the second endpoint takes no token ids after a text")]
        made = rows(scored, listed(scored, dialect.top_count))
        test.update(made.is_top1, made.top1_probs)
        probs += made.top1_probs.tolist()
        answers.append(answer)
        context.on_progress("against", (number + 1) / context.plan.cross_scored_answers)
        if test.log_peak >= LOG_THRESHOLD:
            break
    return [_result(test, probs, answers)]


def _scored(context: Context, answer: Answer, prompt: str) -> list[Position] | None:
    """Return the answer's tokens with the lists of the second endpoint; None if it refuses the prompts."""
    assert context.other is not None and context.other_dialect is not None
    ids: list[Any] = [position.token_id for position in answer.positions]
    start: list[Any] = list(answer.prompt_ids) or [prompt]  # llama.cpp takes texts and ids in one list
    calls = [
        context.other_dialect.call(f"{answer.label} token {i}", [*start, *ids[:i]] if i else prompt, 1)
        for i in range(len(ids))
    ]
    found = []
    for position, reply in zip(answer.positions, context.other.send_all(calls), strict=True):
        if not reply.is_ok or not reply.positions:
            return None
        found.append(_with_list(position, reply.positions[0]))
    return found


def _with_list(position: Position, reference: Position) -> Position:
    """Return a token with the list of the reference, and its logprob there."""
    ids = reference.top_ids or (None,) * len(reference.top)
    for (token, value), token_id in zip(reference.top, ids, strict=True):
        if token_id == position.token_id if token_id is not None else token == position.token:
            return replace(position, token=token, logprob=value, top=reference.top, top_ids=ids)
    return replace(position, logprob=-math.inf, top=reference.top, top_ids=ids)


def _result(test: BernoulliTest, probs: list[float], answers: list[Answer]) -> Result:
    """Return the e-value and the bias that would have been found."""
    is_rejected = test.log_peak >= LOG_THRESHOLD
    bias = smallest_bias(np.array(probs), TOP1_ALTERNATIVES, LOG_THRESHOLD)
    points = f", a bias of {100 * bias:.1f} points would be found" if bias is not None else ""
    result = Result(
        TEST,
        TITLE,
        Status.VIOLATED if is_rejected else Status.CONSISTENT,
        f"{test.events:,} events{points}",
        tokens=test.events,
        e_value=math.exp(min(test.log_peak, 690.0)),
        threshold=math.exp(LOG_THRESHOLD),
        p_value=min(1.0, math.exp(-test.log_peak)),
        smallest_bias=bias,
    )
    if is_rejected:
        text = "sampled tokens do not follow the probabilities of the second endpoint"
        result.findings.append(Finding(text, [call_of(answer) for answer in answers[-2:]]))
    return result
