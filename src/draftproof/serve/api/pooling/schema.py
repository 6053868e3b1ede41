"""Bodies and responses of /v1/embeddings and /v1/score."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from draftproof.serve.api.generation.request_schema import EngineRequest, OneOrMore, TokenId
from draftproof.serve.api.generation.response_schema import PromptDetails, ResponseStruct

MAX_INPUTS = 2048  # of one request, as in the OpenAI API
Texts = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class PoolingRequest(EngineRequest, kw_only=True):
    """Options of both routes."""

    user: Annotated[str, Meta(max_length=256)] | None = None
    add_special_tokens: bool | None = None  # /v1/score: to the contexts


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: OneOrMore | None = None
    # extensions
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/score: contexts, and the continuations whose log-likelihood is computed."""

    text_1: Texts
    text_2: Texts


class PromptUsage(ResponseStruct, kw_only=True):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Embedding(ResponseStruct, kw_only=True):
    """Embedding of one input: numbers, or base64 of little-endian fp32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ResponseStruct, kw_only=True):
    """Response of /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage


class Score(ResponseStruct, kw_only=True):
    """Log-likelihood of one continuation: the sum of the logprobs of its tokens."""

    object: Literal["score"] = "score"
    index: int
    score: float
    is_greedy: bool  # each token is the likeliest at its position
    token_ids: list[int]
    token_logprobs: list[float]


class ScoreResponse(ResponseStruct, kw_only=True):
    """Response of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
