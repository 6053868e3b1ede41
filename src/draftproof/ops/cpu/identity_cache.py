"""Cache of function results, keyed by the identity of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MAX_ENTRIES = 16  # the cache is emptied when it is full


class IdentityCache(Generic[T]):
    """Cache of a function of long-lived objects: steps of one size have the same layout object."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        # The cache holds the arguments, so that their ids are not reused.
        self._kept: dict[tuple[int, ...], tuple[tuple[Any, ...], T]] = {}

    def get(self, *objects: Any) -> T:
        """Return the result for these objects."""
        key = tuple(map(id, objects))
        entry = self._kept.get(key)
        if entry is None:
            if len(self._kept) == MAX_ENTRIES:
                self._kept.clear()
            entry = self._kept[key] = objects, self._make(*objects)
        return entry[1]
