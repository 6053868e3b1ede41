"""Answers in the form of other servers: placeholders for logprobs, a switch without effect."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from draftproof.audit import Verdict, audit
from draftproof.audit.client.answer import Answer, Position
from draftproof.audit.client.parse import fill
from draftproof.audit.probes.against import _add_logprobs
from draftproof.audit.probes.bookkeeping import defects
from draftproof.audit.probes.replay import compared, difference
from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.report.verdict import curl
from draftproof.audit.self_test import STUB_URL
from draftproof.audit.stats.reported_distributions import listed
from draftproof.audit.stats.rows import rows
from draftproof.audit.stub.generate import HONEST, Fault
from draftproof.audit.stub.model import StubModel
from draftproof.audit.stub.server import StubServer

PLAN = Plan(sampling_tokens=1_500, greedy_prompts=1, rescored_answers=1, neighbours=2)
GREEDY_DRAFTS = Fault(accepted_top_p=0.8)


def with_text(request: httpx.Request, model: StubModel) -> httpx.Request:
    """Return a request with the text of its prompt, which is a list of a text and token ids."""
    body = json.loads(request.content) if request.content else {}
    if not isinstance(body.get("prompt"), list):
        return request
    parts = [part if isinstance(part, str) else model.words[part] for part in body["prompt"]]
    return httpx.Request("POST", request.url, json=body | {"prompt": "".join(parts)})


def without_some_logprobs(server: StubServer, other: StubServer | None = None) -> httpx.MockTransport:
    """Return a transport that has 0.0 and no list for some tokens, as llama.cpp for steps with drafts.

    Requests to the host `other` have the answers of the other server.
    """

    def handle(request: httpx.Request) -> httpx.Response:
        if other is not None and request.url.host == "other":
            return other.handle(with_text(request, other.model))
        response = server.handle(request)
        if "json" not in response.headers.get("content-type", ""):
            return httpx.Response(400, json={"error": "no streams"})
        body = json.loads(response.content)
        for choice in body.get("choices", ()):
            if logprobs := choice.get("logprobs"):
                for i in range(3, len(logprobs["tokens"]), 4):
                    logprobs["token_logprobs"][i], logprobs["top_logprobs"][i] = 0.0, {}
        return httpx.Response(response.status_code, json=body)

    return httpx.MockTransport(handle)


def test_placeholders_are_counted_and_not_attributed_to_the_tokens() -> None:
    """Check the statement on a server that returns 0.0 for tokens of steps with drafts."""
    transport = without_some_logprobs(StubServer(StubModel(3), entropy=5))
    report = audit(STUB_URL, transport=transport, plan=PLAN, only=["sampling"])
    assert report.verdict is Verdict.LOSSY and [r.test for r in report.violations] == ["agreement"]
    assert "tokens have the logprob 0.0 and no list" in report.result("agreement").detail
    assert "No test of the sampled tokens is violated" in report.statement()


def test_violations_of_tokens_have_no_such_statement() -> None:
    server = StubServer(StubModel(3), Fault(accepted_top_p=0.8), entropy=5)
    report = audit(STUB_URL, transport=server.transport(), plan=PLAN, only=["sampling"])
    assert report.verdict is Verdict.LOSSY and "No test of the sampled tokens" not in report.statement()


def test_switch_without_effect_is_not_testable() -> None:
    """Check that drafts reported in spite of the switch are no comparison with plain decoding."""
    server = StubServer(StubModel(3), entropy=5)

    def handle(request: httpx.Request) -> httpx.Response:
        response = server.handle(request)
        if "json" not in response.headers.get("content-type", ""):
            return response
        body = json.loads(response.content) | {"timings": {"draft_n": 8, "draft_n_accepted": 3}}
        return httpx.Response(response.status_code, json=body)

    report = audit(STUB_URL, transport=httpx.MockTransport(handle), plan=PLAN, only=["replay"])
    switch = report.result("switch")
    assert switch.status is Status.NOT_TESTABLE and "no effect" in switch.detail


def test_placeholders_are_not_compared_with_another_endpoint() -> None:
    """Check that equal tokens without logprobs on one side are no other distribution."""
    top = (("a", -1.5),)
    answers = [Answer("x", "completions", {}), Answer("x", "completions", {})]
    answers[0].positions = [Position("a", 0.0)] * 8 + [Position("a", -1.5, top)]
    answers[1].positions = [Position("a", -1.5, top)] * 9
    result = compared("against_seeded", "", answers[:1], answers[1:])
    _add_logprobs(result, answers[:1], answers[1:])
    assert result.status is Status.DIFFERS and "over 1 common tokens" in result.detail


@pytest.mark.parametrize(("fault", "status"), [(HONEST, Status.CONSISTENT), (GREEDY_DRAFTS, Status.VIOLATED)])
def test_tokens_are_scored_by_the_second_endpoint(fault: Fault, status: Status) -> None:
    """Check tokens without logprobs against a plain endpoint of the same weights."""
    model = StubModel(3)
    servers = [StubServer(model, fault, entropy=5), StubServer(model, entropy=6)]
    report = audit(
        STUB_URL,
        against="http://other/v1",
        transport=without_some_logprobs(*servers),
        plan=replace(PLAN, cross_scored_answers=8),
        only=["against"],
    )
    result = report.result("against_top1")
    assert result.status is status and result.tokens > 60, result


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"a/v1": "stub", "b/v1": "stub"}),
        ({"model": "m"}, {"a/v1": "m", "b/v1": "m"}),
        ({"model": "m", "against_model": "n"}, {"a/v1": "m", "b/v1": "n"}),
    ],
)
def test_second_endpoint_has_its_own_url_and_model(options: dict[str, str], names: dict[str, str]) -> None:
    """Check the model of all requests, and the commands that reproduce a difference."""
    servers = {"a": StubServer(StubModel(3)), "b": StubServer(StubModel(4))}
    sent: dict[str, set[str]] = {name: set() for name in names}

    def handle(request: httpx.Request) -> httpx.Response:
        if request.content:
            sent[f"{request.url.host}/v1"].add(json.loads(request.content)["model"])
        return servers[request.url.host].handle(request)

    report = audit(
        "http://a/v1",
        against="http://b/v1",
        transport=httpx.MockTransport(handle),
        plan=PLAN,
        only=["against"],
        **options,
    )
    assert sent == {address: {name} for address, name in names.items()}
    finding = report.result("against_greedy").findings[0]
    for made, (address, name) in zip(finding.calls, names.items(), strict=True):
        command = curl(report.url, made)
        assert f"curl -s http://{address}/completions " in command and f'"model": "{name}"' in command


def test_token_is_found_in_its_list_by_id() -> None:
    """Check a part of a character that has the name of the whole character, as in llama.cpp's streams."""
    entries = [{"token": "\ufffd", "id": 5, "logprob": -0.2}, {"token": "\ufffd", "id": 6, "logprob": -1.8}]
    entry = {"token": "\ubd83", "id": 6, "logprob": -1.8, "top_logprobs": entries}
    answer = Answer("x", "completions", {})
    fill(answer, [{"choices": [{"text": "\ubd83", "logprobs": {"content": [entry]}}]}], is_stream=False)
    assert not answer.problems
    assert rows(answer.positions, listed(answer.positions, 2)).ranks.tolist() == [1]


