"""What an endpoint offers: routes, number of logprobs, seeds, options without effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftproof.audit.client.answer import Answer
from draftproof.audit.client.endpoint import Call, Endpoint
from draftproof.errors import DraftproofError

TOP_COUNTS = (20, 5, 1)
TRIAL_PROMPT = "One, two, three, four, five, six,"
MORE_TRIAL_PROMPTS = (
    "The weather today is",
    "My favourite book is about",
    "A recipe for bread:",
    "Dear Anna,",
)
TRIAL_TOKENS = 4
# Values that switch off what a server may apply by default. The first that is accepted is used.
NEUTRAL_OPTIONS: tuple[dict[str, Any], ...] = (
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_p": 1.0, "top_k": 0},
    {"top_p": 1.0},
    {},
)
# Fields of a stream. The first form requests one event a step, where the server has that option.
STREAM_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stream": True, "stream_options": {"include_usage": True}, "stream_granularity": "step"},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True},
)


@dataclass
class Dialect:
    """How requests to one endpoint are written."""

    model: str
    is_chat: bool
    top_count: int = 0  # 0: no logprobs
    has_seed: bool = False
    has_token_ids: bool = False
    neutral: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)  # fields of a stream; empty: no streams
    extra: dict[str, Any] = field(default_factory=dict)  # the user's own fields
    missing: list[str] = field(default_factory=list)  # what the endpoint does not offer

    @property
    def path(self) -> str:
        """Return the route."""
        return "chat/completions" if self.is_chat else "completions"

    def call(self, label: str, prompt: str | list[int], max_tokens: int, **options: Any) -> Call:
        """Return a request in which the options that a server may apply by default are switched off.

        `seed` is left out where the endpoint refuses it. An option with the value None is left out.
        """
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 1.0}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            if self.top_count:
                body |= {"logprobs": True, "top_logprobs": self.top_count}
        else:
            body["prompt"] = prompt
            if self.top_count:
                body["logprobs"] = self.top_count
        if self.has_token_ids:
            body["return_token_ids"] = True
        body |= {**self.neutral, **self.extra, **options}
        if not self.has_seed:
            body.pop("seed", None)
        return Call(label, self.path, {k: v for k, v in body.items() if v is not None})


def discover(endpoint: Endpoint, model: str | None, api: str, extra: Mapping[str, Any]) -> Dialect:
    """Find the dialect of an endpoint with a few short requests."""
    model = model or _first_model(endpoint)
    routes = {"auto": (False, True), "completions": (False,), "chat": (True,)}[api]
    found: list[Dialect] = []
    errors = []
    for is_chat in routes:
        dialect = Dialect(model, is_chat, extra=dict(extra))
        answer = _trial(endpoint, dialect, "route")
        if not answer.is_ok:
            errors.append(f"{dialect.path}: {answer.error}")
            continue
        _find_logprobs(endpoint, dialect)
        found.append(dialect)
        if dialect.top_count:
            break
    if not found:
        raise DraftproofError(f"{endpoint.url} generates nothing: " + "; ".join(errors))
    dialect = max(found, key=lambda d: d.top_count)
    for options in NEUTRAL_OPTIONS:
        dialect.neutral = dict(options)
        if _trial(endpoint, dialect, f"neutral {sorted(options)}").is_ok:
            break
    dialect.has_seed = True
    dialect.has_seed = _trial(endpoint, dialect, "seed", seed=7).is_ok
    dialect.has_token_ids = True
    answer = _trial(endpoint, dialect, "token ids")
    dialect.has_token_ids = answer.is_ok
    for options in STREAM_OPTIONS:
        if _trial(endpoint, dialect, f"stream {sorted(options)}", **options).is_ok:
            dialect.stream = dict(options)
            break
    else:
        dialect.missing.append("streams: they cannot be compared with whole answers")
    if not dialect.top_count:
        dialect.missing.append("logprobs: the distribution of sampled tokens cannot be tested")
    if not dialect.has_seed:
        dialect.missing.append("seed: replays at temperature 1 cannot be tested")
    if "top_k" not in dialect.neutral:
        dialect.missing.append("top_k: truncation that the server applies by default stays on")
    return dialect


def _find_logprobs(endpoint: Endpoint, dialect: Dialect) -> None:
    """Set the largest number of logprobs that is accepted and returned."""
    for count in TOP_COUNTS:
        dialect.top_count = count
        # some tokens may have no list, such as accepted drafts of some servers
        for number, prompt in enumerate((TRIAL_PROMPT, *MORE_TRIAL_PROMPTS)):
            call = dialect.call(f"discovery {dialect.path} logprobs {count} {number}", prompt, TRIAL_TOKENS)
            answer = endpoint.send(call)
            if any(position.top for position in answer.positions):
                return
            if not answer.positions:
                break
    dialect.top_count = 0


def _trial(endpoint: Endpoint, dialect: Dialect, label: str, **options: Any) -> Answer:
    """Send a short request."""
    call = dialect.call(f"discovery {dialect.path} {label}", TRIAL_PROMPT, TRIAL_TOKENS, **options)
    return endpoint.send(call)


def _first_model(endpoint: Endpoint) -> str:
    """Return the first model of the endpoint's list."""
    found = endpoint.get("models")
    try:
        return str(found.events[0]["data"][0]["id"])
    except (IndexError, KeyError, TypeError):
        if found.status == 0:
            raise DraftproofError(f"{endpoint.url} cannot be reached: {found.error}") from None
        reason = found.error or "the list has another form"
        raise DraftproofError(f"{endpoint.url}/models names no model ({reason}): give --model") from None
