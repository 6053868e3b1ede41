"""Bodies of /v1/messages: one definition for encoding and for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from draftproof.serve.api.generation.response_schema import RequestMetrics, ResponseStruct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTextBlock(ResponseStruct, kw_only=True):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class OutputThinkingBlock(ResponseStruct, kw_only=True):
    """Reasoning before the answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class OutputToolUseBlock(ResponseStruct, kw_only=True):
    """Call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Any  # the arguments as they were generated


class MessageUsage(ResponseStruct, kw_only=True):
    """Token counts; input_tokens has no tokens from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class MessageResponse(ResponseStruct, kw_only=True):
    """Body of /v1/messages, and the message of its first event."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Any]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    # extensions of this server, at the end
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TokenCount(ResponseStruct, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    input_tokens: int
