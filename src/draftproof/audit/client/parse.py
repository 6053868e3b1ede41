"""Answers from response bodies and stream events, with logprobs of either form.

Old form (completions): `tokens`, `token_logprobs`, `top_logprobs` as lists. New form (chat, llama.cpp):
`content`, a list with one object for each token. A defect is listed in `problems`, never raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from draftproof.audit.client.answer import Answer, Position, is_partial_text

POSITIVE_LOGPROB_NATS = 1e-3  # larger is no rounding error
EXCESS_MASS = 2e-3  # listed probabilities may add up to 1 and this much
PROBLEM_CHARACTERS = 160
MAX_COUNT = 2**31
MAX_NATS = 1e6


def fill(answer: Answer, events: Sequence[Any], is_stream: bool) -> None:
    """Fill an answer from one body, or from the events of a stream."""
    seen_choice = False
    for event in events:
        if not isinstance(event, Mapping):
            answer.problems.append(f"a JSON object was expected, got {type(event).__name__}")
            continue
        if event.get("error"):
            answer.error = f"error in the answer: {str(event['error'])[:PROBLEM_CHARACTERS]}"
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            seen_choice = True
            _add_choice(answer, choices[0], is_stream)
        _add_usage(answer, event)
    if not seen_choice and answer.error is None:
        answer.error = "the answer has no choices"
    if is_stream and seen_choice and answer.finish_reason is None and answer.error is None:
        answer.error = "the stream ended without a finish reason"


def _add_choice(answer: Answer, choice: Mapping[str, Any], is_stream: bool) -> None:
    """Add text, logprobs and finish reason of one body or event."""
    message = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text")
    if text is None and isinstance(message, Mapping):
        text = "".join(str(message.get(key) or "") for key in ("reasoning_content", "content"))
    answer.text += text if isinstance(text, str) else ""
    reason = choice.get("finish_reason")
    answer.finish_reason = reason if isinstance(reason, str) else answer.finish_reason
    prompt_ids = choice.get("prompt_token_ids")
    if isinstance(prompt_ids, list) and all(_count(i) is not None for i in prompt_ids):
        answer.prompt_ids = prompt_ids
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        return
    ids = choice.get("token_ids")
    if isinstance(logprobs.get("content"), list):
        found = [_new_position(entry, answer) for entry in logprobs["content"]]
    elif isinstance(logprobs.get("tokens"), list):
        found = _old_positions(logprobs, answer)
    else:
        return
    answer.has_logprobs = True
    for place, position in enumerate(found):
        if position is None:
            continue
        given = position.token_id
        if given is None and isinstance(ids, list) and len(ids) == len(found):
            given = _count(ids[place])
        _check(position, answer)
        answer.positions.append(replace(position, token_id=given, chunk_place=place if is_stream else 0))


def _new_position(entry: Any, answer: Answer) -> Position | None:
    """Return the position of one object of the new form."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("token"), str):
        answer.problems.append("an entry of logprobs has no token")
        return None
    items = [
        item for item in _list(entry.get("top_logprobs")) if isinstance(item, Mapping) and "logprob" in item
    ]
    pairs = [(str(item.get("token")), _number(item["logprob"], answer), item.get("id")) for item in items]
    pairs.sort(key=lambda pair: -pair[1])
    return Position(
        entry["token"],
        _number(entry.get("logprob"), answer),
        tuple((token, value) for token, value, _ in pairs),
        _count(entry.get("id")),
        tuple(_count(found) for _, _, found in pairs),
        has_bytes=is_partial_text(entry["token"]),
    )


def _old_positions(logprobs: Mapping[str, Any], answer: Answer) -> list[Position | None]:
    """Return the positions of the old form."""
    tokens, values = logprobs["tokens"], _list(logprobs.get("token_logprobs"))
    tops = _list(logprobs.get("top_logprobs")) or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        lengths = f"{len(tokens)}, {len(values)}, {len(tops)}"
        answer.problems.append(f"tokens, token_logprobs and top_logprobs have the lengths {lengths}")
    found: list[Position | None] = []
    for token, value, top in zip(tokens, values, tops, strict=False):
        if value is None:
            found.append(None)  # the first token of an echoed prompt
            continue
        pairs = _pairs(top, answer) if isinstance(top, Mapping) else []
        text = str(token)
        found.append(Position(text, _number(value, answer), tuple(pairs), has_bytes=is_partial_text(text)))
    return found


def _pairs(top: Mapping[str, Any], answer: Answer) -> list[tuple[str, float]]:
    """Return the entries of a list, largest first."""
    values = top.values()
    is_plain = set(map(type, values)) == {float} and sum(map(abs, values)) < MAX_NATS  # NaN is not
    pairs = list(top.items()) if is_plain else [(str(k), _number(v, answer)) for k, v in top.items()]
    pairs.sort(key=itemgetter(1), reverse=True)
    return pairs


def _number(value: Any, answer: Answer) -> float:
    """Return a logprob; a value that is none becomes a problem and minus infinity."""
    if type(value) in (float, int) and -MAX_NATS < value < MAX_NATS:  # NaN is not
        return float(value)
    if value == -math.inf:
        return -math.inf
    answer.problems.append(f"a logprob is {value!r}"[:PROBLEM_CHARACTERS])
    return -math.inf


def _list(value: Any) -> list[Any]:
    """Return a list, empty for anything else."""
    return value if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    """Return a token id or a number of tokens, None for anything else."""
    return value if isinstance(value, int) and 0 <= value < MAX_COUNT else None


def _check(position: Position, answer: Answer) -> None:
    """List logprobs that no distribution can have."""
    if position.is_placeholder:
        answer.problems.append("a logprob is 0.0 and has no list")
    values = [value for _, value in position.top]
    largest = max([position.logprob, *values])
    if largest > POSITIVE_LOGPROB_NATS:
        answer.problems.append(f"a logprob is positive: {largest}")
        return
    mass = sum(map(math.exp, values))
    if not any(map(position.listed_at, range(len(position.top)))) and not position.has_bytes:
        mass += math.exp(position.logprob)
    if mass > 1 + EXCESS_MASS:
        answer.problems.append(f"probabilities of one position add up to {mass:.3f}")


def _add_usage(answer: Answer, event: Mapping[str, Any]) -> None:
    """Add token counts and speculation metrics, where they are reported."""
    usage = event.get("usage")
    if isinstance(usage, Mapping):
        for name in ("completion_tokens", "prompt_tokens"):
            if _count(usage.get(name)) is not None:
                setattr(answer, name, usage[name])
    metrics = event.get("metrics")
    if not isinstance(metrics, Mapping):
        metrics = {}
    speculation = metrics.get("speculative_decoding")
    if isinstance(speculation, Mapping):
        answer.draft_tokens = _count(speculation.get("num_draft_tokens"))
        answer.accepted_tokens = _count(speculation.get("num_accepted_draft_tokens"))
        if "lossless" in metrics:  # of draftproof; vLLM has the same metrics and no switch
            answer.switch = {"speculative": False}
    timings = event.get("timings")  # llama.cpp
    if isinstance(timings, Mapping) and isinstance(timings.get("draft_n"), int):
        answer.draft_tokens = _count(timings["draft_n"])
        answer.accepted_tokens = _count(timings.get("draft_n_accepted"))
        answer.switch = {"speculative.n_max": 0}
