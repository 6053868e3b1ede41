"""Engine in another process, with the interface that the frontend uses.

Requests are sent as messages. Received frames are decoded to the results that the engine returned. Errors
that only the worker can find, a full queue or an invalid grammar, arrive later as admission failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from draftproof.engine.live.operations import OperationName, PauseMode, Reply
from draftproof.engine.step.step_results import StepResults
from draftproof.engine.validation import Limits, check_request
from draftproof.errors import (
    ConfigError,
    DraftproofError,
    EngineClosedError,
    EngineDeadError,
    EngineDownError,
    LoadError,
    QueueFullError,
    RequestError,
)
from draftproof.metrics import EngineStats, RequestStats, StepTotals, Timings, WorkerStatus
from draftproof.sampling_params import SamplingParams
from draftproof.serve.ipc.connection import ConnectionEvent, WorkerConnection
from draftproof.serve.ipc.decode import (
    DecodedFrame,
    FinishedEntry,
    ReceivedGroup,
    decode_frame,
    to_step_results,
)
from draftproof.serve.ipc.frame import VERSION, Bounds, FrameError, RequestStatus
from draftproof.serve.ipc.messages import (
    DISCONNECTED,
    ENGINE_INFO,
    OPERATION_RESULT,
    TIMINGS,
    EngineInfo,
    OperationResult,
    RunOperation,
    decode_disconnected,
    decode_engine_info,
    decode_operation_result,
    decode_timings,
    encode,
)
from draftproof.serve.ipc.remote_requests import RemoteRequests
from draftproof.serve.ipc.status import read_status, status_folder
from draftproof.types import Request

CONNECT_SECONDS = 60.0
OPERATION_ERRORS = {kind.__name__: kind for kind in (ConfigError, LoadError, EngineDownError)}
NO_RESULTS = StepResults([], np.zeros((0, 0), np.int64), {})
EMPTY_GROUP = ReceivedGroup.build([], {}, 1)
ZERO_STATS = EngineStats(*[0] * 8)


class RemoteEngine:
    """Engine behind a connection. `on_step`: see `connect`."""

    step_blocks = True
    has_operations = False  # the worker runs them

    def __init__(
        self, address: str, seconds: float = CONNECT_SECONDS, on_step: Callable[[float], object] | None = None
    ) -> None:
        self.totals = StepTotals()
        self._on_step = on_step
        self._folder = status_folder(address)
        self._stats, self._timings = ZERO_STATS, Timings()
        self._open = RemoteRequests()
        self._operations: dict[int, Reply] = {}  # by number, not finished yet
        self._num_operations = 0
        self._group, self._group_version = EMPTY_GROUP, 0
        self._sequence = 0
        self._is_connected = False
        self._connection = WorkerConnection(address)
        try:
            self.info = self._connect(seconds)
        except BaseException:
            self._connection.close()
            raise
        limits = self.info.limits
        self._bounds = Bounds(limits.vocab_size, limits.speculative_tokens, len(self.info.sources))

    def _connect(self, seconds: float) -> EngineInfo:
        while True:
            received = self._connection.receive(seconds)
            if received is None:
                raise EngineDownError(f"the engine's process does not respond within {seconds:g} s")
            if isinstance(received, bytes) and received.startswith(ENGINE_INFO):
                return self._on_engine_info(received)

    def _on_engine_info(self, data: bytes) -> EngineInfo:
        info = decode_engine_info(data[len(ENGINE_INFO) :])
        if info.version != VERSION:
            text = f"the engine uses version {info.version} of the wire format, this process {VERSION}"
            raise EngineDeadError(text)
        self._is_connected, self._sequence = True, 0
        return info

    @property
    def limits(self) -> Limits:
        """Limits that requests are validated against."""
        return self.info.limits

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the proposers."""
        return self.info.sources

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text tokens of the model."""
        return self.info.eos_token_ids

    @property
    def is_connected(self) -> bool:
        """Return True while a worker is connected."""
        return self._is_connected

    @property
    def has_work(self) -> bool:
        """Return True while requests are open."""
        return bool(self._open.requests)

    @property
    def weights_version(self) -> int:
        """Version of the weights as of the last frame."""
        return self._stats.weights_version

    @property
    def sleep_level(self) -> int:
        """Level of the engine's sleep as of the last frame; 0: it is awake."""
        return self._stats.sleep_level

    def stats(self) -> EngineStats:
        """Return the statistics of the last frame, over all HTTP processes."""
        return self._stats

    def describe(self) -> str:
        """Return the engine's own description."""
        return self.info.description

    def status(self) -> WorkerStatus:
        """Return the status that the supervisor wrote."""
        return read_status(self._folder)

    def strategy_label(self, params: SamplingParams) -> tuple[str, bool]:
        """Return the verification strategy of a request with its label, and whether it is lossless."""
        return self.info.strategies.label(params)

    def check(self, request: Request) -> int:
        """Validate a request as the engine does, except for what only the worker can check."""
        if not self._is_connected:
            raise self.down_error()
        if self.sleep_level:
            raise EngineDownError("the engine sleeps: wake it up, or try again later")
        if request.id in self._open:
            raise RequestError(f"a request with id {request.id!r} is already running", "request_id")
        self.info.strategies.name_for(request.params)
        return check_request(request, self.limits)

    def down_error(self) -> EngineClosedError:
        """Return the error for a request while no worker is connected."""
        status = self.status()
        reason = f" ({status.reason})" if status.reason else ""
        if status.state in ("failed", "stopped"):
            return EngineDeadError(f"the engine has stopped for good{reason}")
        return EngineDownError(f"the engine is being restarted{reason}: try again in a moment")

    def add(self, request: Request, max_length: int | None = None) -> RequestStats:
        """Queue a request. `max_length`: the result of `check`, if it was called."""
        if max_length is None:
            self.check(request)
        return self._open.add(request, self._send)

    def abort(self, request_id: str) -> bool:
        """Abort a request; return False if it is not open."""
        return self._open.abort(request_id, self._send)

    def operate(self, name: OperationName, arguments: dict[str, Any], mode: PauseMode, reply: Reply) -> None:
        """Send an operation to the worker; `reply` is called with its result or an exception."""
        if not self._is_connected:
            reply(self.down_error())
            return
        self._num_operations += 1
        self._operations[self._num_operations] = reply
        self._send(encode(RunOperation(self._num_operations, name, arguments, mode)))

    def _on_operation_result(self, result: OperationResult) -> None:
        reply = self._operations.pop(result.number, None)
        if reply is not None:
            kind = OPERATION_ERRORS.get(result.error_type, DraftproofError)
            reply(result.value if result.error is None else kind(result.error))

    def _send(self, *parts: bytes) -> None:
        """Send a message; dropped without a worker, because open requests fail then anyway."""
        if self._is_connected:
            self._connection.send(*parts)

    def wake(self) -> None:
        """End the wait of `step`, from any thread."""
        self._connection.wake()

    def set_background_work(self, work: Callable[[], object]) -> None:
        """Ignore `work`: there is no device here to overlap it with."""

    def step(self) -> StepResults:
        """Return the results of the next frame; empty after `wake`. EngineDownError: disconnected."""
        self._open.flush(self._send)
        received = self._connection.receive()
        if isinstance(received, bytes):
            return self._on_message(received)
        if received is ConnectionEvent.DISCONNECTED:
            return self._on_disconnect("the engine's process has ended")
        return NO_RESULTS

    def _on_message(self, data: bytes) -> StepResults:
        try:
            return self._decode(data)
        except (FrameError, msgspec.MsgspecError) as error:
            logging.getLogger("draftproof").critical("cannot decode a message of the engine: %s", error)
            self._connection.reconnect()
            return self._on_disconnect(f"a message of the engine cannot be decoded: {error}")

    def _decode(self, data: bytes) -> StepResults:
        if data.startswith(ENGINE_INFO):
            info = self._on_engine_info(data)
            if _without_pid(info) != _without_pid(self.info):
                self._is_connected = False
                text = "the restarted engine has another model or options: restart the server"
                raise EngineDeadError(text)
            self.info = info
            return NO_RESULTS
        if data.startswith(TIMINGS):
            self._timings = decode_timings(data[len(TIMINGS) :])
            self._stats = replace(self._stats, timings=self._timings)
            return NO_RESULTS
        if data.startswith(OPERATION_RESULT):
            self._on_operation_result(decode_operation_result(data[len(OPERATION_RESULT) :]))
            return NO_RESULTS
        if data.startswith(DISCONNECTED):
            reason = decode_disconnected(data[len(DISCONNECTED) :]).reason
            self._connection.reconnect()
            return self._on_disconnect(f"the engine has stopped: {reason}")
        frame = decode_frame(data, self._bounds)
        if frame.header.sequence != self._sequence:
            raise FrameError(f"frame number {frame.header.sequence}, expected {self._sequence}")
        self._sequence += 1
        return self._apply_frame(frame)

    def _on_disconnect(self, reason: str) -> StepResults:
        """Drop all open requests. EngineDownError if a worker was connected."""
        was_connected, self._is_connected = self._is_connected, False
        self._open.clear()
        for operation in list(self._operations):
            self._operations.pop(operation)(EngineDownError(f"{reason}; the operation may have run or not"))
        self._group = EMPTY_GROUP
        self._stats, self.totals, self._timings = ZERO_STATS, StepTotals(), Timings()
        if was_connected:
            raise EngineDownError(f"{reason}; unfinished requests are lost: try again")
        return NO_RESULTS

    def _apply_frame(self, frame: DecodedFrame) -> StepResults:
        header, opened = frame.header, self._open
        self._stats = frame.engine_stats(self._timings)
        self.totals = StepTotals(header.num_steps, header.busy_seconds)
        if self._on_step is not None and header.step_seconds:
            self._on_step(header.step_seconds)
        failures: dict[str, RequestError | EngineClosedError] = {}
        for i, entry in frame.finished.items():
            if entry.status.is_admission_failure:
                first = opened.remove_prompt(frame.handles[i])
                if first is not None:
                    failures[first.id] = _admission_error(entry)
        if frame.handles != self._group.handles or self._group_version != opened.version:
            self._group = ReceivedGroup.build(frame.handles, opened.requests, self._bounds.vocab_size)
            self._group_version = opened.version
        for i, stats in frame.stats:
            opened.update_stats(frame.handles[i], stats)
        results = to_step_results(frame, self._group, self.info.sources, failures)
        for i in frame.finished:
            opened.remove(frame.handles[i])
        return results

    def close(self) -> None:
        """Close the connection."""
        self._is_connected = False
        self._connection.close()


def _admission_error(entry: FinishedEntry) -> RequestError | EngineClosedError:
    message = entry.message or "the engine gives no reason"
    if entry.status is RequestStatus.QUEUE_FULL:
        return QueueFullError(message, entry.param)
    if entry.status is RequestStatus.CLOSED:
        return EngineDownError(message)
    return RequestError(message, entry.param)


def _without_pid(info: EngineInfo) -> EngineInfo:
    """Return the properties that must be equal after a restart."""
    return msgspec.structs.replace(info, pid=0)
