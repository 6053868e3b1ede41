"""Native loops: numba's `njit`, kept on disk where there is a folder for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def native(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator. With a signature the loop is compiled, or read from the disk, at once."""

    def made(loop: Callable[..., Any]) -> Any:
        compiled: Any = njit
        try:
            return compiled(signature, cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # no folder may be written to, as in a read-only image: compiled at every start
            return compiled(signature, nogil=True, **options)(loop)

    return made
