"""One worker process: started, its reports read, ended together with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

STOP_SECONDS = 10.0  # for the process to end by itself
POLL_SECONDS = 1.0


class WorkerProcess:
    """Child process that ends when its standard input is closed, with a pipe for reports."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        """Start the process. OSError if that fails."""
        self._reader, writer = os.pipe()
        try:
            self._process = _spawn(writer)
        except OSError:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already: its exit status gives the reason
            line = json.dumps({**job, "reports": writer}).encode()
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def read_reports(self, on_report: Callable[[Any], None], on_silence: Callable[[float], None]) -> None:
        """Call `on_report` with each report, `on_silence` every second without one, until the pipe ends."""
        rest, last = b"", time.monotonic()
        with os.fdopen(self._reader, "rb", 0) as pipe:
            while True:
                if select.select([pipe], [], [], POLL_SECONDS)[0]:
                    last = time.monotonic()
                    data = pipe.read(65536)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        on_report(json.loads(line))
                else:
                    on_silence(time.monotonic() - last)

    def kill(self) -> None:
        """Kill the process and everything that it started, which form a session of their own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close_parent_pipe(self) -> None:
        """Close standard input, which makes the process end; kill it after STOP_SECONDS."""
        self._close_stdin()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def wait(self) -> str:
        """Wait for a process that has closed its pipe, kill what it left, and return why it ended."""
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self.kill()
        self._close_stdin()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def _close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()


def _spawn(writer: int) -> subprocess.Popen[bytes]:
    # the same import path as here: a proposer may be named by its module
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "draftproof.serve.worker.main"],
        stdin=subprocess.PIPE,
        pass_fds=[writer],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
