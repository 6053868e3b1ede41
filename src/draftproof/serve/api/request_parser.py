"""From a body to what is asked of the engine: prompts in tokens, SamplingParams, how to tell the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.serve.api.request_schema import (
    AnyJson,
    Asked,
    ChatAsked,
    CompletionAsked,
    FreeText,
    Message,
    SchemaJson,
    Speculative,
    TextPart,
    TokenizeAsked,
)
from draftproof.serve.http.errors import Problem
from draftproof.serve.settings import Settings
from draftproof.text.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters that an event loop should not tokenise itself
RESERVED = {"self", "messages", "chat_template", "add_generation_prompt", "continue_final_message"}
TOO_LONG = "context_length_exceeded"  # the code that clients look for
START_FOR_PREDICTION = """start the server with --speculative-config '{"method": "given"}' to use it"""


@dataclass(frozen=True, slots=True)
class PromptIn:
    """One prompt as the engine takes it, and its text for an echo."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What one HTTP request asks."""

    chat: bool
    prompts: list[PromptIn]
    params: SamplingParams
    stream: bool
    usage: bool  # at the end of the stream
    usage_each: bool  # with every chunk, too
    whole_steps: bool  # a chunk for each step instead of one for each token
    echo: bool = False
    silent: bool = False  # nothing is to be generated: the one token that the engine needs is not told
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    as_ids: bool = False
    provenance: bool = False
    structure: str = "structured_outputs"  # the option that said what the answer must follow
    num_entries: int = 0  # logprobs that may have to be told

    @property
    def tells_logprobs(self) -> bool:
        return self.params.wants_logprobs


class Wishes:
    """Reads bodies for one model."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        self._llm, self._settings = llm, settings
        self.tokenizer: Tokenizer = llm.get_tokenizer()

    # --- the two routes -----------------------------------------------------------------------------

    async def completion(self, asked: CompletionAsked, seed: int) -> Wish:
        n = self._check(asked)
        if asked.best_of is not None and asked.best_of != n:
            raise Problem(
                400, "best_of: answers are not ranked here; ask for n", "best_of", "unsupported_option"
            )
        logprobs, echo = asked.logprobs, bool(asked.echo)
        given = _one_limit(asked)
        most = 16 if given is None else given
        if most == 0 and not echo:
            raise Problem(
                400, "max_tokens must be at least 1, unless echo asks for the prompt alone", "max_tokens"
            )
        if echo and asked.logprob_token_ids is not None:
            raise Problem(
                400,
                "logprob_token_ids is not told of an echoed prompt: leave one of the two out",
                "logprob_token_ids",
            )
        echoed = logprobs if echo else None
        params = self._params(
            asked,
            seed,
            max_tokens=max(most, 1),
            logprobs=logprobs,
            prompt_logprobs=_larger(asked.prompt_logprobs, echoed),
        )
        prompts = await self._prompts(asked, n)
        common = self._common(asked)
        entries = self._entries(prompts, params)
        more: dict[str, Any] = {
            "echo": echo,
            "silent": most == 0,
            "echo_logprobs": echoed,
            "num_entries": entries,
        }
        return Wish(False, prompts, params, **common, **more)

    async def chat(self, asked: ChatAsked, seed: int) -> Wish:
        self._check(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true", "top_logprobs")
        if asked.prediction is not None and not self._llm.limits.takes_prediction:
            raise Problem(400, f"prediction: {START_FOR_PREDICTION}", "prediction", "unsupported_option")
        prediction = None if asked.prediction is None else _text(asked.prediction.content)
        self._check_text(len(prediction or ""), "prediction", self._llm.limits.max_model_len)
        params = self._params(
            asked,
            seed,
            max_tokens=_one_limit(asked),
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            prompt_logprobs=asked.prompt_logprobs,
            prediction=prediction,
        )
        self._check_text(sum(len(_text(message.content)) for message in asked.messages), "messages")
        prompt = PromptIn(await self.conversation(asked))
        self._check_length(prompt, "messages")
        entries = self._entries([prompt], params)
        return Wish(True, [prompt], params, **self._common(asked), num_entries=entries)

    async def conversation(self, asked: ChatAsked | TokenizeAsked) -> list[int]:
        """A conversation in tokens, by the model's own template."""
        names = asked.chat_template_kwargs or {}
        for name in names:
            if name in RESERVED:
                raise Problem(
                    400, f"chat_template_kwargs: {name!r} is not for a client", "chat_template_kwargs"
                )
        assert not isinstance(asked.messages, msgspec.UnsetType)
        open_end = bool(asked.continue_final_message)
        prompted = not open_end if asked.add_generation_prompt is None else asked.add_generation_prompt
        make = partial(
            self._llm.chat_token_ids,
            [_message(message) for message in asked.messages],
            chat_template_kwargs=names,
            add_generation_prompt=prompted,
            continue_final_message=open_end,
        )
        size = sum(len(_text(message.content)) for message in asked.messages)
        return await asyncio.to_thread(make) if size > LONG_TEXT else make()

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        make = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(make) if len(text) > LONG_TEXT else make()

    # --- parts --------------------------------------------------------------------------------------

    def _check(self, asked: Asked) -> int:
        n = asked.n or 1
        if n > self._settings.max_n:
            raise Problem(400, f"n: this server gives at most {self._settings.max_n} answers", "n")
        if not asked.stream:
            for name in ("stream_options", "stream_granularity"):
                if getattr(asked, name) is not None:
                    raise Problem(400, f"{name} needs stream: true", name)
        return n

    def _common(self, asked: Asked) -> dict[str, Any]:
        options = asked.stream_options
        return {
            "stream": bool(asked.stream),
            "usage": bool(options and options.include_usage),
            "usage_each": bool(options and options.continuous_usage_stats),
            "whole_steps": asked.stream_granularity == "step",
            "prompt_logprobs": asked.prompt_logprobs,
            "token_ids": bool(asked.return_token_ids),
            "as_ids": bool(asked.return_tokens_as_token_ids),
            "provenance": bool(asked.provenance),
            "structure": _structure(asked)[1],
        }

    def _params(self, asked: Asked, seed: int, **more: Any) -> SamplingParams:
        given = {name: getattr(asked, name) for name in _SAME if getattr(asked, name) is not None}
        wish = asked.speculative
        if isinstance(wish, Speculative):
            given["speculative"] = msgspec.to_builtins(wish)
        elif wish is not None:
            given["speculative"] = wish
        if asked.logit_bias is not None:
            given["logit_bias"] = {int(key): value for key, value in asked.logit_bias.items()}
        structure, name = _structure(asked)
        try:
            return SamplingParams(seed=seed, structured_outputs=structure, **given, **more)
        except RequestError as error:
            raise Problem(400, str(error), _as_sent(error.param, name)) from error

    async def _prompts(self, asked: CompletionAsked, n: int) -> list[PromptIn]:
        special = asked.add_special_tokens is not False
        several = _several(asked.prompt)
        if len(several) * n > self._settings.max_choices:
            raise Problem(
                400,
                f"prompt: {len(several)} prompts with n={n} are {len(several) * n} answers, and "
                f"{self._settings.max_choices} is the most in one request",
                "prompt",
            )
        made = []
        for prompt in several:
            if isinstance(prompt, str):
                self._check_text(len(prompt), "prompt")
                made.append(PromptIn(await self.encode(prompt, special), prompt))
            else:
                made.append(PromptIn(prompt))
            self._check_length(made[-1])
        return made

    def _entries(self, prompts: list[PromptIn], params: SamplingParams) -> int:
        """Logprobs that the answers may have; Problem if those are more than one request may ask for."""
        length, most = self._llm.limits.max_model_len, self._settings.max_logprob_entries
        count = 0
        for prompt in prompts:
            if params.prompt_logprobs is not None:
                count += len(prompt.ids) * (1 + params.prompt_logprobs)
            if params.wants_logprobs:
                width = 1 + max(params.logprobs or 0, len(params.logprob_token_ids or ()))
                count += width * params.n * min(params.max_tokens or length, length - len(prompt.ids))
        if count > most:
            raise Problem(
                400,
                f"this may be {count} logprobs, and {most} is the most in one request: ask for fewer, "
                "lower the number of tokens, or send several requests",
                "prompt_logprobs" if params.prompt_logprobs else "logprobs",
            )
        return count

    def _check_text(self, size: int, name: str, most: int | None = None) -> None:
        """What cannot fit whatever its tokens are is not tokenised first. `most` tokens: as of a prompt."""
        most = most or self._settings.max_prompt_tokens or self._llm.limits.max_model_len
        if size > most * self.tokenizer.longest:
            raise Problem(400, f"{name}: {size} characters are more than {most} tokens", name, TOO_LONG)

    def _check_length(self, prompt: PromptIn, name: str = "prompt") -> None:
        limits, count = self._llm.limits, len(prompt.ids)
        most = min(self._settings.max_prompt_tokens or limits.max_model_len, limits.max_model_len - 1)
        if count > most:
            raise Problem(400, f"the prompt has {count} tokens, and this server takes {most}", name, TOO_LONG)
        vocab = limits.vocab_size
        if prompt.text is None and prompt.ids and max(prompt.ids) >= vocab:
            raise Problem(
                400,
                f"prompt holds token id {max(prompt.ids)}, outside the vocabulary 0..{vocab - 1}",
                "prompt",
            )


