"""Supervisor of the worker process: starts it, watches it, restarts it, and cleans up after it.

    with Supervisor("smollm2-135m", speculative_config={"method": "ngram"}) as supervisor:
        llm = connect(supervisor.address)

The worker ends with this process, however this process ends, because it holds the other end of a pipe. A
worker that ends by itself is restarted, after a delay that doubles with each consecutive failure; after
`max_restarts` of them the supervisor gives up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.errors import ConfigError, EngineDeadError, LoadError
from draftproof.metrics import WorkerState, WorkerStatus
from draftproof.serve.ipc.status import SOCKET_NAME, read_status, socket_address, write_status
from draftproof.serve.worker_process import WorkerProcess

MAX_SOCKET_PATH_BYTES = 100  # systems allow 104 to 108
MAX_DELAY_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # a worker that served this long resets the count of consecutive failures
ERRORS = {"ConfigError": ConfigError, "LoadError": LoadError}

log = logging.getLogger("draftproof")


class Supervisor:
    """Supervisor of one worker. Options are those of `LLM`."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        max_restarts: int = 5,
        first_delay: float = 0.5,
        hang_seconds: float | None = 300.0,
        log_level: str = "WARNING",
        **options: Any,
    ) -> None:
        """Validate the options and create the folder of the socket.

        `max_restarts`: consecutive ones. `hang_seconds`: a step that takes longer counts as hung and the
        worker is killed; the first steps may compile kernels, so be generous. None: no limit.
        """
        EngineConfig.parse(model, options)  # raises here rather than in the worker
        self._max_restarts, self._first_delay, self._hang_seconds = max_restarts, first_delay, hang_seconds
        self._job = {"model": model, "options": options, "log_level": log_level}
        try:
            json.dumps(self._job)
        except TypeError as error:
            raise ConfigError(f"an option cannot be sent to the engine's process: {error}") from error
        self.folder = _private_folder()
        self.address = socket_address(self.folder)
        self._status = WorkerStatus("starting", since=time.time())
        write_status(self.folder, self._status)
        self._process: WorkerProcess | None = None
        self._is_ready = False  # the present worker has reported that it serves
        self._end_reason: str | None = None  # of the present worker, as it reported it
        self._failure: Exception | None = None
        self._start_decided = threading.Event()  # the first worker is ready, or has failed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="draftproof-supervisor", daemon=True)
        self._clean_up = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def start(self) -> Supervisor:
        """Return when requests are served. Raises ConfigError, LoadError or EngineDeadError."""
        self._thread.start()
        try:
            self._start_decided.wait()
        except BaseException:  # Ctrl-C while the model is loaded
            self.stop()
            raise
        if self._failure is not None:
            self.stop()
            raise self._failure
        return self

    def stop(self) -> None:
        """End the worker and remove its folder. May be called repeatedly."""
        self._stopping.set()
        if self._process is not None:
            self._process.close_parent_pipe()
        if self._thread.is_alive():
            self._thread.join()
        self._clean_up()

    def __enter__(self) -> Supervisor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def status(self) -> WorkerStatus:
        """Return the status that HTTP processes read."""
        return read_status(self.folder)

    # --- supervisor thread ---

    def _supervise(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            reason = self._run_worker()
            if self._stopping.is_set():
                break
            if not self._start_decided.is_set():  # the first start failed: a retry would fail as well
                self._set_status("failed", reason)
                break
            is_first = self._is_ready and time.monotonic() - began > HEALTHY_SECONDS
            failures = 1 if is_first else failures + 1
            if failures > self._max_restarts:
                log.critical("the worker ended %d times in a row, giving up: %s", failures, reason)
                self._set_status("failed", f"it ended {failures} times in a row, last: {reason}")
                break
            delay = min(self._first_delay * 2 ** (failures - 1), MAX_DELAY_SECONDS)
            log.error("the worker ended (%s): restarting in %g s", reason, delay)
            self._status = replace(self._status, restarts=self._status.restarts + 1)
            self._set_status("restarting", reason)
            if self._stopping.wait(delay):
                break
        self._start_decided.set()

    def _set_status(self, state: WorkerState, reason: str | None = None, pid: int | None = None) -> None:
        self._status = WorkerStatus(state, self._status.restarts, reason, pid, time.time())
        with contextlib.suppress(OSError):  # the folder is removed, so no reader is left
            write_status(self.folder, self._status)

    def _run_worker(self) -> str:
        """Run one worker from start to end; return why it ended."""
        self._is_ready, self._end_reason = False, None
        try:
            process = self._process = WorkerProcess({**self._job, "folder": str(self.folder)})
        except OSError as error:
            self._set_failure("OSError", str(error))
            return f"it could not be started: {error}"
        if self._stopping.is_set():  # `stop` may have been called before there was a process
            process.close_parent_pipe()
        process.read_reports(self._on_report, self._on_silence)
        exit_reason = process.wait()
        (self.folder / SOCKET_NAME).unlink(missing_ok=True)
        reason = self._end_reason or exit_reason
        if not self._is_ready:
            self._set_failure("", f"the engine's process ended before it was ready: {reason}")
        return reason

    def _set_failure(self, kind: str, text: str) -> None:
        if self._failure is None:
            self._failure = ERRORS.get(kind, EngineDeadError)(text)

    def _on_report(self, report: dict[str, Any]) -> None:
        if "ready" in report:
            self._is_ready = True
            self._set_status("ready", self._status.reason, report["ready"])
            self._start_decided.set()
        elif "failed" in report:
            self._end_reason = f"{report['failed']}: {report['text']}"
            self._set_failure(report["failed"], report["text"])
        elif "engine_error" in report:
            self._end_reason = report["engine_error"]
        elif self._is_hung(report["beat"]):
            self._kill(f"a step took longer than {self._hang_seconds:g} s")

    def _on_silence(self, seconds: float) -> None:
        if self._is_ready and self._is_hung(seconds):
            self._kill(f"no report for {self._hang_seconds:g} s")

    def _is_hung(self, seconds: float) -> bool:
        return self._hang_seconds is not None and seconds > self._hang_seconds

    def _kill(self, reason: str) -> None:
        self._end_reason = reason
        assert self._process is not None
        self._process.kill()


def _private_folder() -> Path:
    """Create a folder for this user only, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="draftproof-"))
    if len(str(folder / SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="draftproof-", dir="/tmp"))
    return folder
