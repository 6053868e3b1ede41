"""Structural tags that make invalid tool calls impossible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Text around the arguments of a call, and between and around calls.

    `NAME` is replaced by the function's name as JSON.
    """

    begin: str
    end: str
    separator: str
    trigger: str = ""  # text that begins a call inside free text; "": calls cannot be told from content
    before: str = ""
    after: str = ""


TAGGED = CallSyntax(
    begin='<tool_call>\n{"name": NAME, "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
)
# For formats whose markers are special tokens, which a grammar cannot produce.
LISTED = CallSyntax(begin='{"name": NAME, "arguments": ', end="}", separator=", ", before="[", after="]")


def _tag(syntax: CallSyntax, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    begin = syntax.begin.replace("NAME", json.dumps(name, ensure_ascii=False))
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return {"type": "tag", "begin": begin, "content": content, "end": syntax.end}


def forced_calls(
    syntax: CallSyntax, schemas: Mapping[str, Mapping[str, Any]], only_one: bool
) -> dict[str, Any]:
    """Return the structural tag of an output that is calls and nothing else, at least one."""
    tags = [_tag(syntax, name, schema) for name, schema in schemas.items()]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
    if syntax.before:
        ends = [{"type": "const_string", "value": text} for text in (syntax.before, syntax.after)]
        calls = {"type": "sequence", "elements": [ends[0], calls, ends[1]]}
    return {"type": "structural_tag", "format": calls}


def optional_calls(
    syntax: CallSyntax, schemas: Mapping[str, Mapping[str, Any]], only_one: bool
) -> dict[str, Any]:
    """Return the structural tag of free text with calls in it, each of which is valid."""
    assert syntax.trigger
    tags = [_tag(syntax, name, schema) for name, schema in schemas.items()]
    calls = {"type": "triggered_tags", "triggers": [syntax.trigger], "tags": tags}
    return {
        "type": "structural_tag",
        "format": {**calls, "at_least_one": False, "stop_after_first": only_one},
    }
