"""Parser of request bodies: from the HTTP schema to prompts in tokens, SamplingParams and output options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from draftproof.errors import RequestError
from draftproof.sampling_params import SamplingParams
from draftproof.serve.api.generation import request_schema as schema
from draftproof.serve.api.generation.output_parser import OutputOptions
from draftproof.serve.api.generation.prompt_parser import ParsedPrompt, PromptParser, content_text
from draftproof.serve.api.generation.tool_options import ToolOptions, read_tools
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import in_thread_if
from draftproof.serve.http.request_log import NO_KEY
from draftproof.serve.settings import Settings

LONG_LIST_ITEMS = 1024  # longer lists are checked in a thread, not on the event loop
PREDICTION_HINT = """start the server with a --speculative-config, such as '{"method": "ngram"}', to use it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One HTTP request: what to generate and what to return."""

    is_chat: bool
    prompts: list[ParsedPrompt]
    params: SamplingParams
    stream: bool
    final_usage: bool  # usage at the end of the stream
    chunk_usage: bool  # usage with every chunk
    chunk_per_step: bool  # one chunk per step instead of one per token
    echo: bool = False
    prompt_only: bool = False  # max_tokens 0: the one token that the engine generates is not returned
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    as_ids: bool = False
    provenance: bool = False
    structure_option: str = "structured_outputs"  # the option that gave the grammar
    parsing: OutputOptions | None = None  # None: the text of an output is its content
    num_logprob_entries: int = 0  # upper bound of the logprobs in the response


class RequestParser:
    """Parser of request bodies for one model."""

    def __init__(self, llm: Any, settings: Settings, prompts: PromptParser) -> None:
        self._llm, self._settings = llm, settings
        self._prompts = prompts

    async def completion(self, body: schema.CompletionRequest, seed: int, key: str = NO_KEY) -> ParsedRequest:
        """Parse a body of /v1/completions. `key`: short name of the API key."""
        n = self._check_common(body, key)
        if body.best_of is not None and body.best_of != n:
            raise ApiError(400, "best_of is not supported: use n", "best_of", "unsupported_option")
        echo = bool(body.echo)
        if body.suffix and echo:
            raise ApiError(400, "echo cannot be combined with suffix: the prompt has both texts", "echo")
        max_tokens = _token_limit(body, self._llm.default_options.get("max_tokens", 16))
        assert max_tokens is not None
        if max_tokens == 0 and not echo:
            raise ApiError(400, "max_tokens must be at least 1, unless echo is true", "max_tokens")
        if echo and body.logprob_token_ids is not None:
            raise ApiError(400, "logprob_token_ids cannot be combined with echo", "logprob_token_ids")
        echo_logprobs = body.logprobs if echo else None
        self._check_logprobs("logprobs", body.logprobs)
        widths = [width for width in (body.prompt_logprobs, echo_logprobs) if width is not None]
        make = partial(
            self._params,
            body,
            seed,
            key,
            max_tokens=max(max_tokens, 1),
            logprobs=body.logprobs,
            prompt_logprobs=max(widths, default=None),
            **self._suffix_params(body),
        )
        params = await in_thread_if(body.num_items > LONG_LIST_ITEMS, make)
        prompts = await self._prompts.completion(body, n)
        return ParsedRequest(
            is_chat=False,
            prompts=prompts,
            params=params,
            **self._output_options(body),
            echo=echo,
            prompt_only=max_tokens == 0,
            echo_logprobs=echo_logprobs,
            num_logprob_entries=self._count_logprobs(prompts, params),
        )

    async def chat(self, body: schema.ChatCompletionRequest, seed: int, key: str = NO_KEY) -> ParsedRequest:
        """Parse a body of /v1/chat/completions. `key`: short name of the API key."""
        self._check_common(body, key)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        self._check_logprobs("top_logprobs", body.top_logprobs)
        if body.prediction is not None and not self._llm.limits.speculative_tokens:
            raise ApiError(400, f"prediction: {PREDICTION_HINT}", "prediction", "unsupported_option")
        tools = read_tools(body, self._prompts.tool_format)
        prediction = None if body.prediction is None else content_text(body.prediction.content)
        self._prompts.check_characters(len(prediction or ""), "prediction", self._llm.limits.max_model_len)
        make = partial(
            self._params,
            body,
            seed,
            key,
            max_tokens=_token_limit(body, self._llm.default_options.get("max_tokens")),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            prediction=prediction,
            **self._output_params(tools),
        )
        params = await in_thread_if(body.num_items > LONG_LIST_ITEMS, make)
        prompt = ParsedPrompt(await self._prompts.conversation(body))
        self._prompts.check_length(prompt, "messages")
        reasoning = self._prompts.reasoning
        parsing = None
        if tools is not None or reasoning is not None:
            is_open = reasoning is not None and reasoning.is_open(prompt.ids)
            parsing = OutputOptions(tools, reasoning, is_open, body.include_reasoning is not False)
        return ParsedRequest(
            is_chat=True,
            prompts=[prompt],
            params=params,
            **self._output_options(body, tools),
            parsing=parsing,
            num_logprob_entries=self._count_logprobs([prompt], params),
        )

    def _check_common(self, body: schema.GenerationRequest, key: str) -> int:
        """Check the options that both routes share; return n."""
        n = body.n or 1
        if n > self._settings.max_n:
            raise ApiError(400, f"n: the maximum of this server is {self._settings.max_n}", "n")
        if not body.stream:
            for name in ("stream_options", "stream_granularity"):
                if getattr(body, name) is not None:
                    raise ApiError(400, f"{name} needs stream: true", name)
        check_priority(body, self._settings, key)
        self._check_logprobs("prompt_logprobs", body.prompt_logprobs)
        self._check_logprobs("logprob_token_ids", len(body.logprob_token_ids or ()))
        return n

    def _check_logprobs(self, name: str, count: int | None) -> None:
        """Check a number of logprobs per token against the engine's max_logprobs."""
        limit = self._llm.limits.max_logprobs
        if count is not None and 0 <= limit < count:
            raise ApiError(400, f"{name}: {count} exceeds max_logprobs of this server, {limit}", name)

    def _output_options(
        self, body: schema.GenerationRequest, tools: ToolOptions | None = None
    ) -> dict[str, Any]:
        """Return the fields of ParsedRequest that are the same for both routes."""
        options = body.stream_options
        return {
            "stream": bool(body.stream),
            "final_usage": bool(options and options.include_usage),
            "chunk_usage": bool(options and options.continuous_usage_stats),
            "chunk_per_step": body.stream_granularity == "step",
            "prompt_logprobs": body.prompt_logprobs,
            "token_ids": bool(body.return_token_ids),
            "as_ids": bool(body.return_tokens_as_token_ids),
            "provenance": bool(body.provenance),
            "structure_option": "tools" if tools and tools.structural_tag else _structure(body)[1],
        }

    def _output_params(self, tools: ToolOptions | None) -> dict[str, Any]:
        """Return the sampling parameters that the parsing of outputs needs."""
        found: dict[str, Any] = {}
        if tools is not None and tools.structural_tag is not None:
            found["structured_outputs"] = {"structural_tag": tools.structural_tag}
        reasoning = self._prompts.reasoning
        if (tools is not None and tools.keeps_special_tokens) or (reasoning and reasoning.has_special_tokens):
            found["skip_special_tokens"] = False
        return found

    def _params(self, body: schema.GenerationRequest, seed: int, key: str, **more: Any) -> SamplingParams:
        given = dict(self._llm.default_options)
        given |= {name: getattr(body, name) for name in _SAME_NAMES if getattr(body, name) is not None}
        speculative = body.speculative
        if isinstance(speculative, schema.Speculative):
            given["speculative"] = msgspec.to_builtins(speculative)
        elif speculative is not None:
            given["speculative"] = speculative
        if body.logit_bias is not None:
            given["logit_bias"] = {int(key): value for key, value in body.logit_bias.items()}
        key_salt = None if self._settings.share_prefix_cache else key
        if (salt := cache_salt(body.cache_salt, key_salt, body.prompt_cache_key)) is not None:
            given["cache_salt"] = salt
        structure, option = _structure(body)
        if "structured_outputs" in more:
            structure, option = more.pop("structured_outputs"), "tools"
        try:
            return SamplingParams(seed=seed, structured_outputs=structure, **{**given, **more})
        except RequestError as error:
            param = option if error.param == "structured_outputs" else error.param
            raise ApiError(400, str(error), param) from error

    def _suffix_params(self, body: schema.CompletionRequest) -> dict[str, Any]:
        """Return the sampling options of fill in the middle: further tokens end the output."""
        fim = self._prompts.tokenizer.fim if body.suffix and not body.ignore_eos else None
        if fim is None:
            return {}
        return {"stop_token_ids": [*(body.stop_token_ids or ()), *fim.end_token_ids]}

    def _count_logprobs(self, prompts: list[ParsedPrompt], params: SamplingParams) -> int:
        """Return an upper bound of the logprobs in the response; ApiError if it exceeds the limit."""
        length, limit = self._llm.limits.max_model_len, self._settings.max_logprob_entries
        count = 0
        for prompt in prompts:
            if params.prompt_logprobs is not None:
                count += len(prompt.ids) * (1 + params.prompt_logprobs)
            if params.needs_logprobs:
                width = 1 + max(params.logprobs or 0, len(params.logprob_token_ids or ()))
                count += width * params.n * min(params.max_tokens or length, length - len(prompt.ids))
        if count > limit:
            hint = "request fewer logprobs or tokens, or send several requests"
            param = "prompt_logprobs" if params.prompt_logprobs else "logprobs"
            raise ApiError(400, f"up to {count} logprobs, and the maximum is {limit}: {hint}", param)
        return count


