"""Requests of an HTTP process that are open in the worker, with the messages not sent yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftproof.metrics import RequestStats
from draftproof.serve.ipc.messages import AbortRequests, AddRequests, encode, encode_body
from draftproof.types import Request


@dataclass(slots=True)
class PendingAdd:
    """Requests of one prompt that one message will add."""

    prompt_token_ids: object  # the list object itself, which the requests of one prompt share
    handle: int
    seeds: list[int]
    body: bytes


class RemoteRequests:
    """Open requests by handle, and the queue of additions and aborts."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # by handle
        self.version = 0  # increases when `requests` loses one
        self._stats: dict[int, RequestStats] = {}  # by handle
        self._handles: dict[str, int] = {}  # by request id
        self._prompts: dict[int, range] = {}  # all handles of a prompt, by its first
        self._next_handle = 1
        self._pending: PendingAdd | None = None
        self._aborted: list[int] = []  # handles whose abort is not sent yet

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handles

    def add(self, request: Request, send: Callable[..., None]) -> RequestStats:
        """Add a request; it is sent with the others of its prompt. Raises RequestError."""
        pending = self._pending
        if pending is None or pending.prompt_token_ids is not request.prompt_token_ids:
            self.flush(send)
            body = encode_body(request)
            pending = self._pending = PendingAdd(request.prompt_token_ids, self._next_handle, [], body)
        handle = pending.handle + len(pending.seeds)
        pending.seeds.append(request.seed)
        self._next_handle = handle + 1
        self._prompts[pending.handle] = range(pending.handle, self._next_handle)
        self.requests[handle], self._handles[request.id] = request, handle
        stats = self._stats[handle] = RequestStats()
        return stats

    def abort(self, request_id: str, send: Callable[..., None]) -> bool:
        """Remove a request and queue its abort; return False if it is not open."""
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        if self._pending is not None and handle >= self._pending.handle:
            self.flush(send)
        self.remove(handle)
        self._aborted.append(handle)
        return True

    def flush(self, send: Callable[..., None]) -> None:
        """Send the queued aborts and additions."""
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            send(encode(AbortRequests(aborted)))
        if self._pending is not None:
            pending, self._pending = self._pending, None
            send(encode(AddRequests(pending.handle, pending.seeds)), pending.body)

    def remove(self, handle: int) -> None:
        """Remove a request that finished, failed or is aborted."""
        request = self.requests.pop(handle, None)
        if request is not None:
            del self._handles[request.id], self._stats[handle]
            self.version += 1
        self._prompts.pop(handle, None)

    def remove_prompt(self, handle: int) -> Request | None:
        """Remove all requests of a prompt by its first handle; return the first if it was open."""
        first = self.requests.get(handle)
        for each in self._prompts.get(handle, ()):
            self.remove(each)
        return first

    def update_stats(self, handle: int, new: RequestStats) -> None:
        """Copy received statistics to those of the open request."""
        stats = self._stats.get(handle)
        if stats is not None:
            stats.num_cached_tokens, stats.num_preemptions = new.num_cached_tokens, new.num_preemptions
            stats.scheduled_at, stats.first_token_at = new.scheduled_at, new.first_token_at

    def clear(self) -> None:
        """Remove everything, sent or not."""
        self._pending, self._aborted = None, []
        self.version += 1
        for table in (self.requests, self._stats, self._handles, self._prompts):
            table.clear()
