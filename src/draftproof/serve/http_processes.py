"""HTTP processes, one or several on one socket, in front of one engine.

Several are started as programs of their own, never forked. Each ends when the pipe to its parent is closed,
however the parent ended, and is restarted when it ends by itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from draftproof.metrics import Histogram
from draftproof.sampling_params import SamplingParams
from draftproof.serve.api.metrics import ServerMetrics, SharedMetrics
from draftproof.serve.http.request_guard import OpenRequestCounts, create_shared_counts
from draftproof.serve.settings import ApiKeys, Settings

POLL_SECONDS = 0.2
KILL_SECONDS = 10.0  # after the drain, for an HTTP process to end by itself
log = logging.getLogger("draftproof.serve")


def serve_address(
    address: str,
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[Any], object],
    shared: SharedMetrics | None = None,
    counts: OpenRequestCounts | None = None,
    parent: int | None = None,
) -> None:
    """Connect to an engine and serve it; `ready` is called with the connection."""
    from draftproof.serve.http.server import serve
    from draftproof.serve.ipc.remote_llm import connect

    steps = Histogram()
    llm = connect(address, on_step=steps.observe)
    name = settings.served_model_names[0] if settings.served_model_names else llm.config.model
    metrics = ServerMetrics(llm, name, settings.vllm_metrics, steps, shared)
    strategy, lossless = llm.strategy_label(SamplingParams())
    if not lossless:
        log.warning("outputs are not lossless", extra={"fields": {"strategy": strategy}})
    tick, begin = None if shared is None else metrics.write_shared, partial(ready, llm)
    serve(llm, settings, listener, metrics, counts=counts, ready=begin, tick=tick, parent=parent)


class HttpProcessGroup:
    """Several HTTP processes, supervised by this process, which serves no requests itself."""

    def __init__(
        self,
        count: int,
        address: str,
        folder: Path,
        settings: Settings,
        listener: socket.socket,
        ready: Callable[[Any], object],
    ) -> None:
        self._count, self._address, self._folder = count, address, Path(folder)
        self._settings, self._listener, self._ready = settings, listener, ready
        self._counts_fd, self._counts = create_shared_counts(settings, count)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def run(self, log_level: str, log_file: str | None) -> None:
        """Serve until SIGTERM or SIGINT."""
        from draftproof.serve.http.server import BACKLOG
        from draftproof.serve.ipc.remote_llm import connect

        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, lambda *_: setattr(self, "_stopping", True))
        self._log = log_level, log_file
        for number in range(self._count):
            self._start(number)
        self._listener.listen(BACKLOG)
        self._ready(connect(self._address))  # for the start-up message only
        while not self._stopping:
            time.sleep(POLL_SECONDS)
            for number, child in list(self._children.items()):
                if child.poll() is not None and not self._stopping:
                    log.error("an HTTP process ended", extra={"fields": {"status": child.returncode}})
                    self._counts.clear(number)
                    self._start(number)
        self._end()

    def _start(self, number: int) -> None:
        given = {f.name: getattr(self._settings, f.name) for f in fields(Settings)}
        keys = self._settings.api_keys
        given["api_keys"] = (keys.digests, keys.max_priorities)
        given["admin_keys"] = (self._settings.admin_keys.digests,)
        job = {
            "address": self._address,
            "folder": str(self._folder),
            "name": f"{number}-{time.time_ns()}",
            "listener": self._listener.fileno(),
            "counts": (number, self._count, self._counts_fd),
            "settings": given,
            "log": self._log,
        }
        command = [sys.executable, "-P", "-m", "draftproof.serve.http_processes"]
        fds = (self._listener.fileno(), self._counts_fd)
        # a session of its own: Ctrl-C reaches this process only, which stops the others
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
        self._children[number] = child

    def _end(self) -> None:
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        end = time.monotonic() + self._settings.drain_seconds + KILL_SECONDS
        for child in self._children.values():
            try:
                child.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def child() -> None:
    """Run one process of a group: its job is the first line of standard input, whose end ends it."""
    from draftproof.serve.http.request_log import configure_logging

    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return
        line += part
    job = json.loads(line)
    configure_logging(*job["log"])
    given = job["settings"]
    for name in ("api_keys", "admin_keys"):
        given[name] = ApiKeys((), *given[name])
    for name in ("served_model_names", "allowed_hosts", "allowed_origins"):
        given[name] = tuple(given[name])
    listener = socket.socket(fileno=job["listener"])
    shared = SharedMetrics(Path(job["folder"]), job["name"])
    settings = Settings(**given)
    row, num_rows, fd = job["counts"]
    counts = OpenRequestCounts(settings, row, num_rows, fd)
    serve_address(job["address"], settings, listener, lambda _: None, shared, counts, parent=0)


if __name__ == "__main__":
    child()
