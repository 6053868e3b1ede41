"""Engine loop of the worker process, which serves any number of HTTP processes.

One iteration: read messages, admit requests, run a step, send each HTTP process its frame. A step never
waits: grammars are compiled in another process, and sending does not block (see `frontend_connection`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec

from draftproof.llm import LLM
from draftproof.serve.ipc.encode import AdmissionFailure
from draftproof.serve.ipc.frame import VERSION, RequestStatus
from draftproof.serve.ipc.messages import (
    ENGINE_INFO,
    TIMINGS,
    AbortRequests,
    AddRequests,
    EngineInfo,
    Hello,
    RunOperation,
    decode_message,
    encode,
)
from draftproof.serve.worker.frontend_connection import FrontendConnection
from draftproof.serve.worker.frontends import Frontends
from draftproof.serve.worker.operations import Operations
from draftproof.serve.worker.requests import RequestTable
from draftproof.serve.worker.step_sender import StepSender

MAX_MESSAGES_PER_STEP = 1000  # so that many messages do not delay a step for long
STATUS_INTERVAL_SECONDS = 1.0  # between two state frames to idle HTTP processes, and between two TIMINGS
FULL_QUEUE_POLL_SECONDS = 0.002  # between two attempts to send to an HTTP process whose queue is full
DRAIN_SECONDS = 60.0

log = logging.getLogger("draftproof")


class Worker:
    """Engine loop. Runs until `drain` or `stop` is called, or the engine fails."""

    def __init__(self, llm: LLM, address: str, options: dict[str, Any]) -> None:
        self.engine = llm.engine
        self.iteration_began = time.monotonic()  # of the current iteration, for the heartbeat thread
        self._engine_info = ENGINE_INFO + encode(describe_engine(llm, options))
        self.frontends = Frontends(address, lambda connection: self._requests.release(connection))
        self._requests = RequestTable(llm, self.frontends.wake)
        self._operations = Operations(self.engine, self.frontends, lambda: self._sender.send_snapshot())
        self._sender = StepSender(self.engine, self.frontends, self._requests)
        self._last_frame = self._last_timings = time.monotonic()
        self._drain_until: float | None = None

    def drain(self) -> None:
        """Admit no more requests, finish the open ones, and end. From any thread, or a signal handler."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + DRAIN_SECONDS
        self.frontends.wake()

    def stop(self) -> None:
        """End after this iteration and abort open requests."""
        self._drain_until = 0.0
        self.frontends.wake()

    def run(self) -> None:
        """Run the loop. Raises what the engine raises."""
        reason = "it was stopped"
        try:
            while not self._is_drained():
                self._iterate()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._requests.close()
            self._operations.close()
            self.frontends.close(reason)

    def _iterate(self) -> None:
        self.iteration_began = time.monotonic()
        self.engine.runner.check_ranks()
        self._receive()
        self._requests.admit_compiled()
        self._operations.run_prepared()
        self._sender.send_failures()
        if self.iteration_began - self._last_timings >= STATUS_INTERVAL_SECONDS:
            self._last_timings = self.iteration_began
            self.frontends.send_all(TIMINGS + encode(self.engine.stats().timings))
        self.frontends.flush()
        if self._can_step():
            began = time.perf_counter()
            results = self.engine.step()
            self._sender.send_step(results, time.perf_counter() - began)
            if len(results):
                self._last_frame = time.monotonic()
        else:
            self._wait()

    def _can_step(self) -> bool:
        if self.engine.has_operations:
            return True
        connections = self.frontends.connections.values()
        return not self.engine.sleep_level and any(
            each.entries and not each.is_stalled for each in connections
        )

    def _wait(self) -> None:
        """Wait for a message; send the engine's state if none arrives."""
        seconds = FULL_QUEUE_POLL_SECONDS if self.frontends.has_buffered else STATUS_INTERVAL_SECONDS
        arrived = self.frontends.wait(seconds)
        if not arrived and time.monotonic() - self._last_frame >= STATUS_INTERVAL_SECONDS:
            self._last_frame = time.monotonic()
            self._sender.send_snapshot()

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        is_busy = any(each.is_busy for each in self.frontends.connections.values())
        return not is_busy or time.monotonic() > self._drain_until

    def _receive(self) -> None:
        for identity, parts in self.frontends.receive(MAX_MESSAGES_PER_STEP):
            try:
                message = decode_message(parts[0])
            except (msgspec.MsgspecError, IndexError, UnicodeDecodeError) as error:
                log.error("cannot decode a message of an HTTP process: %s", error)
                continue
            connection = self.frontends.connections.get(identity)
            if isinstance(message, Hello):
                self._accept(identity, message)
            elif connection is None:
                log.error("a message without a Hello before it")
                self.frontends.reject(identity)
            elif isinstance(message, RunOperation):
                self._operations.begin(connection, message)
            elif isinstance(message, AbortRequests):
                self._requests.abort(connection, message)
            else:
                self._add(connection, message, parts[1:])

    def _accept(self, identity: bytes, hello: Hello) -> None:
        if hello.version != VERSION:
            log.error("an HTTP process uses version %d of the wire format, not %d", hello.version, VERSION)
        connection = self.frontends.accept(identity)
        # sent for any version: the HTTP process finds the mismatch in it and gives up
        self.frontends.guard(connection, connection.try_send, self.frontends.socket, self._engine_info)

    def _add(self, connection: FrontendConnection, add: AddRequests, parts: list[bytes]) -> None:
        if self._drain_until is None:
            self._requests.add(connection, add, parts)
        else:
            message = "the engine is draining and accepts no new requests"
            connection.failures.append(AdmissionFailure(add.handle, RequestStatus.CLOSED, message))


def describe_engine(llm: LLM, options: dict[str, Any]) -> EngineInfo:
    """Return the engine's properties for HTTP processes."""
    engine = llm.engine
    return EngineInfo(
        version=VERSION,
        pid=os.getpid(),
        model=llm.config.model,
        options=options,
        limits=engine.limits,
        sources=engine.sources,
        strategies=engine.guarantees,
        eos_token_ids=engine.eos_token_ids,
        tokenizer=None if llm.tokenizer is None else llm.tokenizer.where,
        default_options=dict(llm.default_options),
        pooler=llm.pooler,
        description=engine.describe(),
    )
