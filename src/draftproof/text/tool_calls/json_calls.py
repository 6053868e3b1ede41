"""Parsers of formats whose arguments are JSON: Hermes, ERNIE, Llama 3, Mistral, DeepSeek, Kimi."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from draftproof.text.tool_calls.parser import SPACE, Steps, TextReader

NAME_KEYS, ARGUMENT_KEYS = ("name",), ("arguments", "parameters")
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def json_value(reader: TextReader, emit: Callable[[str], None]) -> Steps[None]:
    """Emit one JSON value as it arrives: up to its closing bracket, quote or the delimiter after it."""
    first = yield from reader.skip_space()
    depth, in_string, escaped = 0, False, False
    while char := (yield from reader.peek()):
        if in_string:
            emit(reader.take())
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif first not in '{["' and char in ",}]" + SPACE:
            return
        else:
            emit(reader.take())
            in_string = char == '"'
            depth += (char in "{[") - (char in "}]")
        if first in '{["' and depth <= 0 and not in_string:
            return


def _take_value(reader: TextReader) -> Steps[str]:
    parts: list[str] = []
    yield from json_value(reader, parts.append)
    return "".join(parts)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _emit_arguments(reader: TextReader) -> Steps[None]:
    """Emit the arguments of a call: an object, or a string that contains one."""
    if (yield from reader.skip_space()) != '"':
        yield from json_value(reader, reader.arguments)
        return
    reader.arguments(_without_quotes((yield from _take_value(reader))))


def _without_quotes(text: str) -> str:
    """Return the arguments of a call whose object may be inside a string."""
    value = _decoded(text)
    return value if isinstance(value, str) and isinstance(_decoded(value), dict) else text


def call_object(reader: TextReader, only_known: bool = False) -> Steps[bool]:
    """Parse `{"name": …, "arguments": …}`; return whether it is a call.

    If it is not, nothing is emitted and the mark that the caller set remains.
    `only_known`: a name that is not among the tools is no call.
    """
    if (yield from reader.skip_space()) != "{":
        return False
    reader.take()
    name, buffered, has_arguments = None, "", False
    while (yield from reader.skip_space(",")) == '"':
        key = _decoded((yield from _take_value(reader)))
        if (yield from reader.skip_space()) != ":":
            break
        reader.take()
        if key in NAME_KEYS and name is None:
            value = _decoded((yield from _take_value(reader)))
            if not isinstance(value, str) or not value or (only_known and value not in reader.tools):
                return False
            name = value
            if buffered:
                reader.start_call(name)
                reader.arguments(buffered)
                has_arguments = True
        elif key in ARGUMENT_KEYS and not has_arguments and name is not None:
            reader.start_call(name)
            has_arguments = True
            yield from _emit_arguments(reader)
        else:
            text = yield from _take_value(reader)
            if key in ARGUMENT_KEYS and not buffered:
                buffered = _without_quotes(text)
    if name is None:
        return False
    is_closed = (yield from reader.peek()) == "}"
    if is_closed:
        reader.take()
    if not has_arguments:
        if not is_closed:
            return False
        reader.start_call(name)
        reader.arguments("{}")
    return True


def _marked_call(reader: TextReader, opening: str, closing: str) -> Steps[None]:
    """Parse a call object between markers; text that is no call is content."""
    reader.mark(len(opening))
    if (yield from call_object(reader)):
        yield from reader.stream_until((closing,), _ignore)
    else:
        reader.content(reader.raw())


def _ignore(_: str) -> None:
    pass


def hermes(reader: TextReader) -> Steps[None]:
    """Parse Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    while (yield from reader.stream_until((OPEN,), reader.content)):
        yield from _marked_call(reader, OPEN, CLOSE)


def ernie(reader: TextReader) -> Steps[None]:
    """Parse ERNIE: calls as in Hermes, content in `<response>…</response>`."""
    while marker := (yield from reader.stream_until((OPEN, "<response>", "</response>"), reader.content)):
        if marker == OPEN:
            yield from _marked_call(reader, OPEN, CLOSE)
        else:
            reader.drop_space()
            yield from reader.skip_space()