@pytest.mark.parametrize(("hidden", "is_defect"), [(2, False), (6, True)])
def test_tokens_of_a_stop_string_may_be_counted_and_not_listed(hidden: int, is_defect: bool) -> None:
    answer = Answer("x", "completions", {"stop": ["ills "]}, finish_reason="stop", has_logprobs=True)
    answer.positions, answer.text = [Position("a", -1.5, (("a", -1.5),))] * 8, "a" * 8
    answer.completion_tokens = 8 + hidden
    assert bool(defects(answer, set())) == is_defect


def test_parts_of_characters_may_be_counted_and_not_listed() -> None:
    """Check a stream that has one event for a character of three tokens."""
    answer = Answer("x", "completions", {}, finish_reason="length", has_logprobs=True)
    answer.positions = [Position("a", -1.5, (("a", -1.5),)), Position("\ubd83", -1.5, (("\ufffd", -1.5),))]
    answer.text, answer.completion_tokens = "a\ubd83", 4
    assert not defects(answer, set())
    answer.completion_tokens = 5
    assert defects(answer, set())


def with_kept_stop(server: StubServer, extra_tokens: int) -> httpx.MockTransport:
    """Return a transport that leaves the stop string in the text, and so many tokens behind it."""

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        stops = body.pop("stop", None)
        response = server.handle(httpx.Request(request.method, request.url, json=body) if stops else request)
        if not stops:
            return response
        made = json.loads(response.content)
        choice = made["choices"][0]
        tokens = choice["logprobs"]["tokens"]
        length = next(n for n in range(len(tokens) + 1) if stops[0] in "".join(tokens[:n])) + extra_tokens
        for values in choice["logprobs"].values():
            del values[length:]
        choice |= {"text": "".join(tokens[:length]), "finish_reason": "stop"}
        made["usage"]["completion_tokens"] = length
        return httpx.Response(200, json=made)

    return httpx.MockTransport(handle)


