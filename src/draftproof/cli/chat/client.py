"""Client of a chat API: one request as a stream of chunks, from a server or from this process."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from draftproof.errors import RequestError

Message = dict[str, Any]
Chunk = Mapping[str, Any]
CHAT_PATH = "/v1/chat/completions"
EXTRAS = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "provenance": True,
    "return_token_ids": True,
}


class ChatClient(ABC):
    """Client of /v1/chat/completions."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line about model and engine."""

    @abstractmethod
    def _lines(self, path: str, body: bytes) -> Iterator[bytes]:
        """Yield the lines of a response; RequestError if it is refused. Closing it aborts the request."""

    def close(self) -> None:
        """Release what the client holds."""
        return None

    def chat(
        self, messages: Sequence[Message], options: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[Chunk]:
        """Yield the chunks of the next message. Closing the iterator aborts the request."""
        body = {**options, **EXTRAS, "messages": messages, **({"tools": tools} if tools else {})}
        for line in self._lines(CHAT_PATH, json.dumps(body).encode()):
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RequestError(chunk["error"]["message"])
                yield chunk


def error_message(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "the server refused the request"


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text that arrives in parts."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    if rest:
        yield rest
