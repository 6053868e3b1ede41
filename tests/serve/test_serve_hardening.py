"""Defects found by attacking the server: limits, isolation of keys, hosts, headers."""

from __future__ import annotations

import asyncio
import io as io_module
import json
import pickle
import queue
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from async_serving import run
from draftproof import AsyncLLM
from draftproof.errors import ConfigError
from draftproof.serve.api import token_routes
from draftproof.serve.api.generation import prompt_parser, request_schema
from draftproof.serve.api.generation.response_builder import generation_error
from draftproof.serve.http import io, request_log
from draftproof.serve.http.app import create_app
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.request_log import RequestRecord
from draftproof.serve.http.server import HttpServer, uvicorn_config
from draftproof.serve.settings import ApiKeys, Settings, read_keys
from draftproof.text.grammar import process
from serving import NGRAM, Served, raw_request, serving, tiny
from worker_thread import TIMEOUT_SECONDS, wait_for

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
KEYS = ApiKeys(["alpha", "beta"])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def usage(running: Served, key: str, **more: Any) -> tuple[int, int]:
    """Return the cached prompt tokens and the drafts of a request of one API key."""
    body = {"prompt": "nine ten and then again " * 8, "max_tokens": 24, "temperature": 0, **more}
    got = running.post("/v1/completions", {**body, "ignore_eos": True}, headers=bearer(key))
    assert got.status_code == 200, got.text
    found = got.json()
    drafts = found["metrics"]["speculative_decoding"]["num_draft_tokens"]
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], drafts


@pytest.mark.parametrize("shared", [False, True])
def test_prefix_cache_is_separate_for_each_key_unless_shared(folder: Any, shared: bool) -> None:
    with serving(tiny(folder, SUFFIX), Settings(api_keys=KEYS, share_prefix_cache=shared)) as running:
        assert usage(running, "alpha")[0] == 0
        assert usage(running, "alpha")[0] > 0
        assert (usage(running, "beta")[0] > 0) is shared
        for salt in ({"cache_salt": "s"}, {"prompt_cache_key": "s"}):
            assert usage(running, "alpha", **salt)[0] == 0
            assert usage(running, "alpha", **salt)[0] > 0
            assert (usage(running, "beta", **salt)[0] > 0) is shared


@pytest.mark.parametrize("shared", [False, True])
def test_pool_of_earlier_outputs_is_separate_for_each_key_unless_shared(folder: Any, shared: bool) -> None:
    settings = Settings(api_keys=KEYS, share_prefix_cache=shared)
    with serving(tiny(folder, SUFFIX), settings) as running:
        body = {"prompt": "seven", "temperature": 1, "seed": 9, "logprobs": 0}
        first = usage(running, "alpha", **body)[1]
        assert (usage(running, "beta", **body)[1] > first) is shared
        assert usage(running, "alpha", **body)[1] > first  # its own output is in the pool


@pytest.mark.parametrize(("limit", "accepted"), [(0, [0]), (5, [-5, 0, 5])])
def test_priority_is_limited_by_the_operator(folder: Any, limit: int, accepted: list[int]) -> None:
    with serving(tiny(folder, NGRAM), Settings(max_priority=limit)) as running:
        for priority in (-(2**31), -limit - 1, -5, 0, 5, limit + 1):
            got = running.post("/v1/completions", {"prompt": "one", "max_tokens": 1, "priority": priority})
            assert got.status_code == (200 if priority in accepted else 400), got.text
            if priority not in accepted:
                error = got.json()["error"]
                assert error["param"] == "priority" and "--max-priority" in error["message"]
    with pytest.raises(ConfigError, match="max_priority"):
        Settings(max_priority=-1)


