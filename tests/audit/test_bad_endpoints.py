"""Endpoints that break the protocol: a finding or a clear stop, never an exception."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from draftproof.audit import Report, Verdict
from draftproof.audit import audit as run_audit
from draftproof.audit.client import endpoint as endpoint_module
from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.self_test import STUB_URL
from draftproof.audit.stub.model import StubModel
from draftproof.audit.stub.server import StubServer

PLAN = Plan(sampling_tokens=1_200, greedy_prompts=1, rescored_answers=1, neighbours=2)
Handler = Callable[[httpx.Request], httpx.Response]


def audited(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Audit a handler without waiting between attempts."""
    monkeypatch.setattr(endpoint_module, "MAX_WAIT_SECONDS", 0.0)
    return run_audit(STUB_URL, transport=httpx.MockTransport(handler), plan=PLAN)


def after(count: int, bad: Handler) -> Handler:
    """Return a server that is honest for some requests and then bad."""
    server, seen = StubServer(StubModel(3), entropy=5), [0]

    def handle(request: httpx.Request) -> httpx.Response:
        seen[0] += 1
        return server.handle(request) if seen[0] <= count else bad(request)

    return handle


def dead(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


BAD: dict[str, Handler] = {
    "html": lambda request: httpx.Response(200, html="<html>login</html>"),
    "500": lambda request: httpx.Response(500, text="error"),
    "429": lambda request: httpx.Response(429, headers={"retry-after": "0"}),
    "json": lambda request: httpx.Response(200, text='{"choices": ['),
    "list": lambda request: httpx.Response(200, json=[1, 2]),
    "empty": lambda request: httpx.Response(200, json={"choices": []}),
    "null": lambda request: httpx.Response(
        200, json={"choices": [{"text": None, "logprobs": {"tokens": 3}}]}
    ),
    "dead": dead,
}


@pytest.mark.parametrize("kind", BAD)
def test_endpoint_that_is_bad_from_the_start(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = audited(BAD[kind], monkeypatch)
    assert report.verdict is Verdict.CANNOT_TELL and "cannot tell" in report.statement()


@pytest.mark.parametrize("kind", BAD)
def test_endpoint_that_turns_bad(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the results so far are kept."""
    report = audited(after(22, BAD[kind]), monkeypatch)
    assert report.verdict is Verdict.CANNOT_TELL
    assert report.result("greedy").status is Status.EXACT


def changed(change: Callable[[dict], None]) -> Handler:
    """Return an honest server whose bodies are changed."""
    server = StubServer(StubModel(3), entropy=5)

    def handle(request: httpx.Request) -> httpx.Response:
        response = server.handle(request)
        if (
            request.method == "GET"
            or json.loads(request.content).get("stream")
            or response.status_code != 200
        ):
            return response
        body = response.json()
        if "logprobs" in body["choices"][0]:
            change(body)
        return httpx.Response(200, text=json.dumps(body))

    return handle


def test_nan_logprobs_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(body: dict) -> None:
        if len(body["choices"][0]["logprobs"]["tokens"]) > 20:
            body["choices"][0]["logprobs"]["token_logprobs"][3] = float("nan")

    report = audited(changed(spoil), monkeypatch)
    assert any("nan" in finding.text for finding in report.result("agreement").findings)


def test_logprobs_of_another_length_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(body: dict) -> None:
        body["choices"][0]["logprobs"]["token_logprobs"].pop()

    report = audited(changed(spoil), monkeypatch)
    assert report.verdict is Verdict.LOSSY
    assert any("lengths" in finding.text for finding in report.result("agreement").findings)


def test_half_streams_do_not_end_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a stream that breaks off is compared with nothing, and reported as missing."""
    server = StubServer(StubModel(3), entropy=5)

    def handle(request: httpx.Request) -> httpx.Response:
        response = server.handle(request)
        if request.method == "POST" and json.loads(request.content).get("stream"):

            def half() -> Iterator[bytes]:
                yield response.content[: len(response.content) // 2]
                raise httpx.ReadError("broken", request=request)

            return httpx.Response(200, content=half())
        return response

    report = audited(handle, monkeypatch)
    assert report.stop_reason is None and any("streams" in text for text in report.missing)
    assert report.result("streaming").status is Status.NOT_TESTABLE and not report.violations


def test_rate_limits_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a server which refuses every third request is audited like any other."""
    server, seen = StubServer(StubModel(3), entropy=5), [0]

    def handle(request: httpx.Request) -> httpx.Response:
        seen[0] += 1
        return httpx.Response(429) if seen[0] % 3 == 0 else server.handle(request)

    report = audited(handle, monkeypatch)
    assert report.stop_reason is None and not report.violations