_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
    *("logprob_token_ids", "priority", "cache_salt", "logprobs_mode", "include_draft_logprobs"),
)


def _several(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise Problem(400, "prompt: texts, token ids and lists of token ids do not mix", "prompt")
    return [prompt] if kinds == {int} else list(prompt)


def _one_limit(asked: CompletionAsked | ChatAsked) -> int | None:
    """Under its new name or its old one; some clients send both."""
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise Problem(400, f"max_tokens is {old} and max_completion_tokens {new}: give one", "max_tokens")
    return new if old is None else old


def _larger(left: int | None, right: int | None) -> int | None:
    return max(left, right) if left is not None and right is not None else left if right is None else right


def _structure(asked: Asked) -> tuple[dict[str, Any] | None, str]:
    """What the answer must follow, and the option that said so."""
    form, structure = asked.response_format, asked.structured_outputs
    if structure is not None:
        if form is not None and not isinstance(form, FreeText):
            raise Problem(400, "response_format and structured_outputs: give one of them", "response_format")
        return msgspec.to_builtins(structure), "structured_outputs"
    if isinstance(form, AnyJson):
        return {"json_object": True}, "response_format"
    if isinstance(form, SchemaJson):
        return {"json": form.json_schema.schema}, "response_format"
    return None, "structured_outputs"


def _as_sent(param: str | None, structure: str) -> str | None:
    return structure if param == "structured_outputs" else param


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _message(message: Message) -> dict[str, Any]:
    """As templates know it: instructions of a developer are those of the system."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, str):
        return {"role": role, "content": content}
    return {"role": role, "content": [{"type": "text", "text": part.text} for part in content]}
