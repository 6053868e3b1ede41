"""Errors of the server: OpenAI's error object, limits, keys, disconnects, timeouts, signals, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import openai
import pytest
from pytest import MonkeyPatch

from draftproof import AsyncLLM
from draftproof.errors import ConfigError, EngineDeadError, QueueFullError
from draftproof.serve.api.generation import handler, response_builder
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.http import io, request_guard, uvicorn_protocol
from draftproof.serve.http.request_log import JsonFormatter
from draftproof.serve.http.server import serve
from draftproof.serve.settings import KEY_VARIABLE, ApiKeys, Settings, read_keys
from serving import NGRAM, Served, events, raw_request, serving, slow_down, tiny
from worker_thread import TIMEOUT_SECONDS, wait_for


@pytest.fixture(scope="module")
def served(folder: Any) -> Any:
    limits = {"max_n": 4, "max_choices": 8, "max_prompt_tokens": 100, "max_logprob_entries": 9000}
    with serving(tiny(folder, NGRAM), Settings(max_body_bytes=20_000, **limits)) as running:
        yield running


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"prompt": "one", "max_tokens": 3}
LONG = {**TEXT, "max_tokens": 200, "ignore_eos": True, "speculative": False}
# values of options of /v1/completions that the error names
WRONG_VALUES: dict[str, list[Any]] = {
    "prompt": [[], "", [1, "a"], [[1], []], [5000], ["a"] * 9, "one two " * 200, None],
    "max_tokens": [0, -1, 2.5, "3"],
    "temperature": [-1, "hot"],
    "top_p": [0],
    "n": [0, 5],
    "best_of": [3],
    "logprobs": [21, True],
    "suffix": ["x"],
    "temprature": [1],
    "guided_json": [{}],
    "logit_bias": [{"x": 1}, {"1": 101}, {"5000": 1}],
    "stop": [["x"] * 17],
    "stop_token_ids": [[5000]],
    "allowed_token_ids": [[]],
    "min_tokens": [9],
    "seed": [1 << 63],
    "metadata": [{"k": "x" * 513}, {f"k{i}": "" for i in range(17)}],
    "store": [True],
    "service_tier": ["slow"],
    "priority": [1 << 40],
    "cache_salt": [""],
    "request_id": ["no spaces"],
    "stream_options": [{"include_usage": True}],
    "stream_granularity": ["step"],
    "logprobs_mode": ["cooked"],
    "speculative": [{"num_speculative_tokens": 9}, {"verify_strategy": "unknown"}],
    "structured_outputs": [{}, {"regex": ""}],
    "response_format": [{"type": "json_schema", "json_schema": {"schema": {"not": {}}}}],
}
COMPLETIONS = [({name: value}, name) for name, values in WRONG_VALUES.items() for value in values]
COMPLETIONS += [
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [[1] * 100] * 5, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"logprobs": 20, "n": 4, "max_tokens": 200}, "logprobs"),
    ({"stop": [""]}, "stop[0]"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_granularity": "word"}, "stream_granularity"),
    ({"logprobs": 3, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"echo": True, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"speculative": {"method": "ngram"}}, "speculative.method"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "name": ""}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "names": "y"}]}, "messages[0].names"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "messages"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(
    ("path", "base", "change", "param"),
    [("/v1/completions", TEXT, *case) for case in COMPLETIONS]
    + [("/v1/chat/completions", CHAT, *case) for case in CHATS],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_invalid_option_is_rejected_by_name(
    served: Served, path: str, base: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    got = served.post(path, {**base, **change})
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]


def test_error_message_contains_a_hint(served: Served) -> None:
    def message(**change: Any) -> str:
        return served.post("/v1/chat/completions", {**CHAT, **change}).json()["error"]["message"]

    assert "did you mean 'temperature'" in message(temprature=1)
    assert message(functions=[{"name": "f"}]) == "functions: use tools"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "only text is supported" in message(messages=[image])


def test_prediction_without_speculation_is_refused_with_a_hint(folder: Any) -> None:
    with serving(tiny(folder)) as running:
        body = {**CHAT, "prediction": {"type": "content", "content": "x"}}
        got = running.post("/v1/chat/completions", body)
    error = got.json()["error"]
    assert (got.status_code, error["param"], error["code"]) == (400, "prediction", "unsupported_option")
    assert "start the server with a --speculative-config" in error["message"]


def test_too_long_prompt_has_the_code_of_openai_and_is_not_counted(served: Served) -> None:
    before = served.http.get("/metrics").text
    long = "one " * 150
    for path, body, param in (
        ("/v1/completions", {**TEXT, "prompt": long}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        error = served.post(path, body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), error
    after = served.http.get("/metrics").text
    counts = [line for line in after.splitlines() if line.startswith("draftproof:prompt_tokens_total")]
    assert counts and counts[0] in before


def test_openai_client_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        served.complete("one", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        served.client.completions.create(model="gpt-17", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("gpt-17")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b"[" * 9000, b'{"prompt": NaN}']
)
def test_body_that_is_not_a_json_object_is_rejected(served: Served, body: bytes) -> None:
    got = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert got.status_code == 400 and got.json()["error"]["message"]


def test_wrong_media_type_size_route_and_method_have_their_status(served: Served) -> None:
    assert served.http.post("/v1/completions", content=b"{}").status_code == 415
    assert served.post("/v1/completions", {"prompt": "x" * 30_000}).status_code == 413
    assert served.http.get("/v1/nothing").json()["error"]["code"] == "no_such_route"
    got = served.http.get("/v1/completions")
    assert got.status_code == 405 and got.headers["allow"] == "POST" and "error" in got.json()
    chunks = iter([b'{"prompt": "' + b"x" * 15_000, b"x" * 15_000])
    got = served.http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert got.status_code == 413


def test_incomplete_body_times_out(folder: Any) -> None:
    with serving(tiny(folder), Settings(body_seconds=0.2)) as running:
        where, data = raw_request(running.url, {}, length=9)
        with socket.create_connection(where, timeout=TIMEOUT_SECONDS) as line:
            line.sendall(data)
            assert b" 408 " in line.recv(1000).split(b"\r\n")[0]


def test_request_id_of_an_open_request_is_rejected(served: Served, monkeypatch: MonkeyPatch) -> None:
    slow_down(served.llm, monkeypatch)
    body = {**LONG, "stream": True, "request_id": "twin"}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["x-request-id"] == "twin"
        chunks = events(response)
        assert next(chunks)["id"] == "cmpl-twin"
        error = served.post("/v1/completions", {**TEXT, "request_id": "twin"}).json()["error"]
        assert error["param"] == "request_id"
    sent = served.post("/v1/completions", TEXT, headers={"x-request-id": "from.a-header:1"})
    assert sent.json()["id"] == "cmpl-from.a-header:1" and sent.headers["x-request-id"] == "from.a-header:1"
    forged = served.post("/v1/completions", TEXT, headers={"x-request-id": "a b{}"})
    assert len(forged.headers["x-request-id"]) == 32


def test_options_that_forbid_every_token_give_400(served: Served) -> None:
    body = {**TEXT, "logit_bias": {}, "allowed_token_ids": [1], "min_tokens": 2}
    for stream in (False, True):  # a stream without a token has an error status as well
        got = served.post("/v1/completions", {**body, "stream": stream})
        assert got.status_code == 400 and "no token is left" in got.json()["error"]["message"]


def test_api_keys_are_required_and_limit_open_requests(
    folder: Any, monkeypatch: MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "keys").write_text("# comment\nalpha\n\nbeta\n")
    monkeypatch.setenv(KEY_VARIABLE, "gamma, delta")
    keys = read_keys(str(tmp_path / "keys"))
    with serving(tiny(folder), Settings(api_keys=keys, max_concurrent_per_key=1)) as running:
        slow_down(running.llm, monkeypatch)
        for path in ("/health", "/version", "/openapi.json", "/"):
            assert running.http.get(path).status_code == 200
        wrong = ({"authorization": value} for value in ("Bearer", "Bearer alph", "Basic alpha"))
        for sent in ({}, *wrong):
            got = running.post("/v1/completions", TEXT, headers=sent)
            assert got.status_code == 401 and got.json()["error"]["code"] == "invalid_api_key"
            assert running.http.get("/metrics", headers=sent).status_code == 401
        for key in ("alpha", "beta", "gamma", "delta"):
            got = running.post("/v1/completions", TEXT, headers={"authorization": f"Bearer {key}"})
            assert got.status_code == 200
        with pytest.raises(openai.AuthenticationError):
            running.complete("one")
        mine = {"authorization": "Bearer alpha"}
        stream = {**LONG, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=stream, headers=mine) as response:
            chunks = events(response)  # keeps the response open
            next(chunks)
            busy = running.post("/v1/completions", TEXT, headers=mine)
            assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
            other = running.post("/v1/completions", TEXT, headers={"authorization": "Bearer beta"})
            assert other.status_code == 200


def test_key_file_without_keys_is_a_config_error(tmp_path: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert not read_keys(None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# no key\n")
    with pytest.raises(ConfigError, match="no API key"):
        read_keys(str(tmp_path / "empty"))
    assert ApiKeys(["a"]).find("a") == ApiKeys(["b", "a"]).find("a") != ApiKeys(["b"]).find("b")
    for wrong in ({"max_n": 0}, {"request_seconds": 0}):
        with pytest.raises(ConfigError):
            Settings(**wrong)


def test_full_draining_or_failed_server_responds_503_or_500(folder: Any, monkeypatch: MonkeyPatch) -> None:
    with serving(tiny(folder), Settings(max_concurrent=1)) as running:
        slow_down(running.llm, monkeypatch)
        with running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            chunks = events(response)  # keeps the response open
            next(chunks)
            busy = running.post("/v1/completions", TEXT)
            assert busy.status_code == 503 and busy.headers["retry-after"] == "1"
        wait_for(lambda: running.app.state.guard.num_open == 0)
        running.app.state.guard.draining = True
        assert running.post("/v1/completions", TEXT).json()["error"]["code"] == "draining"
        assert running.http.get("/health").status_code == 503
        running.app.state.guard.draining = False
        for error, status, kind in (
            (QueueFullError("9 requests are waiting already"), 503, "service_unavailable_error"),
            (EngineDeadError("secret details"), 503, "service_unavailable_error"),
            (ZeroDivisionError("secret details"), 500, "server_error"),
        ):
            monkeypatch.setattr(running.llm, "generate", AsyncMock(side_effect=error))
            got = running.post("/v1/completions", TEXT)
            assert got.status_code == status and got.json()["error"]["type"] == kind
            assert "secret" not in got.text and (got.headers.get("retry-after") == "1") == (status == 503)


def test_request_that_takes_too_long_times_out(folder: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "SWEEP_SECONDS", 0.01)
    with serving(tiny(folder), Settings(request_seconds=2)) as running:
        slow_down(running.llm, monkeypatch)
        assert running.post("/v1/completions", LONG).status_code == 504
        with running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            chunks = list(events(response))
        assert response.status_code == 200 and chunks[-1]["error"]["code"] == "timeout"
        assert 0 < len(chunks) < 200
        wait_for(lambda: running.llm.num_open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_aborts_its_request(folder: Any, monkeypatch: MonkeyPatch, stream: bool) -> None:
    with serving(tiny(folder)) as running:
        slow_down(running.llm, monkeypatch)
        where, data = raw_request(running.url, {**LONG, "stream": stream, "n": 2})
        with socket.create_connection(where, timeout=TIMEOUT_SECONDS) as line:
            line.sendall(data)
            if stream:
                assert line.recv(100)
            wait_for(lambda: running.llm.num_open == 1)
        wait_for(lambda: running.llm.num_open == 0)
        wait_for(lambda: running.app.state.guard.num_open == 0)
        assert running.llm.stats.num_emitted_tokens < 400
        assert running.app.state.metrics.disconnects == 1
        assert running.complete("one", max_tokens=2).choices[0].text is not None


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_never_reads_is_dropped_and_others_are_served(
    folder: Any, monkeypatch: MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(request_guard, "SWEEP_SECONDS", 0.02)
    with serving(tiny(folder, max_model_len=256), Settings(stall_seconds=0.3), 4096) as running:
        body = {**LONG, "max_tokens": 250, "stream": stream, "logprobs": 20, "n": 8}
        where, data = raw_request(running.url, body)
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(where)
            line.sendall(data)
            assert running.complete("one", max_tokens=5).choices[0].text is not None
            wait_for(lambda: running.app.state.metrics.disconnects == 1)
        wait_for(lambda: running.llm.num_open == 0)


def test_large_response_is_sent_in_pieces_with_a_time_limit_each() -> None:
    """A client that reads slowly but steadily receives the whole response."""
    guard = SimpleNamespace(settings=SimpleNamespace(request_seconds=60.0))
    ended: list[bool] = []
    admission = SimpleNamespace(end=lambda: ended.append(True))
    client = request_guard.ClientMonitor(None, guard, admission)  # type: ignore[arg-type]
    body, pieces, starts = bytes(range(256)) * 4000, [], []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            pieces.append(message["body"])
            starts.append(client.sending_since)

    asyncio.run(io.send_last(send, body, client))
    assert b"".join(pieces) == body and max(map(len, pieces)) <= io.PIECE_BYTES and ended == [True]
    timed, last = starts[:-1], starts[-1]
    assert len(set(timed)) == len(timed) >= 4 and None not in timed and last is None


def test_incomplete_or_large_headers_close_the_connection(folder: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "HEADER_SECONDS", 0.3)
    with serving(tiny(folder)) as running:
        where, data = raw_request(running.url, {**TEXT})
        for head in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
            with socket.create_connection(where, timeout=TIMEOUT_SECONDS) as line:
                line.sendall(head)
                assert line.recv(10) == b""
        monkeypatch.setattr(uvicorn_protocol, "HEADER_SECONDS", TIMEOUT_SECONDS)
        with socket.create_connection(where, timeout=TIMEOUT_SECONDS) as line:
            line.sendall(b"GET /health HTTP/1.1\r\n" + b"x-filler: 0123456789\r\n" * 4000)
            assert b" 400 " in line.recv(1000)
        with socket.create_connection(
            where, timeout=TIMEOUT_SECONDS
        ) as line:  # a second request over one connection
            for _ in range(2):
                line.sendall(data)
                assert b" 200 " in line.recv(1 << 16)


def test_large_bodies_and_responses_in_a_thread_are_the_same(folder: Any, monkeypatch: MonkeyPatch) -> None:
    body = {"prompt": [list(range(9, 60))] * 2, "max_tokens": 5, "echo": True, "logprobs": 3, "seed": 1}
    results = []
    for limit in (20_000, 10):
        monkeypatch.setattr(handler, "MAX_INLINE_LOGPROBS", limit)
        monkeypatch.setattr(io, "MAX_INLINE_BODY_BYTES", limit)
        with serving(tiny(folder)) as running:
            whole = running.post("/v1/completions", body).json()
            with running.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                parts = [chunk["choices"] for chunk in events(response)]
        results.append((whole["choices"], sorted(parts, key=lambda part: part[0]["index"])))
    assert results[0] == results[1]


def test_log_has_request_fields_and_no_prompt(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secret = "seven eight secret nine"
    served.post("/v1/completions", {"prompt": secret, "max_tokens": 2, "request_id": "logged", "user": "ada"})
    served.post("/v1/completions", {"prompt": secret, "temperature": secret})

    def read() -> list[dict[str, Any]]:
        records = [record for record in list(caplog.records) if record.getMessage() == "request"]
        return [json.loads(JsonFormatter().format(record)) for record in records]

    wait_for(lambda: len(read()) == 2)  # a line is written after its response was sent
    lines = read()
    line = next(line for line in lines if line["request_id"] == "logged")
    assert line["status"] == 200 and line["completion_tokens"] == 2 and line["path"] == "/v1/completions"
    assert line["user"] == "ada" and line["finish_reasons"] == ["length"] and line["seconds"] > 0
    assert secret not in json.dumps(lines) and {each["status"] for each in lines} == {200, 400}


def test_prompts_are_logged_with_log_prompts(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(tiny(folder), Settings(log_prompts=True)) as running:
        running.complete("seven eight", max_tokens=2)
    assert any("seven eight" in JsonFormatter().format(record) for record in caplog.records)


def test_generation_error_has_a_status_by_cause() -> None:
    error = response_builder.generation_error
    assert error("abort", None, False).status == error("error", "the worker ended", True).status == 503
    assert error("error", "NaN", False).status == 500


def test_logprobs_limit_is_the_engines_max_logprobs(folder: Path) -> None:
    with serving(tiny(folder, max_logprobs=50)) as running:
        body = {"prompt": "one two", "max_tokens": 2, "seed": 1}
        got = running.post("/v1/completions", {**body, "logprobs": 50})
        assert got.status_code == 200
        assert len(got.json()["choices"][0]["logprobs"]["top_logprobs"][0]) >= 50
        for option in ("logprobs", "prompt_logprobs"):
            got = running.post("/v1/completions", {**body, option: 51})
            assert got.status_code == 400 and got.json()["error"]["param"] == option
        schemas = running.http.get("/openapi.json").json()["components"]["schemas"]
        parts = schemas["CompletionRequest"]["properties"]["logprobs"]["anyOf"]
        assert [part["maximum"] for part in parts if part["type"] == "integer"] == [50]


@pytest.mark.parametrize("policy", ["accept_all", "normal"])
def test_accept_policy_is_labelled_in_response_and_metrics(folder: Path, policy: str) -> None:
    with serving(tiny(folder, {**NGRAM, "accept_policy": policy})) as running:
        body = {"prompt": "one two three one two", "max_tokens": 4, "seed": 1}
        metrics = running.post("/v1/completions", body).json()["metrics"]
        page = running.http.get("/metrics").text
        lossless = policy == "normal"
        assert metrics["lossless"] is lossless and ("LOSSY" in metrics["strategy"]) is not lossless
        (line,) = [line for line in page.splitlines() if line.startswith("draftproof:lossless{")]
        assert line.endswith(f" {float(lossless)}")
        name = f'draftproof:lossy_requests_total{{model_name="{running.model}"}}'
        assert f"{name} {float(not lossless)}" in page


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signal_before_the_server_loop_stops_the_server(folder: Path, number: signal.Signals) -> None:
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    llm = AsyncLLM.from_llm(tiny(folder))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            metrics = ServerMetrics(llm, "tiny", False)
            serve(llm, Settings(), listener, metrics, ready=lambda: signal.raise_signal(number))  # returns
    finally:
        llm._finalizer()
        for kind, handler in before.items():
            signal.signal(kind, handler)
