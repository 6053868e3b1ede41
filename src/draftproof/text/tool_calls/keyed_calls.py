"""Parsers of formats that name each argument: GLM, Qwen3-Coder (XML), Llama pythonic."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from draftproof.text.tool_calls.json_calls import CLOSE, OPEN
from draftproof.text.tool_calls.parser import SPACE, Steps, TextReader

_SURROGATE = re.compile("[\ud800-\udfff]")
PYTHON_NAMES = {"true": True, "false": False, "null": None}  # written as in JSON by some models


def _encode(value: Any) -> str:
    """Return JSON; ValueError if the value has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # A half of a surrogate pair cannot be encoded, so it stays an escape.
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value, allow_nan=False)


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, dict):
        return set()
    parts = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind or ())
    return found.union(*map(_kinds, parts), map(_kind, values))


def _kind(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def _allowed(reader: TextReader, function: str, key: str) -> set[str]:
    """Return the types that the schema of an argument allows; empty if it does not restrict them."""
    properties = reader.tools.get(function, {}).get("properties")
    return _kinds(properties.get(key)) if isinstance(properties, dict) else set()


def _from_text(text: str, allowed: set[str]) -> str:
    """Return the JSON of a value that a model wrote without a type."""
    try:
        value = json.loads(text)
        is_number = isinstance(value, int) and "number" in allowed
        if "string" in allowed and _kind(value) not in allowed and not is_number:
            return _encode(text)
        return _encode(value)
    except (ValueError, RecursionError):
        return _encode(text) if "string" in allowed else _from_python(text)


def _from_python(text: str) -> str:
    """Return the JSON of a Python literal; other text becomes a string."""
    try:
        return _encode(_literal(ast.parse(text.strip(SPACE), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return _encode(text.strip(SPACE))


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_literal(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_literal(node.operand)
    if isinstance(node, ast.Name) and node.id in PYTHON_NAMES:
        return PYTHON_NAMES[node.id]
    raise ValueError("not a literal")


class _Arguments:
    """Writer of an object of arguments, key by key."""

    def __init__(self, reader: TextReader) -> None:
        self._reader, self._count = reader, 0

    def key(self, name: str) -> None:
        self._reader.arguments(("{" if not self._count else ", ") + _encode(name) + ": ")
        self._count += 1

    def close(self) -> None:
        self._reader.arguments("}" if self._count else "{}")


def _tagged_value(
    reader: TextReader, function: str, key: str, closing: str, trim: Callable[[str], str]
) -> Steps[str]:
    """Emit the value up to a closing tag, a string as it arrives; return the tag, "" at the end."""
    allowed = _allowed(reader, function, key)
    if allowed != {"string"}:
        text, found = yield from reader.take_until((closing,))
        reader.arguments(_from_text(trim(text), allowed))
        return found
    reader.arguments('"')
    held = ""  # a newline that may be the last character of the value
    first = True

    def emit(text: str) -> None:
        nonlocal held, first
        if first and trim is _trim_newlines:
            text = text.removeprefix("\n")
        first = False
        text, held = held + text, ""
        if trim is _trim_newlines and text.endswith("\n"):
            text, held = text[:-1], "\n"
        reader.arguments(_encode(text)[1:-1])

    found = yield from reader.stream_until((closing,), emit)
    reader.arguments('"')
    return found


def _unchanged(text: str) -> str:
    return text


def _trim_newlines(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def glm(reader: TextReader) -> Steps[None]:
    """Parse GLM: `<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`."""
    while (yield from reader.stream_until((OPEN,), reader.content)):
        reader.mark(len(OPEN))
        yield from reader.skip_space()
        name, marker = yield from reader.take_until(("\n", "<arg_key>", CLOSE))
        name = name.strip(SPACE)
        if not name or not marker:
            reader.content(reader.raw())
            continue
        reader.start_call(name)
        arguments = _Arguments(reader)
        if marker == "\n":
            _, marker = yield from reader.take_until(("<arg_key>", CLOSE))
        while marker == "<arg_key>":
            key, found = yield from reader.take_until(("</arg_key>",))
            if found:
                _, found = yield from reader.take_until(("<arg_value>", CLOSE))
            if found != "<arg_value>":
                marker = found
                break
            arguments.key(key.strip(SPACE))
            marker = yield from _tagged_value(reader, name, key.strip(SPACE), "</arg_value>", _unchanged)
            if marker:
                _, marker = yield from reader.take_until(("<arg_key>", CLOSE))
        if marker:  # else the output was cut off
            arguments.close()


def qwen_xml(reader: TextReader) -> Steps[None]:
    """Parse Qwen3-Coder: `<function=name>` with `<parameter=key>` inside, mostly in `<tool_call>`."""
    begin = "<function="
    while opening := (yield from reader.stream_until((OPEN, begin), reader.content)):
        reader.mark(len(opening))
        name, found = "", ""
        if opening == OPEN:
            yield from reader.skip_space()
        if opening == begin or (yield from reader.starts_with(begin)):
            name, found = yield from reader.take_until((">",))
        name = name.strip(SPACE + "\"'")
        if not name or not found:
            reader.content(reader.raw())
            continue
        reader.start_call(name)
        arguments = _Arguments(reader)
        ends = ("<parameter=", "</function>", CLOSE)
        _, marker = yield from reader.take_until(ends)
        while marker == "<parameter=":
            key, marker = yield from reader.take_until((">",))
            if marker:
                key = key.strip(SPACE + "\"'")
                arguments.key(key)
                marker = yield from _tagged_value(reader, name, key, "</parameter>", _trim_newlines)
            if marker:
                _, marker = yield from reader.take_until(ends)
        if marker:
            arguments.close()
        if marker == "</function>" and opening == OPEN:
            yield from reader.stream_until((CLOSE,), lambda _: None)


def pythonic(reader: TextReader) -> Steps[None]:
    """Parse Llama pythonic: the whole output is `[name(key=value, …), …]`, with or without tags."""
    opening, closing = "<|python_start|>", "<|python_end|>"
    reader.mark()
    if (yield from reader.skip_space()) == "<" and (yield from reader.starts_with(opening)):
        yield from reader.skip_space()
    num_calls = 0
    if (yield from reader.peek()) == "[":
        reader.take()
        while (yield from _python_call(reader)):
            num_calls += 1
            reader.mark()
            if (yield from reader.skip_space(",")) == "]":
                reader.take()
                break
    text = reader.raw()
    reader.content(text.strip(SPACE + ",]") if num_calls else text)
    while (yield from reader.stream_until((opening, closing), reader.content)):
        pass


def _identifier(reader: TextReader) -> Steps[str]:
    name = ""
    yield from reader.skip_space()
    while (char := (yield from reader.peek())) and (char.isalnum() or char in "_.-"):
        name += reader.take()
    return name


def _python_call(reader: TextReader) -> Steps[bool]:
    """Parse `name(key=value, …)`; return whether it is a call of a known function with named arguments."""
    name = yield from _identifier(reader)
    if name not in reader.tools or (yield from reader.skip_space()) != "(":
        return False
    reader.take()
    arguments, has_started = _Arguments(reader), False
    while (char := (yield from reader.skip_space(","))) and char != ")":
        key = yield from _identifier(reader)
        if not key or (yield from reader.skip_space()) != "=":
            if not has_started:
                return False
            yield from _python_value(reader)  # an argument without a name has no place in an object
            continue
        reader.take()
        if not has_started:
            reader.start_call(name)
            has_started = True
        arguments.key(key)
        value = yield from _python_value(reader)
        if value:
            reader.arguments(_from_python(value))
    if not char:
        return has_started
    reader.take()
    if not has_started:
        reader.start_call(name)
    arguments.close()
    return True


def _python_value(reader: TextReader) -> Steps[str]:
    """Return the text of a Python value, up to the comma or bracket after it."""
    text, depth, quote, escaped = "", 0, "", False
    while char := (yield from reader.peek()):
        if quote:
            if char == quote and not escaped:
                quote = ""
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif depth == 0 and char in ",)]}":
            break
        else:
            depth += (char in "([{") - (char in ")]}")
        text += reader.take()
    return text
