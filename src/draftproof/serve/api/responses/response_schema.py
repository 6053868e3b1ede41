"""Bodies of /v1/responses: one definition for encoding and for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from draftproof.serve.api.generation.response_schema import ChatLogprob, RequestMetrics, ResponseStruct

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(ResponseStruct, kw_only=True):
    """Text of a generated message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[ChatLogprob] = []


class ReasoningTextPart(ResponseStruct, kw_only=True):
    """Text of the reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(ResponseStruct, kw_only=True):
    """Generated message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputTextPart]


class OutputCall(ResponseStruct, kw_only=True):
    """Call of a function; the arguments are JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputReasoning(ResponseStruct, kw_only=True):
    """Reasoning before the answer."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[None] = []
    content: list[ReasoningTextPart]
    encrypted_content: None = None


class InputTokensDetails(ResponseStruct, kw_only=True):
    """Details of input_tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseStruct, kw_only=True):
    """Details of output_tokens."""

    reasoning_tokens: int


class ResponseUsage(ResponseStruct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ResponseStruct, kw_only=True):
    """Error of a response that failed after its first event."""

    code: str
    message: str
    type: str
    param: str | None = None


class IncompleteDetails(ResponseStruct, kw_only=True):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseStruct, kw_only=True):
    """Body of /v1/responses, and the response of its events."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    # separate tags in one list: `type` of an item
    output: list[Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    system_fingerprint: str
    # extensions of this server, at the end
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class InputTextPart(ResponseStruct, kw_only=True):
    """Text of an input message."""

    type: Literal["input_text"] = "input_text"
    text: str


class InputMessage(ResponseStruct, kw_only=True):
    """Message of the input."""

    id: str
    type: Literal["message"] = "message"
    role: str
    status: ItemStatus = "completed"
    content: list[InputTextPart]


class CallResult(ResponseStruct, kw_only=True):
    """Output of a called function."""

    id: str
    type: Literal["function_call_output"] = "function_call_output"
    status: ItemStatus = "completed"
    call_id: str
    output: str


ListedItem = InputMessage | OutputMessage | OutputCall | CallResult | OutputReasoning


class ItemList(ResponseStruct, kw_only=True):
    """Body of GET /v1/responses/ID/input_items."""

    object: Literal["list"] = "list"
    data: list[Any]  # ListedItem; separate tags in one list
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(ResponseStruct, kw_only=True):
    """Body of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(ResponseStruct, kw_only=True):
    """Body of DELETE /v1/responses/ID."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
