"""Responses API with the openai client: equal to the chat route, events, calls, formats, store, refusals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from draftproof.cli.serve import add_options, read_settings
from draftproof.errors import ConfigError
from draftproof.serve.api.generation.request_schema import Message
from draftproof.serve.api.responses import translate
from draftproof.serve.api.responses.store import ResponseStore
from draftproof.serve.http.errors import ApiError
from draftproof.serve.settings import ApiKeys, Settings
from serving import NGRAM, Served, make_folder, serving, tiny

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "now": {"type": "boolean"}},
    "required": ["city", "now"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": PLACE, "description": "Weather of a city"}
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}
LOGPROBS: Any = ["message.output_text.logprobs"]
KEYS = ("one", "two")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_folder(tmp_path_factory.mktemp("responses"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    settings = Settings(tool_call_parser="hermes", served_model_names=("tiny",), api_keys=ApiKeys(KEYS))
    with serving(tiny(folder, NGRAM), settings) as running:
        running.client = running.client.with_options(api_key="one", timeout=600)
        running.http.headers["authorization"] = "Bearer one"
        running.http.timeout = 600
        yield running


def create(served: Served, given: Any = "one two", **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("seed", "speculative") if name in options}
    extra["return_token_ids"] = True
    options = {"max_output_tokens": 12, "temperature": 1.0, **options}
    return served.client.responses.create(model="tiny", input=given, extra_body=extra, **options)


def chat(served: Served, content: str = "one two", **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    options = {"max_tokens": 12, "temperature": 1.0, **options}
    return served.chat(content, extra_body=extra, **options)


def final(events: list[Any]) -> Any:
    """Check the order and numbers of the events of a stream; return its response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].response


def without_ids(response: Any) -> dict[str, Any]:
    """Return what must not depend on streaming: items without ids, usage, seed, tokens."""
    made = response.to_dict()
    items = [{key: item[key] for key in item if key not in ("id", "call_id")} for item in made["output"]]
    kept = {key: made[key] for key in ("status", "incomplete_details", "usage", "seed", "token_ids", "text")}
    kept["usage"] = {**kept["usage"], "input_tokens_details": None}  # cached tokens depend on the past
    return {"output": items, **kept}


@pytest.mark.parametrize("speculative", [True, False])
def test_response_has_the_bits_of_the_chat_route(served: Served, speculative: bool) -> None:
    seen = set()
    for seed in (1, 2):
        more: Any = {"seed": seed, "speculative": speculative}
        want = chat(served, extra_body=more, logprobs=True, top_logprobs=2).choices[0]
        got = create(served, include=LOGPROBS, top_logprobs=2, **more)
        part = got.output[0].content[0]
        assert got.output_text == want.message.content and got.seed == want.seed == seed
        assert got.token_ids == want.token_ids
        assert [row.to_dict() for row in part.logprobs] == [row.to_dict() for row in want.logprobs.content]
        assert got.usage.output_tokens == 12 and got.status == "incomplete"
        assert got.incomplete_details.reason == "max_output_tokens"
        events = list(create(served, include=LOGPROBS, top_logprobs=2, stream=True, **more))
        assert without_ids(final(events)) == without_ids(got)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in deltas) == got.output_text
        rows = [row.to_dict() for event in deltas for row in event.logprobs]
        assert rows == [row.to_dict() for row in part.logprobs] and len(deltas) > 8
        seen.add(got.output_text)
    assert len(seen) == 2  # control: the seed decides


