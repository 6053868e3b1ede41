"""Kernels compiled side by side before the first of them runs.

A start needs a hundred kernels or more, and one after another they take minutes. Here everything that will be
captured is gone through once without running a kernel: a launch hands its compilation to a thread. What a
kernel would have written stays zero, so that torch's own ops, which do run, find indices that exist.
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
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITCallable, JITFunction

MAX_THREADS = 32
MOMENT = 0.5  # seconds between two looks at how far it is
ALIGNMENT = 16  # bytes, or elements of a size, that the compiler makes use of
_aten = torch.ops.aten
UNWRITTEN = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
_one_at_a_time, _one_parses = threading.Lock(), threading.Lock()
_here = threading.local()


def is_compiling() -> bool:
    """Do launches on this thread run nothing? Then nothing may be concluded from what they leave."""
    return getattr(_here, "compiling", False)


def compile_ahead(functions: Sequence[Callable[[], object]], tick: Callable[[int, int], None]) -> None:
    """Compile what `functions` launch; `tick`: how many kernels are done, of how many.

    One that cannot be compiled, or was not foreseen, is met again when it is launched.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with _one_at_a_time, _parsing_in_turn(), ThreadPoolExecutor(threads, "draftproof-compile") as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        with mode:
            with _launching_nothing(), _Zeros():
                for function in functions:
                    function()
            waiting = set(mode.raw_futures)
            while waiting:
                tick(len(mode.raw_futures) - len(waiting), len(mode.raw_futures))
                waiting = wait(waiting, MOMENT).not_done
        tick(len(mode.raw_futures), len(mode.raw_futures))


@contextmanager
def _parsing_in_turn() -> Iterator[None]:
    """Up to 3.12 Python counts for all threads together how deep it is in a tree, and now and then refuses
    what two of them parse at once ("recursion depth mismatch")."""
    parse = JITCallable.parse

    def in_turn(self: Any) -> Any:
        with _one_parses:
            return parse(self)

    JITCallable.parse = in_turn
    try:
        yield
    finally:
        JITCallable.parse = parse


class _Zeros(TorchDispatchMode):
    """Memory that nothing was written to is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in UNWRITTEN else out


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Launches of this thread compile; those of others, who serve somebody, do what they always do."""
    launch, seen = JITFunction.run, set[Hashable]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not is_compiling():
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        kind = self, *map(_kind, args), *kwargs.items()  # which are constants of the kernel and its options
        if kind in seen:  # a layer like the one before
            return None
        seen.add(kind)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run, _here.compiling = run, True
    try:
        yield
    finally:
        JITFunction.run, _here.compiling = launch, False


def _kind(value: Any) -> Hashable:
    """What the compiler may look at; arguments of one kind share a kernel."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1:
        return "int", value % ALIGNMENT == 0, abs(value) >> 31 != 0
    return value  # type: ignore[no-any-return]
