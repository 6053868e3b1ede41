"""Sender of step results: one frame per HTTP process that has requests in the step."""

from __future__ import annotations

from draftproof.engine.engine import Engine
from draftproof.engine.step.step_results import StepResults
from draftproof.metrics import RequestStats
from draftproof.serve.ipc.encode import EngineSnapshot, RequestGroup, encode_failures, encode_step
from draftproof.serve.worker.frontend_connection import FrontendConnection, RequestEntry
from draftproof.serve.worker.frontends import Frontends
from draftproof.serve.worker.requests import RequestTable
from draftproof.types import Request


class StepSender:
    """Encodes results and sends them; also sends admission failures and the engine's state."""

    def __init__(self, engine: Engine, frontends: Frontends, requests: RequestTable) -> None:
        self._engine, self._frontends, self._requests = engine, frontends, requests
        self._num_steps, self._busy_seconds = 0, 0.0
        self._num_preemptions = 0
        # the grouping by HTTP process, reused while the step's requests stay the same
        self._grouped: list[Request] = []
        self._grouped_version = 0
        self._groups: list[tuple[FrontendConnection, RequestGroup, list[RequestEntry]]] = []

    def _snapshot(self, step_seconds: float = 0.0) -> EngineSnapshot:
        return EngineSnapshot(
            max_drafts=self._engine.limits.speculative_tokens,
            num_steps=self._num_steps,
            step_seconds=step_seconds,
            busy_seconds=self._busy_seconds,
            stats=self._engine.stats(),
        )

    def send_step(self, results: StepResults, seconds: float) -> None:
        """Send the results of a step that took `seconds`, and remove the requests that finished."""
        self._num_steps += 1
        self._busy_seconds += seconds
        if not len(results):
            return
        requests, snapshot = self._requests, self._snapshot(seconds)
        if results.requests != self._grouped or self._grouped_version != requests.version:
            self._group(results.requests)
        if snapshot.stats.num_preemptions != self._num_preemptions:
            self._num_preemptions = snapshot.stats.num_preemptions
            requests.unsent_stats.update(requests.entries)
        for connection, group, entries in self._groups:
            new_stats = self._take_stats(entries) if requests.unsent_stats else []
            frame = encode_step(connection.sequence, snapshot, results, group, new_stats)
            self._frontends.guard(connection, connection.send, self._frontends.socket, frame)
        for i in results.finishes:
            entry = requests.entries.get(results.requests[i].id)
            if entry is not None:  # its HTTP process may have been dropped above
                requests.remove(entry)

    def _take_stats(self, entries: list[RequestEntry]) -> list[tuple[int, RequestStats]]:
        """Return (index, statistics) of the entries with unsent ones; final ones are not sent again."""
        unsent = self._requests.unsent_stats
        found = [(i, entry.stats) for i, entry in enumerate(entries) if entry.request.id in unsent]
        final = (i for i, stats in found if stats.first_token_at is not None)
        unsent.difference_update(entries[i].request.id for i in final)
        return found

    def _group(self, requests: list[Request]) -> None:
        by_connection: dict[FrontendConnection, list[tuple[int, RequestEntry]]] = {}
        for i, request in enumerate(requests):
            entry = self._requests.entries[request.id]
            by_connection.setdefault(entry.connection, []).append((i, entry))
        self._grouped, self._grouped_version, self._groups = requests, self._requests.version, []
        for connection, pairs in by_connection.items():
            at = None if len(by_connection) == 1 else [i for i, _ in pairs]
            group = RequestGroup.build(at, [(entry.handle, entry.kind, entry.width) for _, entry in pairs])
            self._groups.append((connection, group, [entry for _, entry in pairs]))

    def send_failures(self) -> None:
        """Send the admission failures of every HTTP process."""
        for connection in list(self._frontends.connections.values()):
            if connection.failures:
                failures, connection.failures = connection.failures, []
                frame = encode_failures(connection.sequence, self._snapshot(), failures)
                self._frontends.guard(connection, connection.send, self._frontends.socket, frame)

    def send_snapshot(self) -> None:
        """Send the engine's state to every HTTP process; dropped where the queue is full."""
        self._frontends.for_each(self._send_snapshot)

    def _send_snapshot(self, connection: FrontendConnection) -> None:
        frame = encode_failures(connection.sequence, self._snapshot(), [])
        if not connection.outbox and connection.try_send(self._frontends.socket, frame):
            connection.sequence += 1
