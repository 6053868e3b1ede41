"""Decorator for compiled loops: numba's `njit` with a cache on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def native(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator. With a signature the loop is compiled, or loaded from disk, at import."""

    def made(loop: Callable[..., Any]) -> Any:
        compiled: Any = njit
        try:
            return compiled(signature, cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # no writable cache folder, as in a read-only image: compile at every start
            return compiled(signature, nogil=True, **options)(loop)

    return made