@pytest.mark.parametrize(("extra_tokens", "status"), [(0, Status.DIFFERS), (1, Status.VIOLATED)])
def test_stop_string_may_stay_in_the_text_and_nothing_behind_it(extra_tokens: int, status: Status) -> None:
    transport = with_kept_stop(StubServer(StubModel(3), entropy=5), extra_tokens)
    report = audit(STUB_URL, transport=transport, plan=PLAN, only=["options"])
    assert report.result("stop").status is status
    assert (report.result("agreement").status is Status.VIOLATED) == bool(extra_tokens)


def test_stop_string_that_is_removed_without_an_end_is_a_violation() -> None:
    """Check a server that removes the stop string from the text and continues, as mlx_lm.server."""
    server = StubServer(StubModel(3), entropy=5)

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        stops = body.pop("stop", None)
        if not stops:
            return server.handle(request)
        made = json.loads(server.handle(httpx.Request(request.method, request.url, json=body)).content)
        made["choices"][0]["text"] = made["choices"][0]["text"].replace(stops[0], "")
        return httpx.Response(200, json=made)

    report = audit(STUB_URL, transport=httpx.MockTransport(handle), plan=PLAN, only=["options"])
    assert report.result("stop").status is Status.VIOLATED


@pytest.mark.parametrize(("is_faulty", "status"), [(False, Status.EXACT), (True, Status.DIFFERS)])
def test_greedy_outputs_are_compared_with_those_without_speculation(is_faulty: bool, status: Status) -> None:
    server = StubServer(StubModel(3), entropy=5)

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        if is_faulty and "drafts" in body:
            body["logit_bias"] = {"3": 100}
            request = httpx.Request("POST", request.url, json=body)
        return server.handle(request)

    report = audit(
        STUB_URL, transport=httpx.MockTransport(handle), plan=PLAN, only=["greedy"], without={"drafts": 0}
    )
    assert report.result("switch_greedy").status is status


def test_difference_of_answers_without_tokens() -> None:
    """Check what is stated about two texts, and about equal texts with other finish reasons."""
    answers = [Answer("x", "completions", {}, text=text) for text in ("one two", "one on")]
    assert difference(*answers) == "the texts differ: 'two' and 'on' at character 4"
    ends = [
        Answer("x", "completions", {}, text="a", finish_reason=reason, completion_tokens=count)
        for reason, count in (("length", 24), ("stop", 4))
    ]
    assert difference(*ends) == "the finish reasons are 'length' and 'stop', with 24 and 4 tokens in usage"
