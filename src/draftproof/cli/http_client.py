"""HTTP client of `draftproof chat --url`: a chat stream as token events."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from draftproof.errors import DraftproofError, RequestError
from draftproof.metrics import SpecStats
from draftproof.outputs import TokenEvent
from draftproof.serve.settings import KEY_VARIABLE

TIMEOUT_SECONDS = 600.0


class HttpClient:
    """Client of one server. The API key is read from the environment."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r} is not the address of a server: write http://HOST:PORT")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def describe(self) -> str:
        """Return one line about the model and engine of the server."""
        with self._request("GET", "/version") as response:
            return str(json.load(response)["engine"])

    def chat(self, messages: list[dict[str, str]], params: dict[str, Any]) -> ChatStream:
        """Send messages and return the stream of the output."""
        body = {
            **params,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "provenance": True,
            "return_token_ids": True,
        }
        return ChatStream(self._request("POST", "/v1/chat/completions", json.dumps(body)))

    def _request(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        """Send one request; raise an error with the message of the server if it is refused."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=TIMEOUT_SECONDS)
        headers = {"content-type": "application/json", "connection": "close"}
        if key := os.environ.get(KEY_VARIABLE, "").split(",")[0].strip():
            headers["authorization"] = f"Bearer {key}"
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DraftproofError(f"no server responds at {self._parts.geturl()}: {error}") from error
        if response.status != 200:
            with response:
                hint = f"; set {KEY_VARIABLE}" if response.status == 401 else ""
                raise RequestError(_message(response.read()) + hint)
        return response


class ChatStream:
    """Token events of one output; `stats` holds the speculation counters at the end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response, self.stats = response, SpecStats()

    def __iter__(self) -> Iterator[TokenEvent]:
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
        metrics = (chunk.get("metrics") or {}).get("speculative_decoding")
        if metrics is not None:
            self.stats.num_emitted_tokens = chunk["usage"]["completion_tokens"]
            self.stats.num_drafts = metrics["num_spec_steps"]
            self.stats.num_draft_tokens = metrics["num_draft_tokens"]
            self.stats.num_accepted_tokens = metrics["num_accepted_draft_tokens"]


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "the server refused the request"
