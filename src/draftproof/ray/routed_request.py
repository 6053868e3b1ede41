"""HTTP request on its way from the ingress to a replica, with the hashes that the router compares."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Scope

BLOCK_BYTES = 64  # of a prompt, hashed together with all blocks before it
MAX_BLOCKS = 256
SCOPE_KEYS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)


class _Prompt(msgspec.Struct):
    """Parts of a body that precede the generated text, undecoded, in the order of usual chat templates."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()  # /v1/messages
    instructions: msgspec.Raw = msgspec.Raw()  # /v1/responses
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()  # /v1/responses, /v1/embeddings


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """Request as the parts of an ASGI scope that can be sent, and its whole body."""

    scope: dict[str, Any]
    body: bytes
    prefix_hashes: tuple[bytes, ...]  # of the prompt's first blocks, each with all before it


def new_request(scope: Scope, body: bytes) -> RoutedRequest:
    """Return the request of an ASGI scope and a body."""
    sent = {key: scope[key] for key in SCOPE_KEYS if key in scope}
    return RoutedRequest(sent, body, tuple(_prefix_hashes(dict(scope["headers"]), body)))


def _prefix_hashes(headers: dict[bytes, bytes], body: bytes) -> Iterator[bytes]:
    """Yield one hash a whole block; an API key has prefixes of its own, as in the engine."""
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    text = b"".join(bytes(getattr(prompt, name)) for name in _Prompt.__struct_fields__)
    key = headers.get(b"authorization", headers.get(b"x-api-key", b""))
    running = hashlib.blake2b(key, digest_size=8)
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        running.update(text[start : start + BLOCK_BYTES])
        yield running.digest()
