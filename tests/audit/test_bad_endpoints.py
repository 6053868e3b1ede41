"""Endpoints that break the protocol: a finding or a clear stop, never an exception."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from draftproof.audit import Report, Verdict
from draftproof.audit import audit as run_audit
from draftproof.audit.client import endpoint as endpoint_module
from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.report.html import html
from draftproof.audit.report.markdown import markdown
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
    assert report.verdict is Verdict.INCONCLUSIVE and "inconclusive" in report.statement()


@pytest.mark.parametrize("kind", BAD)
def test_endpoint_that_turns_bad(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the results so far are kept."""
    report = audited(after(22, BAD[kind]), monkeypatch)
    assert report.verdict is Verdict.INCONCLUSIVE
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


def test_half_streams_after_good_ones_keep_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an endpoint whose streams break off once the audit has begun."""
    server, seen = StubServer(StubModel(3), entropy=5), [0]

    def handle(request: httpx.Request) -> httpx.Response:
        response = server.handle(request)
        is_stream = request.method == "POST" and json.loads(request.content).get("stream")
        seen[0] += bool(is_stream)
        if is_stream and seen[0] > 1:
            return httpx.Response(200, content=response.content[: len(response.content) // 2])
        return response

    report = audited(handle, monkeypatch)
    assert not report.violations and report.result("top1").tokens > 300
    assert report.result("streaming").status is Status.NOT_TESTABLE


JUNK = (
    None, True, -3, 10**400, 1e308, math.nan, math.inf, -math.inf, "", "\ud800", "<b>", [], {}, {"a": None},
)  # fmt: skip


def spoiled(value: Any, rng: random.Random, share: float) -> Any:
    """Return a JSON value in which some parts are replaced."""
    if rng.random() < share:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        return {key: spoiled(item, rng, share) for key, item in value.items() if rng.random() >= share}
    if isinstance(value, list):
        return [spoiled(item, rng, share) for item in value if rng.random() >= share]
    return value


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("error")
def test_random_junk_is_never_an_exception(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every form of a report after answers with junk in random places."""
    server, rng = StubServer(StubModel(3), is_chat_only=bool(seed % 2), entropy=5), random.Random(seed)
    share, lock = (0.0003, 0.003, 0.03)[seed // 2], threading.Lock()

    def handle(request: httpx.Request) -> httpx.Response:
        response = server.handle(request)
        if request.method == "GET":
            return response
        events = response.text.split("\n\n") if "data:" in response.text[:5] else [response.text]
        made = []
        for event in events:
            head, _, text = event.rpartition("data: ") if event.startswith("data:") else ("", "", event)
            if text.startswith("{"):
                with lock:
                    text = json.dumps(spoiled(json.loads(text), rng, share))
            made.append(("data: " if event.startswith("data:") else head) + text)
        headers = {"retry-after": "-1"}
        return httpx.Response(response.status_code, text="\n\n".join(made), headers=headers)

    report = audited(handle, monkeypatch)
    json.dumps(report.as_json(), allow_nan=False).encode()
    assert (markdown(report) + html(report) + report.statement()).encode()


def test_connection_that_is_closed_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a real socket: each response stops before its stated length."""
    monkeypatch.setattr(endpoint_module, "MAX_WAIT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choices": [')

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        report = run_audit(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", model="m", plan=PLAN)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert report.verdict is Verdict.INCONCLUSIVE and "RemoteProtocolError" in report.statement()
