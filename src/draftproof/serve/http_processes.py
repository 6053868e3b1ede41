"""The processes that speak HTTP, one or several on one socket, in front of one engine.

Several are started as programs of their own, never forked. Each ends when the pipe to its parent does,
however the parent ended, and is started again when it dies by itself.
"""

from __future__ import annotations

import argparse
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
from draftproof.serve.api.metrics import Meters
from draftproof.serve.api.shared_metrics import Board
from draftproof.serve.http.shared_limits import Seats, shared
from draftproof.serve.settings import Keys, Settings

LOOK_SECONDS = 0.2
log = logging.getLogger("draftproof.serve")


def serve_address(
    address: str,
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[Any], object],
    board: Board | None = None,
    seats: Seats | None = None,
    parent: int | None = None,
) -> None:
    """Connects to an engine and serves it; `ready` is called with the connection."""
    from draftproof.serve.http.server import serve
    from draftproof.serve.ipc.remote_llm import connect

    steps = Histogram()
    llm = connect(address, on_step=steps.observe)
    name = settings.served_model_names[0] if settings.served_model_names else llm.config.model
    meters = Meters(llm, name, settings.vllm_metrics, steps, board)
    tick = None if board is None else meters.post
    told = partial(ready, llm)
    serve(llm, settings, listener, meters, seats=seats, ready=told, tick=tick, parent=parent)


class Fleet:
    """Several server processes and this one, which only looks after them."""

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
        self._room, self._seats = shared(settings, count)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def run(self, options: argparse.Namespace) -> None:
        """Until SIGTERM or SIGINT."""
        from draftproof.serve.http.server import BACKLOG
        from draftproof.serve.ipc.remote_llm import connect

        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._stop)
        self._log = options.log_level, options.log_file
        for number in range(self._count):
            self._start(number)
        self._listener.listen(BACKLOG)
        self._ready(connect(self._address))  # for the banner alone
        while not self._stopping:
            time.sleep(LOOK_SECONDS)
            for number, child in list(self._children.items()):
                if child.poll() is not None and not self._stopping:
                    log.error("a server process died", extra={"facts": {"status": child.returncode}})
                    self._seats.clear(number)
                    self._start(number)
        self._end()

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _start(self, number: int) -> None:
        given = {f.name: getattr(self._settings, f.name) for f in fields(Settings)}
        given["api_keys"] = self._settings.api_keys.digests
        job = {
            "address": self._address,
            "folder": str(self._folder),
            "name": f"{number}-{time.time_ns()}",
            "listener": self._listener.fileno(),
            "seats": (number, self._count, self._room),
            "settings": given,
            "log": self._log,
        }
        command = [sys.executable, "-P", "-m", "draftproof.serve.http_processes"]
        fds = (self._listener.fileno(), self._room)
        # of a group of its own: Ctrl-C is for this process to tell
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
        self._children[number] = child

    def _end(self) -> None:
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        end = time.monotonic() + self._settings.drain_seconds + 10
        for child in self._children.values():
            try:
                child.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def child() -> None:
    """What a process of a Fleet runs: its job is a line on standard input, which stays open for its life."""
    from draftproof.serve.http.request_log import set_up

    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return
        line += part
    job = json.loads(line)
    set_up(*job["log"])
    given = job["settings"]
    given["api_keys"] = Keys((), given["api_keys"])
    given["served_model_names"] = tuple(given["served_model_names"])
    listener = socket.socket(fileno=job["listener"])
    board = Board(Path(job["folder"]), job["name"])
    settings = Settings(**given)
    seats = Seats(settings, *job["seats"])
    serve_address(job["address"], settings, listener, lambda _: None, board, seats, parent=0)


if __name__ == "__main__":
    child()
