"""Result of one test, and what tests share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftproof.audit.client.answer import Answer
from draftproof.audit.client.discovery import Dialect
from draftproof.audit.client.endpoint import Call, Endpoint


class Status(enum.StrEnum):
    """Outcome of one test."""

    EXACT = "exact"  # equal, bit for bit
    CONSISTENT = "consistent"  # no deviation as large as the stated bias
    DIFFERS = "differs"  # not reproducible; this alone is not lossy
    VIOLATED = "violated"
    NOT_TESTABLE = "not testable"


@dataclass
class Finding:
    """One violation with the requests that reproduce it."""

    text: str
    calls: list[Call] = field(default_factory=list)


@dataclass
class Result:
    """Outcome of one test with its figures."""

    test: str
    title: str
    status: Status
    detail: str
    tokens: int = 0
    e_value: float | None = None
    threshold: float | None = None
    p_value: float | None = None
    smallest_bias: float | None = None
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Sizes of an audit in tokens and requests."""

    sampling_tokens: int = 11_500  # prompts included; with a budget, the smallest number
    budget_tokens: int | None = None  # of the whole audit: the sampling test gets what the others leave
    answer_tokens: int = 256
    greedy_prompts: int = 4
    greedy_tokens: int = 40
    rescored_answers: int = 3
    rescored_tokens: int = 80
    replayed_prompts: int = 2
    replayed_tokens: int = 40
    neighbours: int = 64
    neighbour_tokens: int = 8
    option_tokens: int = 24
    cross_scored_answers: int = 24


@dataclass
class Context:
    """What every test receives."""

    endpoint: Endpoint
    dialect: Dialect
    plan: Plan
    plain_body: Mapping[str, Any] | None = None  # fields that switch speculation off
    other: Endpoint | None = None
    other_dialect: Dialect | None = None
    answers: list[Answer] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)  # by label
    on_progress: Callable[[str, float], None] = lambda stage, share: None

    def call(self, label: str, prompt: str, max_tokens: int, **options: Any) -> Call:
        """Return a request in the endpoint's dialect."""
        self.prompts[label] = prompt
        return self.dialect.call(label, prompt, max_tokens, **options)

    def send(self, calls: list[Call], width: int | None = None) -> list[Answer]:
        """Send requests and keep the answers."""
        found = self.endpoint.send_all(calls, width)
        self.answers.extend(found)
        return found

    def one(self, call: Call) -> Answer:
        """Send one request and keep the answer."""
        return self.send([call])[0]


def call_of(answer: Answer) -> Call:
    """Return the request of an answer."""
    return Call(answer.label, answer.path, answer.body, answer.url)


def not_testable(test: str, title: str, reason: str) -> Result:
    """Return the result of a test that the endpoint does not allow."""
    return Result(test, title, Status.NOT_TESTABLE, reason)
