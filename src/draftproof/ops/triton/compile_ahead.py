"""Parallel compilation of kernels before the first of them runs.

A warm-up needs a hundred kernels or more, and compiling them one after another takes minutes. Here every
function that will be captured is called once without running a kernel: a launch submits its compilation to a
thread pool. Memory that a kernel would have written stays zero, so that torch ops, which do run, read valid
indices.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITCallable, JITFunction

MAX_THREADS = 32
POLL_SECONDS = 0.5  # between two progress reports
ALIGNMENT = 16  # bytes of an address, or elements of a size, that the compiler specialises on
# Functions that return memory without contents.
ALLOCATIONS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
)
_compile_lock, _parse_lock = threading.Lock(), threading.Lock()
_thread_state = threading.local()


def is_compiling() -> bool:
    """Return whether launches on this thread only compile, so that their outputs are meaningless."""
    return getattr(_thread_state, "compiling", False)


def compile_ahead(functions: Sequence[Callable[[], object]], report: Callable[[int, int], None]) -> None:
    """Compile the kernels that `functions` launch; `report` receives the number compiled and the total.

    A kernel that fails to compile, or was not launched here, is compiled at its first real launch.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with _compile_lock, _serial_parsing(), ThreadPoolExecutor(threads, "draftproof-compile") as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        with mode:
            with _compile_only_launches(), _zeroed_allocations():
                for function in functions:
                    function()
            pending = set(mode.raw_futures)
            while pending:
                report(len(mode.raw_futures) - len(pending), len(mode.raw_futures))
                pending = wait(pending, POLL_SECONDS).not_done
        report(len(mode.raw_futures), len(mode.raw_futures))


@contextmanager
def _serial_parsing() -> Iterator[None]:
    """Let one thread at a time parse kernel sources.

    Up to Python 3.12 the recursion depth of the parser is shared between threads, and concurrent parsing
    sometimes fails with "recursion depth mismatch".
    """
    parse = JITCallable.parse

    def locked_parse(self: Any) -> Any:
        with _parse_lock:
            return parse(self)

    JITCallable.parse = locked_parse
    try:
        yield
    finally:
        JITCallable.parse = parse


@contextmanager
def _zeroed_allocations() -> Iterator[None]:
    """Zero what this thread allocates.

    A dispatch mode of torch could do the same, but its first use imports torch's compiler: 2 s.
    """

    def zeroed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **options: Any) -> Tensor:
            out = allocate(*args, **options)
            return out.zero_() if is_compiling() else out

        return run

    before = [(owner, name, vars(owner).get(name)) for owner, name in ALLOCATIONS]
    for owner, name in ALLOCATIONS:
        setattr(owner, name, zeroed(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in before:
            if function is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)


@contextmanager
def _compile_only_launches() -> Iterator[None]:
    """Let launches of this thread compile only; launches of other threads run as usual."""
    launch, compiled = JITFunction.run, set[Hashable]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not is_compiling():
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        key = self, *map(_argument_key, args), *kwargs.items()  # constants of the kernel and launch options
        if key in compiled:  # e.g. a layer of the same shape
            return None
        compiled.add(key)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run, _thread_state.compiling = run, True
    try:
        yield
    finally:
        JITFunction.run, _thread_state.compiling = launch, False


def _argument_key(value: Any) -> Hashable:
    """Return the properties of an argument that the compiler specialises on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1:
        return "int", value % ALIGNMENT == 0, abs(value) >> 31 != 0
    return value  # type: ignore[no-any-return]
