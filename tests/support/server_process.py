"""Server processes started by the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

TIMEOUT_SECONDS = 300  # reached by a test that hangs only


class Program:
    """A server that was started by its command."""

    def __init__(self, process: subprocess.Popen[str], url: str, banner: str, log: list[str]) -> None:
        self.process, self.url, self.banner, self.log = process, url, banner, log
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_SECONDS)

    def post(self, body: Any, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body, **more)


def command_line(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "draftproof", "serve", model, "--port", "0", *options]


@contextmanager
def started(command: list[str], **variables: str) -> Iterator[Program]:
    pipe = subprocess.PIPE
    environment = {**os.environ, "COLUMNS": "200", **variables}
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,))
    reader.start()
    banner = ""
    try:
        for line in process.stdout:
            banner += line
            if found := re.search(r"(http://\S+)/v1", line):
                break
        else:
            raise AssertionError("".join(log))
        made = Program(process, found[1], banner, log)
        with made.http:
            yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_SECONDS)
        reader.join()
        process.stdout.close()
        process.stderr.close()
