"""Tool-call formats: parsed calls, independence of the split of the text, detection."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof.errors import ConfigError
from draftproof.text.tool_calls.formats import FORMATS, detect, find_format
from draftproof.text.tool_calls.parser import CallDelta, ParsedText, collect

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": WEATHER, "time": {"type": "object", "properties": {}}}
OSLO, NOW = ("weather", {"city": 'O"slo\n', "days": 3}), ("time", {})
ARGUMENTS = '{"city": "O\\"slo\\n", "days": 3}'
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"

# format, text, content, calls
CASES = [
    (
        "hermes",
        f'Yes.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "Yes.",
        [OSLO, NOW],
    ),
    ("hermes", '<tool_call>{"arguments": {}, "name": "time"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "time", "id": [1, "}"]}</tool_call>done ', "done", [NOW]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", "a < b, <tool_cal and\n", "a < b, <tool_cal and\n", []),
    ("hermes", "<tool_call>{no</tool_call> x", "<tool_call>{no</tool_call> x", []),
    ("hermes", '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    (
        "ernie",
        "<response>\nYes.\n</response>\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n',
        "Yes.",
        [OSLO],
    ),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [OSLO]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; '
        '{"name": "time", "parameters": {}}',
        "",
        [OSLO, NOW],
    ),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", ' {"a": 1} and more', ' {"a": 1} and more', []),
    ("pythonic", "[weather(city='O\"slo\\n', days=3), time()]", "", [OSLO, NOW]),
    ("pythonic", "<|python_start|>[time()]<|python_end|>", "", [NOW]),
    ("pythonic", "[weather(days=-1, city=null)]", "", [("weather", {"days": -1, "city": None})]),
    (
        "pythonic",
        "[weather(days=[1, (2, {'a': true})])]",
        "",
        [("weather", {"days": [1, [2, {"a": True}]]})],
    ),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[weather(3)]", "[weather(3)]", []),
    (
        "mistral",
        f'Yes. [TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "time", "arguments": {}}]',
        "Yes.",
        [OSLO, NOW],
    ),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time{{}}", "", [OSLO, NOW]),
    ("mistral", "[TOOL_CALLS]time[CALL_ID]abc123def[ARGS]{}", "", [NOW]),
    (
        "json_list",
        f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time", "arguments": {{}}}}]',
        "",
        [OSLO, NOW],
    ),
    ("mistral", "a list [TOOL", "a list [TOOL", []),
    (
        "deepseek",
        "Yes."
        + DEEPSEEK.format(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            + ARGUMENTS
            + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n"
            + "```json\n{}\n```<｜tool▁call▁end｜>"
        ),
        "Yes.",
        [OSLO, NOW],
    ),
    (
        "deepseek",
        DEEPSEEK.format(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"),
        "",
        [OSLO],
    ),
    (
        "glm",
        'Yes.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>O"slo\n</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time</tool_call>",
        "Yes.",
        [OSLO, NOW],
    ),
    (
        "qwen_xml",
        '<tool_call>\n<function=weather>\n<parameter=city>\nO"slo\n\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "",
        [OSLO, NOW],
    ),
    (
        "kimi",
        "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.time:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Yes.",
        [OSLO, NOW],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "",
        [OSLO],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>Yes.<|end|><|start|>assistant to=functions.time<|channel|>"
        "commentary json<|message|>{}<|call|>",
        "Yes.",
        [NOW],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        [],
    ),
]
IDS = [f"{case[0]}-{i}" for i, case in enumerate(CASES)]
cases = pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=IDS)


def parse_chunks(name: str, chunks: list[str]) -> ParsedText:
    parser = find_format(name).parser(TOOLS)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)] + parser.finish()
    return collect(deltas)


@cases
def test_format_gives_content_and_calls(name: str, text: str, content: str, calls: list) -> None:
    parsed = FORMATS[name].parse_text(text, TOOLS)
    assert parsed.content == content
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    if "analysis" in text:
        assert parsed.reasoning in ("Think.", "Hm.")


@cases
def test_every_split_gives_the_same_result(name: str, text: str, content: str, calls: list) -> None:
    whole = FORMATS[name].parse_text(text, TOOLS)
    assert parse_chunks(name, list(text)) == whole
    for at in range(len(text) + 1):
        assert parse_chunks(name, [text[:at], text[at:]]) == whole, at


@cases
def test_cut_off_output_gives_the_same_result_for_every_split(
    name: str, text: str, content: str, calls: list
) -> None:
    for end in range(len(text)):
        assert parse_chunks(name, list(text[:end])) == FORMATS[name].parse_text(text[:end], TOOLS), end


PIECES = sorted(
    {piece for case in CASES for piece in (case[1][:9], case[1][-9:], case[1])}
    | set("<>{}[]()\"'\\,:=\n a")
    | {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>", "<|message|>", "<｜tool▁sep｜>", "[ARGS]"}
)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_random_text_gives_the_same_result_for_every_split(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=6)))
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=40))
    chunks, at = [], 0
    for size in sizes:
        chunks.append(text[at : at + size])
        at += size
    assert parse_chunks(name, [*chunks, text[at:]]) == FORMATS[name].parse_text(text, TOOLS)


def test_result_depends_on_the_text() -> None:
    """Negative control: a changed text or a split that loses a character is seen."""
    name, text, _, _ = CASES[0]
    whole = FORMATS[name].parse_text(text, TOOLS)
    assert parse_chunks(name, [text[:30], text[31:]]) != whole
    assert parse_chunks(name, [text.replace("slo", "lso")]) != whole


@pytest.mark.parametrize("name", FORMATS)
def test_name_precedes_arguments_and_arguments_arrive_before_the_end(name: str) -> None:
    like = {"deepseek_v31": "deepseek", "mistral_v11": "mistral"}.get(name, name)
    text = next(case[1] for case in CASES if case[0] == like and OSLO in case[3])
    parser = FORMATS[name].parser(TOOLS)
    deltas = [[d for d in parser.feed(char) if isinstance(d, CallDelta)] for char in text]
    calls = [delta for each in deltas for delta in each]
    assert calls[0].name == "weather" and not calls[0].arguments
    assert all(delta.name is None or not delta.arguments for delta in calls)
    arrivals = [i for i, each in enumerate(deltas) if any(d.index == 0 and d.arguments for d in each)]
    assert len(arrivals) > 2


def test_plain_text_is_emitted_without_delay() -> None:
    for each in FORMATS.values():
        parser = each.parser(TOOLS)
        parser.feed("Hello")
        assert collect(parser.feed(" you")).content == " you", each.name


def test_kimi_keeps_ids_of_the_text_and_mistral_ids_have_nine_characters() -> None:
    text = next(case[1] for case in CASES if case[0] == "kimi")
    calls = FORMATS["kimi"].parse_text(text, TOOLS).calls
    assert [call.id for call in calls] == ["functions.weather:0", "functions.time:1"]
    assert len(FORMATS["mistral"].make_id("weather", 0)) == 9
    assert FORMATS["hermes"].make_id("weather", 0).startswith("call_")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for t in tools %}<tool_call>\n", "hermes"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<tool_call><function=example>", "qwen_xml"),
        ("<response><tool_call>", "ernie"),
        ("{{ bos_token }}[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}```json", "deepseek"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_v11"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi"),
        ("<|start|>assistant<|channel|>commentary to=functions.", "harmony"),
        ('Respond in the format {"name": function name, "parameters": …} <|python_tag|>', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|im_start|>{{ message.content }}", None),
    ],
)
def test_format_is_detected_from_the_template(template: str, name: str | None) -> None:
    found = detect(template)
    assert (found and found.name) == name


def test_unknown_format_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        find_format("hermse")
