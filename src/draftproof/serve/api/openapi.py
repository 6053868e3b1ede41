"""OpenAPI document, built from the structs that decode requests and encode responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from draftproof import __version__
from draftproof.engine.validation import Limits
from draftproof.serve.api.generation.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from draftproof.serve.api.generation.response_schema import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)
from draftproof.serve.api.messages.request_schema import CountTokensRequest, MessagesRequest
from draftproof.serve.api.messages.response_schema import MessageResponse, TokenCount
from draftproof.serve.api.pooling.schema import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from draftproof.serve.api.responses.input_items import MAX_LIMIT
from draftproof.serve.api.responses.request_schema import ResponseRequest
from draftproof.serve.api.responses.response_schema import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ResponseObject,
)
from draftproof.serve.http.errors import MESSAGES_PATH, ErrorResponse, MessageErrorResponse

_ERRORS = {
    "400": "Invalid request; `param` names the option.",
    "401": "Missing or wrong API key.",
    "404": "Unknown model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many open requests of this key.",
    "500": "Internal error.",
    "503": "The server is full, starting or stopping; try again later.",
    "504": "The request timed out.",
}
# routes with a body: description, request, response
POSTS: dict[str, tuple[str, type[Any], type[Any]]] = {
    "/v1/completions": ("Continue prompts.", CompletionRequest, CompletionResponse),
    "/v1/chat/completions": ("Continue a conversation.", ChatCompletionRequest, ChatCompletionResponse),
    "/v1/embeddings": ("Embeddings of texts.", EmbeddingRequest, EmbeddingResponse),
    "/v1/score": ("Scores of pairs of texts.", ScoreRequest, ScoreResponse),
    "/v1/rerank": ("Order documents by their relevance to a query.", RerankRequest, RerankResponse),
    "/v1/responses": ("Create a response.", ResponseRequest, ResponseObject),
    "/v1/responses/input_tokens": ("Count the input tokens.", ResponseRequest, InputTokenCount),
    "/v1/messages": ("Create a message.", MessagesRequest, MessageResponse),
    "/v1/messages/count_tokens": ("Count the tokens of a message.", CountTokensRequest, TokenCount),
    "/tokenize": ("Tokenize a prompt or a conversation.", TokenizeRequest, TokenizeResponse),
    "/detokenize": ("Detokenize.", DetokenizeRequest, DetokenizeResponse),
}
# routes without one: description, response; None: plain text
GETS: dict[str, tuple[str, type[Any] | None]] = {
    "/v1/models": ("List the models.", ModelList),
    "/version": ("Version and engine.", Version),
    "/v1/models/{model}": ("Describe a model.", ModelCard),
    "/v1/responses/{id}": ("Return a stored response.", ResponseObject),
    "/v1/responses/{id}/input_items": ("List the input of a stored response.", ItemList),
    "/tokenizer_info": ("Describe the tokenizer.", TokenizerInfo),
    "/health": ("State of the engine.", Health),
    "/metrics": ("Metrics for Prometheus.", None),
}
# options that hold texts or token ids, one or several
PROMPT_OPTIONS = (
    ("CompletionRequest", "prompt"),
    ("EmbeddingRequest", "input"),
    ("ScoreRequest", "text_1"),
    ("ScoreRequest", "text_2"),
)
COUNTS = (TokenCount, InputTokenCount)  # responses that are never streamed
CONVERSATION_FIELDS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
CONVERSATION_FIELDS |= {"tools"}


def document(
    models: Sequence[str], limits: Limits, allows_empty_prompt: bool, needs_key: bool
) -> dict[str, Any]:
    """Build the document. `allows_empty_prompt`: the tokenizer adds tokens to an empty text."""
    kinds: list[Any] = [ErrorResponse, MessageErrorResponse, Health, DeletedResponse, ItemList]
    kinds += [each for _, body, response in POSTS.values() for each in (body, response)]
    kinds += [ModelList, TokenizerInfo, Version]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _specialize(components, models, limits, allows_empty_prompt)
    paths: dict[str, Any] = {}
    for path, (text, body, response) in POSTS.items():
        error = MessageErrorResponse if path.startswith(MESSAGES_PATH) else ErrorResponse
        paths[path] = {"post": _operation(text, response, body, error)}
    for path, (text, kind) in GETS.items():
        paths[path] = {"get": _operation(text, kind)}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}
    ]
    stored = paths["/v1/responses/{id}"]
    stored["delete"] = _operation("Delete a stored response.", DeletedResponse)
    listed = paths["/v1/responses/{id}/input_items"]["get"]
    for operation in (*stored.values(), listed):
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
        operation["responses"]["400"] = _content("No responses are stored.", "ErrorResponse")
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}
    for name, what in {
        "after": {"type": "string"},
        "limit": limit,
        "order": {"enum": ["asc", "desc"]},
    }.items():
        listed["parameters"].append({"name": name, "in": "query", "schema": what})
    paths["/health"]["get"]["responses"]["503"] = _content("Requests are not served.", "Health")
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Draftproof", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in (
            *POSTS,
            "/v1/responses/{id}",
            "/v1/responses/{id}/input_items",
            "/v1/models",
            "/v1/models/{model}",
            "/tokenizer_info",
            "/metrics",
        ):
            for operation in paths[path].values():
                operation["security"] = [{"key": []}]
    return result


def _specialize(
    components: dict[str, Any], models: Sequence[str], limits: Limits, allows_empty_prompt: bool
) -> None:
    """Add what the types cannot express: kinds of prompts, models, vocabulary and limits of this server."""
    vocab_size = limits.vocab_size
    _limit_ids(components, vocab_size)
    if limits.max_logprobs >= 0:
        _limit_logprobs(components, limits.max_logprobs)
    token_id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": token_id, "minItems": 1}
    text = {"type": "string"} if allows_empty_prompt else {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": item, "minItems": 1} for item in (text, ids)]
    for name, option in PROMPT_OPTIONS:
        components[name]["properties"][option] = {"anyOf": [text, ids, *several]}
    for name in (body.__name__ for _, body, _ in POSTS.values()):
        components[name]["properties"]["model"] = {"enum": [*models, None], "default": None}
    for name in ("TextPart", "Prediction", "SummaryText"):
        components[name]["required"].remove("type")  # it has a single value
    whole = components["TokenizeRequest"]
    forms = []
    for needed, others in (("prompt", CONVERSATION_FIELDS), ("messages", {"prompt", "add_special_tokens"})):
        properties = {name: what for name, what in whole["properties"].items() if name not in others}
        form = {"type": "object", "properties": properties, "required": [needed]}
        forms.append({**form, "additionalProperties": False})
    components["TokenizeRequest"] = {"title": whole["title"], "anyOf": forms}


def _limit_logprobs(components: dict[str, Any], max_logprobs: int) -> None:
    for name in ("CompletionRequest", "ChatCompletionRequest", "ResponseRequest"):
        properties = components[name]["properties"]
        for option in ("logprobs", "top_logprobs", "prompt_logprobs"):
            for part in properties.get(option, {}).get("anyOf", ()):
                if part.get("type") == "integer":
                    part["maximum"] = max_logprobs
        for part in properties.get("logprob_token_ids", {}).get("anyOf", ()):
            if part.get("type") == "array":
                part["maxItems"] = max_logprobs


def _limit_ids(part: Any, vocab_size: int) -> None:
    """Replace the general bound of token ids by the vocabulary size."""
    if isinstance(part, dict):
        if part.get("exclusiveMaximum") == 1 << 31 and part.get("minimum") == 0:
            part["maximum"] = vocab_size - 1
            del part["exclusiveMaximum"]
        part = list(part.values())
    for item in part if isinstance(part, list) else ():
        _limit_ids(item, vocab_size)


def _operation(
    text: str, response: type | None, body: type | None = None, error: type = ErrorResponse
) -> dict[str, Any]:
    """Describe one route. `response` None: plain text."""
    done = _content("Success.", "" if response is None else response.__name__)
    if response is None:
        done["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if body is not None and issubclass(body, SamplingRequest) and response not in COUNTS:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        done["content"]["text/event-stream"] = {"schema": event}
    codes = _ERRORS if body is not None else {c: t for c, t in _ERRORS.items() if c in ("401", "404", "500")}
    responses = {"200": done, **{code: _content(text, error.__name__) for code, text in codes.items()}}
    result: dict[str, Any] = {"summary": text, "responses": responses}
    if body is not None:
        result["requestBody"] = {"required": True, "content": _content("", body.__name__)["content"]}
    return result


def _content(text: str, name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
