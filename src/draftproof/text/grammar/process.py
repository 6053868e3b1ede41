"""The process that compiles grammars, as seen from here: a job goes out, a grammar comes back, in time.

What is guaranteed: a job is answered or refused within its seconds (the start of the process, once, comes on
top), takes no more than the worker's memory limit where the system can hold one, and can crash nothing here.
"""

from __future__ import annotations

import contextlib
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
    """One worker, started when it is first needed and again after it had to be killed. Thread-safe."""

    def __init__(self, vocabulary: Sequence[bytes], stops: Sequence[int]) -> None:
        self._tokens = list(vocabulary), list(stops)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Ahead of the first job; does not wait."""
        with self._lock:
            self._running()

    def compile(self, job: Job, seconds: float) -> str:
        """The compiled grammar, serialised; RequestError if there is none within `seconds`."""
        if not self._lock.acquire(timeout=START_SECONDS + seconds):
            raise RequestError("grammars of other requests are being compiled: try again later", PARAM)
        try:
            worker = self._running()
            try:
                worker.ready()
                status, text = worker.ask(job, seconds)
                if status == "broke":
                    raise EOFError
            except (queue.Empty, EOFError, OSError) as error:
                self._worker = None
                worker.close()
                raise RequestError(_why(error, seconds), PARAM) from error
        finally:
            self._lock.release()
        if status != "made":
            raise RequestError(f"structured_outputs: {job[0]} cannot be used: {tidied(text)}", PARAM)
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
        # -P: the worker's own folder is no place to import from
        command = [sys.executable, "-P", str(Path(grammar_worker.__file__))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._answers: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._told = False
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        self.close = weakref.finalize(self, _end, self._process)
        self._send(tokens)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> None:
        if self._told:
            return
        status, text = self._receive(START_SECONDS)
        if status != "ready":
            raise OSError(f"the grammar compiler does not start: {text}")
        self._told = True

    def ask(self, job: Job, seconds: float) -> tuple[str, str]:
        self._send(job)
        return self._receive(seconds)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        grammar_worker.write_frame(self._process.stdin, value)

    def _receive(self, seconds: float) -> tuple[str, str]:
        answer = self._answers.get(timeout=seconds)
        if answer is None:
            raise EOFError
        return answer


def _read(process: subprocess.Popen[bytes], answers: queue.Queue[tuple[str, str] | None]) -> None:
    """A thread's life: reading with a time limit works on no system's pipes, waiting for a queue on all."""
    assert process.stdout is not None
    with process.stdout as stream:
        try:
            while True:
                answers.put(grammar_worker.read_frame(stream))
        except (EOFError, OSError, ValueError):
            answers.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what it was not told any more
            process.stdin.close()


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, queue.Empty):
        return (
            f"structured_outputs: it takes longer than {seconds:g} s to compile: make it smaller, "
            "for example by lower bounds on repetitions and fewer alternatives"
        )
    if isinstance(error, (EOFError, BrokenPipeError)):  # it ended before its answer, or before all was asked
        return "structured_outputs: the compiler broke over it (too much memory, or nesting): make it smaller"
    return str(error)


def tidied(text: str) -> str:
    """What the compiler says, without its file names, times and the whole source again."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    head, _, rest = first.partition("] ")
    if head.startswith("[") and rest:
        first = rest.partition(": ")[2] or rest
    return first.partition(" The JSON string is:")[0][:300]
