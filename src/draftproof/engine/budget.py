"""How many drafts a request may have: fewer while they keep falling, more when they stand again.

Rows cost time, so a request whose drafts fall must soon stop paying for them, and one that meets a
repeating passage must get its full length back within two or three windows. Output never depends on this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FIRST = 2  # drafts of a request that has no history: a full window in every slot would be dear
FIRST_PAUSE = 2
MAX_PAUSE = 32


class DraftBudgets:
    """Begin small; double while whole windows stand; halve when all fall; at zero pause, then probe.

    One line a slot, and whole columns at a time: a step asks for all its requests at once.
    """

    def __init__(self, num_slots: int, adaptive: bool) -> None:
        self.adaptive = adaptive
        self._limit, self._level, self._pause, self._next_pause = np.zeros((4, num_slots), np.int64)

    def start(self, slot: int, limit: int) -> None:
        """A request that may have `limit` drafts sits down."""
        self._limit[slot] = limit
        self._level[slot] = min(limit, FIRST) if self.adaptive else limit
        self._pause[slot], self._next_pause[slot] = 0, FIRST_PAUSE

    def take(self, slots: Ints) -> Ints:
        """Drafts allowed to each in the coming step."""
        pause = self._pause[slots]
        self._pause[slots] = np.maximum(pause - 1, 0)
        return np.where(pause > 0, 0, self._level[slots])

    def record(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """What became of a window each. Windows without drafts say nothing."""
        if not self.adaptive:
            return
        told = drafted > 0
        if not told.any():
            return
        slots, drafted, accepted = slots[told], drafted[told], accepted[told]
        level, next_pause = self._level[slots], self._next_pause[slots]
        # a cut window (rows or tokens ran out) says nothing against the level it was cut from
        grown = np.where(accepted == drafted, 2 * np.maximum(drafted, level), accepted + 1)
        stood = accepted > 0
        lower = level // 2
        out = ~stood & (lower == 0)
        level = np.where(stood, np.minimum(self._limit[slots], grown), np.maximum(lower, 1))  # 1: the probe
        self._level[slots] = level
        self._pause[slots] = np.where(out, next_pause, self._pause[slots])
        longer = np.where(out, np.minimum(MAX_PAUSE, 2 * next_pause), next_pause)
        self._next_pause[slots] = np.where(stood, FIRST_PAUSE, longer)
