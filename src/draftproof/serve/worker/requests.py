"""Requests in the worker: decoded, their grammars compiled, admitted to the engine, aborted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from draftproof.engine.step.step_results import column_logprob_kind, logprob_width_of
from draftproof.errors import DraftproofError, EngineDownError, QueueFullError, RequestError
from draftproof.llm import LLM
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.encode import AdmissionFailure
from draftproof.serve.ipc.frame import RequestStatus
from draftproof.serve.ipc.messages import (
    AbortRequests,
    AddRequests,
    RequestBody,
    build_params,
    build_requests,
    decode_body,
)
from draftproof.serve.worker.frontend_connection import FrontendConnection, RequestEntry
from draftproof.types import Grammar

NUM_GRAMMAR_THREADS = 4  # they wait for the one process that compiles grammars

log = logging.getLogger("draftproof")


class RequestTable:
    """Requests of all HTTP processes. `wake` ends the wait of the worker's loop, from any thread."""

    def __init__(self, llm: LLM, wake: Callable[[], None]) -> None:
        self.entries: dict[str, RequestEntry] = {}  # by request id
        self.version = 0  # increases when `entries` loses one
        self.unsent_stats: set[str] = set()  # ids of requests whose statistics are not sent yet
        self._llm, self._engine, self._wake = llm, llm.engine, wake
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, "draftproof-grammar")
        self._compiled: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def add(self, connection: FrontendConnection, add: AddRequests, parts: list[bytes]) -> None:
        """Admit the requests of one prompt, after its grammar is compiled if it has one."""
        try:
            body = decode_body(parts[0])
            params = build_params(body.params)
        except (msgspec.MsgspecError, IndexError, UnicodeDecodeError, RequestError) as error:
            self._fail(connection, add, error)
            return
        if not params.needs_grammar:
            self._admit(connection, add, body, params, None)
        else:
            connection.compiling.add(add.handle)
            self._grammar_threads.submit(self._compile, connection, add, body, params)

    def _compile(
        self, connection: FrontendConnection, add: AddRequests, body: RequestBody, params: SamplingParams
    ) -> None:
        """Compile the grammar in a thread, then queue the admission for the worker's loop."""
        try:
            grammar = self._llm.compile_grammar(params, body.prompt)
            self._compiled.put(partial(self._admit, connection, add, body, params, grammar))
        except Exception as error:
            self._compiled.put(partial(self._fail, connection, add, error))
        self._wake()

    def admit_compiled(self) -> None:
        """Admit the requests whose grammars have been compiled."""
        while True:
            try:
                self._compiled.get_nowait()()
            except Empty:
                return

    def _admit(
        self,
        connection: FrontendConnection,
        add: AddRequests,
        body: RequestBody,
        params: SamplingParams,
        grammar: Grammar | None,
    ) -> None:
        if grammar is not None and add.handle not in connection.compiling:
            return  # aborted meanwhile, or the HTTP process disconnected
        connection.compiling.discard(add.handle)
        vocab = self._engine.limits.vocab_size
        kind, width = column_logprob_kind(params, vocab), logprob_width_of(params, vocab)
        made: list[RequestEntry] = []
        try:
            for i, request in enumerate(build_requests(add, body, params, f"{connection.number}:", grammar)):
                stats = self._engine.add(request)
                made.append(RequestEntry(connection, add.handle + i, request, stats, kind, width))
        except Exception as error:
            for entry in made:
                self._engine.abort(entry.request.id)
            self._fail(connection, add, error)
            return
        for entry in made:
            self.entries[entry.request.id] = connection.entries[entry.handle] = entry
            self.unsent_stats.add(entry.request.id)

    def _fail(self, connection: FrontendConnection, add: AddRequests, error: Exception) -> None:
        connection.compiling.discard(add.handle)
        if not isinstance(error, DraftproofError):
            log.error("a request could not be admitted", exc_info=error)
        status = RequestStatus.QUEUE_FULL if isinstance(error, QueueFullError) else RequestStatus.INVALID
        if isinstance(error, EngineDownError):  # it sleeps
            status = RequestStatus.CLOSED
        param = error.param if isinstance(error, RequestError) else None
        connection.failures.append(AdmissionFailure(add.handle, status, str(error), param))

    def abort(self, connection: FrontendConnection, abort: AbortRequests) -> None:
        """Abort requests by handle."""
        for handle in abort.handles:
            connection.compiling.discard(handle)
            entry = connection.entries.get(handle)  # it may have finished meanwhile
            if entry is not None:
                self.remove(entry)
                self._engine.abort(entry.request.id)

    def release(self, connection: FrontendConnection) -> None:
        """Abort all requests of a connection."""
        connection.compiling.clear()
        for entry in list(connection.entries.values()):
            self.remove(entry)
            self._engine.abort(entry.request.id)

    def remove(self, entry: RequestEntry) -> None:
        """Remove a request that finished or is aborted."""
        del self.entries[entry.request.id], entry.connection.entries[entry.handle]
        self.unsent_stats.discard(entry.request.id)
        self.version += 1

    def close(self) -> None:
        """Stop the grammar threads without waiting for them."""
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
