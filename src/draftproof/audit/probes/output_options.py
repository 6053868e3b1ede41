"""Tests of options that end or shape an output: stop, max_tokens, min_tokens, JSON, streaming."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from draftproof.audit.client.answer import Answer
from draftproof.audit.probes.replay import compared
from draftproof.audit.probes.result import Context, Finding, Result, Status, call_of, not_testable
from draftproof.audit.prompts import COPIES, FREE

STREAM = "a stream has the same output as a whole answer"
STOP = "an output ends before its stop string"
STOP_IDS = "an output ends at its stop token"
LENGTH = "max_tokens is the exact limit"
MIN_LENGTH = "an output has at least min_tokens tokens"
JSON = "json_schema is followed"
SHORT_LENGTHS = (1, 3, 6, 7)
FIRST_SEED = 11_000
JSON_TOKENS = 60
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "is_large": {"type": "boolean"}},
    "required": ["colour", "is_large"],
    "additionalProperties": False,
}


def run(context: Context) -> list[Result]:
    """Run all tests of this file."""
    base = context.one(context.call("option base", COPIES[0], context.plan.option_tokens, temperature=0))
    results = [_streaming(context), _stop(context, base), _stop_ids(context, base)]
    context.on_progress("options", 0.3)
    results += [_length(context), _min_length(context), _json(context)]
    context.on_progress("options", 0.6)
    return results


def _streaming(context: Context) -> Result:
    """Compare a stream with a whole answer, greedy and seeded."""
    if not context.dialect.stream:
        return not_testable("streaming", STREAM, "no streams")
    first: list[Answer] = []
    second: list[Answer] = []
    for i, temperature in enumerate((0.0, 1.0)):
        if temperature and not context.dialect.has_seed:
            continue
        for streamed in (False, True):
            options: dict[str, Any] = {"temperature": temperature, "seed": FIRST_SEED + i}
            if streamed:
                options |= context.dialect.stream
            label = f"option {'stream' if streamed else 'whole'} {i}"
            call = context.call(label, COPIES[i], context.plan.option_tokens, **options)
            (second if streamed else first).append(context.one(call))
    return compared("streaming", STREAM, first, second)


def _stop(context: Context, base: Answer) -> Result:
    """Use a string inside the greedy output, over a token boundary, as the stop string."""
    text = base.text
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    if not base.is_ok or len(stop) < 3:
        return not_testable("stop", STOP, "the output is too short")
    cut = text[: text.find(stop)]
    call = context.call("option stop", COPIES[0], context.plan.option_tokens, temperature=0, stop=[stop])
    answer = context.one(call)
    if not answer.is_ok:
        return not_testable("stop", STOP, f"refused: {answer.error}")
    tokens = answer.token_count
    finding = Finding(f"stop {stop!r}: {answer.text[-40:]!r}, finish reason {answer.finish_reason}", [call])
    if answer.text.rstrip() != cut.rstrip() and not _is_repeated(context, base, answer):
        return Result("stop", STOP, Status.DIFFERS, "the outputs are not reproducible", tokens)
    if answer.finish_reason == "stop" and _ends_with_stop(context, answer, stop):
        detail = f"the text keeps {stop!r} and ends at the token that completes it"
        return Result("stop", STOP, Status.DIFFERS, detail, tokens, findings=[finding])
    if stop in answer.text or (answer.text == text and cut != text):
        return Result("stop", STOP, Status.VIOLATED, "text after the stop string", tokens, findings=[finding])
    if answer.text.rstrip() == text.replace(stop, "").rstrip() != cut.rstrip():
        detail = "the stop string is removed, and text after it is returned"
        return Result("stop", STOP, Status.VIOLATED, detail, tokens, findings=[finding])
    if answer.text.rstrip() == cut.rstrip() and answer.finish_reason == "stop":
        return Result("stop", STOP, Status.EXACT, f"ends before {stop!r}", tokens)
    if cut.startswith(answer.text.rstrip()) and answer.text.rstrip() != cut.rstrip():
        return Result("stop", STOP, Status.VIOLATED, "the text is cut too early", tokens, findings=[finding])
    return Result("stop", STOP, Status.DIFFERS, "the output differs from the one without stop", tokens)


def _ends_with_stop(context: Context, answer: Answer, stop: str) -> bool:
    """Return whether the last token completes the stop string, which the server leaves in the text.

    One token less, without the option, must have a text without the string.
    """
    length = answer.token_count - 1
    if stop not in answer.text:
        return False
    if length == 0:
        return True
    shorter = context.one(context.call("option stop shorter", COPIES[0], length, temperature=0))
    return shorter.is_ok and shorter.token_count == length and stop not in shorter.text


def _is_repeated(context: Context, *answers: Answer) -> bool:
    """Return whether requests have the same text again, twice."""
    for answer in answers:
        for i in (1, 2):
            again = context.one(replace(call_of(answer), label=f"{answer.label} again {i}"))
            if again.text != answer.text:
                return False
    return True


def _stop_ids(context: Context, base: Answer) -> Result:
    """Use a token of the greedy output as the stop token (an extension of OpenAI's API)."""
    ids = [position.token_id for position in base.positions]
    chosen = next((i for i in ids[2:] if i is not None), None)
    if chosen is None:
        return not_testable("stop_ids", STOP_IDS, "the endpoint reports no token ids")
    options = {"temperature": 0, "stop_token_ids": [chosen]}
    answer = context.one(context.call("option stop id", COPIES[0], context.plan.option_tokens, **options))
    if not answer.is_ok:
        return not_testable("stop_ids", STOP_IDS, f"refused: {answer.error}")
    found = [position.token_id for position in answer.positions]
    # an output of an inexact server may differ from the first one
    if found == ids or (chosen in found[:-1] and answer.finish_reason == "length"):
        return not_testable("stop_ids", STOP_IDS, "stop_token_ids has no effect")
    if chosen in found[:-1]:
        finding = Finding(f"tokens after the stop token {chosen}", [call_of(answer)])
        return Result("stop_ids", STOP_IDS, Status.VIOLATED, finding.text, len(found), findings=[finding])
    return Result("stop_ids", STOP_IDS, Status.EXACT, f"ends at token {chosen}", len(found))


def _length(context: Context) -> Result:
    """Compare the number of tokens with the limit."""
    findings, tokens = [], 0
    for limit in SHORT_LENGTHS:
        answer = context.one(context.call(f"option length {limit}", COPIES[0], limit, temperature=0))
        if not answer.is_ok:
            continue
        count = max(len(answer.positions), answer.completion_tokens or 0)
        tokens += count
        is_short = count < limit and answer.finish_reason == "length"
        if count > limit or is_short or (count == limit and answer.finish_reason not in ("length", "stop")):
            text = f"max_tokens {limit}: {count} tokens, finish reason {answer.finish_reason}"
            findings.append(Finding(text, [call_of(answer)]))
    if not tokens:
        return not_testable("max_tokens", LENGTH, "no token counts")
    status = Status.VIOLATED if findings else Status.EXACT
    detail = f"{len(findings)} of {len(SHORT_LENGTHS)} limits are not kept"
    return Result("max_tokens", LENGTH, status, detail, tokens, findings=findings)


def _min_length(context: Context) -> Result:
    """Find a prompt with a short output and require a longer one (an extension of OpenAI's API)."""
    limit = context.plan.option_tokens
    for i, prompt in enumerate((*FREE[:2], "Reply with one word: yes or no?")):
        options = {"seed": FIRST_SEED + 50 + i}
        short = context.one(context.call(f"option short {i}", prompt, limit, **options))
        if not short.is_ok or short.finish_reason != "stop":
            continue
        call = context.call(f"option min_tokens {i}", prompt, limit, min_tokens=limit, **options)
        answer = context.one(call)
        if not answer.is_ok:
            return not_testable("min_tokens", MIN_LENGTH, f"refused: {answer.error}")
        if answer.token_count >= limit:
            return Result("min_tokens", MIN_LENGTH, Status.EXACT, f"{limit} tokens", answer.token_count)
        if answer.same_bits(short):
            return not_testable("min_tokens", MIN_LENGTH, "min_tokens has no effect")
        finding = Finding(f"min_tokens {limit}: {answer.token_count} tokens", [call])
        return Result("min_tokens", MIN_LENGTH, Status.VIOLATED, finding.text, limit, findings=[finding])
    return not_testable("min_tokens", MIN_LENGTH, "no output ended early")


def _json(context: Context) -> Result:
    """Require JSON of a schema, greedy and sampled."""
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    bad, good, tokens = [], 0, 0
    for i, temperature in enumerate((0.0, 1.0, 1.0)):
        options = {"temperature": temperature, "seed": FIRST_SEED + 90 + i, "response_format": form}
        prompt = 'Describe a thing as JSON, such as {"colour": "red", "is_large": true}:'
        answer = context.one(context.call(f"option json {i}", prompt, JSON_TOKENS, **options))
        if not answer.is_ok:
            return not_testable("json_schema", JSON, f"refused: {answer.error}")
        tokens += answer.token_count
        if answer.finish_reason == "length":
            continue
        if _fits(answer.text):
            good += 1
        else:
            bad.append(Finding(f"{answer.text[:80]!r} does not match the schema", [call_of(answer)]))
    if not good:
        reason = "response_format has no effect" if bad else "no output ended"
        return not_testable("json_schema", JSON, reason)
    status = Status.VIOLATED if bad else Status.EXACT
    return Result(
        "json_schema", JSON, status, f"{good} outputs match, {len(bad)} do not", tokens, findings=bad
    )


def _fits(text: str) -> bool:
    """Return whether a text is JSON of the schema."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == {"colour", "is_large"}
        and value["colour"] in ("red", "green", "blue")
        and isinstance(value["is_large"], bool)
    )
