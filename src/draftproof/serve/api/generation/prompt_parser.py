"""Parser of prompts: texts, token ids and conversations of a request body, as tokens within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from draftproof.errors import ConfigError
from draftproof.serve.api.generation import request_schema as schema
from draftproof.serve.api.generation.tool_options import message_fields, template_tools, tool_messages_as_text
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import in_thread_if
from draftproof.serve.settings import Settings
from draftproof.text.reasoning.section import find_reasoning
from draftproof.text.tokenizer import Tokenizer
from draftproof.text.tool_calls.formats import detect, find_format

LONG_TEXT_CHARACTERS = 4096  # longer texts are tokenized in a thread, not on the event loop
PART_CHARACTERS = 32  # characters that take as long as one message
RESERVED_TEMPLATE_NAMES = {
    *("self", "messages", "chat_template", "tools"),
    *("add_generation_prompt", "continue_final_message", "control_tokens_in_messages"),
}
EFFORT = "reasoning_effort"
THINKING_SWITCHES = ("enable_thinking", "thinking")  # names of templates that turn reasoning off
TOO_LONG = "context_length_exceeded"  # the code that clients test for


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt in tokens, and its text for an echo."""

    ids: list[int]
    text: str | None = None


class PromptParser:
    """Parser of the prompts of one model."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        self._llm, self._settings = llm, settings
        self.tokenizer: Tokenizer = llm.get_tokenizer()
        template = self.tokenizer.chat_template
        source = "" if template is None else template.source
        name = settings.tool_call_parser
        found = detect(source) if name is None else find_format(name)
        special = {self.tokenizer.token_text(i): i for i in self.tokenizer.special_ids}
        self.tool_format = None if found is None else replace(found, special_tokens=special)
        self.reasoning = find_reasoning(llm.config.reasoning_parser, self.tokenizer, llm.limits.vocab_size)
        self.template_names = frozenset() if template is None else template.names
        for name in settings.default_chat_template_kwargs.keys() - self.template_names:
            raise ConfigError(f"default_chat_template_kwargs: the chat template does not use {name!r}")

    async def conversation(
        self, body: schema.ChatCompletionRequest | schema.TokenizeRequest, pool: Executor | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, rendered by the model's chat template."""
        names = self._template_values(body)
        for name in RESERVED_TEMPLATE_NAMES.intersection(names):
            text = f"chat_template_kwargs: {name!r} is reserved for the server"
            raise ApiError(400, text, "chat_template_kwargs")
        assert not isinstance(body.messages, msgspec.UnsetType)
        num_parts = sum(message.num_parts for message in body.messages)
        if num_parts > schema.MAX_MESSAGES:
            text = f"messages: {num_parts} messages and parts, and the maximum is {schema.MAX_MESSAGES}"
            raise ApiError(400, text, "messages")
        size = sum(_num_characters(message) for message in body.messages)
        self.check_characters(size, "messages")
        continues = bool(body.continue_final_message)
        add_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        messages, names = self._template_input(body, names)
        render = partial(
            self._llm.chat_token_ids,
            messages,
            chat_template_kwargs=names,
            add_generation_prompt=add_prompt,
            continue_final_message=continues,
            control_tokens_in_messages=self._settings.allow_control_tokens,
        )
        is_long = size + num_parts * PART_CHARACTERS > LONG_TEXT_CHARACTERS
        return await in_thread_if(is_long, render, pool)

    def _template_values(self, body: schema.ChatCompletionRequest | schema.TokenizeRequest) -> dict[str, Any]:
        """Return chat_template_kwargs and `reasoning_effort`, under the names that the template reads."""
        defaults, names = self._settings.default_chat_template_kwargs, body.chat_template_kwargs or {}
        effort = body.reasoning_effort if isinstance(body, schema.ChatCompletionRequest) else None
        if effort is None:
            return {**defaults, **names}
        if EFFORT in self.template_names:
            return {**defaults, EFFORT: effort, **names}
        switches = [name for name in THINKING_SWITCHES if name in self.template_names]
        if effort == "none" and (switches or self.reasoning is None):
            return {**defaults, **dict.fromkeys(switches, False), **names}
        hint = f"it reads {' and '.join(switches)} of chat_template_kwargs" if switches else "leave it out"
        text = f"reasoning_effort: the chat template of this model does not use it; {hint}"
        raise ApiError(400, text, EFFORT, "unsupported_option")

    def _template_input(
        self, body: schema.ChatCompletionRequest | schema.TokenizeRequest, names: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and names that the template gets, tools included."""
        assert not isinstance(body.messages, msgspec.UnsetType)
        form = self.tool_format
        as_text = form is not None and form.has_text_arguments
        messages = [
            {**_message(message), **message_fields(message, at, as_text)}
            for at, message in enumerate(body.messages)
        ]
        no_tools = isinstance(body, schema.ChatCompletionRequest) and body.tool_choice == "none"
        tools = [] if no_tools else template_tools(body.tools or [])
        if "tools" in self.template_names:
            return messages, {**names, "tools": tools} if tools else names
        if form is not None and form.has_system_prompt:
            return tool_messages_as_text(messages, tools), names
        if tools or any("tool_calls" in message for message in messages):
            text = "tools: the chat template of this model has none"
            raise ApiError(400, f"{text}; start the server with --tool-call-parser hermes", "tools")
        return messages, names

    async def encode(self, text: str, add_special_tokens: bool, pool: Executor | None = None) -> list[int]:
        """Return the tokens of a text that is short enough for a prompt, in a thread of `pool`."""
        self.check_characters(len(text), "prompt")
        call = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await in_thread_if(len(text) > LONG_TEXT_CHARACTERS, call, pool)

    async def completion(self, body: schema.CompletionRequest, n: int) -> list[ParsedPrompt]:
        """Return the prompts of a completion request, each of which is generated n times."""
        special = body.add_special_tokens is not False
        limit = max(self._settings.max_choices, self._llm.limits.max_model_len)
        if not isinstance(body.prompt, str) and len(body.prompt) > limit:
            text = f"prompt: {len(body.prompt)} items, and the maximum is {limit}"
            raise ApiError(400, text, "prompt", TOO_LONG if type(body.prompt[0]) is int else None)
        prompts = prompt_list(body.prompt)
        num_choices = len(prompts) * n
        if num_choices > self._settings.max_choices:
            text = f"prompt: {len(prompts)} prompts with n={n} are {num_choices} choices, and the maximum is "
            raise ApiError(400, f"{text}{self._settings.max_choices}", "prompt")
        if not body.suffix:
            return await self.tokenized(prompts, special)
        texts = [body.suffix, *(prompt for prompt in prompts if isinstance(prompt, str))]
        for text in texts:
            self.check_characters(len(text), "suffix" if text is body.suffix else "prompt")
        join = partial(self._fill_in_middle, prompts, body.suffix, special)
        return await in_thread_if(sum(map(len, texts)) > LONG_TEXT_CHARACTERS, join)

    def _fill_in_middle(self, prompts: list[Any], suffix: str, special: bool) -> list[ParsedPrompt]:
        parsed = []
        for prompt in prompts:
            parsed.append(ParsedPrompt(self.tokenizer.fill_in_middle(prompt, suffix, special)))
            self.check_length(parsed[-1])
        return parsed

    async def tokenized(
        self, prompts: list[Any], add_special_tokens: bool, name: str = "prompt", keep_last: int | None = None
    ) -> list[ParsedPrompt]:
        """Return texts and lists of token ids as prompts within the limits.

        `name`: the option that has them. `keep_last`: cut longer prompts to so many tokens.
        """
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        parse = partial(self._tokenize, prompts, add_special_tokens, name, keep_last)
        return await in_thread_if(size > LONG_TEXT_CHARACTERS, parse)

    def _tokenize(
        self, prompts: list[Any], add_special_tokens: bool, name: str, keep_last: int | None
    ) -> list[ParsedPrompt]:
        parsed = []
        for prompt in prompts:
            text, ids = None, prompt
            if isinstance(prompt, str):
                self.check_characters(len(prompt), name)
                text, ids = prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            parsed.append(ParsedPrompt(ids if keep_last is None else ids[-keep_last:], text))
            self.check_length(parsed[-1], name)
        return parsed

    def check_characters(self, size: int, name: str, max_tokens: int | None = None) -> None:
        """Reject a text that cannot fit into `max_tokens` (default: of a prompt) before tokenizing it."""
        limit = max_tokens or self._settings.max_prompt_tokens or self._llm.limits.max_model_len
        if size > limit and size > limit * self.tokenizer.longest:
            raise ApiError(400, f"{name}: {size} characters are more than {limit} tokens", name, TOO_LONG)

    def check_length(self, prompt: ParsedPrompt, name: str = "prompt") -> None:
        """Reject a prompt that is too long or has token ids outside the vocabulary."""
        limits, count = self._llm.limits, len(prompt.ids)
        limit = min(self._settings.max_prompt_tokens or limits.max_model_len, limits.max_model_len - 1)
        if count > limit:
            raise ApiError(400, f"the prompt has {count} tokens, and the maximum is {limit}", name, TOO_LONG)
        vocab = limits.vocab_size
        if prompt.text is None and prompt.ids and max(prompt.ids) >= vocab:
            text = f"{name}: token id {max(prompt.ids)} is outside the vocabulary 0..{vocab - 1}"
            raise ApiError(400, text, name)


def prompt_list(prompt: Any, name: str = "prompt") -> list[Any]:
    """Return one or several prompts as a list of texts or of token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ApiError(400, f"{name}: texts, token ids and lists of token ids cannot be mixed", name)
    return [prompt] if kinds == {int} else list(prompt)


def content_text(content: str | Sequence[schema.TextPart] | None) -> str:
    """Return the text of a message's content."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _num_characters(message: schema.Message) -> int:
    """Return the characters of a message's content and reasoning."""
    return len(content_text(message.content)) + len(message.reasoning_content or message.reasoning or "")


def _message(message: schema.Message) -> dict[str, Any]:
    """Return a message for the chat template; the role "developer" becomes "system"."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    content: Any = message.content or ""
    if not isinstance(content, str):
        content = [{"type": "text", "text": part.text} for part in content]
    fields = {} if message.name is None else {"name": message.name}
    if reasoning := message.reasoning_content or message.reasoning:
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return {"role": role, "content": content, **fields}
