"""Client of one endpoint: bounded concurrency and rate, retries, a token count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from draftproof.audit.client.answer import Answer
from draftproof.audit.client.exchange import Exchange, ExchangeFile, exchange
from draftproof.audit.client.parse import fill
from draftproof.errors import DraftproofError, RequestError

MAX_ATTEMPTS = 4
MAX_WAIT_SECONDS = 20.0
FIRST_WAIT_SECONDS = 0.5
MAX_FAILURES_IN_A_ROW = 6  # requests that failed after all attempts


class EndpointDownError(DraftproofError):
    """The endpoint returned no answer to several requests in a row."""


@dataclass(frozen=True)
class Call:
    """One request of an audit. The label names it in the report and in the stored results."""

    label: str
    path: str
    body: Mapping[str, Any]
    url: str = ""  # of the endpoint; empty: of the audited one


def base_url(url: str) -> str:
    """Return the URL in front of the routes; `/v1` is added to a URL without a path."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        is_address = False
    if not is_address:
        raise RequestError(f"{url!r} is not the address of an endpoint: write http://HOST:PORT/v1")
    if parts.username is not None or parts.query:
        # the URL is part of the report, and of every command in it
        raise RequestError("a URL with a password or a query is not supported: use --key-env for a key")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _header_value(key: str) -> str:
    """Return an API key without the end of its line."""
    if not key.strip().isascii():
        raise RequestError("the API key has characters that no HTTP header allows: check --key-env")
    return key.strip()


class Endpoint:
    """OpenAI-compatible endpoint at a base URL."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        concurrency: int = 4,
        requests_per_second: float | None = None,
        timeout_seconds: float = 120.0,
        transport: httpx.BaseTransport | None = None,
        stored: ExchangeFile | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = base_url(url)
        self.concurrency = concurrency
        self.generated_tokens = self.prompt_tokens = self.requests = 0
        self.on_answer: Callable[[Answer], None] = lambda answer: None
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {_header_value(key)}"} if key else {},
            timeout=timeout_seconds,
            transport=transport,
            limits=httpx.Limits(max_connections=None),
        )
        self._interval_seconds = 1 / requests_per_second if requests_per_second else 0.0
        self._next_start = 0.0
        self._stored = stored
        self._wait = wait
        self._lock = threading.Lock()
        self._failures_in_a_row = 0

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all prompts and outputs so far."""
        return self.prompt_tokens + self.generated_tokens

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str) -> Exchange:
        """Read a page such as `/models`."""
        return self._attempts(f"get {path}", path, None)

    def send(self, call: Call) -> Answer:
        """Send one request and return its answer, with `error` set if there is none."""
        found = self._attempts(call.label, call.path, call.body)
        answer = Answer(call.label, call.path, call.body, self.url)
        answer.status, answer.seconds = found.status, found.seconds
        answer.error = found.error
        if found.events:
            fill(answer, found.events, bool(call.body.get("stream")))
        with self._lock:
            self.requests += 1
            self.generated_tokens += answer.token_count
            self.prompt_tokens += answer.prompt_tokens or 0
            is_failure = found.is_retried and not found.events
            self._failures_in_a_row = self._failures_in_a_row + 1 if is_failure else 0
            failures = self._failures_in_a_row
        self.on_answer(answer)
        if failures >= MAX_FAILURES_IN_A_ROW:
            raise EndpointDownError(f"{failures} requests in a row failed: {answer.error}")
        return answer

    def send_all(self, calls: Sequence[Call], width: int | None = None) -> list[Answer]:
        """Send requests at the same time, `width` at most; return answers in the order of the calls."""
        width = min(len(calls), width or self.concurrency)
        if width <= 1:
            return [self.send(call) for call in calls]
        with ThreadPoolExecutor(width) as pool:
            return list(pool.map(self.send, calls))

    def _attempts(self, label: str, path: str, body: Mapping[str, Any] | None) -> Exchange:
        """Exchange with retries; a stored result is returned without a request."""
        key = ExchangeFile.key(self.url, label, body)
        stored = self._stored.get(key) if self._stored else None
        if stored is not None:
            return stored
        wait_seconds = FIRST_WAIT_SECONDS
        for attempt in range(MAX_ATTEMPTS):
            self._pace()
            start = time.monotonic()
            found = exchange(self._client, path.lstrip("/"), body)
            found.seconds = time.monotonic() - start
            if not found.is_retried or attempt == MAX_ATTEMPTS - 1:
                break
            self._wait(min(MAX_WAIT_SECONDS, found.retry_after_seconds or wait_seconds))
            wait_seconds *= 2
        if self._stored:
            self._stored.put(key, found)
        return found

    def _pace(self) -> None:
        """Wait until the next request may start."""
        if not self._interval_seconds:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + self._interval_seconds
        if start > now:
            self._wait(start - now)
