"""Messages API with the anthropic client: equal to the chat route, events, tools, stops, errors, keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftproof.serve.settings import ApiKeys, Settings
from serving import NGRAM, Served, make_folder, serving, tiny

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "now": {"type": "boolean"}},
    "required": ["city", "now"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "input_schema": PLACE, "description": "Weather of a city"}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": PLACE, "description": "Weather of a city"},
}
USER: Any = {"role": "user", "content": "one two"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_folder(tmp_path_factory.mktemp("messages"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    settings = Settings(tool_call_parser="hermes", served_model_names=("tiny",), api_keys=ApiKeys(["one"]))
    with serving(tiny(folder, NGRAM), settings) as running:
        running.http.headers["authorization"] = "Bearer one"
        running.http.timeout = 600
        yield running


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Return the client's package, which takes seconds to import: not in every worker."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(served: Served, anthropic: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.url, api_key="one", max_retries=0, timeout=600) as made:
        yield made


def options(**more: Any) -> dict[str, Any]:
    """Return the options of a request; those of this server are sent as extra fields."""
    own = ("seed", "speculative", "top_k")  # top_k and temperature: newer clients have no argument for them
    extra = {name: more.pop(name) for name in own if name in more}
    given: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 12}
    return {**given, **more, "extra_body": {"return_token_ids": True, "temperature": 1.0, **extra}}


def chat(served: Served, **more: Any) -> dict[str, Any]:
    """Return the response of the chat route."""
    body = {"messages": [USER], "max_tokens": 12, "temperature": 1.0, "return_token_ids": True, **more}
    got = served.post("/v1/chat/completions", body)
    assert got.status_code == 200, got.text
    return {**got.json(), **got.json()["choices"][0]}


def events(served: Served, **more: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against its name."""
    body = {key: value for key, value in options(**more).items() if key != "extra_body"}
    body |= {"stream": True, **options(**more)["extra_body"]}
    lines = served.post("/v1/messages", body).text.split("\n\n")
    found = []
    for event in filter(None, lines):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def blocks(content: Any) -> list[dict[str, Any]]:
    """Return content blocks without the random ids of calls."""
    return [{key: value for key, value in block.to_dict().items() if key != "id"} for block in content]


@pytest.mark.parametrize("speculative", [True, False])
def test_message_has_the_bits_of_the_chat_route(served: Served, client: Any, speculative: bool) -> None:
    seen = set()
    for seed in (1, 2):
        more: Any = {"seed": seed, "speculative": speculative, "top_k": 40}
        want = chat(served, **more)
        got = client.messages.create(**options(**more))
        assert got.content[0].text == want["message"]["content"] and got.token_ids == want["token_ids"]
        assert (got.stop_reason, got.seed, got.role, got.type) == ("max_tokens", seed, "assistant", "message")
        usage = got.usage
        assert usage.output_tokens == 12
        assert usage.input_tokens + usage.cache_read_input_tokens == want["usage"]["prompt_tokens"]
        with client.messages.stream(**options(**more)) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == got.content[0].text and blocks(final.content) == blocks(got.content)
        assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
        assert events(served, **more)[-2]["token_ids"] == got.token_ids
        seen.add(text)
    assert len(seen) == 2  # control: the seed decides


def test_events_have_the_documented_order(served: Served) -> None:
    kinds = [event["type"] for event in events(served, seed=1, max_tokens=3)]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_forced_call_equals_the_chat_route_whole_and_streamed(
    served: Served, client: Any, choice: Any, chat_choice: Any
) -> None:
    for speculative in (True, False):
        more: Any = {"seed": 3, "speculative": speculative, "max_tokens": 160}
        named = {"tools": [CHAT_TOOL], "tool_choice": chat_choice, "parallel_tool_calls": False}
        want = chat(served, **named, **more)
        given = options(tools=[TOOL], tool_choice=choice, **more)
        got = client.messages.create(**given)
        [call], [block] = want["message"]["tool_calls"], got.content
        assert block.name == "weather" and block.input == json.loads(call["function"]["arguments"])
        assert got.token_ids == want["token_ids"] and got.stop_reason == "tool_use"
        with client.messages.stream(**given) as stream:
            assert blocks(stream.get_final_message().content) == blocks(got.content)


