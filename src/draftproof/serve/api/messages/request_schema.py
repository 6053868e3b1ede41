"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from draftproof.serve.api.generation.request_schema import (
    MAX_MESSAGES,
    CacheMark,
    FunctionName,
    OneOrMore,
    SamplingRequest,
    StopText,
    Strict,
    TemplateNames,
    Unsupported,
)

BlockId = Annotated[str, Meta(max_length=256)]


class TextBlock(Strict, kw_only=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: str
    cache_control: CacheMark | None = None
    citations: Annotated[list[None], Meta(max_length=0)] | None = None


class ToolUseBlock(Strict, kw_only=True, tag_field="type", tag="tool_use"):
    """Call of a tool that the assistant made."""

    id: BlockId
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheMark | None = None
    caller: Any = None  # the anthropic client sends it back


class ToolResultBlock(Strict, kw_only=True, tag_field="type", tag="tool_result"):
    """Result of a call."""

    tool_use_id: BlockId
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None


class ThinkingBlock(Strict, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn."""

    thinking: str
    signature: str | None = None
    cache_control: CacheMark | None = None


class RedactedThinkingBlock(Strict, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server; it is not used."""

    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(Strict, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]


class CustomTool(Strict, kw_only=True):
    """Tool that the client runs."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheMark | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they are generated
    defer_loading: Literal[False] | None = None


class MessageToolChoice(Strict, kw_only=True):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict, kw_only=True):
    """Options of the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: OneOrMore | None = None
    display: Literal["summarized", "omitted"] | None = None  # summarized: the reasoning itself


class JsonFormat(Strict, kw_only=True):
    """JSON schema of the output."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, kw_only=True):
    """Format of the output and effort of the reasoning."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class MessageMetadata(Strict, kw_only=True):
    """Metadata; written to the log."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


_NO_EDITS: tuple[Any, ...] = (
    None,
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
UNSUPPORTED: Unsupported = {
    "container": ("containers are not supported; run tools in the client", (None,)),
    "mcp_servers": ("MCP servers are not supported; run tools in the client", (None, [])),
    "context_management": ("the conversation is not edited; send less of it", _NO_EDITS),
    "thread": ("threads are not supported; send the whole conversation", (None,)),
    "inference_geo": ("the region cannot be chosen", (None,)),
    "diagnostics": ("diagnostics are not supported; see usage.cache_read_input_tokens", (None,)),
    "output_format": ("use output_config.format", (None,)),
    "stop": ("use stop_sequences", (None,)),
    "n": ("a message has one output: send several requests", (None, 1)),
    "modalities": ("only text and tools are supported", (None, ["text"])),
}
Messages = Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
SystemText = str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)]
CustomTools = Annotated[list[CustomTool], Meta(max_length=128)]


class CountTokensRequest(SamplingRequest, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED

    messages: Messages
    system: SystemText | None = None
    tools: CustomTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheMark | None = None
    chat_template_kwargs: TemplateNames | None = None
    # fields without influence on the output
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: Annotated[str, Meta(max_length=256)] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: OneOrMore
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
