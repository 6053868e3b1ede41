"""Request bodies: one definition for decoding, validation and /openapi.json.

Unknown options are rejected by name; null means "not given", as in the OpenAI API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from draftproof.sampling_params import MAX_SEED, MAX_VALUE, MIN_SEED

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
MetadataKey = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
FunctionName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
TemplateNames = Annotated[dict[TemplateName, Any], Meta(max_length=64)]
MAX_MESSAGES = 4096  # of a conversation; the parts of their contents count as well
MAX_LIST_ITEMS = 1 << 18  # of lists of token ids, biases, choices; the largest vocabularies fit
Unsupported = dict[str, tuple[str, tuple[Any, ...]]]
Logprobs = Count  # the engine's max_logprobs limits it further, see RequestParser

LogitBias = Annotated[
    dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LIST_ITEMS)
]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LIST_ITEMS)]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of bodies and their parts; unknown fields are errors."""


class StreamOptions(Strict, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted; events have no padding in either case


class CacheMark(Strict, kw_only=True):
    """Mark of a prefix to be cached; accepted, since every prefix is cached."""

    type: Literal["ephemeral"] | None = None
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[str, Meta(max_length=16)] | None = None


class Speculative(Strict, kw_only=True):
    """Speculation of this request: off, with fewer drafts, or with another strategy."""

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    verify_strategy: str | None = None
    adaptive: bool | None = None  # false: always num_speculative_tokens drafts


class Structure(Strict, kw_only=True):
    """Grammar of the output: exactly one of json, regex, choice, grammar, json_object, structural_tag."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    reasoning_end: str | int | None = None
    disable_any_whitespace: bool = False
    max_whitespace: OneOrMore | None = None


class JsonSchema(Strict, kw_only=True):
    """JSON schema of the output."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    description: str | None = None
    strict: bool | None = None  # the output follows the schema in either case


class FreeText(Strict, kw_only=True, tag_field="type", tag="text"):
    """Output without a grammar."""


class AnyJson(Strict, kw_only=True, tag_field="type", tag="json_object"):
    """Output that is a JSON object."""


class SchemaJson(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """Output that follows a JSON schema."""

    json_schema: JsonSchema


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ResponseFormat = FreeText | AnyJson | SchemaJson


class EngineRequest(Strict, kw_only=True):
    """Options of every route that runs the model."""

    model: str | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: Name | None = None


class SamplingRequest(EngineRequest, kw_only=True):
    """Options of every route that generates."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_VALUE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1 / MAX_VALUE, le=MAX_VALUE)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=MIN_SEED, le=MAX_SEED)] | None = None  # -1: a fresh one
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Words], Meta(max_length=256)] | None = None
    allowed_token_ids: TokenIds | None = None
    structured_outputs: Structure | None = None
    thinking_token_budget: Count | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    # extensions of this server
    speculative: bool | Speculative | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None


class GenerationRequest(SamplingRequest, kw_only=True):
    """Options of /v1/completions and /v1/chat/completions."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    prompt_logprobs: Logprobs | None = None
    logprob_token_ids: TokenIds | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    # fields of the OpenAI API without influence on the output
    safety_identifier: Annotated[str, Meta(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=256)] | None = None  # part of the cache salt
    metadata: Metadata | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheMark | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    return_tokens_as_token_ids: bool | None = None
    # extensions of this server
    include_draft_logprobs: bool | None = None
    provenance: bool | None = None
    stream_granularity: Literal["token", "step"] | None = None

    @property
    def num_items(self) -> int:
        """Number of items in the lists that may be long."""
        lists = self.logit_bias, self.allowed_token_ids, self.logprob_token_ids
        return sum(len(each or ()) for each in lists)


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Count | None = None  # default 16; 0 with echo: return the prompt only
    max_completion_tokens: OneOrMore | None = None  # the same under its new name
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: OneOrMore | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None  # text after the output, for models with tokens for it


class TextPart(Strict, kw_only=True, tag_field="type", tag="text"):
    """Text part of a message."""

    text: str
    cache_control: CacheMark | None = None
    prompt_cache_breakpoint: CacheMark | None = None


class CalledFunction(Strict, kw_only=True):
    """Function and arguments of a call."""

    name: FunctionName
    arguments: str = ""


class MessageToolCall(Strict, kw_only=True):
    """Tool call in a message of the assistant."""

    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients send the field of a stream back


class Function(Strict, kw_only=True):
    """Function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, kw_only=True):
    """Tool that the model may use."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Strict, kw_only=True):
    """Name of the function that must be called."""

    name: FunctionName


class ToolChoice(Strict, kw_only=True):
    """Choice of one function."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=128)]


class Message(Strict, kw_only=True):
    """One message. A client may send a generated message back with its nulls and empty lists."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None  # for templates that use it
    refusal: None = None
    audio: None = None
    function_call: CalledFunction | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None  # for templates that use it
    reasoning: str | None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    provider_specific_fields: Annotated[dict[str, Any], Meta(max_length=64)] | None = None  # of litellm

    @property
    def num_parts(self) -> int:
        """Number of parts and tool calls, at least 1."""
        parts = len(self.content) if isinstance(self.content, list) else 1
        return parts + len(self.tool_calls or ())


class Prediction(Strict, kw_only=True, tag_field="type", tag="content"):
    """Expected output, used as drafts."""

    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: OneOrMore | None = None
    max_completion_tokens: OneOrMore | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: TemplateNames | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None  # false: reasoning is left out of the response


class TokenizeRequest(Strict, kw_only=True):
    """Body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | UnsetType = UNSET
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateNames | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


_NO_TOOLS = "tools are for /v1/chat/completions"
_NO_BEAM_SEARCH = "beam search is a method of LLM, not of the server"
_ONLY_TEXT, _USE_STRUCTURE = "only text is supported", "use structured_outputs"
# options of other servers: why they are not supported, and values that change nothing and are accepted
UNSUPPORTED: Unsupported = {
    "suffix": ("it is for /v1/completions", (None, "")),
    "tools": (_NO_TOOLS, (None, [])),
    "tool_choice": (_NO_TOOLS, (None, "none", "auto")),
    "functions": ("use tools", (None, [])),
    "function_call": ("use tool_choice", (None, "none", "auto")),
    "parallel_tool_calls": (_NO_TOOLS, (None, True, False)),
    "audio": (_ONLY_TEXT, (None,)),
    "modalities": (_ONLY_TEXT, (None, ["text"])),
    "reasoning_effort": ("it is for chat completions", (None,)),
    "verbosity": ("verbosity is not supported", (None,)),
    "web_search_options": ("web search is not supported", (None,)),
    "store": ("nothing is stored", (None, False)),
    "chat_template": ("not accepted from clients; send a rendered prompt to /v1/completions", (None,)),
    "guided_json": (_USE_STRUCTURE, ()),
    "guided_regex": (_USE_STRUCTURE, ()),
    "guided_choice": (_USE_STRUCTURE, ()),
    "guided_grammar": (_USE_STRUCTURE, ()),
    "truncate_prompt_tokens": ("prompts are not truncated; send a shorter one", (None,)),
    "use_beam_search": (_NO_BEAM_SEARCH, (None, False)),
    "length_penalty": (_NO_BEAM_SEARCH, (None, 1.0)),
}
