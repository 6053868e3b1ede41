"""What clients may send: one definition for decoding, for checking and for /openapi.json.

An option that is not here is refused by name; null means "not given", as OpenAI has it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from draftproof.sampling_params import LARGEST, MAX_SEED

MOST_LOGPROBS = 20
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
OneOrMore = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$", max_length=128)]
Words = Annotated[str, Meta(min_length=1, max_length=100)]
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
TemplateName = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateNames = Annotated[dict[TemplateName, Any], Meta(max_length=64)]
Logprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A body, or a part of one."""


class StreamOptions(Strict, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Strict, kw_only=True):
    """How this one request is speculated: off, with fewer drafts, or judged by another strategy."""

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    verify_strategy: str | None = None
    adaptive: bool | None = None  # false: always as many drafts as that


class Structure(Strict, kw_only=True):
    """Exactly one of json, regex, choice, grammar, json_object."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    reasoning_end: str | int | None = None
    disable_any_whitespace: bool = False
    max_whitespace: OneOrMore | None = None


class JsonSchema(Strict, kw_only=True):
    schema: dict[str, Any]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    description: str | None = None
    strict: bool | None = None  # an answer follows the schema in either case


class FreeText(Strict, kw_only=True, tag_field="type", tag="text"):
    pass


class AnyJson(Strict, kw_only=True, tag_field="type", tag="json_object"):
    pass


class SchemaJson(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = FreeText | AnyJson | SchemaJson


class Asked(Strict, kw_only=True):
    """What both routes take."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=LARGEST)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1 / LARGEST, le=LARGEST)] | None = None
    logit_bias: dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    min_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Words], Meta(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    prompt_logprobs: Logprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: Name | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # this server's own
    speculative: bool | Speculative | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    include_draft_logprobs: bool | None = None
    provenance: bool | None = None
    stream_granularity: Literal["token", "step"] | None = None


class CompletionAsked(Asked, kw_only=True):
    """POST /v1/completions"""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Count | None = None  # 16; 0 with echo: the prompt alone
    max_completion_tokens: OneOrMore | None = None  # the same
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: OneOrMore | None = None
    add_special_tokens: bool | None = None


class TextPart(Strict, kw_only=True, tag_field="type", tag="text"):
    text: str


class Message(Strict, kw_only=True):
    """One turn. What a client keeps of an answer may come back with its nulls and empty lists."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[None], Meta(max_length=0)] | None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None


class Prediction(Strict, kw_only=True, tag_field="type", tag="content"):
    """What the client expects to be said."""

    content: str | Annotated[list[TextPart], Meta(min_length=1)]


class ChatAsked(Asked, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: OneOrMore | None = None
    max_completion_tokens: OneOrMore | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: TemplateNames | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[None], Meta(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None


class TokenizeAsked(Strict, kw_only=True):
    """POST /tokenize: of a prompt, or of a conversation."""

    model: str | None = None
    prompt: str | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(min_length=1)] | UnsetType = UNSET
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateNames | None = None
    return_token_strs: bool | None = None


class DetokenizeAsked(Strict, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


# known elsewhere and not honoured here: the reason is better than "unknown"
NOT_HONOURED = {
    "suffix": "text after the answer is not supported",
    "tools": "tool calls are not supported",
    "tool_choice": "tool calls are not supported",
    "functions": "tool calls are not supported",
    "function_call": "tool calls are not supported",
    "parallel_tool_calls": "tool calls are not supported",
    "audio": "only text is supported",
    "modalities": "only text is supported",
    "reasoning_effort": "this server does not steer reasoning; see structured_outputs.reasoning_end",
    "verbosity": "this server does not steer verbosity",
    "web_search_options": "this server searches nothing",
    "store": "this server stores nothing",
    "metadata": "this server stores nothing; `user` is written to the log",
    "service_tier": "there is one tier here; `priority` orders requests",
    "chat_template": "templates of clients are not run; send a rendered prompt to /v1/completions",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "truncate_prompt_tokens": "prompts are not cut; send a shorter one",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
}
# and what of it asks for nothing that is not done anyway
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "chat_template": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
}
