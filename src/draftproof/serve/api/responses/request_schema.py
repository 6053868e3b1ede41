"""Body of POST /v1/responses: one definition for decoding, validation and /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from draftproof.serve.api.generation.request_schema import (
    MAX_MESSAGES,
    CacheMark,
    FunctionName,
    Logprobs,
    Metadata,
    OneOrMore,
    SamplingRequest,
    StopText,
    Strict,
    TemplateNames,
    Unsupported,
)

Id = Annotated[str, Meta(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict, kw_only=True, tag_field="type", tag="input_text"):
    """Text part of a message or of a function's output."""

    text: str
    prompt_cache_breakpoint: CacheMark | None = None


class OutputText(Strict, kw_only=True, tag_field="type", tag="output_text"):
    """Text part of a generated message that is sent back."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # the openai client adds it


class Refusal(Strict, kw_only=True, tag_field="type", tag="refusal"):
    """Refusal in a message of another server."""

    refusal: str


class ReasoningText(Strict, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class SummaryText(Strict, kw_only=True, tag_field="type", tag="summary_text"):
    """Summary of a reasoning item."""

    text: str


Part = InputText | OutputText | Refusal | ReasoningText
Parts = Annotated[list[Part], Meta(max_length=MAX_MESSAGES)]


class InputItem(Strict, kw_only=True):
    """Message, call, output of a call or reasoning; the type of a message may be left out."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Id | None = None
    status: Status | None = None
    # messages
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    # calls and their outputs
    call_id: Id | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    parsed_arguments: Any = None  # the openai client adds it
    # reasoning
    summary: Annotated[list[SummaryText], Meta(max_length=MAX_MESSAGES)] | None = None
    encrypted_content: str | None = None  # not used: reasoning items have their text


class ResponseTool(Strict, kw_only=True):
    """Function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class NamedTool(Strict, kw_only=True):
    """Function of a tool choice."""

    type: Literal["function"]
    name: FunctionName


class ResponseToolChoice(Strict, kw_only=True):
    """Choice of one function, or of the functions that may be called."""

    type: Literal["function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(max_length=128)] | None = None


class TextFormat(Strict, kw_only=True):
    """Format of the output text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # the output follows the schema in either case


class TextOptions(Strict, kw_only=True):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict, kw_only=True):
    """Options of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # the reasoning itself is returned
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Strict, kw_only=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None  # accepted; events have no padding in either case


_ONLY_TEXT = "only text is supported"
UNSUPPORTED: Unsupported = {
    "background": ("not supported: use stream, or keep the connection open", (None, False)),
    "conversation": ("not supported: use previous_response_id, or send the items as input", (None,)),
    "prompt": ("prompt templates are not supported: send instructions and input", (None,)),
    "truncation": ("input is not truncated; send less of it", (None, "disabled")),
    "context_management": ("input is not compacted; send less of it", (None, [])),
    "moderation": ("moderation is not supported", (None,)),
    "image": (_ONLY_TEXT, (None,)),
    "audio": (_ONLY_TEXT, (None,)),
    "modalities": (_ONLY_TEXT, (None, ["text"])),
    "messages": ("messages are for /v1/chat/completions; send input", ()),
    "response_format": ("use text.format", (None,)),
    "max_tokens": ("use max_output_tokens", (None,)),
    "n": ("a response has one output: send several requests", (None, 1)),
    "logprobs": ('use include: ["message.output_text.logprobs"]', (None, False)),
}


class ResponseRequest(SamplingRequest, kw_only=True):
    """Body of POST /v1/responses."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool | None = None  # default: true if this server stores responses
    max_output_tokens: OneOrMore | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(max_length=32)] | None = None
    top_logprobs: Logprobs | None = None
    stream_options: ResponseStreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    chat_template_kwargs: TemplateNames | None = None
    # fields without influence on the output
    user: Annotated[str, Meta(max_length=256)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=256)] | None = None  # part of the cache salt
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    prompt_cache_options: CacheMark | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[str, Meta(max_length=32)] | None = None
    max_tool_calls: OneOrMore | None = None  # limits tools that run on the server; there are none