# options that have the same name and meaning in SamplingParams
_SAME_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
    *("logprob_token_ids", "priority", "logprobs_mode", "include_draft_logprobs", "thinking_token_budget"),
)


def _token_limit(
    body: schema.CompletionRequest | schema.ChatCompletionRequest, default: int | None
) -> int | None:
    """Return max_tokens under its old or new name; some clients send both."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(400, f"max_tokens is {old} and max_completion_tokens {new}: give one", "max_tokens")
    given = new if old is None else old
    return default if given is None else given


def _structure(body: schema.GenerationRequest) -> tuple[dict[str, Any] | None, str]:
    """Return the structured_outputs of SamplingParams, and the option that gave them."""
    form, structure = body.response_format, body.structured_outputs
    if structure is not None:
        if form is not None and not isinstance(form, schema.FreeText):
            raise ApiError(400, "response_format and structured_outputs: give one of them", "response_format")
        return msgspec.to_builtins(structure), "structured_outputs"
    if isinstance(form, schema.AnyJson):
        return {"json_object": True}, "response_format"
    if isinstance(form, schema.SchemaJson):
        return {"json": form.json_schema.schema}, "response_format"
    return None, "structured_outputs"


def cache_salt(salt: str | None, key: str | None, cache_key: str | None = None) -> str | None:
    """Return the salt of the request's cached prefixes and of the pool of earlier outputs.

    It depends on the API key, because cached_tokens and times show whether a prefix is cached.
    """
    if key in (None, NO_KEY) and not cache_key:
        return salt
    return json.dumps([key, salt, cache_key])


def check_priority(body: schema.EngineRequest, settings: Settings, key: str) -> None:
    """Reject a priority outside the range of the API key, or of the server."""
    limit = settings.api_keys.max_priorities.get(key, settings.max_priority)
    if abs(body.priority or 0) > limit:
        text = f"the range of this server or key is {-limit}..{limit}; its operator can raise --max-priority"
        raise ApiError(400, f"priority: {text}", "priority")
