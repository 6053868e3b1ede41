"""Compilation on all cores: numba compiles one function at a time in a process.

Forked children compile kernels into the disk cache, from which this process loads them. All processes take
the next group of kernels from one pipe. A kernel that a child does not finish is compiled when its address is
needed. A child also compiles loops, while this process loads a model.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

from draftproof.numba_jit import CompiledLoop
from draftproof.ops.cpu.jit.compile import Kernel, new_symbol_numbers

MAX_PROCESSES = 8
MAX_GROUPS = 256  # an index in the queue is one byte
MAX_WAIT_SECONDS = 120.0  # for children after the last group was taken; then they are killed
MAX_CHILD_SECONDS = 300  # of a child; then it ends, also without its parent
WAIT_INTERVAL_SECONDS = 0.01


def compile_kernels(kernels: Sequence[Kernel]) -> None:
    """Compile the kernels that are neither loaded nor in the disk cache, if several cores can do it."""
    max_processes = min(_num_cores(), MAX_PROCESSES)
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.is_available]
    groups = _groups(missing, 2 * max_processes)
    count = min(max_processes, len(groups)) - 1
    if count < 1:
        return
    queue, end = os.pipe()
    os.write(end, bytes(range(len(groups))))
    os.close(end)
    children: list[int] = []

    def compile_in_child() -> None:
        _compile_next(queue, lambda i: [kernel.compile() for kernel in groups[i]])

    try:
        with suppress(OSError):  # without room for a process this one compiles the rest
            for _ in range(count):
                children.append(_fork(compile_in_child))
        _compile_next(queue, lambda i: [kernel.address for kernel in groups[i]])
        _wait(children)
    finally:
        os.close(queue)
        _kill(children)


class LoopCompilation:
    """Compilation of loops in a child process, which ends by itself."""

    def __init__(self, loops: Sequence[CompiledLoop]) -> None:
        """Start a child, if a loop is not in the disk cache and several cores can compile."""
        self._child: int | None = None
        missing = [loop for loop in loops if not loop.is_available] if _num_cores() > 1 else []
        if missing:
            with suppress(OSError):
                self._child = _fork(lambda: [loop.compile() for loop in missing])
                self._kill = weakref.finalize(self, _kill, [self._child])

    def wait_for(self, loop: CompiledLoop) -> None:
        """Wait until the child has compiled a loop or has ended; the loop is then loaded or compiled here."""
        deadline = time.monotonic() + MAX_WAIT_SECONDS if self._child is not None else 0.0
        while self._child is not None:
            if not _is_running(self._child):
                self._kill.detach()  # the number may be that of another process later
                self._child = None
            elif loop.is_available:
                return
            elif time.monotonic() > deadline:
                self._kill()
                self._child = None
            else:
                time.sleep(WAIT_INTERVAL_SECONDS)


def _wait(children: Sequence[int]) -> None:
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while any(map(_is_running, children)) and time.monotonic() < deadline:
        time.sleep(WAIT_INTERVAL_SECONDS)


def _kill(children: Sequence[int]) -> None:
    """Kill children that still run: a lock of another thread may have been copied."""
    for child in filter(_is_running, children):
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _groups(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """Return the kernels by module, the largest group first: a process compiles shared functions once.

    With fewer than `count` modules the longest groups are divided.
    """
    modules: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        modules.setdefault(kernel.fn.__module__, []).append(kernel)
    groups = list(modules.values())
    while len(groups) < min(count, len(kernels)):
        longest = max(groups, key=len)
        half = len(longest) // 2
        groups += [longest[:half], longest[half:]]
        groups.remove(longest)

    def code_bytes(group: list[Kernel]) -> int:
        return sum(_code_bytes(kernel.fn, set()) for kernel in group)

    return sorted(groups, key=code_bytes, reverse=True)[:MAX_GROUPS]


def _is_running(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:  # it was waited for, or SIGCHLD is ignored in this process
        return False


def _num_cores() -> int:
    """Return the cores that this process may use; 1 where a fork of a process with threads is not safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _compile_next(queue: int, compiled: Callable[[int], object]) -> None:
    while taken := os.read(queue, 1):
        compiled(taken[0])


def _fork(run: Callable[[], object]) -> int:
    """Start a child that calls `run`; return its process id."""
    # under the lock no other thread changes the state of the compiler that a child copies
    with global_compiler_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: a child that hangs is killed
        child = os.fork()
    if child:
        return child
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(MAX_CHILD_SECONDS)
        new_symbol_numbers()
        run()
    finally:
        os._exit(0)


def _code_bytes(fn: Callable[..., Any], seen: set[Any]) -> int:
    """Return the bytes of code of a function and of the device functions it calls."""
    seen.add(fn)
    values = [cell.cell_contents for cell in fn.__closure__ or ()]
    values += [fn.__globals__.get(name) for name in fn.__code__.co_names]
    called = [value.py_func for value in values if hasattr(value, "py_func")]
    return len(fn.__code__.co_code) + sum(_code_bytes(one, seen) for one in called if one not in seen)
