"""What a long run says on its way: lines, and how far a phase has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing(*facts: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Telling:
    """Says nothing unless it is given ways to."""

    say: Callable[[str], None] = _nothing
    show: Callable[[str, int, int], None] = _nothing  # what, done, of how many
