"""Uvicorn's HTTP protocol with limits on the size of a request's headers and the time they may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
HEADER_SECONDS = 20.0


class Protocol(HttpToolsProtocol):
    """Connection that is closed if it sends no request, or never completes its headers."""

    _header_bytes = 0  # of a request with incomplete headers; -1: they are complete
    _field_bytes = 0  # of its URL and complete fields, which may all be in the packet of the body
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the headers."""
        before = self._header_bytes
        super().data_received(data)
        if before >= 0 and self._header_bytes >= 0 and self.parser is not None:
            self._header_bytes = before + len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")

    def on_message_begin(self) -> None:
        """Start the timer of a request."""
        super().on_message_begin()
        self._header_bytes = self._field_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close_slow)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the URL."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a field."""
        self._count_field(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_field(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser stops, and 400 is sent

    def on_headers_complete(self) -> None:
        """Stop the timer."""
        self._header_bytes = -1
        self._stop_timer()
        super().on_headers_complete()

    def _close_slow(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
