"""Processes of the ranks behind rank 0: started, watched and ended by the engine.

Messages go to each process through a pipe that it reads in order. When its standard input is closed,
for whatever reason, the process ends at once. A third pipe reports to rank 0.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from draftproof.config import EngineConfig
from draftproof.engine.parallel.rank_folder import RankFolder
from draftproof.errors import ConfigError, EngineDeadError, LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.weights.sharding import Sharding
from draftproof.ops import resolve_device
from draftproof.ops.parallel.communicator import rank_device

EXIT_SECONDS = 5.0  # for a process to end after its standard input was closed
REASON_SECONDS = 5.0  # for the end of a process to be noticed after a collective has failed
ERRORS = {"ConfigError": ConfigError, "LoadError": LoadError}
Call = tuple[Any, ...]  # name of a method of `follower.Follower`, then its arguments


class RankProcess:
    """One rank's process and its pipes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        messages, self.messages = Pipe(duplex=False)
        self.reports, reports = Pipe(duplex=False)
        paths = [path or os.getcwd() for path in sys.path]  # the import path of this process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "draftproof.engine.parallel.follower"]
            + [str(pipe.fileno()) for pipe in (messages, reports)],
            stdin=subprocess.PIPE,
            pass_fds=[messages.fileno(), reports.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        messages.close()
        reports.close()

    def end(self) -> None:
        """Close the pipes, wait, and kill the process if it has not ended."""
        assert self.process.stdin is not None
        for pipe in (self.process.stdin, self.messages):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def exit_reason(self) -> str:
        """Wait for the end of the process and return its reason."""
        status = self.process.wait()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"


class RankProcesses:
    """Processes of ranks 1 to N - 1."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; `wait_reports` returns when each has imported its modules."""
        folder = RankFolder()
        self.path = str(folder.path / "store")  # rendezvous file of torch.distributed
        self.failure: EngineDeadError | None = None
        self._has_failed = threading.Event()
        self._on_failure: Any = lambda: None
        self._calls: list[Call] | None = None  # recorded calls
        self._sends = True
        self._watcher: threading.Thread | None = None
        self._processes: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, _end_all, self._processes, folder)
        try:
            for rank in range(1, config.tensor_parallel_size):
                self._processes.append(RankProcess(rank))
                self._send_to(self._processes[-1], (config, rank, self.path))
        except BaseException:
            self.close()
            raise

    def wait_reports(self) -> list[Any]:
        """Return the next report of every rank; raise the error of one that failed."""
        found = []
        for each in self._processes:
            try:
                kind, value = each.reports.recv()
            except (EOFError, OSError):
                kind, value = "EngineDeadError", f"it ended: {each.exit_reason()}"
            if kind != "report":
                self.close()
                raise ERRORS.get(kind, EngineDeadError)(f"tensor-parallel rank {each.rank}: {value}")
            found.append(value)
        return found

    def watch(self, on_failure: Any) -> None:
        """Call `on_failure` in a thread if a process ends; no further reports are read."""
        self._on_failure = on_failure
        arguments = (weakref.ref(self), list(self._processes))
        self._watcher = threading.Thread(target=_watch, args=arguments, name="draftproof-ranks", daemon=True)
        self._watcher.start()

    def call(self, *call: Any) -> None:
        """Let every rank run a call."""
        if self._calls is not None:
            self._calls.append(call)
        if not self._sends:
            return
        message = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
        for each in self._processes:
            self._send_bytes(each, message)

    def call_rank(self, rank: int, *call: Any) -> None:
        """Let one rank run a call, which is not recorded."""
        self._send_to(self._processes[rank - 1], call)

    def send(self, message: Any) -> None:
        """Send a message, which is not a call, to every rank."""
        for each in self._processes:
            self._send_to(each, message)

    @contextlib.contextmanager
    def recording(self, sends: bool) -> Iterator[list[Call]]:
        """Record the calls of a block, and send them too if `sends`; yields the list."""
        before = self._calls, self._sends
        calls: list[Call] = []
        self._calls, self._sends = calls, sends
        try:
            yield calls
        finally:
            self._calls, self._sends = before

    def check(self, error: BaseException | None = None) -> None:
        """Raise EngineDeadError if a rank has ended, or if `error` ended a collective."""
        if error is not None and self.failure is None:
            self._has_failed.wait(REASON_SECONDS)
        if self.failure is None and error is not None:
            self.failure = EngineDeadError(f"a tensor-parallel step failed: {type(error).__name__}: {error}")
        if self.failure is not None:
            self.close()
            raise EngineDeadError(str(self.failure)) from error

    def close(self) -> None:
        """End all processes."""
        self._finalizer()

    def fail(self, rank: int, reason: str) -> None:
        """Record the end of a process, unless this process ended it."""
        if self._finalizer.alive and self.failure is None:
            self.failure = EngineDeadError(f"tensor-parallel rank {rank} ended: {reason}")
            self._on_failure()
        self._has_failed.set()

    def _send_to(self, process: RankProcess, message: Any) -> None:
        self._send_bytes(process, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send_bytes(self, process: RankProcess, message: bytes) -> None:
        try:
            process.messages.send_bytes(message)
        except OSError as error:
            raise RuntimeError(f"tensor-parallel rank {process.rank} does not read") from error


def start_ranks(config: EngineConfig, model: ModelConfig) -> RankProcesses:
    """Start the processes of an engine, after a check that its model can be cut."""
    Sharding(model, 0, config.tensor_parallel_size, config.tp_invariant)
    rank_device(resolve_device(config.device), 0, config.tensor_parallel_size)
    return RankProcesses(replace(config, speculative=None))


def _watch(ranks: weakref.ref[RankProcesses], processes: list[RankProcess]) -> None:
    """Wait for the first process that ends, by the end of its pipe of reports."""
    from multiprocessing.connection import wait

    pipes: dict[Any, RankProcess] = {each.reports: each for each in processes}
    while pipes:
        for ready in wait(list(pipes)):
            each = pipes.pop(ready)
            reason = None
            with contextlib.suppress(EOFError, OSError):
                assert isinstance(ready, Connection)
                reason = ready.recv()[1]
            reason = reason or each.exit_reason()
            owner = ranks()
            if owner is None:
                return
            owner.fail(each.rank, reason)
            del owner


def _end_all(processes: list[RankProcess], folder: RankFolder) -> None:
    for each in processes:
        with contextlib.suppress(OSError):
            if each.process.stdin is not None:
                each.process.stdin.close()
    for each in processes:
        each.end()
    folder.remove()
