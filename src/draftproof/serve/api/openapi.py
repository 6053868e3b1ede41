"""OpenAPI document, built from the structs that decode requests and encode responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from draftproof import __version__
from draftproof.engine.validation import Limits
from draftproof.serve.api import request_schema, response_schema
from draftproof.serve.http.errors import ErrorResponse

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


CONVERSATION_FIELDS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}


def document(
    models: Sequence[str], limits: Limits, allows_empty_prompt: bool, needs_key: bool
) -> dict[str, Any]:
    """Build the document. `allows_empty_prompt`: the tokenizer adds tokens to an empty text."""
    posts = {
        "/v1/completions": (
            "Continue prompts.",
            request_schema.CompletionRequest,
            response_schema.CompletionResponse,
            True,
        ),
        "/v1/chat/completions": (
            "Continue a conversation.",
            request_schema.ChatCompletionRequest,
            response_schema.ChatCompletionResponse,
            True,
        ),
        "/tokenize": (
            "Tokenize a prompt or a conversation.",
            request_schema.TokenizeRequest,
            response_schema.TokenizeResponse,
            False,
        ),
        "/detokenize": (
            "Detokenize.",
            request_schema.DetokenizeRequest,
            response_schema.DetokenizeResponse,
            False,
        ),
    }
    gets = {
        "/v1/models": ("List the models.", response_schema.ModelList),
        "/version": ("Version and engine.", response_schema.Version),
    }
    kinds: list[Any] = [ErrorResponse, response_schema.Health]
    kinds += [each for _, body, response, _ in posts.values() for each in (body, response)]
    kinds += [response for _, response in gets.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _specialize(components, models, limits, allows_empty_prompt)
    paths: dict[str, Any] = {}
    for path, (text, body, response, streams) in posts.items():
        paths[path] = {"post": _operation(text, response, streams, body)}
    for path, (text, response) in gets.items():
        paths[path] = {"get": _operation(text, response)}
    paths["/v1/models/{model}"] = {"get": _operation("Describe a model.", response_schema.ModelCard)}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}
    ]
    paths["/health"] = {"get": _operation("State of the engine.", response_schema.Health)}
    paths["/health"]["get"]["responses"]["503"] = _content("Requests are not served.", "Health")
    paths["/metrics"] = {"get": _operation("Metrics for Prometheus.", None)}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Draftproof", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in (*posts, "/v1/models", "/v1/models/{model}", "/metrics"):
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
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
        "minItems": 1,
    }
    text = {"type": "string"} if allows_empty_prompt else {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": item, "minItems": 1} for item in (text, ids)]
    components["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [text, ids, *several]}
    for name in ("CompletionRequest", "ChatCompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        components[name]["properties"]["model"] = {"enum": [*models, None], "default": None}
    for name in ("TextPart", "Prediction"):
        components[name]["required"].remove("type")  # it has a single value
    whole = components["TokenizeRequest"]
    forms = []
    for needed, others in (("prompt", CONVERSATION_FIELDS), ("messages", {"prompt", "add_special_tokens"})):
        properties = {name: what for name, what in whole["properties"].items() if name not in others}
        forms.append(
            {"type": "object", "properties": properties, "required": [needed], "additionalProperties": False}
        )
    components["TokenizeRequest"] = {"title": whole["title"], "anyOf": forms}


def _limit_logprobs(components: dict[str, Any], max_logprobs: int) -> None:
    """Add the engine's limit of logprobs per token."""
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        properties = components[name]["properties"]
        for option in ("logprobs", "top_logprobs", "prompt_logprobs"):
            for part in properties.get(option, {}).get("anyOf", ()):
                if part.get("type") == "integer":
                    part["maximum"] = max_logprobs
        for part in properties["logprob_token_ids"]["anyOf"]:
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
    text: str, response: type | None, streams: bool = False, body: type | None = None
) -> dict[str, Any]:
    """Describe one route. `response` None: plain text."""
    done: dict[str, Any] = {
        "description": "Success.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    if response is not None:
        done = _content("Success.", response.__name__)
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        done["content"]["text/event-stream"] = {"schema": event}
    codes = _ERRORS if body is not None else {c: t for c, t in _ERRORS.items() if c in ("401", "404", "500")}
    responses = {"200": done, **{code: _content(text, "ErrorResponse") for code, text in codes.items()}}
    result: dict[str, Any] = {"summary": text, "responses": responses}
    if body is not None:
        result["requestBody"] = {"required": True, **_content("", body.__name__)}
        result["requestBody"].pop("description")
    return result


def _content(text: str, name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
