"""Entry point of the worker process: `python -m draftproof.serve.worker.main`, started by the supervisor.

The first line of standard input is the job. Standard input stays open; when the parent closes it, for
whatever reason, the process and everything that it started end at once. Reports to the supervisor go to a
pipe, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.errors import DraftproofError
from draftproof.registry import no_collection
from draftproof.serve.ipc.status import socket_address

if TYPE_CHECKING:
    from draftproof.serve.worker.worker import Worker

HEARTBEAT_SECONDS = 1.0
SWITCH_INTERVAL_SECONDS = 0.0005  # upper bound of the delay of a step by a thread that reads a grammar
EXIT_SETUP_FAILED, EXIT_ENGINE_FAILED = 2, 70


class ReportPipe:
    """Pipe to the supervisor. A pipe without a reader is ignored, since the parent has ended then."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "wb", 0)
        self._lock = threading.Lock()

    def send(self, **report: Any) -> None:
        """Write one report."""
        with self._lock, contextlib.suppress(OSError):
            self._pipe.write(json.dumps(report).encode() + b"\n")


def main() -> int:
    """Build the engine, serve until the end, and return the exit status."""
    job = json.loads(sys.stdin.buffer.readline())
    folder = Path(job["folder"])
    reports = ReportPipe(job["reports"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the server acts
    logging.basicConfig(level=job["log_level"], format="%(asctime)s %(levelname)s worker: %(message)s")
    threading.Thread(target=_watch_parent_pipe, args=(folder,), name="draftproof-life", daemon=True).start()
    try:
        with no_collection():
            from draftproof.llm import LLM
            from draftproof.serve.worker.worker import Worker

        llm = LLM(job["model"], **job["options"])
        worker = Worker(llm, socket_address(folder), job["options"])
    except Exception as error:
        if not isinstance(error, DraftproofError):
            logging.getLogger("draftproof").exception("the engine cannot be built")
        reports.send(failed=type(error).__name__, text=str(error))
        return EXIT_SETUP_FAILED
    signal.signal(signal.SIGTERM, lambda *_: worker.drain())
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()  # the model stays until the process ends: exclude it from garbage collection
    reports.send(ready=os.getpid())
    arguments = worker, reports
    threading.Thread(target=_report_beats, args=arguments, name="draftproof-beat", daemon=True).start()
    try:
        worker.run()
    except BaseException as error:
        logging.getLogger("draftproof").critical("the engine failed", exc_info=error)
        reports.send(engine_error=f"{type(error).__name__}: {error}")
        return EXIT_ENGINE_FAILED
    finally:
        llm.close()
    return 0


def _report_beats(worker: Worker, reports: ReportPipe) -> None:
    """Report the age of the current iteration every second; it keeps growing in a worker that hangs."""
    while True:
        reports.send(beat=time.monotonic() - worker.iteration_began)
        time.sleep(HEARTBEAT_SECONDS)


def _watch_parent_pipe(folder: Path) -> None:
    """Block until standard input is closed, then end the process and its children."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():  # the leader of its group: children end with it
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # without the interpreter's own shutdown, which a failed device can block
