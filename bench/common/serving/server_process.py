"""Server started by its command, its processes, and a cheap HTTP client for it.

The client writes and reads raw sockets: a load client that parses every event with a library would be the
bottleneck, and a client that misbehaves on purpose needs the socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NGRAM = '{"method": "ngram", "num_speculative_tokens": 5}'
SECONDS = 300.0


# --- processes --------------------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return round(int(found[1]) / 1024, 1) if found else 0.0


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and all its descendants."""
    return sum(cpu_seconds(each) for each in family(pid) if alive(each))


def num_files(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Program:
    """Running `draftproof serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str, banner: str) -> None:
        self.process, self.url, self.banner = process, url, banner
        host, port = url.removeprefix("http://").split(":")
        self.where = host, int(port)
        self.seen = set(family(process.pid))

    @property
    def pid(self) -> int:
        """Return the id of the main process."""
        return self.process.pid

    def _running(self, module: str) -> list[int]:
        found = []
        for pid in family(self.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if module.encode() in words:
                found.append(pid)
        self.seen.update(family(self.pid))
        return found

    def worker(self) -> int | None:
        """Return the id of the worker process."""
        return next(iter(self._running("draftproof.serve.worker.main")), None)

    def servers(self) -> list[int]:
        """Return the ids of the HTTP processes."""
        return self._running("draftproof.serve.http_processes") or [self.pid]

    def rss(self) -> dict[str, float]:
        """Return the resident memory of server and worker, in MiB."""
        worker = self.worker()
        return {
            "server": max(rss_mib(pid) for pid in self.servers()),
            "worker": rss_mib(worker) if worker is not None else 0.0,
        }

    def wait_until_ended(self, seconds: float = 15.0) -> list[int]:
        """Wait for the processes to end; return the pids that still run."""
        end = time.monotonic() + seconds
        while any(map(alive, self.seen)) and time.monotonic() < end:
            time.sleep(0.05)
        return [pid for pid in self.seen if alive(pid)]

    def stop(self) -> int:
        """Terminate the server and return its exit status."""
        self.seen.update(family(self.pid))
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@contextmanager
def served(model: str, *options: str, errors: str = os.devnull, **variables: str) -> Iterator[Program]:
    """Start a server on a free port.

    errors: file for its standard error. variables: of its environment.
    """
    command = [sys.executable, "-m", "draftproof", "serve", model, "--port", "0", *options]
    environment = {**os.environ, "COLUMNS": "200", **variables}
    with open(errors, "a") as sink:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True, env=environment)
    assert process.stdout is not None
    banner = ""
    try:
        for line in process.stdout:
            banner += line
            if found := re.search(r"(http://\S+)/v1", line):
                break
        else:
            raise SystemExit(f"the server did not start: {' '.join(command)}\n{banner}")
        made = Program(process, found[1], banner)
        yield made
        made.stop()
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(120)
        process.stdout.close()


# --- a client ---------------------------------------------------------------------------------------------


@dataclass
class Reply:
    """Response of the server."""

    status: int
    data: bytes  # body, without the framing of chunks

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.data)

    def events(self) -> list[Any]:
        """Return the events of a stream; the last one of a complete stream is "[DONE]"."""
        lines = [line[6:] for line in self.data.split(b"\n\n") if line.startswith(b"data: ")]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def request_bytes(body: Any, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """Return an HTTP request with a JSON body."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = "content-type: application/json\r\n" if body is not None else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{kind}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def parse(data: bytes) -> Reply:
    """Return the response in the received bytes."""
    head, _, rest = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    if b"transfer-encoding: chunked" not in head.lower():
        return Reply(status, rest)
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size or b"0", 16)])
        rest = rest[int(size or b"0", 16) + 2 :]
    return Reply(status, b"".join(parts))


async def send_request(
    where: tuple[str, int],
    body: Any,
    path: str = "/v1/completions",
    method: str = "POST",
    on_data: Callable[[bytes], object] | None = None,
    seconds: float = SECONDS,
) -> Reply:
    """Send a request and return the whole response; `on_data` is called with each piece of it."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(*where)
        try:
            writer.write(request_bytes(body, path, method))
            parts = []
            while data := await reader.read(1 << 16):
                parts.append(data)
                if on_data is not None:
                    on_data(data)
        finally:
            writer.close()
        return parse(b"".join(parts))


async def get(where: tuple[str, int], path: str) -> Reply:
    """Send a GET request."""
    return await send_request(where, None, path, "GET", seconds=30)
