"""The supervisor: starts the worker, watches it, starts it again when it dies, and leaves nothing behind.

    with Supervisor("smollm2-135m", speculative_config={"method": "ngram"}) as supervisor:
        llm = connect(supervisor.address)

The worker's life hangs on a pipe: when this process ends, however it ends, the worker does too. A worker that
dies is started again, after a delay that doubles; after so many failures in a row that is given up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from draftproof.config import DEFAULT_MODEL, EngineConfig
from draftproof.errors import ConfigError, EngineDeadError, LoadError
from draftproof.serve.ipc.status import (
    SOCKET,
    State,
    WorkerStatus,
    address_of,
    read_status,
    write_status,
)

LONGEST_PATH = 100  # of a socket's file: systems allow 104 to 108
LONGEST_DELAY = 30.0
HEALTHY_SECONDS = 60.0  # after which a worker's death is its first
STOP_SECONDS = 10.0
ERRORS = {"ConfigError": ConfigError, "LoadError": LoadError}

log = logging.getLogger("draftproof")


class Supervisor:
    """Of one worker. Options are those of `LLM`."""

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
        """`max_restarts`: in a row. `hang_seconds`: a step that takes longer than this does not end any more;
        the first of its kind may compile kernels, so be generous. None: it may take as long as it likes."""
        EngineConfig.parse(model, options)  # what is wrong with them is said here and now
        self._max_restarts, self._first_delay, self._hang_seconds = max_restarts, first_delay, hang_seconds
        try:
            self._job = json.dumps({"model": model, "options": options, "log_level": log_level})
        except TypeError as error:
            raise ConfigError(f"an option cannot be sent to the engine's process: {error}") from error
        self.folder = _private_folder()
        self.address = address_of(self.folder)
        self._status = WorkerStatus("starting", since=time.time())
        write_status(self.folder, self._status)
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: Exception | None = None
        self._settled = threading.Event()  # it is ready, or never will be
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch_over, name="draftproof-supervisor", daemon=True)
        self._clean_up = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def start(self) -> Supervisor:
        """Returns when requests are served. ConfigError, LoadError, EngineDeadError: why they cannot be."""
        self._thread.start()
        try:
            self._settled.wait()
        except BaseException:  # Ctrl-C, while a model is loaded
            self.stop()
            raise
        if self._failure is not None:
            self.stop()
            raise self._failure
        return self

    def stop(self) -> None:
        """End the worker and remove its folder. Once more does nothing."""
        self._stopping.set()
        self._let_go()
        if self._thread.is_alive():
            self._thread.join()
        self._clean_up()

    def __enter__(self) -> Supervisor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def status(self) -> WorkerStatus:
        return read_status(self.folder)

    # --- the thread ---------------------------------------------------------------------------------

    def _watch_over(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            reason, ready = self._serve_once()
            if self._stopping.is_set():
                break
            if not self._settled.is_set():  # the first one: nobody waits for a second try of what cannot be
                self._say("failed", reason)
                break
            failures = 1 if ready and time.monotonic() - began > HEALTHY_SECONDS else failures + 1
            if failures > self._max_restarts:
                log.critical("the worker died %d times in a row, that is enough: %s", failures, reason)
                self._say("failed", f"it died {failures} times in a row, the last time because: {reason}")
                break
            delay = min(self._first_delay * 2 ** (failures - 1), LONGEST_DELAY)
            log.error("the worker died (%s) and is started again in %g s", reason, delay)
            self._status = replace(self._status, restarts=self._status.restarts + 1)
            self._say("restarting", reason)
            if self._stopping.wait(delay):
                break
        self._settled.set()

    def _say(self, state: State, reason: str | None = None, pid: int | None = None) -> None:
        self._status = WorkerStatus(state, self._status.restarts, reason, pid, time.time())
        with contextlib.suppress(OSError):  # the folder is gone: so is everybody who could read it
            write_status(self.folder, self._status)

    def _serve_once(self) -> tuple[str, bool]:
        """From start to end: why it ended, and whether it ever served."""
        reader, writer = os.pipe()
        try:
            process = self._process = self._spawn(writer)
        except OSError as error:
            os.close(reader)
            self._fail("OSError", str(error))
            return f"it could not be started: {error}", False
        finally:
            os.close(writer)
        if self._stopping.is_set():  # `stop` may have come before there was somebody to let go
            self._let_go()
        reason, ready = self._listen(reader, process)
        status = _wait(process)
        _end_group(process.pid)  # what it started is nobody's now
        with contextlib.suppress(OSError):  # what it was not told any more
            if process.stdin is not None:
                process.stdin.close()
        (self.folder / SOCKET).unlink(missing_ok=True)
        reason = reason or _exit_reason(status)
        if not ready:
            self._fail("", f"the engine's process ended before it was ready: {reason}")
        return reason, ready

    def _fail(self, kind: str, text: str) -> None:
        if self._failure is None:
            self._failure = ERRORS.get(kind, EngineDeadError)(text)

    def _spawn(self, writer: int) -> subprocess.Popen[bytes]:
        # what can be imported here can be there: a proposer is named by its module
        paths = [path or os.getcwd() for path in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "draftproof.serve.ipc.worker_main"],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        job = {**json.loads(self._job), "folder": str(self.folder), "reports": writer}
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead already: its end says why
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        return process

    def _listen(self, reader: int, process: subprocess.Popen[bytes]) -> tuple[str | None, bool]:
        """Until it ends, or hangs: then it is ended. Why, if it said so, and whether it was ready."""
        reason, ready, rest = None, False, b""
        heard = time.monotonic()
        with os.fdopen(reader, "rb", 0) as pipe:
            while True:
                if select.select([pipe], [], [], 1.0)[0]:
                    heard = time.monotonic()
                    data = pipe.read(65536)
                    if not data:
                        return reason, ready
                    *lines, rest = (rest + data).split(b"\n")
                    for report in map(json.loads, lines):
                        if "ready" in report:
                            ready = True
                            self._say("ready", self._status.reason, report["ready"])
                            self._settled.set()
                        elif "failed" in report:
                            reason = f"{report['failed']}: {report['text']}"
                            self._fail(report["failed"], report["text"])
                        elif "broke" in report:
                            reason = report["broke"]
                        elif self._hangs(report["beat"]):
                            reason = f"a step took longer than {self._hang_seconds:g} s"
                            _end_group(process.pid)
                elif ready and self._hangs(time.monotonic() - heard):
                    reason = f"it was silent for {self._hang_seconds:g} s"
                    _end_group(process.pid)

    def _hangs(self, seconds: float) -> bool:
        return self._hang_seconds is not None and seconds > self._hang_seconds

    def _let_go(self) -> None:
        """Cut the life line; the worker ends by itself, or is ended."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _end_group(process.pid)


def _private_folder() -> Path:
    """Only this user's, and short enough for the name of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="draftproof-"))
    if len(str(folder / SOCKET)) > LONGEST_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="draftproof-", dir="/tmp"))
    return folder


def _wait(process: subprocess.Popen[bytes]) -> int:
    """It has closed its pipe; it may not have come to its end."""
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _end_group(process.pid)
        return process.wait()


def _end_group(pid: int) -> None:
    """The worker and all it has started; they are a session of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _exit_reason(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"it ended with status {status}"
