"""/openapi.json, from the same definitions that decode and encode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from draftproof import __version__
from draftproof.serve.api import request_schema, response_schema
from draftproof.serve.http.errors import ErrorReply

_REFUSALS = {
    "400": "The request is wrong; `param` names the option.",
    "401": "An API key is needed.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "This key has too many requests open.",
    "500": "The server failed.",
    "503": "The server is busy, starts, or stops; try again later.",
    "504": "The request took too long.",
}


CONVERSATION = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}


def document(models: Sequence[str], vocab_size: int, empty_prompts: bool, needs_key: bool) -> dict[str, Any]:
    """`empty_prompts`: an empty text has tokens, because the model begins every text with one."""
    posts = {
        "/v1/completions": (
            "Continue prompts.",
            request_schema.CompletionAsked,
            response_schema.TextReply,
            True,
        ),
        "/v1/chat/completions": (
            "Answer a conversation.",
            request_schema.ChatAsked,
            response_schema.ChatReply,
            True,
        ),
        "/tokenize": (
            "A prompt or a conversation in tokens.",
            request_schema.TokenizeAsked,
            response_schema.TokenizeReply,
            False,
        ),
        "/detokenize": (
            "Tokens as text.",
            request_schema.DetokenizeAsked,
            response_schema.DetokenizeReply,
            False,
        ),
    }
    gets = {
        "/v1/models": ("The models here.", response_schema.ModelList),
        "/version": ("What runs.", response_schema.Version),
    }
    kinds: list[Any] = [ErrorReply, response_schema.Health]
    kinds += [each for _, asked, reply, _ in posts.values() for each in (asked, reply)]
    kinds += [reply for _, reply in gets.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _fit(components, models, vocab_size, empty_prompts)
    paths: dict[str, Any] = {}
    for path, (text, asked, reply, streams) in posts.items():
        paths[path] = {"post": _operation(text, reply, streams, asked)}
    for path, (text, reply) in gets.items():
        paths[path] = {"get": _operation(text, reply)}
    paths["/v1/models/{model}"] = {"get": _operation("One model.", response_schema.ModelCard)}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}
    ]
    paths["/health"] = {"get": _operation("Is the engine there?", response_schema.Health)}
    paths["/health"]["get"]["responses"]["503"] = _content("It is not.", "Health")
    paths["/metrics"] = {"get": _operation("For Prometheus.", None)}
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


def _fit(components: dict[str, Any], models: Sequence[str], vocab_size: int, empty_prompts: bool) -> None:
    """What the types cannot say: prompts that do not mix, the names and the vocabulary of this server."""
    _limit_ids(components, vocab_size)
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
        "minItems": 1,
    }
    text = {"type": "string"} if empty_prompts else {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": item, "minItems": 1} for item in (text, ids)]
    components["CompletionAsked"]["properties"]["prompt"] = {"anyOf": [text, ids, *several]}
    for name in ("CompletionAsked", "ChatAsked", "TokenizeAsked", "DetokenizeAsked"):
        components[name]["properties"]["model"] = {"enum": [*models, None], "default": None}
    for name in ("TextPart", "Prediction"):
        components[name]["required"].remove("type")  # there is only one
    whole = components["TokenizeAsked"]
    forms = []
    for needed, others in (("prompt", CONVERSATION), ("messages", {"prompt", "add_special_tokens"})):
        properties = {name: what for name, what in whole["properties"].items() if name not in others}
        forms.append(
            {"type": "object", "properties": properties, "required": [needed], "additionalProperties": False}
        )
    components["TokenizeAsked"] = {"title": whole["title"], "anyOf": forms}


def _limit_ids(part: Any, vocab_size: int) -> None:
    """Token ids have a bound of their own in the types; here it is the vocabulary's."""
    if isinstance(part, dict):
        if part.get("exclusiveMaximum") == 1 << 31 and part.get("minimum") == 0:
            part["maximum"] = vocab_size - 1
            del part["exclusiveMaximum"]
        part = list(part.values())
    for item in part if isinstance(part, list) else ():
        _limit_ids(item, vocab_size)


def _operation(
    text: str, reply: type | None, streams: bool = False, asked: type | None = None
) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    if reply is not None:
        done = _content("Done.", reply.__name__)
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        done["content"]["text/event-stream"] = {"schema": event}
    codes = (
        _REFUSALS if asked is not None else {c: t for c, t in _REFUSALS.items() if c in ("401", "404", "500")}
    )
    responses = {"200": done, **{code: _content(text, "ErrorReply") for code, text in codes.items()}}
    result: dict[str, Any] = {"summary": text, "responses": responses}
    if asked is not None:
        result["requestBody"] = {"required": True, **_content("", asked.__name__)}
        result["requestBody"].pop("description")
    return result


def _content(text: str, name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
