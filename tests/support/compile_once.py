"""Locks of kernels between processes that run tests: one compiles a kernel, the others wait and load it."""

from __future__ import annotations

import fcntl
from functools import wraps
from typing import Any

from numba.core.registry import cpu_target

from draftproof.ops.cpu.jit.compile import Kernel

_compile = Kernel.compile


@wraps(_compile)
def _compile_once(self: Kernel) -> Any:
    cache = self._cache
    if cache is None or self.is_available:
        return _compile(self)
    files = cache._cache_file
    name = files._name(cache._index_key(self.signature, cpu_target.target_context.codegen()))
    cache._impl.locator.ensure_cache_path()
    with open(files._data_path(f"{name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _compile(self)


def install() -> None:
    """Lock each kernel that this process compiles."""
    Kernel.compile = _compile_once  # type: ignore[method-assign]