@pytest.mark.parametrize("field", ["prompt", "messages", "tokens"])
def test_long_text_is_rejected_by_tokenizer_routes_as_by_prompts(
    folder: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/detokenize" if field == "tokens" else "/tokenize"

    def body(count: int) -> dict[str, Any]:
        text = "one " * count
        return {"prompt": text, "messages": [{"role": "user", "content": text}], "tokens": [5] * count}

    monkeypatch.setattr(token_routes, "MIN_TRIMMED_TOKENS", 4)
    with serving(tiny(folder, max_model_len=64)) as running:
        assert running.post(path, {field: body(9)[field]}).status_code == 200
        got = running.post(path, {field: body(2000)[field]})
        assert got.status_code == 400, got.text[:200]
        error = got.json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def block_encoding(running: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], threading.Event]:
    """Return a body whose text is encoded in a thread after the event is set, and the event."""
    backend, release = running.llm.get_tokenizer(), threading.Event()
    encode = backend.encode

    def wait(text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("slow"):
            release.wait(TIMEOUT_SECONDS)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(backend, "encode", wait)
    monkeypatch.setattr(prompt_parser, "LONG_TEXT_CHARACTERS", 100)
    return {"prompt": "slow" * 50}, release


def test_tokenizer_routes_count_as_open_requests_of_a_key(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny(folder), Settings(api_keys=KEYS, max_concurrent_per_key=1)) as running:
        slow, release = block_encoding(running, monkeypatch)
        sender = threading.Thread(
            target=running.post, args=("/tokenize", slow), kwargs={"headers": bearer("alpha")}
        )
        sender.start()
        try:
            wait_for(lambda: running.app.state.guard.num_open == 1)
            got = running.post("/tokenize", {"prompt": "one"}, headers=bearer("alpha"))
            assert got.status_code == 429
            other = running.post("/tokenize", {"prompt": "one"}, headers=bearer("beta"))
            assert other.status_code == 200
        finally:
            release.set()
            sender.join()


PROMPT = {"prompt": "one", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/completions", {**PROMPT, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/messages", {**CHAT, "model": "tiny", "stream": True}),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"], "model": "tiny"}),
        ("/v1/responses", {"input": "one", "max_output_tokens": 2, "stream": True}),
        ("/v1/responses/input_tokens", {"input": "one"}),
        ("/v1/embeddings", {"input": "one"}),
        ("/tokenize", {"prompt": "one"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_next_request_is_admitted_with_the_last_bytes(folder: Any, path: str, body: Any) -> None:
    """A key with one open request may send the next one as soon as it has the last byte."""
    settings = Settings(max_concurrent_per_key=1, served_model_names=("tiny",))

    async def post(engine: AsyncLLM) -> list[tuple[bytes, bool]]:
        """Return the parts of a response, and whether a request is admitted when each of them is sent."""
        app, parts = create_app(engine, settings), []
        head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": head}
        bodies = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return bodies.pop() if bodies else await asyncio.Future()

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200
            if message.get("body"):
                is_admitted = True
                try:
                    with app.state.guard.admit(RequestRecord("next", "POST", path, 0.0)):
                        pass
                except ApiError as error:
                    is_admitted = error.status != 429
                parts.append((message["body"], is_admitted))

        await app(scope, receive, send)
        return parts

    parts = run(tiny(folder), post)
    assert [is_admitted for _, is_admitted in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1 or "stream" not in body


def test_waiting_tokenizer_routes_delay_no_chat(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts of /tokenize occupy their own threads only."""
    with serving(tiny(folder)) as running:
        body = {"messages": [{"role": "user", "content": "ten " * 40}], "max_tokens": 1}
        running.post("/v1/chat/completions", body)  # compiles the kernels
        slow, release = block_encoding(running, monkeypatch)
        senders = [threading.Thread(target=running.post, args=("/tokenize", slow)) for _ in range(40)]
        for sender in senders:
            sender.start()
        try:
            wait_for(lambda: running.app.state.guard.num_open == len(senders))
            assert running.post("/v1/chat/completions", body).status_code == 200
            assert running.app.state.guard.num_open == len(senders)  # all of them still wait
        finally:
            release.set()
            for sender in senders:
                sender.join()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 3000}] * 2},
            "messages",
        ),
        ("/v1/completions", {"prompt": [1] * 300_000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [1] * 300_000}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 0 for i in range(300_000)}}, "logit_bias"),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"choice": ["a"] * 300_000}},
            "structured_outputs.choice",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_number_of_items_is_limited(folder: Any, path: str, body: dict[str, Any], param: str) -> None:
    with serving(tiny(folder)) as running:
        got = running.post(path, body)
        error = got.json()["error"]
        assert (got.status_code, error["param"]) == (400, param), got.text[:300]
        if param != "prompt":  # ids need no rendering
            assert error["code"] != "context_length_exceeded", "it was rendered and encoded first"


def test_many_messages_are_rendered_in_a_thread(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty messages take time as well: the number of characters alone does not decide."""
    threads = []
    with serving(tiny(folder)) as running:
        render = running.llm.chat_token_ids

        def record(messages: Any, **template: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return render(messages, **template)

        monkeypatch.setattr(running.llm, "chat_token_ids", record)
        for count in (1, request_schema.MAX_MESSAGES):
            running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * count})
    assert threads[0] != threads[1]


def test_tokenizer_info_has_special_tokens_and_template(folder: Any) -> None:
    with serving(tiny(folder), Settings(api_keys=KEYS)) as running:
        assert running.http.get("/tokenizer_info").status_code == 401
        got = running.http.get("/tokenizer_info", headers=bearer("alpha")).json()
    assert got["eos_token"] == "<|im_end|>" and got["bos_token"] is None
    assert "add_generation_prompt" in got["chat_template"] and got["vocab_size"] > 256


def test_header_limit_holds_in_one_packet(folder: Any) -> None:
    with serving(tiny(folder)) as running:
        address, whole = raw_request(running.url, {"prompt": "one", "max_tokens": 1})
        for count, status in ((0, b" 200 "), (4000, b" 400 ")):
            extra = b"x-filler: 0123456789\r\n" * count
            with socket.create_connection(address, timeout=TIMEOUT_SECONDS) as line:
                line.sendall(whole.replace(b"host: x\r\n", b"host: x\r\n" + extra))
                assert status in line.recv(1000).split(b"\r\n")[0]
        with socket.create_connection(address, timeout=TIMEOUT_SECONDS) as line:
            line.sendall(b"GET /health?" + b"x" * (70 << 10) + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 400 " in line.recv(1000)


@pytest.mark.parametrize("has_length", [True, False])
def test_client_that_sends_a_whole_large_body_first_sees_413(folder: Any, has_length: bool) -> None:
    """The client reads after its last byte was sent, as node does; a reset would discard the response."""
    size, part = 6 << 20, b"x" * (1 << 16)
    with serving(tiny(folder), Settings(max_body_bytes=1000)) as running:
        address, _ = raw_request(running.url, {})
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {size}\r\n\r\n" if has_length else "transfer-encoding: chunked\r\n\r\n"
        with socket.create_connection(address, timeout=TIMEOUT_SECONDS) as line:
            line.sendall(head.encode())
            for _ in range(size // len(part)):
                line.sendall(part if has_length else b"10000\r\n" + part + b"\r\n")
            line.sendall(b"" if has_length else b"0\r\n\r\n")
            received = b""
            while got := line.recv(1 << 16):
                received += got
        assert b" 413 " in received and b"body_too_large" in received


def test_body_that_ends_beyond_the_limit_is_rejected_at_once(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "LINGER_SECONDS", 600.0)
    with serving(tiny(folder), Settings(max_body_bytes=1000)) as running:
        parts = [b'{"prompt": "', b"x" * 2000, b'"}']
        headers = {"content-type": "application/json"}
        got = running.http.post(
            "/v1/completions", content=iter(parts), headers=headers, timeout=TIMEOUT_SECONDS
        )
        assert got.status_code == 413


def test_error_of_a_lost_worker_gives_its_advice_once() -> None:
    for text in ("the engine's process ended; unfinished requests are lost: try again", "it ended"):
        assert generation_error("error", text, worker_lost=True).message.count("try again") == 1


def test_param_of_an_error_is_null_and_not_empty(folder: Any) -> None:
    with serving(tiny(folder)) as running:
        for body in ({"": 1, "prompt": "one"}, {"prompt": "one", "logit_bias": {"": 1}}, []):
            got = running.post("/v1/completions", body)
            assert got.status_code == 400 and got.json()["error"]["param"] != "", got.text


def test_failure_of_a_thread_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", request_log.log_thread_failure)
    thread = threading.Thread(target=int, args=("x",), name="failing")
    thread.start()
    thread.join()
    line = json.loads(request_log.JsonFormatter().format(caplog.records[-1]))
    assert (line["message"], line["thread"]) == ("a thread failed", "failing")
    assert "ValueError" in json.dumps(line)


def test_truncated_reply_of_the_grammar_compiler_ends_its_reader() -> None:
    """A compiler that is killed within a reply leaves part of a frame in the pipe."""
    replies: Any = queue.Queue()
    source = io_module.BytesIO(struct.pack("<Q", 100) + pickle.dumps("x" * 80)[:40])
    process._read(SimpleNamespace(stdout=source), replies)  # type: ignore[arg-type]
    assert replies.get_nowait() is None


class HeldDrain:
    """Engine that drains until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    async def drain(self, seconds: float) -> int:
        await asyncio.to_thread(self.released.wait, seconds)
        return 0

    async def shutdown(self) -> None:
        return None


def test_new_connections_get_503_while_the_server_drains(folder: Any) -> None:
    engine, held, settings = AsyncLLM.from_llm(tiny(folder)), HeldDrain(), Settings()
    app = create_app(engine, settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(uvicorn_config(app, settings), held, app.state.guard, settings, None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            wait_for(lambda: server.started)
            server.should_exit = True
            wait_for(lambda: app.state.guard.draining)
            got = httpx.post(
                f"{url}/v1/completions", json={"prompt": "one", "max_tokens": 1}, timeout=TIMEOUT_SECONDS
            )
            assert (got.status_code, got.json()["error"]["code"]) == (503, "draining")
            assert "retry-after" in got.headers
            assert httpx.get(f"{url}/health", timeout=TIMEOUT_SECONDS).json()["status"] == "draining"
        finally:
            held.released.set()
            thread.join(TIMEOUT_SECONDS)
            engine._finalizer()
    assert not thread.is_alive()


@pytest.mark.parametrize("seconds", [0.05, 0.0])
def test_silent_stream_gets_comments(folder: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "one", "max_tokens": 3, "stream": True, "seed": 1, "temperature": 0}
    with serving(tiny(folder), Settings(keep_alive_seconds=seconds)) as running:
        open_stream = running.llm.stream

        def slow(*given: Any, **options: Any) -> Any:
            stream = open_stream(*given, **options)
            read = stream.read

            async def read_late() -> Any:
                stream.read = read
                await asyncio.sleep(0.5)
                return await read()

            stream.read = read_late
            return stream

        expected = running.post("/v1/completions", body).text
        monkeypatch.setattr(running.llm, "stream", slow)
        got = running.post("/v1/completions", body).text
        assert (": keep-alive\n\n" in got) is bool(seconds)
        assert got.startswith(": keep-alive") is bool(seconds), "before the first token too"
        texts = [
            [
                json.loads(line[6:])["choices"][0]["text"]
                for line in text.splitlines()
                if line[:7] == "data: {"
            ]
            for text in (got, expected)
        ]
        assert texts[0] == texts[1] and got.endswith("data: [DONE]\n\n")
        completed = running.client.completions.create(model=running.model, **body)
        assert "".join(chunk.choices[0].text for chunk in completed) == "".join(texts[0])


def test_keys_have_priority_limits_of_their_own(folder: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nalpha max-priority=9\nbeta\n\ngamma max-priority=0\n")
    keys = read_keys(str(path))
    copied = ApiKeys((), keys.digests, keys.max_priorities)  # as another HTTP process gets them
    for held in (keys, copied):
        with serving(tiny(folder), Settings(api_keys=held, max_priority=2)) as running:
            for key, limit in (("alpha", 9), ("beta", 2), ("gamma", 0)):
                for priority in (-limit - 1, -limit, limit, limit + 1):
                    body = {"prompt": "one", "max_tokens": 1, "priority": priority}
                    got = running.post("/v1/completions", body, headers=bearer(key))
                    assert got.status_code == (200 if abs(priority) <= limit else 400), (key, priority)
    for line in ("alpha max-priority=-1", "alpha max_priority=1", "alpha beta", "alpha max-priority=1 x"):
        path.write_text(line)
        with pytest.raises(ConfigError, match="line 1: a key may be followed by max-priority=N"):
            read_keys(str(path))
