"""HTTP on a socket: uvicorn's, with a limit on the size of a request's head and on the time it may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0


class Protocol(HttpToolsProtocol):
    """A connection that says nothing, or never comes to the end of its headers, is closed."""

    _head_bytes = 0  # of a request whose head is not complete; -1: it is
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._head_bytes
        super().data_received(data)
        if before >= 0 and self._head_bytes >= 0 and self.parser is not None:
            self._head_bytes = before + len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        self._stop_timer()
        super().on_headers_complete()

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
