"""One HTTP exchange, its result as plain data, and the file that keeps results for a resumed audit."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from draftproof.errors import RequestError

ERROR_CHARACTERS = 300
RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


@dataclass
class Exchange:
    """Response to one request: JSON objects of the body or of the stream's events."""

    status: int = 0
    events: list[Any] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    retry_after_seconds: float | None = None

    @property
    def is_retried(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.status in RETRIED_STATUS or (self.status == 0 and self.error is not None)


def exchange(client: httpx.Client, path: str, body: Mapping[str, Any] | None) -> Exchange:
    """Send one request and read its whole response. Errors of the network become `error`."""
    found = Exchange()
    is_stream = bool(body and body.get("stream"))
    method = "GET" if body is None else "POST"
    try:
        with client.stream(method, path, json=body) as response:
            found.status = response.status_code
            found.retry_after_seconds = _seconds(response.headers.get("retry-after"))
            if found.status != 200:
                found.error = f"status {found.status}: {response.read().decode(errors='replace')}"
            elif is_stream:
                _read_events(response, found)
            else:
                found.events.append(_json(response.read().decode(errors="replace")))
    except (httpx.HTTPError, httpx.StreamError, UnicodeError) as error:  # the last: of a host name
        text = f"{type(error).__name__}: {error}"
        found.error = text if not found.events else f"the stream broke off: {text}"
    except (ValueError, RecursionError) as error:
        found.error = f"the body is not JSON: {error}"
    if found.error is not None:
        found.error = found.error[:ERROR_CHARACTERS]
    return found


def _read_events(response: httpx.Response, found: Exchange) -> None:
    """Read server-sent events up to `[DONE]` or the end."""
    is_html = "html" in response.headers.get("content-type", "")
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        found.events.append(_json(data))
    if is_html or not found.events:
        found.error = "the response is no stream of events"


def _json(text: str) -> Any:
    """Return the value of a JSON text. Halves of surrogate pairs, which no file can hold, are replaced."""
    value = json.loads(text)
    return _without_surrogates(value) if "\\ud" in text.lower() else value


def _without_surrogates(value: Any) -> Any:
    """Return a JSON value with whole characters alone."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_without_surrogates(item) for item in value]
        case dict():
            return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _seconds(text: str | None) -> float | None:
    """Return the value of a Retry-After header in seconds; None for dates."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


class ExchangeFile:
    """Results by label and body in a file of JSON lines; an audit that starts again reads them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stored: dict[str, Exchange] = {}
        try:
            self._file = path.open("a+", errors="replace")
            self._file.seek(0)
            text = self._file.read()
            if text and not text.endswith("\n"):
                self._file.write("\n")  # after a line that was not written to its end
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        for line in text.splitlines():
            try:
                record = json.loads(line)
                self._stored[record["key"]] = Exchange(**record["exchange"])
            except (ValueError, KeyError, TypeError):
                continue  # the last line of an audit that was stopped

    @staticmethod
    def key(url: str, label: str, body: Mapping[str, Any] | None) -> str:
        """Return the key of a request."""
        text = json.dumps([url, label, body], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def get(self, key: str) -> Exchange | None:
        """Return a stored result."""
        return self._stored.get(key)

    def put(self, key: str, found: Exchange) -> None:
        """Store a result unless the same request may succeed later."""
        if found.is_retried:
            return
        with self._lock:
            self._file.write(json.dumps({"key": key, "exchange": asdict(found)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
