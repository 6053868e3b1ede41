"""What a step costs by its rows: measured at start, then corrected by real steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

SLOW = 5.0  # times what was expected: not a step's time any more
# Whatever disturbs a step that is waited for makes it look slower, never quicker: so it is believed at once
# when it was quick, and only little by little when it was slow. Of steps that follow one another in a queue
# one looks as much too quick as the one before it was read too late.
DOWN, UP = 0.5, 0.1
NEAR = 0.01  # a ratio that has moved by less changes nothing: this is asked at every step
ROWS_FREE = 64  # rows that cost as much as all that a step costs without them, where nothing was measured


class RowCosts:
    """Seconds of a step by its rows.

    An empty step reads no keys and waits for no host, so it says how costs grow with rows, not what they
    are. What was observed at some sizes corrects the sizes between and beside them.
    """

    def __init__(self, seconds: Mapping[int, float], learns: bool = True) -> None:
        self._rows = sorted(seconds)
        self._empty = [seconds[size] for size in self._rows]
        self._sizes = np.array(self._rows, np.int64)
        self._learns = learns
        self._ratio = np.full(len(self._rows), np.nan)  # real over empty, where it is known
        self._used = self._ratio.copy()  # as of the last time that it mattered
        self._set(np.array(self._empty))

    def _set(self, seconds: Reals) -> None:
        # a larger step is never quicker: what the clock says to the contrary is noise
        self._seconds: Reals = np.maximum.accumulate(seconds)
        self._by_size: list[float] = self._seconds.tolist()

    @classmethod
    def guess(cls, most: int) -> RowCosts:
        """Where nothing was measured; the clock is then not asked later either."""
        sizes = {min(1 << power, most) for power in range(most.bit_length() + 1)}
        return cls({size: 1.0 + size / ROWS_FREE for size in sizes}, learns=False)

    def observe(self, rows: int, seconds: float, queued: bool = False) -> None:
        """A real step of that size took so long; `queued`: since the one before it was read."""
        at = bisect_left(self._rows, rows)
        if not self._learns or at == len(self._rows):
            return
        new, old = seconds / self._empty[at], float(self._ratio[at])
        known = np.flatnonzero(~np.isnan(self._used)) if old != old else ()
        if old == old or len(known):
            if seconds > SLOW * self._by_size[at]:
                return  # a pause of whoever calls, not a cost
            first = old != old  # this size was not seen before: its neighbours' ratio
            old = float(np.interp(at, known, self._ratio[known])) if first else old
            new = old + (new - old) * (UP if not first and (queued or new > old) else DOWN)
        self._ratio[at] = new
        if abs(new - self._used[at]) <= NEAR * new:
            return
        self._used[at] = new
        known = np.flatnonzero(~np.isnan(self._used))
        ratio = np.interp(np.arange(len(self._rows)), known, self._ratio[known])
        self._set(self._empty * ratio)

    def of(self, rows: int) -> float:
        """Seconds; of more rows than were ever measured, as the largest that was."""
        return self._by_size[min(bisect_left(self._rows, rows), len(self._rows) - 1)]

    def best(self, rows: int, tokens: float, gains: Reals) -> int:
        """How many drafts to add to `rows` rows that commit `tokens`, if the n-th adds gains[n - 1]."""
        sizes = self._sizes[np.searchsorted(self._sizes, rows) :]
        if not len(sizes) or not len(gains):
            return 0
        counts = np.minimum(sizes - rows, len(gains))
        total = np.append(0.0, np.cumsum(gains))
        rates = (tokens + total[counts]) / self._seconds[-len(sizes) :]
        return int(counts[rates.argmax()])

    def beyond(self, rows: int) -> tuple[int, float]:
        """Rows that a step has room for beside these, and the seconds that it costs to use them.

        It has room at no cost unless it is of one of the sizes exactly; then the next size has. (0, 0): none.
        """
        at = int(np.searchsorted(self._sizes, rows, side="right"))
        if at == len(self._sizes):
            return 0, 0.0
        return int(self._sizes[at]) - rows, float(self._seconds[at]) - self.of(rows)
