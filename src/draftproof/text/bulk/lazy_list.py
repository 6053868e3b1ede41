"""Read-only list whose items are made when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LazyList(Sequence[Any]):
    """Sequence that compares equal to a list of its items; a pickle or a deep copy is such a list."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # like a list

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyList | list):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
