"""Tool-call formats against the response parser of transformers: more than 200 outputs, and every split.

The outputs have the forms of the models' chat templates. Pythonic calls, JSON lists and Llama's objects have
no template in transformers; their calls are known because the test writes them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftproof.text.tool_calls.formats import FORMATS, find_format
from draftproof.text.tool_calls.parser import ParsedText, collect

response_parser = pytest.importorskip("transformers.utils.chat_parsing.response_parser")

Calls = list[tuple[str, dict[str, Any]]]
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": STRING, "state": STRING, "unit": {"enum": ["celsius", "kelvin"]}}},
    "register_user": {
        "properties": {
            "name": STRING,
            "age": INTEGER,
            "address": {"type": "object"},
            "role": {"anyOf": [STRING, {"type": "null"}]},
            "passed": {"type": "boolean"},
            "aliases": {"type": "array", "items": STRING},
            "score": {"type": "number"},
        }
    },
    "write_file": {"properties": {"path": STRING, "content": STRING, "mode": {"type": ["integer", "null"]}}},
    "now": {"properties": {}},
}
CALLS: list[Calls] = [
    [("now", {})],
    [("get_weather", {"city": "Tokyo", "unit": "celsius"})],
    [("get_weather", {"city": "San Francisco", "state": "CA"})],
    [("get_weather", {"city": "Reykjavík", "state": "Höfuðborgarsvæðið"})],
    [("get_weather", {"city": "北京", "unit": "kelvin"}), ("now", {})],
    [("get_weather", {"city": "Dallas"}), ("get_weather", {"city": "Orlando"})],
    [("get_weather", {"city": "a"}), ("now", {}), ("get_weather", {"city": "b"}), ("now", {})],
    [("get_weather", {"city": "Martha's Vineyard", "state": '"cool" units'})],
    [("get_weather", {"city": "{value} [complex] (x) <y>", "state": "a; b, c: d=e"})],
    [("get_weather", {"city": "42", "state": "true"})],
    [("get_weather", {"city": "null", "state": "3.5"})],
    [("register_user", {"name": "Ann", "age": 37, "passed": True})],
    [("register_user", {"name": "Bo", "role": None, "aliases": ["x", "y"]})],
    [
        (
            "register_user",
            {"name": "C", "role": "admin", "address": {"city": "Oslo", "zip": [1, 2, {"a": None}]}},
        )
    ],
    [("register_user", {"age": -1, "score": -2.5, "passed": False, "aliases": []})],
    [("register_user", {"address": {}, "aliases": ["", " ", "a,b", "]}"]})],
    [("write_file", {"path": "C:\\Users\\file", "content": "line 1\nline 2"})],
    [("write_file", {"path": "a.py", "content": "def f(x):\n    return {'a': [x, \"b\"]}"})],
    [("write_file", {"path": "a.html", "content": "<div class='x'>1 &amp; 2</div>", "mode": 0})],
    [("write_file", {"path": "a.json", "content": '{"name": "get_weather", "arguments": {}}', "mode": None})],
    [("write_file", {"path": "emoji", "content": "👍🏽 é \u2028 ﷽"})],
    [("write_file", {"path": "t.c", "content": 'int main() { printf("%d\\n", 1); }\t// [TOOL'})],
]
CONTENTS = ["", "Let me look."]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [compact({"name": name, key: arguments}) for name, arguments in calls]


def raw(value: Any) -> str:
    return value if isinstance(value, str) else compact(value)


def glm(calls: Calls) -> str:
    parts = []
    for name, arguments in calls:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in arguments.items())
        parts.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n" + "\n".join(parts)


def qwen_xml(calls: Calls) -> str:
    parts = []
    for name, arguments in calls:
        pairs = (f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in arguments.items())
        parts.append(f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>")
    return "\n".join(parts)


def deepseek(calls: Calls) -> str:
    texts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(a)}\n```<｜tool▁call▁end｜>"
        for name, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(texts)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    texts = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(a)}<｜tool▁call▁end｜>" for name, a in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    texts = (f"{begin}functions.{name}:{i}{middle}{compact(a)}{end}" for i, (name, a) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def harmony(calls: Calls) -> str:
    start = "<|start|>assistant"
    return start + start.join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact(a)}<|call|>"
        for name, a in calls
    )


WRITERS = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects(calls)),
    "ernie": lambda calls: "\n".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in objects(calls)),
    "glm": glm,
    "qwen_xml": qwen_xml,
    "deepseek": deepseek,
    "deepseek_v31": deepseek_v31,
    "kimi": kimi,
    "harmony": harmony,
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(objects(calls))}]",
    "mistral_v11": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{compact(a)}" for name, a in calls),
    "llama3_json": lambda calls: "; ".join(objects(calls, "parameters")),
    "pythonic": lambda calls: f"[{', '.join(f'{n}({python_arguments(a)})' for n, a in calls)}]",
    "json_list": lambda calls: f"[{', '.join(objects(calls))}]",
}


def python_arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def field(**fields: Any) -> dict[str, Any]:
    return {"repeats": True, "content": "json", "transform": NAMED, "transform_each": False, **fields}


# The calls in the language of transformers' response templates.
TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": field(open="<tool_call>", close="</tool_call>", transform=None),
    "ernie": field(open="<tool_call>", close="</tool_call>", transform=None),
    "glm": field(
        open_pattern=r"<tool_call>(?P<name>[^\n<]+)\n?",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
    ),
    "qwen_xml": field(
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^>]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"},
    ),
    "deepseek": field(
        open_pattern=r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        close="\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": field(
        open_pattern=r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>", close="<｜tool▁call▁end｜>"
    ),
    "kimi": field(
        open_pattern=r"<\|tool_call_begin\|>functions\.(?P<name>[^:]+):\d+<\|tool_call_argument_begin\|>",
        close="<|tool_call_end|>",
    ),
    "harmony": field(
        open_pattern=r"to=functions\.(?P<name>\S+) <\|constrain\|>json<\|message\|>", close="<|call|>"
    ),
    "mistral": field(open="[TOOL_CALLS]", transform=None, repeats=False),
    "mistral_v11": field(
        open_pattern=r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", close_pattern=r"(?=\[TOOL_CALLS\]|\Z)"
    ),
}


def oracle(name: str, text: str) -> Calls:
    """Return the calls that transformers finds."""
    calls = {key: value for key, value in TEMPLATES[name].items() if value not in (None, False)}
    template = {"start_anchor": "\0", "fields": {"content": {}, "tool_calls": calls}}
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]
    found = response_parser.parse_response(text, template, prefix="", tools=tools).get("tool_calls", [])
    functions = [call.get("function", call) for call in found]
    return [(function["name"], function["arguments"]) for function in functions]


CASES = [
    pytest.param(name, content, calls, id=f"{name}-{i}{'-content' if content else ''}")
    for name in WRITERS
    for i, calls in enumerate(CALLS)
    for content in CONTENTS[
        : 1 if i > 3 or name in ("llama3_json", "pythonic", "json_list", "harmony") else 2
    ]
]
assert len(CASES) > 200


def parse_chunks(name: str, chunks: list[str]) -> ParsedText:
    parser = find_format(name).parser(TOOLS)
    return collect([delta for chunk in chunks for delta in parser.feed(chunk)] + parser.finish())


@pytest.mark.parametrize(("name", "content", "calls"), CASES)
def test_calls_are_those_of_transformers_for_every_split(name: str, content: str, calls: Calls) -> None:
    text = content + WRITERS[name](calls)
    whole = FORMATS[name].parse_text(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    assert whole.content == content
    if name in TEMPLATES:
        assert oracle(name, text) == calls
    assert parse_chunks(name, list(text)) == whole
    for at in range(1, len(text), 1 + len(text) // 40):
        assert parse_chunks(name, [text[:at], text[at:]]) == whole, at


# Outputs that vLLM's public tests have, with the result that they expect.
WEATHER = ("get_weather", {"city": "Tokyo"})
OTHERS: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "", [("now", {})]),  # cut off after the call
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', "", [("f", "hello")]),  # type: ignore[list-item]
    ("mistral", '[TOOL_CALLS] [{"arguments":{"name": "Jo"}, "name": "f"}]', "", [("f", {"name": "Jo"})]),
    ("mistral", '[TOOL_CALLS]f{"a": 3.5}[TOOL_CALLS]g{"b": 6}', "", [("f", {"a": 3.5}), ("g", {"b": 6})]),
    ("kimi", kimi([WEATHER]).replace(":0<", ":0 <"), "", [WEATHER]),
    ("kimi", kimi([WEATHER]).replace("functions.", ""), "", [WEATHER]),
    ("glm", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    (
        "glm",
        "<tool_call>get_weather\n  <arg_key>city</arg_key>\n  <arg_value>Tokyo</arg_value>\n  </tool_call>",
        "",
        [WEATHER],
    ),
    (
        "qwen_xml",
        "<function=get_weather>\n<parameter=city>\nTokyo\n</parameter>\n</function>",
        "",
        [WEATHER],
    ),
    (
        "llama3_json",
        '{"name": "now", "arguments": {}} ; {"name": "now", "parameters": {}}',
        "",
        [("now", {})] * 2,
    ),
    ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', []),
    ("pythonic", "[get_weather(city='Martha\\'s')]", "", [("get_weather", {"city": "Martha's"})]),
    ("pythonic", "[get_weather(city=1e999)]", "", [("get_weather", {"city": "1e999"})]),
    ("deepseek", deepseek([WEATHER] * 2).replace("\n<", "<"), "", [WEATHER] * 2),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|>"
        + harmony([WEATHER])
        + "<|start|>assistant<|channel|>final<|message|>So.",
        "So.",
        [WEATHER],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), OTHERS)
def test_outputs_of_public_tests_give_their_results(name: str, text: str, content: str, calls: Calls) -> None:
    found = FORMATS[name].parse_text(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert found.content == content and parse_chunks(name, list(text)) == found


def test_values_without_json_become_text() -> None:
    """Numbers that JSON cannot have, halves of surrogate pairs and very deep values give valid JSON."""
    for value in ("NaN", "1e999", "[" * 5000, '"\\ud83d"', "'\\ud83d\\ude00'"):
        text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        arguments = FORMATS["glm"].parse_text(text, {}).calls[0].arguments
        assert "a" in json.loads(arguments.encode())
