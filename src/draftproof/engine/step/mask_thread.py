"""Thread that computes grammar masks, so that a slow grammar delays a step by no more than a budget.

A call into a grammar library cannot be interrupted. The thread of a call that exceeds its limit is abandoned:
its request fails, another thread computes the other masks, and the abandoned one ends when the call returns.
Limits are in CPU time of the thread, so a loaded machine fails no request.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.verify.grammar_guide import ROW_SECONDS, GrammarGuide

MIN_WAIT_SECONDS = 0.01


class MaskTask(NamedTuple):
    """One request's window of a step."""

    guide: GrammarGuide
    drafts: list[int]


class MaskThread:
    """Computes the masks of steps in a thread, started at first use."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds  # for all requests of a step together, beyond ROW_SECONDS a row
        self._worker: _Worker | None = None

    def fill(self, tasks: Sequence[MaskTask], words: int) -> tuple[Tensor, list[dict[int, str]]]:
        """Return the masks of all windows [sum of 1 + drafts, words] int32, and errors by row of each."""
        offsets = [0]
        for task in tasks:
            offsets.append(offsets[-1] + 1 + len(task.drafts))
        masks = torch.zeros((offsets[-1], words), dtype=torch.int32)
        errors: list[dict[int, str]] = []
        left = self._step_seconds
        while len(errors) < len(tasks):
            first = len(errors)
            rows = [masks[offsets[i] : offsets[i + 1]] for i in range(first, len(tasks))]
            run = _Run(tasks[first:], rows, left)
            if self._worker is None:
                self._worker = _Worker()
            is_complete = self._worker.execute(run)
            errors += run.errors
            left = run.seconds_left
            if not is_complete:
                self._worker = None
                masks = masks.clone()  # the abandoned thread may still write to the old rows
                at = len(errors)
                masks[offsets[at] : offsets[at + 1]] = 0
                errors.append({0: tasks[at].guide.fail_as_too_slow()})
                left = 0.0
        return masks, errors


class _Run:
    """Masks of the windows of one step. It may be abandoned between two windows or within one."""

    def __init__(self, tasks: Sequence[MaskTask], rows: list[Tensor], seconds: float) -> None:
        self._tasks, self._rows = tasks, rows
        self._lock = threading.Lock()
        self._is_abandoned = False
        self.errors: list[dict[int, str]] = []
        self.seconds_left = seconds
        self.deadline = float("inf")  # CPU time of the thread after which the current window is abandoned
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def execute(self, clock: Callable[[], float]) -> None:
        """Compute the masks in the calling thread."""
        try:
            for (guide, drafts), rows in zip(self._tasks, self._rows, strict=True):
                allowance = len(rows) * ROW_SECONDS
                started = clock()
                limit = allowance + min(guide.seconds_left, self.seconds_left)
                self.deadline = started + limit
                errors = guide.fill(drafts, rows, limit)
                with self._lock:
                    if self._is_abandoned:
                        return
                    self.deadline = float("inf")
                    self.seconds_left = max(0.0, self.seconds_left - max(0.0, clock() - started - allowance))
                    self.errors.append(errors)
        except BaseException as error:  # raised again in the thread that waits
            self.failure = error
        self.done.set()

    def wait(self, clock: Callable[[], float]) -> bool:
        """Wait for the masks; return False if a window exceeded its limit and the run was abandoned."""
        while not self.done.wait(max(MIN_WAIT_SECONDS, min(1.0, self.deadline - clock()))):
            with self._lock:
                if clock() > self.deadline:
                    self._is_abandoned = True
                    return False
        if self.failure is not None:
            raise self.failure
        return True


class _Worker:
    """A daemon thread that executes runs."""

    def __init__(self) -> None:
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        clocks: queue.SimpleQueue[Callable[[], float]] = queue.SimpleQueue()
        threading.Thread(
            target=_execute_runs, args=(self._runs, clocks), name="draftproof-masks", daemon=True
        ).start()
        self._clock = clocks.get()
        weakref.finalize(self, self._runs.put, None)

    def execute(self, run: _Run) -> bool:
        """Execute a run; return False if it was abandoned: this worker must not be used again."""
        self._runs.put(run)
        return run.wait(self._clock)


def _execute_runs(
    runs: queue.SimpleQueue[_Run | None], clocks: queue.SimpleQueue[Callable[[], float]]
) -> None:
    clock = _thread_clock()
    clocks.put(clock)
    with torch.inference_mode():
        while (run := runs.get()) is not None:
            run.execute(clock)
            del run  # its grammars


def _thread_clock() -> Callable[[], float]:
    """Return the CPU clock of the calling thread, for any thread to read; wall time where there is none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.perf_counter
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock_id)
