"""Tool calls over HTTP: forced calls, streams, messages and refusals, with the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof.serve.settings import Settings
from serving import CHAT, NGRAM, Served, make_folder, serving, tiny, with_grammars

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "now": {"type": "boolean"}},
    "required": ["city", "now"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", PLACE, description="Weather of a city"), tool("time", NOTHING)]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Serve with a format whose markers are text, and with one whose markers are special tokens."""
    folder = make_folder(tmp_path_factory.mktemp("tools"))
    changed = {"config.json": {"max_position_embeddings": 2048}, "tokenizer_config.json": {}}
    if request.param == "mistral":  # the template renders tools itself
        changed["tokenizer_config.json"] = {"chat_template": "{{ tools | tojson if tools }}" + CHAT}
    for name, fields in changed.items():
        given = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**given, **fields}))
    with serving(with_grammars(tiny(folder, NGRAM)), Settings(tool_call_parser=request.param)) as running:
        yield running


def check_calls(message: Any, names: set[str]) -> None:
    assert message.content is None and message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function" and call.id and call.function.name in names
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["city"] in ("Oslo", "Rome") and isinstance(arguments["now"], bool)
        else:
            assert arguments == {}


def plain(calls: Any) -> list[tuple[str, str]]:
    """Return names and arguments; ids are random."""
    return [(call.function.name, call.function.arguments) for call in calls]


def test_required_call_is_valid_and_equal_without_speculation(served: Served) -> None:
    seen = set()
    for seed in range(4):
        made = []
        for speculative in (True, False):
            answer = served.chat(
                "one two",
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=1.0,
                seed=seed,
                max_tokens=120,
                extra_body={"speculative": speculative, "return_token_ids": True},
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            check_calls(choice.message, {"weather", "time"})
            assert len(choice.message.tool_calls) == 1
            made.append((plain(choice.message.tool_calls), choice.model_extra["token_ids"]))
        assert made[0] == made[1]
        seen.add(str(made[0][0]))
    assert len(seen) > 1  # control: the seed decides, not the grammar alone


def test_streamed_call_equals_the_whole_one_and_begins_with_the_name(served: Served) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 1.0, "seed": 3, "max_tokens": 120}
    whole = served.chat("one two", **options).choices[0]
    chunks = [c.choices[0] for c in served.chat("one two", stream=True, **options) if c.choices]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert deltas[0].function.name == "weather" and deltas[0].id and deltas[0].type == "function"
    assert all(call.function.name is None and call.id is None for call in deltas[1:])
    text = "".join(call.function.arguments for call in deltas)
    assert [("weather", text)] == plain(whole.message.tool_calls)
    assert len(deltas) > 3 and not any(chunk.delta.content for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    check_calls(whole.message, {"weather"})


def test_auto_output_without_a_call_is_content(served: Served) -> None:
    options: Any = {"temperature": 0.0, "max_tokens": 12}
    whole = served.chat("one two", tools=TOOLS, **options).choices[0]
    assert whole.message.tool_calls is None and whole.message.content and whole.finish_reason == "length"
    chunks = list(served.chat("one two", tools=TOOLS, stream=True, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.message.content
    none = served.chat("one two", tools=TOOLS, tool_choice="none", **options).choices[0]
    assert none.message.content == served.chat("one two", **options).choices[0].message.content


def conversation(arguments: str) -> list[dict[str, Any]]:
    """Return a question, a call with these arguments, and its result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]


# agents send arguments that are no JSON back, beside the error that they caused
@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', '{"city": '])
def test_conversation_with_calls_and_results_is_accepted(served: Served, arguments: str) -> None:
    messages: Any = conversation(arguments)
    create = served.client.chat.completions.create
    answer = create(model=served.model, messages=messages, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].message.content is not None


def test_template_without_tools_shows_calls_and_results_as_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    render = served.llm.chat_token_ids

    def record(messages: Any, **template: Any) -> list[int]:
        seen.append(messages)
        return render(messages, **template)

    monkeypatch.setattr(served.llm, "chat_token_ids", record)
    for options in ({}, {"tools": TOOLS}):
        body = {"messages": conversation('{"city": "Oslo"}'), "max_tokens": 1, **options}
        assert served.post("/v1/chat/completions", body).status_code == 200
    if seen[1][0]["role"] != "system":  # the template renders tools itself
        assert seen[0] == seen[1] and seen[0][1]["tool_calls"] and seen[0][2]["role"] == "tool"
        return
    shown = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert seen[0] == seen[1][1:] and "<tools>" in seen[1][0]["content"]
    assert seen[0][1] == {"role": "assistant", "content": shown}
    assert seen[0][2] == {"role": "user", "content": "<tool_response>\nsun\n</tool_response>"}


NOT_ENFORCED = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
    ({"tools": TOOLS, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"tools": TOOLS, "response_format": NOT_ENFORCED}, "response_format"),
    ({"tools": [tool("f", {"type": "object", "not": {}}, strict=True)], "tool_choice": "required"}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
]


@pytest.mark.parametrize(("options", "param"), REFUSED)
def test_inconsistent_tools_are_refused_by_name(served: Served, options: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2, **options}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param), reply.text


def test_model_without_a_format_refuses_tools_with_advice(folder: Path) -> None:
    with serving(tiny(folder)) as running:
        for options in ({"tools": TOOLS}, {"messages": conversation("{}")}):
            body = {"messages": [{"role": "user", "content": "one"}], **options}
            reply = running.post("/v1/chat/completions", body)
            assert reply.status_code == 400 and "--tool-call-parser" in reply.json()["error"]["message"]
