"""Client of a server over HTTP."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from draftproof.cli.chat.client import ChatClient, error_message
from draftproof.errors import DraftproofError, RequestError
from draftproof.serve.settings import KEY_VARIABLE

TIMEOUT_SECONDS = 600.0


class HttpClient(ChatClient):
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

    def _lines(self, path: str, body: bytes) -> Iterator[bytes]:
        with self._request("POST", path, body) as response:
            try:
                yield from response
            except (OSError, http.client.HTTPException) as error:
                raise DraftproofError(f"the connection to {self._parts.geturl()} broke: {error}") from error

    def _request(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
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
                raise RequestError(error_message(response.read()) + hint)
        return response
