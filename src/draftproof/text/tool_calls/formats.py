"""Table of tool-call formats: parser, marks in the chat template, ids of calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import ConfigError, nearest
from draftproof.text.tool_calls import grammar, harmony, json_calls, keyed_calls
from draftproof.text.tool_calls.parser import ParsedText, Steps, TextReader, ToolCallParser, collect

Tools = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments, by name of the function
_ALPHANUMERIC = string.ascii_letters + string.digits


def _call_id(name: str, index: int) -> str:
    return "call_" + secrets.token_hex(12)


def _nine_characters(name: str, index: int) -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format in which a family of models writes tool calls."""

    name: str
    models: str
    parse: Callable[[TextReader], Steps[None]]
    template_marks: tuple[str, ...]  # all of them are in a chat template of this format
    has_special_tokens: bool = False  # its markers are special tokens, so the text must contain those
    make_id: Callable[[str, int], str] = _call_id  # from the name and the index of a call
    syntax: grammar.CallSyntax = grammar.LISTED  # of calls under a grammar
    has_text_arguments: bool = False  # templates need the arguments of earlier calls as text
    has_system_prompt: bool = False  # can be used with templates without tools
    special_tokens: Mapping[str, int] = field(default_factory=dict)  # of the model: id by text

    def parser(self, tools: Tools) -> ToolCallParser:
        """Return a parser for one output."""
        return ToolCallParser(self.parse, tools)

    def parse_text(self, text: str, tools: Tools) -> ParsedText:
        """Parse a whole output: the incremental parser, fed once."""
        parser = self.parser(tools)
        return collect([*parser.feed(text), *parser.finish()])


# The order matters for detection: marks of a later format may occur in templates of an earlier one.
FORMATS = {
    each.name: each
    for each in (
        ToolCallFormat(
            "harmony",
            "gpt-oss",
            harmony.harmony,
            ("<|channel|>", "functions"),
            has_special_tokens=True,
            syntax=grammar.HARMONY,
        ),
        ToolCallFormat(
            "kimi",
            "Kimi K2",
            json_calls.kimi,
            ("<|tool_call_argument_begin|>",),
            has_special_tokens=True,
            syntax=grammar.KIMI,
        ),
        ToolCallFormat(
            "deepseek",
            "DeepSeek V3, R1",
            json_calls.deepseek,
            ("<｜tool▁sep｜>", "```json"),
            has_special_tokens=True,
            syntax=grammar.DEEPSEEK_FENCED,
            has_text_arguments=True,
        ),
        ToolCallFormat(
            "deepseek_v31",
            "DeepSeek V3.1",
            json_calls.deepseek,
            ("<｜tool▁sep｜>",),
            has_special_tokens=True,
            syntax=grammar.DEEPSEEK,
            has_text_arguments=True,
        ),
        ToolCallFormat(
            "mistral_v11",
            "Mistral Small 3.2, Devstral, Magistral",
            json_calls.mistral,
            ("[TOOL_CALLS]", "[ARGS]"),
            has_special_tokens=True,
            make_id=_nine_characters,
            syntax=grammar.MISTRAL_NAMED,
        ),
        ToolCallFormat(
            "mistral",
            "earlier Mistral, Ministral",
            json_calls.mistral,
            ("[TOOL_CALLS]",),
            has_special_tokens=True,
            make_id=_nine_characters,
            syntax=grammar.MISTRAL,
        ),
        ToolCallFormat(
            "glm", "GLM-4.5 and later", keyed_calls.glm, ("<arg_key>",), syntax=grammar.TAGGED_JSON
        ),
        ToolCallFormat(
            "qwen_xml", "Qwen3-Coder", keyed_calls.qwen_xml, ("<function=",), syntax=grammar.TAGGED_JSON
        ),
        ToolCallFormat(
            "ernie", "ERNIE 4.5", json_calls.ernie, ("<tool_call>", "<response>"), syntax=grammar.TAGGED
        ),
        ToolCallFormat(
            "hermes",
            "Hermes, Qwen 2.5 and 3, QwQ",
            json_calls.hermes,
            ("<tool_call>",),
            syntax=grammar.TAGGED,
            has_system_prompt=True,
        ),
        ToolCallFormat(
            "pythonic",
            "Llama 3.2 and 4 (lists)",
            keyed_calls.pythonic,
            ("[func_name1(",),
            has_special_tokens=True,
        ),
        ToolCallFormat(
            "llama3_json",
            "Llama 3.1, 3.2, 3.3",
            json_calls.llama3,
            ('{"name": function name',),
            has_special_tokens=True,
            syntax=grammar.LLAMA,
        ),
        ToolCallFormat("json_list", "any, under a grammar", json_calls.json_list, ("\0",)),
    )
}


def detect(template: str) -> ToolCallFormat | None:
    """Return the format that a chat template writes calls in; None if it has no known one."""
    found = (each for each in FORMATS.values() if all(mark in template for mark in each.template_marks))
    return next(found, None)


def find_format(name: str) -> ToolCallFormat:
    """Return the format of an option; ConfigError for an unknown name."""
    if name not in FORMATS:
        raise ConfigError(f"unknown tool-call parser {name!r}: {nearest(name, FORMATS)}")
    return FORMATS[name]
