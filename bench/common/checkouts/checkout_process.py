"""Process that runs the package of a checkout, driven by JSON lines on its stdin and stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH_FOLDER = Path(__file__).parents[2]


class CheckoutProcess:
    """Process with the sources of one checkout."""

    def __init__(self, folder: Path, worker: Path) -> None:
        """Start `worker`, a file of this checkout, with the package of `folder`."""
        path = [str(folder.resolve() / "src"), str(BENCH_FOLDER), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(worker)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return the reply to the oldest command."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with exit code {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def call(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its reply."""
        self.send(**command)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
