"""Responses kept in memory for `previous_response_id`, by API key, with bounds on their number and bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from draftproof.serve.api.generation.request_schema import Message
from draftproof.serve.http.errors import ApiError
from draftproof.serve.settings import Settings

OFF = (
    "this server stores no responses: send the whole conversation as input, "
    "or start the server with --max-stored-responses and one HTTP process"
)
_MESSAGES = msgspec.json.Decoder(list[Message])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation up to its end, without instructions, both as JSON.

    The last message of the conversation is the output of the response.
    """

    body: bytes
    conversation: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that count against the bound."""
        return len(self.body) + len(self.conversation)

    def messages(self) -> list[Message]:
        """Return the conversation."""
        return _MESSAGES.decode(self.conversation)


class ResponseStore:
    """Bounded store of one HTTP process. The responses of a key that were used longest ago go first."""

    def __init__(self, settings: Settings) -> None:
        self._max_entries, self._max_bytes = settings.max_stored_responses, settings.max_stored_bytes
        self._entries: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: dict[str, int] = {}
        self._lock = threading.Lock()  # large responses are built in a thread

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return self._max_entries > 0

    def add(self, key: str, id: str, body: bytes, messages: Sequence[Message]) -> None:
        """Store a response of an API key, unless it exceeds the bound by itself."""
        entry = StoredResponse(body, msgspec.json.encode(messages))
        with self._lock:
            self._remove(key, id)
            if not self.is_on or entry.num_bytes > self._max_bytes:
                return
            entries = self._entries.setdefault(key, OrderedDict())
            entries[id] = entry
            self._num_bytes[key] = self._num_bytes.get(key, 0) + entry.num_bytes
            while len(entries) > self._max_entries or self._num_bytes[key] > self._max_bytes:
                self._remove(key, next(iter(entries)))

    def find(self, key: str, id: str, param: str | None = None) -> StoredResponse:
        """Return a response of an API key; ApiError 404 if there is none, 400 if none are stored."""
        if not self.is_on:
            raise ApiError(400, f"{param}: {OFF}" if param else OFF, param, "unsupported_option")
        with self._lock:
            entries = self._entries.get(key, OrderedDict())
            if id in entries:
                entries.move_to_end(id)
                return entries[id]
        text = f"there is no stored response {id!r}: it was deleted, dropped for newer ones, or not stored"
        raise ApiError(404, text, param, "previous_response_not_found" if param else "response_not_found")

    def delete(self, key: str, id: str) -> None:
        """Remove a response of an API key; ApiError 404 if there is none."""
        self.find(key, id)
        with self._lock:
            self._remove(key, id)

    def _remove(self, key: str, id: str) -> None:
        entry = self._entries.get(key, OrderedDict()).pop(id, None)
        if entry is not None:
            self._num_bytes[key] -= entry.num_bytes
