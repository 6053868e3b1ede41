"""Decorator for compiled loops: numba's `njit` with a cache on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys


class LightCache(FunctionCache):
    """Disk cache that loads numba's typed functions, and scipy with them, only if a loop must be compiled."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # symbols that count references to arrays
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        if found is None:
            target_context.refresh()
        return found


def native(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator. With a signature the loop is compiled, or loaded from disk, at import."""

    def made(loop: Callable[..., Any]) -> Any:
        compiled: Any = njit(nogil=True, **options)(loop)
        with suppress(RuntimeError):  # no writable folder, as in a read-only image: compiled at every start
            compiled._cache = LightCache(loop)
        if signature is not None:
            compiled.compile(signature)
            compiled.disable_compile()
        return compiled

    return made
