"""Decorator for compiled loops: numba's `njit` with a cache on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
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

    def has(self, sig: Any) -> bool:
        """Return whether code for the types `sig` is in the cache."""
        key = self._index_key(sig, cpu_target.target_context.codegen())
        with self._guard_against_spurious_io_errors():
            return key in self._cache_file._load_index()
        return False


class CompiledLoop(NamedTuple):
    """Compiled loop with the types of its arguments, for compilation before its first call."""

    function: Any  # made by `native`
    types: tuple[Any, ...]

    @property
    def is_available(self) -> bool:
        """Return whether the loop is in the disk cache, or whether no disk cache exists."""
        cache = self.function._cache
        return not isinstance(cache, LightCache) or cache.has(self.types)

    def compile(self) -> None:
        """Compile the loop into the disk cache."""
        self.function.compile(self.types)


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
