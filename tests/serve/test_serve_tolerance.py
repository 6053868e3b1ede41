"""Fields that clients always send and that change no output; seeds, names and cache salts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from draftproof import SamplingParams
from draftproof.sampling_params import MAX_SEED
from draftproof.serve.http.request_log import JsonFormatter
from serving import NGRAM, Served, events, serving, tiny

PROMPT = "one two three four one two three"
COMPLETION = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 1}
# fields without influence on the output, with values that OpenAI's clients send
HARMLESS: dict[str, Any] = {
    "metadata": {"trace": "a1"},
    "store": False,
    "user": "ada",
    "safety_identifier": "hash-1",
    "prompt_cache_key": "conversation-1",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "service_tier": "flex",
}


@pytest.fixture(scope="module")
def served(folder: Any) -> Any:
    with serving(tiny(folder, NGRAM)) as running:
        yield running


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("name", HARMLESS)
def test_field_without_influence_changes_no_bit(served: Served, name: str, speculative: bool) -> None:
    body = {**COMPLETION, "speculative": speculative}
    plain = served.post("/v1/completions", {**COMPLETION, "speculative": False}).json()
    got = served.post("/v1/completions", {**body, name: HARMLESS[name]})
    assert got.status_code == 200, got.text
    assert got.json()["choices"] == plain["choices"]
    assert got.json().get("service_tier") == ("default" if name == "service_tier" else None)


def test_control_field_that_changes_the_output_is_detected(served: Served) -> None:
    plain = served.post("/v1/completions", COMPLETION).json()
    assert served.post("/v1/completions", {**COMPLETION, "seed": 4}).json()["choices"] != plain["choices"]
    assert served.post("/v1/completions", {**COMPLETION, "store": True}).status_code == 400


def test_stream_accepts_obfuscation_and_reports_the_service_tier(served: Served) -> None:
    streams = []
    for options in ({}, {"stream_options": {"include_obfuscation": True}, "service_tier": "priority"}):
        body = {**COMPLETION, "stream": True, **options}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            streams.append(list(events(response)))
    assert [each["choices"] for each in streams[0]] == [each["choices"] for each in streams[1]]
    assert {each["service_tier"] for each in streams[1]} == {"default"}
    assert all("service_tier" not in each and "obfuscation" not in each for each in streams[0])


def test_safety_identifier_is_logged_and_metadata_is_not(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served.post("/v1/completions", {**COMPLETION, **HARMLESS, "request_id": "tolerant"})
    records = [record for record in caplog.records if record.message == "request"]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    (line,) = [line for line in lines if line["request_id"] == "tolerant"]
    assert line["safety_identifier"] == "hash-1" and line["user"] == "ada" and "a1" not in json.dumps(line)


def test_prompt_cache_key_separates_cached_prefixes(served: Served) -> None:
    prompt = "nine ten and then again " * 8

    def cached(**more: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **more}
        usage = served.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(prompt_cache_key="a") == 0
    assert cached(prompt_cache_key="a") > 0
    for other in ({"prompt_cache_key": "b"}, {"prompt_cache_key": "a", "cache_salt": "s"}, {}):
        assert cached(**other) == 0
    assert cached(prompt_cache_key="") > 0  # not given


@pytest.mark.parametrize("chat", [True, False])
def test_negative_seed_is_taken_modulo_2_to_63(served: Served, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}

    def choice(seed: int, **more: Any) -> Any:
        got = served.post(path, {**body, "max_tokens": 8, "seed": seed, **more})
        assert got.status_code == 200, got.text
        return got.json()["choices"][0]

    assert choice(-7) == choice(MAX_SEED + 1 - 7) == choice(-7, speculative=False)
    assert choice(-(2**63))["seed"] == 0 and choice(-7) != choice(7)
    assert len({choice(-1)["seed"] for _ in range(3)}) == 3  # fresh ones
    params = SamplingParams(seed=-7), SamplingParams(seed=-1)
    assert params[0].seed == MAX_SEED - 6 and params[1].seed is None


def test_message_name_is_passed_to_the_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that use the name of a message get it; for the others it changes nothing."""
    seen: list[Any] = []
    render = served.llm.chat_token_ids

    def record(messages: Any, **template: Any) -> list[int]:
        seen.append(messages)
        return render(messages, **template)

    monkeypatch.setattr(served.llm, "chat_token_ids", record)
    texts = []
    for name in ({}, {"name": "ada"}):
        messages = [{"role": "user", "content": "hi", **name}]
        got = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "seed": 2})
        assert got.status_code == 200, got.text
        texts.append(got.json()["choices"])
    assert seen[1][0]["name"] == "ada" and "name" not in seen[0][0] and texts[0] == texts[1]


def test_marks_of_caches_and_providers_in_messages_change_nothing(served: Served) -> None:
    """Send what coding clients and litellm add to messages."""
    mark = {"type": "ephemeral"}
    parts = [
        {"type": "text", "text": "hi", "cache_control": mark, "prompt_cache_breakpoint": {"mode": "explicit"}}
    ]
    answer = {"role": "assistant", "content": "yes", "provider_specific_fields": {"refusal": None}}
    choices = []
    for user, assistant in (("hi", {"role": "assistant", "content": "yes"}), (parts, answer)):
        messages = [{"role": "user", "content": user}, assistant, {"role": "user", "content": "go"}]
        got = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "seed": 2})
        assert got.status_code == 200, got.text
        choices.append(got.json()["choices"])
    assert choices[0] == choices[1]