def llama3(reader: TextReader) -> Steps[None]:
    """Parse Llama 3: `{"name": …, "parameters": …}` as the whole output or after `<|python_tag|>`."""
    tag = "<|python_tag|>"
    reader.mark()
    at_call = (yield from reader.skip_space()) == "{"
    if not at_call:
        reader.content(reader.raw())
    while True:
        if not at_call:
            if not (yield from reader.stream_until((tag,), reader.content)):
                return
            reader.mark(len(tag))
        at_call = yield from call_object(reader, only_known=True)
        if not at_call:
            reader.content(reader.raw())
            continue
        reader.mark()
        at_call = (yield from reader.skip_space(";,")) == "{"
        if not at_call:
            reader.content(reader.raw().strip(SPACE + ";,"))


def mistral(reader: TextReader) -> Steps[None]:
    """Parse Mistral: `[TOOL_CALLS]` before a list of call objects, or before `name[ARGS]{…}`."""
    tag = "[TOOL_CALLS]"
    while (yield from reader.stream_until((tag,), reader.content)):
        reader.mark(len(tag))
        is_call = False
        if (yield from reader.skip_space()) == "[":
            reader.take()
            while (yield from reader.skip_space(",")) == "{" and (yield from call_object(reader)):
                is_call = True
                reader.mark()
            if is_call and (yield from reader.peek()) == "]":
                reader.take()
        else:
            is_call = yield from _named_json(reader, ("[CALL_ID]", "[ARGS]"))
        text = reader.raw()
        reader.content(text.strip(SPACE + ",]") if is_call else text)


def json_list(reader: TextReader) -> Steps[None]:
    """Parse an output that is a list of call objects, which a grammar guarantees."""
    reader.mark()
    num_calls = 0
    if (yield from reader.skip_space()) == "[":
        reader.take()
        while (yield from reader.skip_space(",")) == "{" and (yield from call_object(reader)):
            num_calls += 1
            reader.mark()
        if num_calls and (yield from reader.peek()) == "]":
            reader.take()
    text = reader.raw()
    reader.content(text.strip(SPACE + ",]") if num_calls else text)
    yield from reader.stream_until(("\0",), reader.content)


def _named_json(reader: TextReader, markers: tuple[str, ...]) -> Steps[bool]:
    """Parse a name, markers with text that is skipped, and a JSON object; return whether it is a call."""
    name = ""
    while (char := (yield from reader.peek())) and char not in "[{":
        name += reader.take()
    name = name.strip(SPACE)
    while char == "[":
        for marker in markers:
            if (yield from reader.starts_with(marker)):
                break
        else:
            return False
        while (char := (yield from reader.peek())) and char not in "[{":
            reader.take()
    if not name or not char:
        return False
    reader.start_call(name)
    yield from json_value(reader, reader.arguments)
    return True


def deepseek(reader: TextReader) -> Steps[None]:
    """Parse DeepSeek V3 (`function<sep>name` and a fenced object) and V3.1 (`name<sep>{…}`)."""
    section, call = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    separator, closing, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    while marker := (yield from reader.stream_until((section, call, end), reader.content)):
        if marker != call:
            continue
        reader.mark(len(call))
        name, found = yield from reader.take_until((separator, closing))
        if found == separator and (yield from reader.skip_space()) != "{":
            name, found = yield from reader.take_until(("\n", closing))
            yield from reader.skip_space("`json")
        if not found or found == closing or not name.strip(SPACE):
            reader.content(reader.raw())
            continue
        reader.start_call(name.strip(SPACE))
        yield from json_value(reader, reader.arguments)
        yield from reader.stream_until((closing,), _ignore)


def kimi(reader: TextReader) -> Steps[None]:
    """Parse Kimi K2: `functions.name:0<|tool_call_argument_begin|>{…}` between markers."""
    section, call = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
    separator, closing = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ids: set[str] = set()
    while marker := (
        yield from reader.stream_until((section, call, "<|tool_calls_section_end|>"), reader.content)
    ):
        if marker != call:
            continue
        reader.mark(len(call))
        head, found = yield from reader.take_until((separator, closing))
        id = head.strip(SPACE)
        name = id.removeprefix("functions.").rpartition(":")[0] or id.removeprefix("functions.")
        if found != separator or not name:
            reader.content(reader.raw())
            continue
        reader.start_call(name, None if id in ids else id)
        ids.add(id)
        yield from json_value(reader, reader.arguments)
        yield from reader.stream_until((closing,), _ignore)
