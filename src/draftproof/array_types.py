"""Aliases of numpy array types, and the indices of ragged arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]


def ragged_indices(counts: Ints) -> tuple[Ints, Ints]:
    """Return the group [N] of each element, and its place [N] in it, of groups of `counts` elements."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(counts.cumsum() - counts, counts)
