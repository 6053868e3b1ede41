"""How many drafts a request may have. Output never depends on this.

Where the cost of rows is known (a table of step times, measured when steps are captured), drafts are given
to whoever is likeliest to keep them, as many in all as make the most committed tokens a second. Where it is
not, each request is on its own: fewer while its drafts keep falling, more when they stand again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Bools = NDArray[np.bool_]

FIRST = 2  # drafts of a request that has no history: a full window in every slot would be dear
FIRST_PAUSE = 2
MAX_PAUSE = 32
HOPE = 0.7  # that a draft stands, before anything is known
SURE = 0.98  # that a draft stands, at most: later drafts are then less likely than earlier ones
LEARN = 0.1  # weight of a new observation of a step's time
SLOW = 5.0  # times what was expected: not a step's time any more
MEMORY = 0.75  # weight of what was known, after each window
PROBE = 64  # every so many steps all requests are tried again, with one draft each


class RowCosts:
    """Seconds of a step by its rows: measured at start on empty steps, then corrected by real ones.

    An empty step reads no keys and waits for no host, so it says how costs grow with rows, not what they
    are. What was observed at some sizes corrects the sizes between and beside them.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._sizes = np.array(sorted(seconds), np.int64)
        self._empty = np.array([seconds[size] for size in self._sizes.tolist()])
        self._ratio = np.full(len(self._sizes), np.nan)  # real over empty, where it is known
        self._seconds = np.maximum.accumulate(self._empty)

    def observe(self, rows: int, seconds: float) -> None:
        """A real step of that size took so long."""
        at = int(np.searchsorted(self._sizes, rows))
        if at == len(self._sizes) or seconds > SLOW * self._seconds[at]:
            return  # a pause of whoever calls, not a cost
        new, old = seconds / self._empty[at], self._ratio[at]
        self._ratio[at] = new if np.isnan(old) else old + (new - old) * LEARN
        known = np.flatnonzero(~np.isnan(self._ratio))
        ratio = np.interp(np.arange(len(self._sizes)), known, self._ratio[known])
        # a larger step is never quicker: what the clock says to the contrary is noise
        self._seconds = np.maximum.accumulate(self._empty * ratio)

    def best(self, rows: int, gains: Reals) -> int:
        """How many drafts to add to `rows` rows, if the n-th adds gains[n - 1] committed tokens."""
        sizes = self._sizes[np.searchsorted(self._sizes, rows) :]
        if not len(sizes) or not len(gains):
            return 0
        counts = np.minimum(sizes - rows, len(gains))
        total = np.append(0.0, np.cumsum(gains))
        rates = (rows + total[counts]) / self._seconds[-len(sizes) :]
        return int(counts[rates.argmax()])


class DraftBudgets:
    """One line a slot, and whole columns at a time: a step asks for all its requests at once."""

    def __init__(self, num_slots: int, adaptive: bool) -> None:
        self.adaptive = adaptive
        self.costs: RowCosts | None = None
        self._limit, self._level, self._pause, self._next_pause = np.zeros((4, num_slots), np.int64)
        self._stood, self._fell = np.zeros((2, num_slots))
        self._steps = 0

    def start(self, slot: int, limit: int) -> None:
        """A request that may have `limit` drafts sits down."""
        self._limit[slot] = limit
        self._level[slot] = min(limit, FIRST) if self.adaptive else limit
        self._pause[slot], self._next_pause[slot] = 0, FIRST_PAUSE
        self._stood[slot], self._fell[slot] = HOPE, 1 - HOPE

    def take(self, slots: Ints) -> Ints:
        """Drafts allowed to each in the coming step."""
        self._steps += 1
        if self.costs is not None and self.adaptive:
            return self._afford(slots, self.costs)
        pause = self._pause[slots]
        self._pause[slots] = np.maximum(pause - 1, 0)
        level: Ints = np.where(pause > 0, 0, self._level[slots])
        return level

    def record(self, slots: Ints, granted: Ints, drafted: Ints, accepted: Ints) -> None:
        """What became of a window each: rows set aside for drafts, drafts there were, drafts that stood."""
        if not self.adaptive:
            return
        if self.costs is not None:
            self._remember(slots, granted, accepted)
        else:
            self._climb(slots, drafted, accepted)

    # --- with costs ---------------------------------------------------------------------------------

    def _afford(self, slots: Ints, costs: RowCosts) -> Ints:
        limit = self._limit[slots]
        if self._steps % PROBE == 0:  # whatever the prices say: they may be wrong as well
            return np.minimum(limit, 1)
        likely = np.minimum(self._stood[slots] / (self._stood[slots] + self._fell[slots]), SURE)
        place = np.arange(1, int(limit.max(initial=0)) + 1)
        survival = np.where(place <= limit[:, None], likely[:, None] ** place, 0.0)  # [B, K], falls along K
        gains = np.sort(survival[survival > 0])[::-1]
        count = costs.best(len(slots), gains)
        if count == 0:
            return np.zeros_like(slots)
        given = survival >= gains[count - 1]
        over = int(given.sum()) - count  # ties: the last of them go without
        budget = given.sum(1)
        for i in np.flatnonzero((survival == gains[count - 1]).any(1))[::-1][:over].tolist():
            budget[i] -= 1
        out: Ints = budget.astype(np.int64)
        return out

    def _remember(self, slots: Ints, granted: Ints, accepted: Ints) -> None:
        """A row that was set aside and had no draft in it did not stand."""
        told = granted > 0
        slots, granted, accepted = slots[told], granted[told], accepted[told]
        self._stood[slots] = MEMORY * self._stood[slots] + accepted
        self._fell[slots] = MEMORY * self._fell[slots] + (accepted < granted)

    # --- without ------------------------------------------------------------------------------------

    def _climb(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Double while whole windows stand; halve when all fall; at zero pause, then probe.

        Rows cost time, so a request whose drafts fall must soon stop paying for them, and one that meets
        a repeating passage must get its full length back within two or three windows. Windows without
        drafts say nothing.
        """
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
