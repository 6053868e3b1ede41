"""Pause of full garbage collections while many outputs are generated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MIN_COLLECTIONS_BETWEEN_FULL = 10_000  # collections of the middle generation, some thousand objects each


@contextmanager
def no_full_collection() -> Iterator[None]:
    """Delay full garbage collections.

    A full collection visits every object that was ever imported, which takes as long as a hundred steps of a
    fast device. New objects are collected as usual, and everything after some ten million objects.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, MIN_COLLECTIONS_BETWEEN_FULL))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
