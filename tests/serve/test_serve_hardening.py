"""Defects found by attacking the server: limits, isolation of keys, hosts, headers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from draftproof.errors import ConfigError
from draftproof.serve.api import token_routes
from draftproof.serve.api.generation import prompt_parser, request_schema
from draftproof.serve.settings import ApiKeys, Settings
from serving import NGRAM, Served, serving, tiny
from worker_thread import wait_for

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
            release.wait(30)
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
            began = time.monotonic()
            got = running.post("/v1/chat/completions", body, timeout=20)
            assert got.status_code == 200 and time.monotonic() - began < 10
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
        assert got.status_code == 400 and got.json()["error"]["param"] == param, got.text[:300]


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
