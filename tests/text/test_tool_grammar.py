"""Grammars of tool calls: what a random walk through them generates is parsed as valid calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from draftproof import SamplingParams
from draftproof.text.grammar.compiler import GrammarCompiler
from draftproof.text.tool_calls.formats import FORMATS
from draftproof.text.tool_calls.grammar import ANY_OBJECT, LISTED, CallGrammar, CallSyntax
from draftproof.text.tool_calls.parser import ParsedText

END = 256
NAMES = [name for name in FORMATS if name != "json_list"]
SYNTAXES = [each.syntax for each in FORMATS.values()]
MARKERS = sorted(set(re.findall(r"<[|｜].*?[|｜]>|\[[A-Z_]+\]", str(SYNTAXES))))
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["O", "Rome"]}, "now": {"type": "boolean"}},
    "required": ["city", "now"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": PLACE, "time": {"type": "object", "properties": {}, "additionalProperties": False}}
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


class Bytes:
    """Tokenizer of bytes, an end token, and each marker as a special token."""

    special_ids = frozenset(range(END, END + 1 + len(MARKERS)))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else self.token_text(token).encode()

    def token_text(self, token: int) -> str:
        return ["<end>", *MARKERS][token - END]


SPECIAL = {Bytes().token_text(token): token for token in Bytes.special_ids}
SIZE = END + len(SPECIAL)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Bytes(), SIZE, (END,))  # type: ignore[arg-type]
    yield made
    made.close()


def allowed(state: Any) -> list[int]:
    row = torch.zeros((SIZE + 31) // 32, dtype=torch.int32)
    state.fill(row)
    return np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")).tolist()


def start_state(compiler: GrammarCompiler, tag: dict[str, Any]) -> Any:
    grammar = compiler.compile(SamplingParams(structured_outputs={"structural_tag": tag}))
    assert grammar is not None
    return grammar.start()


def walk(compiler: GrammarCompiler, tag: dict[str, Any], seed: int, start: list[int]) -> str:
    """Return the text of a random output of a grammar that begins with the tokens `start`."""
    state, chooser, ids = start_state(compiler, tag), random.Random(seed), [*start]
    assert all(map(state.accept, start)), decode(start)
    for _ in range(4000):
        choices = allowed(state)
        others = [token for token in choices if token != END]
        ends = END in choices and (not others or chooser.random() < 0.2)
        token = END if ends else chooser.choice(others)
        assert state.accept(token)
        if token == END:
            return decode(ids)
        ids.append(token)
    raise AssertionError(f"the output does not end: {decode(ids)}")


def encode(text: str, special: Mapping[str, int]) -> list[int]:
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [t for part in parts for t in ([special[part]] if part in special else part.encode())]


def decode(ids: list[int]) -> str:
    return b"".join(map(Bytes().token_bytes, ids)).decode(errors="replace")


def parsed(name: str, syntax: CallSyntax, text: str) -> ParsedText:
    return FORMATS[syntax.parser or name].parse_text(text, SCHEMAS)


def check(found: ParsedText) -> None:
    for call in found.calls:
        arguments = json.loads(call.arguments)
        if call.name == "weather":
            assert arguments["city"] in ("O", "Rome") and isinstance(arguments["now"], bool)
        else:
            assert (call.name, arguments) == ("time", {})


@pytest.mark.parametrize("special", [SPECIAL, {}], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", NAMES)
def test_required_output_is_calls(compiler: GrammarCompiler, name: str, special: Mapping[str, int]) -> None:
    syntax = FORMATS[name].syntax
    for only_one in (True, False):
        tag = CallGrammar(syntax, SCHEMAS, only_one, special).required()
        message = syntax.message.replace("$text", "hm")  # free text would make the walk long
        start = message + syntax.before + syntax.call.partition("$name")[0]
        for seed in range(3):
            text = walk(compiler, tag, seed, encode(start, special))
            found = parsed(name, syntax, text)
            check(found)
            assert not found.content and found.calls and (len(found.calls) == 1 or not only_one), text
            assert found.reasoning == ("hm" if message else "")
        call = syntax.call.replace("$name", "time").replace("$arguments", "{}").replace("$digit", "0")
        two = message + syntax.before + call + syntax.separator + call + syntax.after
        accepted = all(map(start_state(compiler, tag).accept, encode(two, special)))
        assert accepted == (not only_one and not syntax.is_single)
        assert accepted is False or len(parsed(name, syntax, two).calls) == 2


@pytest.mark.parametrize("special", [SPECIAL, {}], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_in_free_text_are_valid(
    compiler: GrammarCompiler, name: str, special: Mapping[str, int]
) -> None:
    syntax = FORMATS[name].syntax
    tag = CallGrammar(syntax, SCHEMAS, False, special).optional()
    call = syntax.call.replace("$name", "time").replace("$arguments", "{}").replace("$digit", "0")
    section = syntax.before + call + syntax.after
    before = syntax.message.replace("$text", "hm") if syntax.message else "" if syntax.opening else "a <b [c "
    free = syntax.answer.replace("$text", "hello") if syntax.answer else "hello {}[]"
    for text, is_valid, is_whole in [
        (before + section, True, True),
        (free, True, True),
        ("", True, not syntax.answer),
        (before + section.replace("time", "f"), False, False),
        (before + section.replace("{}", '{"a":1}'), False, False),
        (before + section.partition("time")[0], True, False),
    ]:
        state = start_state(compiler, tag)
        assert all(map(state.accept, encode(text, special))) == is_valid, text
        if is_valid:
            assert (END in allowed(state)) == is_whole, text
    assert [c.name for c in parsed(name, syntax, before + section).calls] == ["time"]
    # Special tokens that are no part of the format are never allowed.
    used = {special[marker] for marker in special if marker in str(syntax)}
    assert not Bytes.special_ids - used - {END} & {*allowed(start_state(compiler, tag))}


@pytest.mark.parametrize("name", NAMES)
def test_output_is_calls_or_json_of_the_schema(compiler: GrammarCompiler, name: str) -> None:
    syntax = LISTED if FORMATS[name].syntax.opening else FORMATS[name].syntax
    tag = CallGrammar(syntax, SCHEMAS, True, SPECIAL).or_json(ANSWER)
    begin = syntax.before + syntax.call.partition("$name")[0]
    text = walk(compiler, tag, 0, encode(begin, SPECIAL))
    check(parsed(name, syntax, text))
    assert len(parsed(name, syntax, text).calls) == 1
    begin = syntax.answer.partition("$text")[0] + "{"
    text = walk(compiler, tag, 0, encode(begin, SPECIAL))
    found = parsed(name, syntax, text)
    assert not found.calls and isinstance(json.loads(found.content)["ok"], bool)


def test_schema_of_any_object_is_enforced_as_an_object(compiler: GrammarCompiler) -> None:
    tag = CallGrammar(FORMATS["hermes"].syntax, {"f": ANY_OBJECT}, True, {}).required()
    for arguments, is_valid in [('{"a": [1, {"b": null}]}', True), ("{}", True), ("[1]", False)]:
        text = FORMATS["hermes"].syntax.call.replace("$name", "f").replace("$arguments", arguments)
        state = start_state(compiler, tag)
        assert all(map(state.accept, text.encode())) == is_valid
