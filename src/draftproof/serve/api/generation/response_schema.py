"""Response bodies: one definition for encoding and for /openapi.json.

Fields with UNSET are left out unless they were requested.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length", "tool_calls"]


class ResponseStruct(msgspec.Struct, kw_only=True, gc=False):
    """Base of all response structs; without reference cycles, so not garbage collected."""


# --- parts ---


class PromptDetails(ResponseStruct, kw_only=True):
    """Details of prompt_tokens."""

    cached_tokens: int


class CompletionDetails(ResponseStruct, kw_only=True):
    """Details of completion_tokens."""

    accepted_prediction_tokens: int | UnsetType = UNSET  # with a prediction
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET  # of a model whose reasoning markers are known


class Usage(ResponseStruct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET  # at the end
    completion_tokens_details: CompletionDetails | UnsetType = UNSET  # if it has a field


class SpeculativeDecoding(ResponseStruct, kw_only=True):
    """Speculation statistics of a request, under vLLM's names. The mean includes the bonus token."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]  # steps with 0, 1, … accepted drafts
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class WeightsVersion(ResponseStruct, kw_only=True):
    """Version of the weights that tokens were made with, until the next one begins."""

    version: int
    first_token: int


class RequestMetrics(ResponseStruct, kw_only=True):
    """Statistics of a request."""

    speculative_decoding: SpeculativeDecoding | None
    strategy: str  # verification strategy with its label
    lossless: bool
    queue_seconds: float | None = None  # in the engine, of the first choice
    first_token_seconds: float | None = None  # from its arrival in the engine
    weights_version: int = 0  # of the weights that the newest token was made with
    # by choice, in order: each version and the index of its first token
    weights_versions: list[list[WeightsVersion]] = []


class TokenInfo(ResponseStruct, kw_only=True):
    """One entry of prompt_logprobs, by token id."""

    logprob: float
    rank: int
    decoded_token: str


class DraftTopLogprob(ResponseStruct, kw_only=True):
    """One of the likeliest tokens of the drafter."""

    token: str
    token_id: int
    logprob: float


class DraftInfo(ResponseStruct, kw_only=True):
    """A draft token, accepted or rejected."""

    token: str
    token_id: int
    position: int
    source: str
    accepted: bool
    draft_logprob: float | None
    target_logprob: float | None
    draft_rank: int | None
    draft_top_logprobs: list[DraftTopLogprob]


PromptLogprobs = list[dict[str, TokenInfo] | None]


class Extras(ResponseStruct, kw_only=True):
    """Optional fields of a choice, or of the tokens of a chunk."""

    token_ids: list[int] | UnsetType = UNSET
    provenance: list[str] | UnsetType = UNSET
    drafts: list[DraftInfo] | UnsetType = UNSET
    # of chunks with provenance
    step_end: bool | UnsetType = UNSET  # it holds the last token of a step
    num_draft: int | UnsetType = UNSET  # with step_end: number of drafts that the step verified


# --- /v1/completions ---


class CompletionLogprobs(ResponseStruct, kw_only=True):
    """Logprobs of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Extras, kw_only=True):
    """Choice of a completion, or of its chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET  # with finish_reason
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(ResponseStruct, kw_only=True):
    """Body of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | UnsetType = UNSET  # if the request has one
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics


# --- /v1/chat/completions ---


class TopLogprob(ResponseStruct):
    """Alternative token with its logprob."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ResponseStruct):
    """Logprob of one token with alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseStruct, kw_only=True):
    """Logprobs of a chat choice."""

    content: list[ChatLogprob]


class FunctionCall(ResponseStruct, kw_only=True):
    """Function and arguments of a call; the arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseStruct, kw_only=True):
    """Tool call of a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(ResponseStruct, kw_only=True):
    """New part of a call's function; the name is in the first part only."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(ResponseStruct, kw_only=True):
    """New part of a tool call."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatMessage(ResponseStruct, kw_only=True):
    """Generated message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text under its other name
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Extras, kw_only=True):
    """Choice of a chat response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET


class ChatCompletionResponse(ResponseStruct, kw_only=True):
    """Body of /v1/chat/completions."""

    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | UnsetType = UNSET  # if the request has one
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics


class Delta(ResponseStruct, kw_only=True):
    """New part of a message in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Extras, kw_only=True):
    """Choice of a chat chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET


# --- the other routes ---


class ModelCard(ResponseStruct, kw_only=True):
    """One model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "draftproof"
    root: str
    max_model_len: int


class ModelList(ResponseStruct, kw_only=True):
    """List of the models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(ResponseStruct, kw_only=True):
    """State of the engine."""

    status: Literal["ok", "starting", "restarting", "draining", "failed", "stopped"]
    reason: str | None = None
    restarts: int = 0


class Version(ResponseStruct, kw_only=True):
    """Version of the server."""

    version: str
    engine: str  # model, device, numerics, proposer, strategy and its label
    weights_version: int = 0  # 0: as loaded


class TokenizeResponse(ResponseStruct, kw_only=True):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(ResponseStruct, kw_only=True):
    """Text of tokens."""

    prompt: str


class TokenizerInfo(ResponseStruct, kw_only=True):
    """Special tokens, chat template and sizes of the tokenizer, under the names of tokenizer_config.json."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    chat_template: str | None = None
    vocab_size: int
    model_max_length: int
