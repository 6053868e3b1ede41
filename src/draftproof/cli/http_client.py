"""A small client for `draftproof chat --url`: a server's stream as the events that the command line shows."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from draftproof.errors import DraftproofError, RequestError
from draftproof.metrics import SpecStats
from draftproof.serve.settings import KEY_VARIABLE
from draftproof.types import TokenEvent

SECONDS = 600.0


class Client:
    """Of one server. A key is taken from the environment."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r} is no address of a server: write http://HOST:PORT")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def describe(self) -> str:
        """What runs there, in one line."""
        with self._ask("GET", "/version") as response:
            return str(json.load(response)["engine"])

    def chat(self, messages: list[dict[str, str]], wish: dict[str, Any]) -> ChatStream:
        body = {
            **wish,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "provenance": True,
            "return_token_ids": True,
        }
        return ChatStream(self._ask("POST", "/v1/chat/completions", json.dumps(body)))

    def _ask(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=SECONDS)
        headers = {"content-type": "application/json", "connection": "close"}
        if key := os.environ.get(KEY_VARIABLE, "").split(",")[0].strip():
            headers["authorization"] = f"Bearer {key}"
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DraftproofError(f"nobody answers at {self._parts.geturl()}: {error}") from error
        if response.status != 200:
            with response:
                hint = f"; set {KEY_VARIABLE}" if response.status == 401 else ""
                raise RequestError(_message(response.read()) + hint)
        return response


class ChatStream(Iterator[TokenEvent]):
    """One answer; afterwards `stats` says what speculation did."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self._events = self._read()
        self.stats = SpecStats()

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def _read(self) -> Iterator[TokenEvent]:
        with self._response:
            for line in self._response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield from self._events_of(json.loads(data))

    def _events_of(self, chunk: dict[str, Any]) -> Iterator[TokenEvent]:
        if "error" in chunk:
            raise RequestError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            for token, origin in zip(choice.get("token_ids", []), choice.get("provenance", []), strict=True):
                self.stats.num_steps += choice["step_end"]
                text, reason = choice["delta"]["content"], choice["finish_reason"]
                yield TokenEvent(choice["index"], token, text, origin, None, choice["step_end"], reason)
        told = (chunk.get("metrics") or {}).get("speculative_decoding")
        if told is not None:
            self.stats.num_emitted_tokens = chunk["usage"]["completion_tokens"]
            self.stats.num_drafts = told["num_spec_steps"]
            self.stats.num_draft_tokens = told["num_draft_tokens"]
            self.stats.num_accepted_tokens = told["num_accepted_draft_tokens"]


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "the server refused"
