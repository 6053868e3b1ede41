"""Chat templates: messages in, prompt text out, in a sandbox that behaves like transformers'."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftproof.errors import LoadError, RequestError, nearest

OPTIONAL_NAMES = ("tools", "documents")  # always defined; None: not given
GENERAL_NAMES = {*OPTIONAL_NAMES, "messages", "add_generation_prompt"}
_MARK = "DRAFTPROOF_CONTINUE_HERE "  # ends in a space, to detect a template that trims


class _Generation(Extension):
    """Tag `{% generation %}`: it marks assistant text for training and changes nothing in a prompt."""

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


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its content as one string."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise RequestError("only text is supported in the parts of a message", "messages")
    return {**message, "content": "\n".join(str(text) for text in texts)}


class ChatTemplate:
    """Compiled template and the special tokens that it may use (bos_token, eos_token, …)."""

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
            self.names = frozenset(find_undeclared_variables(environment.parse(source)))  # that it reads
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise LoadError(f"{where}: the chat template cannot be compiled: {error}") from error
        self._takes_parts = self._probe_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **more: Any,
    ) -> str:
        """Return the prompt; RequestError with the reason if the template refuses the messages.

        Content given as a list of text parts is joined by newlines for templates that expect a string.
        `continue_final_message` leaves the last message open for the model to continue.
        """
        self._check_names(more)
        plain = [message if self._takes_parts else _joined(message) for message in messages]
        if not continue_final_message:
            return self._render(plain, add_generation_prompt, more)
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", "messages"
            )
        last = _joined(plain[-1]) if plain else {}
        content = last.get("content")
        if not isinstance(content, str):
            raise RequestError("there is no final message to continue", "messages")
        text = self._render([*plain[:-1], {**last, "content": content + _MARK}], False, more)
        before, found, _ = text.rpartition(_MARK.strip())
        if not found:
            raise RequestError("the chat template drops the final message", "messages")
        # A template that trims has removed the mark's trailing space: trim the text as well.
        return before if _MARK in text else before.rstrip()

    def _check_names(self, given: Mapping[str, Any]) -> None:
        """Refuse names that the template does not read, since they would have no effect."""
        for name in given.keys() - self.names:
            if name not in OPTIONAL_NAMES:
                known = self.names - GENERAL_NAMES - self._special.keys() - self._template.globals.keys()
                hint = nearest(name, known, f"it reads: {', '.join(sorted(known)) or 'no further names'}")
                text = f"chat_template_kwargs: the chat template does not use {name!r}; {hint}"
                raise RequestError(text, "chat_template_kwargs")
            if given[name] is not None:
                raise RequestError(f"the chat template of this model does not use {name}", name)

    def _probe_parts(self) -> bool:
        """Return whether the template accepts a list of parts, by rendering one."""
        probe = "draftproof-probe"
        message = {"role": "user", "content": [{"type": "text", "text": probe}]}
        try:
            text = self._render([message], True, {})
        except RequestError:
            return False
        return probe in text and "'type'" not in text and '"type"' not in text

    def _render(
        self, messages: list[Mapping[str, Any]], add_generation_prompt: bool, more: Mapping[str, Any]
    ) -> str:
        names = {"tools": None, "documents": None, **self._special, **more}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **names
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused: {error}", "messages") from error
        except Exception as error:  # a template is a program: any exception concerns its input
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"the chat template cannot render these messages ({reason})", "messages"
            ) from error
