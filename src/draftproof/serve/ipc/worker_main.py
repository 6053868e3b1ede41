"""The worker's process: `python -m draftproof.serve.ipc.worker_main`, started by the supervisor.

Its standard input is its life line: one line says what to do, and when it is closed, for whatever reason,
nobody is there to serve any more and the process ends at once, with all it has started. Reports go to a pipe:
one line of JSON each.
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
from typing import Any

from draftproof.errors import DraftproofError
from draftproof.serve.ipc.status import address_of

BEAT_SECONDS = 1.0
SWITCH_SECONDS = 0.0005  # a thread that reads a compiled grammar holds a step up by this much at most
FAILED, BROKE = 2, 70  # exit status: it could not be set up; the engine broke


class Reports:
    """To the supervisor. If nobody reads, the life line says so."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "wb", 0)
        self._lock = threading.Lock()

    def send(self, **what: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pipe.write(json.dumps(what).encode() + b"\n")


def main() -> int:
    job = json.loads(sys.stdin.buffer.readline())
    folder = Path(job["folder"])
    reports = Reports(job["reports"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to everybody: the server decides
    logging.basicConfig(level=job["log_level"], format="%(asctime)s %(levelname)s worker: %(message)s")
    threading.Thread(target=_hold_on, args=(folder,), name="draftproof-life", daemon=True).start()
    try:
        from draftproof.llm import LLM
        from draftproof.serve.ipc.worker import Worker

        llm = LLM(job["model"], **job["options"])
        worker = Worker(llm, address_of(folder), job["options"])
    except DraftproofError as error:
        reports.send(failed=type(error).__name__, text=str(error))
        return FAILED
    except Exception as error:
        logging.getLogger("draftproof").exception("the engine cannot be built")
        reports.send(failed=type(error).__name__, text=str(error))
        return FAILED
    signal.signal(signal.SIGTERM, lambda *_: worker.drain())
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # the model is no garbage: the collector need not look at it again
    reports.send(ready=os.getpid())
    threading.Thread(target=_beat, args=(worker, reports), name="draftproof-beat", daemon=True).start()
    try:
        worker.run()
    except BaseException as error:
        logging.getLogger("draftproof").critical("the engine broke", exc_info=error)
        reports.send(broke=f"{type(error).__name__}: {error}")
        return BROKE
    finally:
        llm.close()
    return 0


def _beat(worker: Any, reports: Reports) -> None:
    """How long ago the last turn began: of a worker that hangs, this grows."""
    while True:
        reports.send(beat=time.monotonic() - worker.turned)
        time.sleep(BEAT_SECONDS)


def _hold_on(folder: Path) -> None:
    """Until the supervisor lets go, or dies."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():  # what this process started ends with it
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # a device in trouble may hold up the interpreter's own way out
