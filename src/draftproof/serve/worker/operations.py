"""Operations in the worker: prepared in a thread, run between two steps, their results sent back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from draftproof.engine.engine import Engine
from draftproof.engine.live.operations import Operation
from draftproof.errors import DraftproofError
from draftproof.serve.ipc.messages import OPERATION_RESULT, OperationResult, RunOperation, encode
from draftproof.serve.worker.frontend_connection import FrontendConnection
from draftproof.serve.worker.frontends import Frontends

log = logging.getLogger("draftproof")


class Operations:
    """Operations of all HTTP processes. Files are read in a thread, so that steps go on meanwhile."""

    def __init__(self, engine: Engine, frontends: Frontends, send_state: Callable[[], None]) -> None:
        self._engine, self._frontends, self._send_state = engine, frontends, send_state
        self._thread = ThreadPoolExecutor(1, "draftproof-operation")  # one: they run in the order they came
        self._prepared: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def begin(self, connection: FrontendConnection, message: RunOperation) -> None:
        """Prepare an operation, then queue it for the worker's loop."""
        self._thread.submit(self._prepare, connection, message)

    def _prepare(self, connection: FrontendConnection, message: RunOperation) -> None:
        reply = partial(self._reply, connection, message)
        try:
            run = self._engine.prepare(message.name, message.arguments)
            self._prepared.put(partial(self._engine.operate, Operation(run, message.mode, reply)))
        except Exception as error:
            self._prepared.put(partial(reply, error))
        self._frontends.wake()

    def run_prepared(self) -> None:
        """Queue the operations that have been prepared; the engine runs them in its next steps."""
        while True:
            try:
                self._prepared.get_nowait()()
            except Empty:
                return

    def _reply(self, connection: FrontendConnection, message: RunOperation, result: Any) -> None:
        sent = OperationResult(message.number, result if isinstance(result, int) else None)
        if isinstance(result, Exception):
            kind = type(result).__name__
            if not isinstance(result, DraftproofError):
                log.error("%s failed", message.name, exc_info=result)
            sent = OperationResult(message.number, None, f"{result}" or kind, kind)
        else:
            log.info("%s has run, weights version %d", message.name, self._engine.weights_version)
        self._send_state()  # before the result, so that the caller sees the new state
        data = OPERATION_RESULT + encode(sent)
        self._frontends.guard(connection, connection.send_message, self._frontends.socket, data)

    def close(self) -> None:
        """Stop the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
