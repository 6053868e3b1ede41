"""Decoding of the stub with drafts of an n-gram lookup or the likeliest tokens, honest or with a fault."""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof.audit.stub.model import END_ID, Row, StubModel, make_row

MAX_DRAFTS = 4
KEPT_OPTIONS = ("temperature",)  # by a server that drops the others inside a window


class Sampler(enum.StrEnum):
    """How noise selects a token."""

    RANKS = "ranks"  # cumulative distribution, the most likely token first
    IDS = "ids"  # cumulative distribution in the order of token ids
    RACE = "race"  # noise for each token


@dataclass(frozen=True)
class Fault:
    """Planted defects; all off is an honest server."""

    accepted_top_p: float = 0.0  # a draft in this nucleus is accepted without sampling
    top1_bias: float = 0.0
    mixed_bias: float = 0.0  # share of positions where the top-1 token is taken without sampling
    shared_noise: Sampler | None = None  # all positions of a window use the noise of the first
    is_seed_ignored: bool = False
    depends_on_width: bool = False
    has_wrong_rows: bool = False  # an accepted draft has the logprobs of the row before
    has_zero_logprobs: bool = False  # an accepted draft has the logprob 0.0 and no list
    emits_after_end: bool = False  # stop strings and the end are applied after whole windows
    drops_options: bool = False  # options apply to the first token of a window alone


HONEST = Fault()


@dataclass
class Output:
    """Generated tokens: id, row that is reported, index in its window."""

    tokens: list[tuple[int, Row | None, int]] = field(default_factory=list)
    finish_reason: str = "length"
    text: str = ""


def noise(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the key alone."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


def generate(
    model: StubModel,
    rows: Sequence[Row],
    prompt: Sequence[int],
    body: Mapping[str, Any],
    seed: int,
    fault: Fault,
    reports_processed: bool = False,
) -> Output:
    """Return the output of one request with the distributions `rows`."""
    lookup, made = Lookup(prompt), Output()
    history = lookup.history
    counts: Counter[int] = Counter()
    limit, stops = int(body.get("max_tokens", 16)), _stops(body)
    while True:
        drafts, place = lookup.drafts(), 0
        while True:
            reported = rows[model.row_index(history)]
            draft = drafts[place] if place < len(drafts) else None
            if not drafts and place < MAX_DRAFTS:
                draft = reported.order[0]  # as a draft head would
            key = len(made.tokens) - (place if fault.shared_noise else 0)
            number = noise(0 if fault.is_seed_ignored else seed, key)
            options = (
                {k: body[k] for k in KEPT_OPTIONS if k in body} if fault.drops_options and place else body
            )
            token = choose(reported, options, counts, number, fault, draft)
            was_accepted = token == draft
            if place and fault.has_wrong_rows:
                made.tokens.append((token, rows[model.row_index(history[:-1])], place))
            elif was_accepted and fault.has_zero_logprobs:
                made.tokens.append((token, None, place))
            else:
                shown = _processed(reported, options, counts) if reports_processed else reported
                made.tokens.append((token, shown, place))
            lookup.add(token)
            counts[token] += 1
            made.text += "" if token == END_ID else model.pieces[token]
            is_step_end = not was_accepted
            if not fault.emits_after_end or is_step_end:
                is_finished = _is_finished(made, token, limit, stops, not fault.emits_after_end)
                if is_finished:
                    return made
            place += 1
            if is_step_end:
                break


def _is_finished(made: Output, token: int, limit: int, stops: Sequence[str], is_cut: bool) -> bool:
    """Apply end token, stop strings and length."""
    found = [made.text.find(stop) for stop in stops if stop in made.text]
    if token == END_ID:
        made.finish_reason = "stop"
    elif found:
        made.finish_reason = "stop"
        if is_cut:
            made.text = made.text[: min(found)]
    elif len(made.tokens) < limit:
        return False
    return True


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


class Lookup:
    """Drafts of an n-gram lookup: the tokens after the last earlier occurrence of the newest token pair."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.history: list[int] = []
        self._ends: dict[tuple[int, int], int] = {}  # index after the last occurrence but the newest
        for token in prompt:
            self.add(token)

    def add(self, token: int) -> None:
        """Add a token to the history."""
        if len(self.history) > 1:
            self._ends[self.history[-2], self.history[-1]] = len(self.history)
        self.history.append(token)

    def drafts(self) -> list[int]:
        """Return the drafted tokens."""
        start = self._ends.get((self.history[-2], self.history[-1])) if len(self.history) > 1 else None
        return [] if start is None else self.history[start : start + MAX_DRAFTS]


def choose(
    row: Row, body: Mapping[str, Any], counts: Counter[int], number: float, fault: Fault, draft: int | None
) -> int:
    """Return the next token id."""
    if fault.accepted_top_p and draft is not None and _in_nucleus(row, draft, fault.accepted_top_p):
        return draft
    row = _processed(row, body, counts)
    if float(body.get("temperature", 1.0)) == 0:
        return row.order[0]
    if fault.top1_bias or fault.mixed_bias:
        top = row.order[0]
        before = math.exp(row.logprobs[top])
        after = min(1.0, before + fault.top1_bias + fault.mixed_bias * (1 - before))
        if number < after:
            return top
        others = [x if i != top else -math.inf for i, x in enumerate(row.logprobs)]
        return make_row(others).sample((number - after) / (1 - after))
    match fault.shared_noise:
        case Sampler.RANKS:
            return row.sample_sorted(number)
        case Sampler.RACE:
            return row.sample_race(number)
    return row.sample(number)


def _in_nucleus(row: Row, token: int, top_p: float) -> bool:
    """Return whether a token is among the most likely that hold `top_p` of the mass."""
    mass = 0.0
    for candidate in row.order:
        if candidate == token:
            return True
        mass += math.exp(row.logprobs[candidate])
        if mass >= top_p:
            return False
    return False


_OPTIONS = ("logit_bias", "presence_penalty", "frequency_penalty", "min_p", "min_tokens")


def _processed(row: Row, body: Mapping[str, Any], counts: Counter[int]) -> Row:
    """Return the distribution after the options of the request."""
    temperature, top_k, top_p = (body.get(k) for k in ("temperature", "top_k", "top_p"))
    is_plain = temperature in (None, 1.0, 0, 0.0) and (top_k or 0) <= 0 and top_p in (None, 1.0)
    if is_plain and not any(body.get(name) for name in _OPTIONS):
        return row
    logits = list(row.logprobs)
    for key, value in (body.get("logit_bias") or {}).items():
        logits[int(key)] += float(value)
    for token, count in counts.items():
        logits[token] -= float(body.get("presence_penalty") or 0) + count * float(
            body.get("frequency_penalty") or 0
        )
    if sum(counts.values()) < int(body.get("min_tokens") or 0):
        logits[END_ID] = -math.inf
    if temperature not in (None, 0, 0.0, 1.0):
        logits = [x / float(temperature) for x in logits]
    row = make_row(logits)
    kept = len(logits) if not top_k or top_k < 0 else int(top_k)
    floor = row.logprobs[row.order[0]] + math.log(float(body["min_p"])) if body.get("min_p") else -math.inf
    mass, allowed = 0.0, set()
    for token in row.order[:kept]:
        if row.logprobs[token] < floor or mass >= float(top_p if top_p is not None else 1.0):
            break
        allowed.add(token)
        mass += math.exp(row.logprobs[token])
    return make_row([x if i in allowed else -math.inf for i, x in enumerate(row.logprobs)])
