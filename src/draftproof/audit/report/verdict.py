"""The report of an audit and its verdict."""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftproof.audit.client.endpoint import Call
from draftproof.audit.probes.result import Result, Status
from draftproof.audit.stats.error_rate import ERROR_RATE

MAX_EPSILON = 0.1  # a larger detectable bias supports no statement
ARGMAX_TESTS = ("greedy",)
EQUALITY_TESTS = ("greedy", "greedy_repeat", "replay", "neighbours", "streaming")
FINITE_E_VALUE = 1e300


class Verdict(enum.StrEnum):
    """The statement that an audit supports."""

    EXACT = "exact"
    LOSSLESS = "lossless within"
    LOSSY = "lossy"
    INCONCLUSIVE = "inconclusive"


@dataclass
class Report:
    """Results of one audit."""

    url: str
    model: str = ""
    suite: str = "quick"
    version: str = ""
    started: str = ""
    seconds: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    results: list[Result] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    stop_reason: str | None = None

    def result(self, test: str) -> Result | None:
        """Return the result of a test by name."""
        return next((result for result in self.results if result.test == test), None)

    @property
    def epsilon(self) -> float | None:
        """Return the smallest bias of the top-1 token that would have been found."""
        top1 = self.result("top1")
        return top1.smallest_bias if top1 is not None else None

    @property
    def violations(self) -> list[Result]:
        """Return the tests that found a violation."""
        return [result for result in self.results if result.status is Status.VIOLATED]

    @property
    def verdict(self) -> Verdict:
        """Return the statement that the results support."""
        if self.violations:
            return Verdict.LOSSY
        top1 = self.result("top1")
        if self.stop_reason or top1 is None or top1.status is not Status.CONSISTENT:
            return Verdict.INCONCLUSIVE
        if self.epsilon is None or self.epsilon > MAX_EPSILON:
            return Verdict.INCONCLUSIVE
        statuses = {result.test: result.status for result in self.results}
        if all(statuses.get(test) is Status.EXACT for test in EQUALITY_TESTS) and (
            Status.DIFFERS not in statuses.values()
        ):
            return Verdict.EXACT
        return Verdict.LOSSLESS

    def statement(self) -> str:
        """Return the verdict as one sentence with its limits."""
        points = f"{100 * self.epsilon:.1f} points" if self.epsilon is not None else "no stated bias"
        match self.verdict:
            case Verdict.LOSSY:
                names = ", ".join(result.test for result in self.violations)
                text = f"lossy: {names}. The report has the commands that reproduce each finding."
                return text + self._sampled_statement()
            case Verdict.EXACT:
                return (
                    f"exact: every replay is equal bit for bit, and no bias of {points} or more "
                    f"(power 0.9, error rate {ERROR_RATE})."
                )
            case Verdict.LOSSLESS:
                names = ", ".join(r.test for r in self.results if r.status is Status.DIFFERS)
                return f"lossless within {points} (power 0.9, error rate {ERROR_RATE}); not exact" + (
                    f": {names} differ." if names else ": not every replay could be tested."
                )
        return f"inconclusive: {self.stop_reason or self._reason()}."

    def _sampled_statement(self) -> str:
        """Return what is known of the sampled tokens if other tests found the violations."""
        if any(result.e_value is not None or result.test in ARGMAX_TESTS for result in self.violations):
            return ""
        texts = {
            "top1": "where it reports logprobs",
            "against_top1": "by the logprobs of the second endpoint",
        }
        found = [(result, texts[result.test]) for result in self.results if result.test in texts]
        parts = [
            f"{text} ({result.tokens:,} tokens), no bias of {100 * result.smallest_bias:.1f} points or more"
            for result, text in found
            if result.smallest_bias is not None
        ]
        return f" No test of the sampled tokens is violated: {'; '.join(parts)}." if parts else ""

    def _reason(self) -> str:
        """Return why there is no statement."""
        top1 = self.result("top1")
        if top1 is None:
            return "the sampled distribution was not tested"
        return top1.detail

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "url": self.url,
            "model": self.model,
            "suite": self.suite,
            "draftproof": self.version,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "tokens": {"generated": self.generated_tokens, "prompt": self.prompt_tokens},
            "requests": self.requests,
            "drafts": {"drafted": self.draft_tokens, "accepted": self.accepted_tokens},
            "error_rate": ERROR_RATE,
            "verdict": str(self.verdict),
            "epsilon": self.epsilon,
            "statement": self.statement(),
            "missing": self.missing,
            "stopped": self.stop_reason,
            "tests": [self._result_json(result) for result in self.results],
        }

    def _result_json(self, result: Result) -> dict[str, Any]:
        """Return one result as plain data."""
        e_value = None if result.e_value is None else min(result.e_value, FINITE_E_VALUE)
        return {
            "test": result.test,
            "title": result.title,
            "status": str(result.status),
            "detail": result.detail,
            "tokens": result.tokens,
            "e_value": e_value,
            "threshold": result.threshold,
            "p_value": result.p_value,
            "smallest_bias": result.smallest_bias,
            "findings": [
                {"text": finding.text, "reproduce": [curl(self.url, call) for call in finding.calls]}
                for finding in result.findings
            ],
        }


def curl(url: str, call: Call) -> str:
    """Return a command that sends a request again. The key is read from the variable API_KEY."""
    body: Mapping[str, Any] = call.body
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    header = "-H 'Content-Type: application/json' -H \"Authorization: Bearer $API_KEY\""
    return f"curl -s {call.url or url}/{call.path} {header} -d {data}"
