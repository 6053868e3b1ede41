"""Client of the process that compiles grammars.

Guarantees: a job is compiled or refused within its time limit (plus the start of the process, once); it takes
no more than the worker's memory limit where the system supports one; it cannot crash this process.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftproof.errors import RequestError
from draftproof.structured_outputs import PARAM
from draftproof.text.grammar import worker as grammar_worker

START_SECONDS = 120.0
Job = tuple[str, str, dict[str, Any]]  # kind, source, options


class GrammarProcess:
    """Worker process, started at first use and again after it was killed. Thread-safe."""

    def __init__(self, vocabulary: Sequence[bytes], stops: Sequence[int]) -> None:
        self._tokens = list(vocabulary), list(stops)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Start the worker before the first job, without waiting for it."""
        with self._lock:
            self._running()

    def compile(self, job: Job, seconds: float) -> str:
        """Return the compiled grammar, serialized; RequestError if it fails or exceeds `seconds`."""
        if not self._lock.acquire(timeout=START_SECONDS + seconds):
            raise RequestError("grammars of other requests are being compiled: try again later", PARAM)
        try:
            worker = self._running()
            try:
                worker.ready()
                status, text = worker.run(job, seconds)
                if status == "out_of_memory":
                    raise EOFError
            except (queue.Empty, EOFError, OSError) as error:
                self._worker = None
                worker.close()
                raise RequestError(_why(error, seconds), PARAM) from error
        finally:
            self._lock.release()
        if status != "made":
            raise RequestError(f"structured_outputs: {job[0]} cannot be used: {short_message(text)}", PARAM)
        return text

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.close()
            self._worker = None

    def _running(self) -> _Worker:
        if self._worker is not None and not self._worker.alive:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            self._worker = _Worker(self._tokens)
        return self._worker


class _Worker:
    def __init__(self, tokens: tuple[list[bytes], list[int]]) -> None:
        # -P: do not import from the worker's own folder
        command = [sys.executable, "-P", str(Path(grammar_worker.__file__))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._replies: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._is_ready = False
        threading.Thread(target=_read, args=(self._process, self._replies), daemon=True).start()
        self.close = weakref.finalize(self, _end, self._process)
        self._send(tokens)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> None:
        if self._is_ready:
            return
        status, text = self._receive(START_SECONDS)
        if status != "ready":
            raise OSError(f"the grammar compiler does not start: {text}")
        self._is_ready = True

    def run(self, job: Job, seconds: float) -> tuple[str, str]:
        self._send(job)
        return self._receive(seconds)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        grammar_worker.write_frame(self._process.stdin, value)

    def _receive(self, seconds: float) -> tuple[str, str]:
        reply = self._replies.get(timeout=seconds)
        if reply is None:
            raise EOFError
        return reply


def _read(process: subprocess.Popen[bytes], replies: queue.Queue[tuple[str, str] | None]) -> None:
    """Read replies in a thread: a queue can be read with a time limit, a pipe not on every system."""
    assert process.stdout is not None
    with process.stdout as stream:
        try:
            while True:
                replies.put(grammar_worker.read_frame(stream))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # killed, maybe within a reply
            replies.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # unsent data
            process.stdin.close()


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, queue.Empty):
        return (
            f"structured_outputs: it takes longer than {seconds:g} s to compile: make it smaller, "
            "for example by lower bounds on repetitions and fewer alternatives"
        )
    if isinstance(error, (EOFError, BrokenPipeError)):  # it ended before its reply or before it read the job
        text = "structured_outputs: the compiler ran out of memory or stack"
        return f"{text}: use a smaller, less nested grammar"
    return str(error)


def short_message(text: str) -> str:
    """Return the first line of a compiler message without file names, times and the source."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    head, _, rest = first.partition("] ")
    if head.startswith("[") and rest:
        first = rest.partition(": ")[2] or rest
    return first.partition(" The JSON string is:")[0][:300]