def test_conversation_with_results_is_rendered_as_on_the_chat_route(served: Served, client: Any) -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}
    messages: Any = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "three"}, call]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "sun"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "four"},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "five", "cache_control": {"type": "ephemeral"}}]
    got = client.messages.create(**options(messages=messages, system=system, tools=[TOOL], seed=4))
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    chat_messages = [
        {"role": "system", "content": "five"},
        USER,
        {
            "role": "assistant",
            "content": "three",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "user", "content": "four"},
    ]
    want = chat(served, messages=chat_messages, tools=[CHAT_TOOL], seed=4)
    assert got.prompt_token_ids == want["prompt_token_ids"] and got.token_ids == want["token_ids"]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=system, tools=[TOOL])
    assert counted.input_tokens == len(want["prompt_token_ids"])
    failed: Any = [*messages[:2], {"role": "user", "content": [{**messages[2]["content"][0]}]}]
    failed[2]["content"][0] |= {"is_error": True, "content": "no"}
    marked = [*chat_messages[:3], {**chat_messages[3], "content": "Error: no"}]
    got = client.messages.create(**options(messages=failed, system="five", tools=[TOOL], seed=4))
    want = chat(served, messages=marked, tools=[CHAT_TOOL], seed=4)
    assert got.prompt_token_ids == want["prompt_token_ids"]


def test_turns_of_one_role_are_joined_and_a_prefill_is_continued(served: Served, client: Any) -> None:
    prefill: Any = [USER, {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}]
    got = client.messages.create(**options(messages=prefill, seed=2))
    parts = [{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}]
    joined = [{"role": "user", "content": parts}, prefill[2]]
    want = chat(served, messages=joined, continue_final_message=True, seed=2)
    assert got.prompt_token_ids == want["prompt_token_ids"]
    assert got.content[0].text == want["message"]["content"]


def test_stop_sequence_and_structured_output(served: Served, client: Any) -> None:
    text = client.messages.create(**options(seed=1)).content[0].text
    stop = text[3]
    got = client.messages.create(**options(seed=1, stop_sequences=[stop]))
    assert got.stop_reason == "stop_sequence" and got.stop_sequence == stop
    assert got.content[0].text == text[: text.index(stop)]
    form = {"format": {"type": "json_schema", "schema": PLACE}}
    made = client.messages.create(**options(seed=1, max_tokens=200, output_config=form))
    assert made.stop_reason == "end_turn" and json.loads(made.content[0].text)["city"] in ("Oslo", "Rome")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"container": "c"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"stop": ["x"]}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_result"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 20000}]}, "messages"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_refusals_have_the_form_of_the_api(served: Served, more: dict[str, Any], param: str) -> None:
    got = served.post("/v1/messages", {"messages": [USER], "max_tokens": 2, **more})
    body = got.json()
    assert got.status_code == 400 and body["type"] == "error", got.text
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"].startswith(param)
    # the client then sends the conversation without a thread
    assert ("details" in body["error"]) == ("thread" in more)


def test_errors_and_keys_of_the_client(served: Served, client: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**options(model="claude"))
    assert caught.value.body["error"]["type"] == "not_found_error"
    body = {"messages": [USER], "max_tokens": 1}
    for headers, status in (({"x-api-key": "one"}, 200), ({"x-api-key": "two"}, 401), ({}, 401)):
        got = httpx.post(f"{served.url}/v1/messages", json=body, headers=headers, timeout=600)
        assert got.status_code == status
    assert got.json()["error"]["type"] == "authentication_error" and got.json()["type"] == "error"
    assert served.http.get("/v1/messages").json()["type"] == "error"  # no such method


def test_failure_after_the_first_event_is_an_event(
    served: Served, client: Any, anthropic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the end of a stream: an exception in the builder is reported to the client."""
    monkeypatch.setattr("draftproof.serve.api.messages.builder.MessageBuilder.response", None)
    with (
        pytest.raises(anthropic.APIStatusError, match="internal"),
        client.messages.stream(**options(seed=1)) as stream,
    ):
        stream.until_done()
