"""What clients get: one definition for encoding and for /openapi.json.

Fields with UNSET are left out unless they were asked for.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length"]


class Reply(msgspec.Struct, kw_only=True, gc=False):
    """Plain data without cycles, so the collector need not look."""


# --- parts ------------------------------------------------------------------------------------------------


class PromptDetails(Reply, kw_only=True):
    cached_tokens: int


class CompletionDetails(Reply, kw_only=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET  # once it is known
    completion_tokens_details: CompletionDetails | UnsetType = UNSET  # with a prediction


class SpeculativeDecoding(Reply, kw_only=True):
    """Of one request, all its answers together, in vLLM's names. The mean counts the bonus token."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]  # steps with 0, 1, … accepted drafts
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RequestMetrics(Reply, kw_only=True):
    speculative_decoding: SpeculativeDecoding | None
    strategy: str  # the verification that served it, with its label
    lossless: bool
    queue_seconds: float | None = None  # in the engine, of the first answer
    first_token_seconds: float | None = None  # from its arrival there


class TokenInfo(Reply, kw_only=True):
    """One entry of prompt_logprobs, by token id."""

    logprob: float
    rank: int
    decoded_token: str


class DraftInfo(Reply, kw_only=True):
    """A draft, whether it stood or fell."""

    token: str
    token_id: int
    position: int
    source: str
    accepted: bool
    draft_logprob: float | None
    target_logprob: float | None


PromptLogprobs = list[dict[str, TokenInfo] | None]


class Extras(Reply, kw_only=True):
    """On request, of an answer or of the tokens of a chunk."""

    token_ids: list[int] | UnsetType = UNSET
    provenance: list[str] | UnsetType = UNSET
    drafts: list[DraftInfo] | UnsetType = UNSET
    # of chunks that tell provenance
    step_end: bool | UnsetType = UNSET  # the last token that its step committed is in it
    num_draft: int | UnsetType = UNSET  # with step_end: the drafts that the step verified


class PromptExtras(Reply, kw_only=True):
    """On request: with each answer of a completion, once for a conversation."""

    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


# --- /v1/completions ----------------------------------------------------------------------------------------


class TextLogprobs(Reply, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Extras, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET  # where the answer ends
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextReply(Reply, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    metrics: RequestMetrics


# --- /v1/chat/completions -----------------------------------------------------------------------------------


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply, kw_only=True):
    content: list[ChatLogprob]


class ChatMessage(Reply, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Extras, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET


class ChatReply(PromptExtras, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics


class Delta(Reply, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Extras, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET


# --- the other routes ---------------------------------------------------------------------------------------


class ModelCard(Reply, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "draftproof"
    root: str
    max_model_len: int


class ModelList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Reply, kw_only=True):
    status: Literal["ok", "starting", "restarting", "draining", "failed", "stopped"]
    reason: str | None = None
    restarts: int = 0


class Version(Reply, kw_only=True):
    version: str
    engine: str  # model, device, numerics, proposer, strategy and its label


class TokenizeReply(Reply, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Reply, kw_only=True):
    prompt: str
