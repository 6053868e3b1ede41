"""Structural tags that make invalid tool calls impossible.

A `CallSyntax` is the text of calls as templates. Where a marker in a template is a special token of the
model, the grammar matches that token; elsewhere it matches the marker's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_OBJECT: dict[str, Any] = {"type": "object"}
Format = dict[str, Any]  # part of a structural tag
Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments, by name of the function
_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # of DeepSeek


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Templates of calls under a grammar.

    `$name` and `$arguments` are those of a call, `$digit` is one digit, `$text` any text.
    """

    call: str
    separator: str = ""
    before: str = ""  # the first call
    after: str = ""  # the last call
    trigger: str = ""  # marker that begins a call, or all calls, inside free text
    opening: str = ""  # without a trigger: first character of calls, with which no other output begins
    message: str = ""  # any number of messages precede a call or the answer
    answer: str = ""  # output without calls, where the format has messages
    is_single: bool = False  # one call at most
    parser: str = ""  # name of the format that parses the output; "": the format of the model


TAGGED = CallSyntax(
    '<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>', "\n", trigger="<tool_call>"
)
# For formats whose arguments are not JSON: the schema of the arguments applies to JSON only.
TAGGED_JSON = CallSyntax(TAGGED.call, "\n", trigger="<tool_call>", parser="hermes")
LISTED = CallSyntax(
    '{"name": "$name", "arguments": $arguments}',
    ", ",
    before="[",
    after="]",
    opening="[",
    parser="json_list",
)
LLAMA = CallSyntax('{"name": "$name", "parameters": $arguments}', "; ", opening="{")
MISTRAL = CallSyntax(LISTED.call, ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]")
MISTRAL_NAMED = CallSyntax("[TOOL_CALLS]$name[ARGS]$arguments", trigger="[TOOL_CALLS]")
DEEPSEEK_FENCED = CallSyntax(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    "\n",
    *_SECTION,
    trigger=_SECTION[0],
)
DEEPSEEK = CallSyntax(
    "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
    "",
    *_SECTION,
    trigger=_SECTION[0],
)
KIMI = CallSyntax(
    "<|tool_call_begin|>functions.$name:$digit<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    before="<|tool_calls_section_begin|>",
    after="<|tool_calls_section_end|>",
    trigger="<|tool_calls_section_begin|>",
)
HARMONY = CallSyntax(
    "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
    message="<|channel|>analysis<|message|>$text<|end|><|start|>assistant",
    answer="<|channel|>final<|message|>$text",
    is_single=True,  # the end of a call ends the output
)


class CallGrammar:
    """Builder of the structural tags of one request."""

    def __init__(
        self, syntax: CallSyntax, schemas: Schemas, only_one: bool, special_tokens: Mapping[str, int]
    ) -> None:
        """`special_tokens`: ids of the model's special tokens, by their text."""
        self._syntax, self._schemas, self._special = syntax, schemas, special_tokens
        self._is_single = only_one or syntax.is_single
        fields = ("$name", "$arguments", "$digit", "$text")
        markers = sorted(special_tokens, key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, (*fields, *markers))) + ")")

    def required(self) -> dict[str, Any]:
        """Return the tag of an output with at least one call and no other content."""
        return _tag(self._sequence(*self._messages(), *self._calls()))

    def optional(self) -> dict[str, Any]:
        """Return the tag of free text with calls in it, each of which is valid."""
        syntax = self._syntax
        if syntax.answer:
            answer = self._sequence(*self._elements(syntax.answer))
            return _tag(self._sequence(*self._messages(), _or([self._sequence(*self._calls()), answer])))
        if not syntax.trigger:
            other = rf"([ \t\r\n]*[^ \t\r\n{re.escape(syntax.opening)}][\s\S]*)?"
            return _tag(_or([self._sequence(*self._calls()), {"type": "regex", "pattern": other}]))
        # Calls between two markers are one section; other calls are recognized one by one.
        calls = self._calls(syntax.trigger) if syntax.before else [self._any_call(syntax.trigger)]
        rules, is_repeated = self._sequence(*calls), not self._is_single and not syntax.before
        token = self._special.get(syntax.trigger)
        if token is None:
            return _tag({"type": "dispatch", "rules": [[syntax.trigger, rules]], "loop": is_repeated})
        others = sorted(set(self._special.values()) - {token})
        free = {"type": "token_dispatch", "rules": [[token, rules]], "loop": is_repeated}
        return _tag({**free, "exclude_tokens": others})

    def or_json(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tag of an output that is calls, or JSON of a schema."""
        answer = self._elements(self._syntax.answer or "$text", {"$text": _json(schema)})
        outputs = [self._sequence(*self._calls()), self._sequence(*answer)]
        return _tag(self._sequence(*self._messages(), _or(outputs)))

    # --- parts of tags ------------------------------------------------------------------------------

    def _messages(self) -> list[Format]:
        if not self._syntax.message:
            return []
        return [{"type": "star", "content": self._sequence(*self._elements(self._syntax.message))}]

    def _calls(self, without: str = "") -> list[Format]:
        """Return the elements of at least one call; `without`: text at the start that is left out."""
        syntax = self._syntax
        found = self._elements(syntax.before.removeprefix(without))
        found.append(self._any_call("" if syntax.before else without))
        if not self._is_single:
            further = self._sequence(*self._elements(syntax.separator), self._any_call())
            found.append({"type": "star", "content": further})
        return found + self._elements(syntax.after)

    def _any_call(self, without: str = "") -> Format:
        calls = []
        for name, schema in self._schemas.items():
            fields = {"$name": _text(name), "$arguments": _json(schema)}
            calls.append(self._sequence(*self._elements(self._syntax.call.removeprefix(without), fields)))
        return _or(calls)

    def _elements(self, template: str, fields: Mapping[str, Format] | None = None) -> list[Format]:
        """Return a template as a list of texts, special tokens and fields."""
        parts = [part for part in self._parts.split(template) if part]
        known = {"$digit": {"type": "regex", "pattern": "[0-9]"}, **(fields or {})}
        found: list[Format] = []
        for at, part in enumerate(parts):
            if part == "$text" and part not in known:
                end = parts[at + 1] if at + 1 < len(parts) else ""
                is_marked = bool(end) and end not in self._special  # special tokens are no text
                found.append({"type": "any_text", **({"excludes": [end]} if is_marked else {})})
            elif part in self._special:
                found.append({"type": "token", "token": self._special[part]})
            else:
                found.append(known.get(part) or _text(part))
        return found

    def _sequence(self, *elements: Format) -> Format:
        return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _json(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _or(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _tag(content: Format) -> dict[str, Any]:
    return {"type": "structural_tag", "format": content}