def test_control_lost_seed_changes_the_bits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: translate without the seed."""
    want = chat(served, extra_body={"seed": 1}).choices[0].token_ids
    assert create(served, seed=1).token_ids == want
    names = tuple(name for name in translate._SAME_NAMES if name != "seed")
    monkeypatch.setattr(translate, "_SAME_NAMES", names)
    assert create(served, seed=1).token_ids != want


def test_events_of_a_message_have_the_documented_order(served: Served) -> None:
    events = list(create(served, seed=1, stream=True, max_output_tokens=3))
    kinds = [event.type.removeprefix("response.") for event in events]
    middle = kinds[4:-4]
    assert kinds[2:4] == ["output_item.added", "content_part.added"] and set(middle) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = events[-1].response.output_text
    assert events[-4].text == text and events[-3].part.text == text and events[-2].item.status == "incomplete"
    assert events[2].item.content == [] and events[2].item.id == events[-2].item.id == events[4].item_id


def test_forced_call_equals_the_chat_route_whole_and_streamed(served: Served) -> None:
    options: Any = {"max_output_tokens": 160, "parallel_tool_calls": False}
    for choice, chat_choice in (
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            "required",
        ),
    ):
        for speculative in (True, False):
            more: Any = {"seed": 3, "speculative": speculative}
            want = chat(
                served,
                tools=[CHAT_TOOL],
                tool_choice=chat_choice,
                max_tokens=160,
                parallel_tool_calls=False,
                extra_body=more,
            ).choices[0]
            got = create(served, tools=[TOOL], tool_choice=choice, **options, **more)
            [item], [call] = got.output, want.message.tool_calls
            assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
            assert got.token_ids == want.token_ids and got.status == "completed"
            assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")
            events = list(create(served, tools=[TOOL], tool_choice=choice, stream=True, **options, **more))
            assert without_ids(final(events)) == without_ids(got)
            parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            done = [e for e in events if e.type == "response.function_call_arguments.done"]
            assert "".join(parts) == item.arguments == done[0].arguments and len(parts) > 3


def test_results_of_calls_continue_the_conversation(served: Served) -> None:
    """Render calls and results as the chat route does, and accept generated items as input."""
    first = create(served, tools=[TOOL], tool_choice="required", seed=3, max_output_tokens=160)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    given: Any = [{"role": "user", "content": "one two"}, *(item.to_dict() for item in first.output)]
    got = create(served, [*given, *results], tools=[TOOL], seed=4)
    messages: Any = [
        {"role": "user", "content": "one two"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "sun"} for call in calls),
    ]
    body = {"messages": messages, "tools": [CHAT_TOOL], "seed": 4, "max_tokens": 12, "temperature": 1.0}
    want = served.post("/v1/chat/completions", {**body, "return_token_ids": True}).json()
    assert got.token_ids == want["choices"][0]["token_ids"]
    assert got.prompt_token_ids == want["prompt_token_ids"]
    stored = create(served, results, previous_response_id=first.id, tools=[TOOL], seed=4)
    assert stored.prompt_token_ids == got.prompt_token_ids and stored.token_ids == got.token_ids


class Person(BaseModel):
    name: str
    age: int


def test_structured_output_is_parsed_by_the_client(served: Served) -> None:
    """Use `responses.parse` and `responses.stream` with a pydantic class."""
    options: Any = {"model": "tiny", "input": "one", "max_output_tokens": 400, "text_format": Person}
    options["extra_body"] = {"seed": 2}
    parsed = served.client.responses.parse(**options)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Person)
    with served.client.responses.stream(**options) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    made = create(served, text={"format": {"type": "json_object"}}, seed=1, max_output_tokens=400)
    assert made.status == "incomplete" or isinstance(json.loads(made.output_text), dict)


def test_previous_response_continues_the_conversation_without_its_instructions(served: Served) -> None:
    first = create(served, "one", instructions="two", seed=5)
    second = create(served, "three", previous_response_id=first.id, instructions="four", seed=6)
    messages = [
        {"role": "system", "content": "four"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "three"},
    ]
    body = {"messages": messages, "seed": 6, "max_tokens": 12, "temperature": 1.0, "return_token_ids": True}
    want = served.post("/v1/chat/completions", body).json()
    assert second.prompt_token_ids == want["prompt_token_ids"]
    assert second.token_ids == want["choices"][0]["token_ids"]
    assert second.previous_response_id == first.id and second.instructions == "four"


def test_stored_response_is_returned_and_deleted_for_its_key_only(served: Served) -> None:
    made = create(served, seed=5, metadata={"a": "b"})
    assert served.client.responses.retrieve(made.id).to_dict() == made.to_dict()
    other = served.client.with_options(api_key="two")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.create(model="tiny", input="x", previous_response_id=made.id)
    served.client.responses.delete(made.id)
    for id in (made.id, create(served, store=False).id):
        with pytest.raises(openai.NotFoundError):
            served.client.responses.retrieve(id)


def test_input_items_are_listed_by_the_client_in_pages(served: Served) -> None:
    """List calls, results and earlier turns; items sent back as input give the same prompt."""
    first = create(served, tools=[TOOL], tool_choice="required", seed=3, max_output_tokens=160)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls
    ]
    second = create(served, results, previous_response_id=first.id, tools=[TOOL], seed=4)
    list_items = served.client.responses.input_items.list
    items = list(list_items(second.id, order="asc", limit=1))  # the client requests page after page
    kinds = [item.type for item in items]
    assert kinds == ["message", *["function_call"] * len(calls), *["function_call_output"] * len(calls)]
    assert items[0].content[0].text == "one two" and items[-1].output == "sun"
    assert len({item.id for item in items}) == len(items)
    newest = list_items(second.id, limit=2)
    assert [item.id for item in newest.data] == [item.id for item in items[:-3:-1]] and newest.has_more
    again = create(served, [item.to_dict() for item in items], tools=[TOOL], seed=4)
    assert (again.prompt_token_ids, again.token_ids) == (second.prompt_token_ids, second.token_ids)
    for query in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "msg_1"}, {"other": 1}):
        got = served.http.get(f"/v1/responses/{second.id}/input_items", params=query)
        assert got.status_code == 400 and got.json()["error"]["param"] == next(iter(query))
    with pytest.raises(openai.NotFoundError):
        served.client.with_options(api_key="two").responses.input_items.list(second.id)


def test_counted_input_tokens_equal_those_of_the_response(served: Served) -> None:
    count = served.client.responses.input_tokens.count
    made = create(served, "one two three", instructions="four", tools=[TOOL], seed=1)
    options: Any = {"model": "tiny", "tools": [TOOL]}
    counted = count(input="one two three", instructions="four", **options)
    assert counted.input_tokens == made.usage.input_tokens and counted.object == "response.input_tokens"
    longer = create(served, "five", previous_response_id=made.id, tools=[TOOL])
    assert (
        count(input="five", previous_response_id=made.id, **options).input_tokens == longer.usage.input_tokens
    )
    assert count(input="one", model="tiny").input_tokens < counted.input_tokens  # control: tools count
    got = served.post("/v1/responses/input_tokens", {"input": [{"role": "user"}]})
    assert got.status_code == 400 and got.json()["error"]["param"] == "input[0].content"


def test_store_is_bounded_by_entries_and_bytes() -> None:
    message = [Message(role="user", content="x" * 100)]
    store = ResponseStore(Settings(max_stored_responses=2, max_stored_bytes=1000))
    for id in "abc":
        store.add("key", id, b"{}", message)
        store.find("key", "a" if id == "b" else id)  # the use of "a" makes "b" the oldest
    store.find("key", "a")
    with pytest.raises(ApiError, match="no stored response 'b'"):
        store.find("key", "b")
    store.add("key", "long", bytes(800), message)
    for id in ("a", "c"):
        with pytest.raises(ApiError):
            store.find("key", id)
    store.add("key", "huge", bytes(1001), message)
    store.add("other", "a", b"", message)
    assert store.find("key", "long").messages()[0].content == "x" * 100
    with pytest.raises(ApiError):
        store.find("key", "huge")
    store.delete("key", "long")
    assert store._num_bytes["key"] == 0
    with pytest.raises(ConfigError, match="max_stored_bytes"):
        Settings(max_stored_bytes=-1)


def test_several_processes_have_no_store() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    for given, stored in (([], 1000), (["--max-stored-responses", "5"], 5), (["--server-processes", "2"], 0)):
        assert read_settings(parser.parse_args(given)).max_stored_responses == stored
    with pytest.raises(ConfigError, match="--server-processes 1"):
        read_settings(parser.parse_args(["--server-processes", "2", "--max-stored-responses", "5"]))


def test_server_without_a_store_refuses_with_advice(folder: Path) -> None:
    with serving(tiny(folder), Settings(max_stored_responses=0)) as running:
        for more in ({"store": True}, {"previous_response_id": "resp_1"}):
            got = running.post("/v1/responses", {"input": "one", "max_output_tokens": 1, **more})
            assert got.status_code == 400 and "--max-stored-responses" in got.json()["error"]["message"]
            assert got.json()["error"]["param"] == next(iter(more))
        assert running.http.get("/v1/responses/resp_1").status_code == 400


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[...].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"include": ["everything"]}, "include[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[...].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": "word " * 20000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 1000}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
]


@pytest.mark.parametrize(("options", "param"), REFUSED)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    served: Served, options: dict[str, Any], param: str
) -> None:
    got = served.post("/v1/responses", {"input": "one", "max_output_tokens": 2, **options})
    error = got.json()["error"]
    assert got.status_code == (404 if "previous_response_id" in options else 400), got.text
    assert error["param"].replace("[0]", "[...]").startswith(param.replace("[0]", "[...]")), got.text


def test_fields_without_influence_change_no_bit(served: Served) -> None:
    plain = create(served, seed=7)
    more: Any = {
        "metadata": {"a": "b"},
        "store": True,
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "truncation": "disabled",
        "background": False,
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "medium", "format": {"type": "text"}},
    }
    got = create(served, seed=7, **more)
    assert got.token_ids == plain.token_ids and got.metadata == {"a": "b"} and got.service_tier == "default"
    drawn = {create(served).seed for _ in range(2)}
    assert len(drawn) == 2 and all(0 <= seed < 1 << 53 for seed in drawn)


def test_failure_after_the_first_event_is_an_event(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the end of a stream: an exception in the builder is reported to the client."""
    monkeypatch.setattr("draftproof.serve.api.responses.builder.ResponsesBuilder._usage", None)
    events = list(create(served, seed=7, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
    assert events[-1].sequence_number == len(events) - 1
