"""Chat templates: messages in, prompt text out, in a sandbox that behaves as transformers' does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftproof.errors import LoadError, RequestError


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; for a prompt it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """One compiled template and the special tokens that it may name (bos_token, eos_token, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise LoadError(f"{where}: the chat template cannot be compiled: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **more: Any
    ) -> str:
        """The prompt. What the template refuses is the request's fault, and it says why."""
        names = {"tools": None, "documents": None, **self._special, **more}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **names
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused: {error}", "messages") from error
        except Exception as error:  # a template is a program: any of its errors is about its input
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"the chat template cannot render these messages ({reason})", "messages"
            ) from error
