"""Bodies and responses of /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from draftproof.serve.api.generation.request_schema import EngineRequest, OneOrMore, TokenId
from draftproof.serve.api.generation.response_schema import PromptDetails, ResponseStruct

MAX_INPUTS = 2048  # of one request, as in the OpenAI API
ScoreType = Literal["log_likelihood", "cosine", "probability"]
Texts = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class PoolingRequest(EngineRequest, kw_only=True):
    """Options of all routes."""

    user: Annotated[str, Meta(max_length=256)] | None = None
    add_special_tokens: bool | None = None  # /v1/score: to the contexts
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: OneOrMore | None = None
    # extensions
    normalize: bool | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/score: queries and documents, or contexts and continuations."""

    text_1: Texts
    text_2: Texts
    # extension: log_likelihood, or the score that the model was trained for
    score_type: ScoreType | None = None


class RerankRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None  # 0: all


class PromptUsage(ResponseStruct, kw_only=True):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    weights_version: int  # of the newest weights that a prompt was computed with


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
    """Score of one pair. A log-likelihood is the sum of the logprobs of the continuation's tokens."""

    object: Literal["score"] = "score"
    index: int
    score: float
    # of a log-likelihood
    is_greedy: bool | UnsetType = UNSET  # each token is the likeliest at its position
    token_ids: list[int] | UnsetType = UNSET
    token_logprobs: list[float] | UnsetType = UNSET


class ScoreResponse(ResponseStruct, kw_only=True):
    """Response of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
    score_type: ScoreType


class RerankDocument(ResponseStruct, kw_only=True):
    """Document of a result."""

    text: str


class RerankResult(ResponseStruct, kw_only=True):
    """Document with its relevance to the query."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankResponse(ResponseStruct, kw_only=True):
    """Response of /v1/rerank, the most relevant document first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]
