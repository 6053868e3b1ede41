"""Every tool-call format over HTTP: calls under speculation equal those of an engine without a proposer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from draftproof.serve.api.generation import request_parser
from draftproof.serve.api.generation.tool_options import read_tools
from draftproof.text.tool_calls.formats import FORMATS
from draftproof.text.tool_calls.grammar import CallSyntax
from serving import CHAT, NGRAM, Served, events, make_folder, serving, tiny, with_grammars

DAYS = {
    "type": "object",
    "properties": {"days": {"enum": list(range(20))}},
    "required": ["days"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": DAYS, "time": DAYS}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": DAYS}} for name in SCHEMAS]
# Formats whose grammar is not in the form of their parser, and messages, which a random model never ends.
NATIVE = {
    "glm": CallSyntax(
        "<tool_call>$name\n<arg_key>days</arg_key>\n<arg_value>$digit</arg_value>\n</tool_call>", "\n"
    ),
    "qwen_xml": CallSyntax(
        "<tool_call>\n<function=$name>\n<parameter=days>\n$digit\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    "pythonic": CallSyntax("$name(days=$digit)", ", ", before="[", after="]"),
    "harmony": replace(FORMATS["harmony"].syntax, message=""),
}
MARKERS = sorted(set(re.findall(r"<[|｜].*?[|｜]>|\[[A-Z_]+\]", str([f.syntax for f in FORMATS.values()]))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint with tools in its template and the markers among its special tokens."""
    made = make_folder(tmp_path_factory.mktemp("formats"))
    backend = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    backend.add_special_tokens(MARKERS)
    backend.save(str(made / "tokenizer.json"))
    changed = {
        "config.json": {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 1024},
        "tokenizer_config.json": {"chat_template": "{{ tools | tojson if tools }}" + CHAT},
    }
    for name, fields in changed.items():
        given = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps({**given, **fields}))
    return made


@pytest.fixture(scope="module")
def drafted(folder: Path) -> Iterator[Served]:
    with serving(with_grammars(tiny(folder, NGRAM))) as running:
        yield running


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Served]:
    with serving(with_grammars(tiny(folder))) as running:
        yield running


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest, drafted: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make both servers use a format."""
    tokenizer = drafted.llm.get_tokenizer()
    form = replace(
        FORMATS[request.param],
        syntax=NATIVE.get(request.param, FORMATS[request.param].syntax),
        special_tokens={tokenizer.token_text(i): i for i in tokenizer.special_ids},
    )
    monkeypatch.setattr(request_parser, "read_tools", lambda body, _: read_tools(body, form))
    return request.param


def whole(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a response without streaming has, ids of calls apart."""
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    message = choice["message"]
    return {
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())],
        "content": message["content"] or "",
        "logprobs": choice["logprobs"]["content"],
        "reason": choice["finish_reason"],
    }


def streamed(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """Return the same of a stream."""
    found: dict[str, Any] = {"calls": [], "content": "", "logprobs": [], "reason": None}
    with served.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        for event in events(reply):
            choice = event["choices"][0]
            found["content"] += choice["delta"].get("content") or ""
            found["logprobs"] += (choice.get("logprobs") or {}).get("content") or ()
            found["reason"] = choice["finish_reason"] or found["reason"]
            for call in choice["delta"].get("tool_calls") or ():
                function = call["function"]
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    found["calls"].append((function["name"], function["arguments"]))
                else:
                    name, text = found["calls"][call["index"]]
                    found["calls"][call["index"]] = (name, text + function["arguments"])
    return found


def test_calls_of_every_format_are_equal_without_speculation(
    drafted: Served, plain: Served, name: str
) -> None:
    body = {
        "messages": [{"role": "user", "content": "one two one two"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "temperature": 1.0,
        "max_tokens": 100,
        "logprobs": True,
    }
    for seed, is_parallel in enumerate([False, True]):
        body |= {"seed": seed, "parallel_tool_calls": is_parallel}
        expected = whole(plain, body)
        assert expected["calls"] and streamed(drafted, body) == expected
        if not is_parallel:
            assert whole(drafted, body) == expected
        if expected["reason"] == "tool_calls":
            assert not expected["content"]
            assert all(0 <= json.loads(arguments)["days"] < 20 for _, arguments in expected["calls"])


def test_strict_schema_with_auto_is_equal_without_speculation(
    drafted: Served, plain: Served, name: str
) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    body = {"messages": [{"role": "user", "content": "one"}], "tools": strict, "max_tokens": 12, "seed": 1}
    body |= {"temperature": 1.0, "logprobs": True}
    expected = whole(plain, body)
    assert whole(drafted, body) == expected == streamed(drafted, body)
    answer = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer}}
    found = whole(drafted, {**body, "response_format": form, "max_tokens": 90})
    if found["calls"]:
        assert [call for call, _ in found["calls"]] == ["weather"] * len(found["calls"])
    else:
        assert isinstance(json.loads(found["content"])["ok"], bool)
