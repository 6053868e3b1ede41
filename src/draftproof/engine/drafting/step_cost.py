"""What a step costs by its rows: timed at start without requests, then corrected by real steps (`clocked`).

An empty step reads no keys, so it says how costs grow with rows and not what a step of these requests costs
without drafts: the more that is, the less a draft adds to it. So a price is made of rows, with what steps of
that size cost more than empty ones, or less; of what a key costs (a token that a request has stored, and that
every step reads) with whatever else a step costs beside its rows; and of what a proposer with a model takes
behind a step for the next drafts. Prices are in the time of empty steps: how quick the machine is at the
moment cancels out of every choice.

Where steps are queued ahead the host works beside the device, and a step is never done sooner than the host:
up to that time rows cost nothing. Steps in which the device waited are not told here (`pacing`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

from draftproof.engine.drafting.step_cost_filter import LEAST_KEYS, Clocked

NOTHING: Mapping[int, float] = {}

FIRST, EVERY = 3, 4  # steps of one size: these, then every so many are looked at: all they tell is the speed
HOSTED = 1 / 16  # of a step in what the host takes
BURST = 2.0  # times what it usually takes: by how much more does not matter
SURELY = 0.85  # of what it usually takes: often it takes less, and then rows are waited for
LEAST_DEAR = 0.25  # of what was timed: what costs nothing would be asked for always, and never known again
ROWS_FREE = 64  # rows that cost as much as all that a step costs without them, where nothing was measured


class RowCosts:
    """Prices of steps, in the time of empty ones."""

    def __init__(
        self,
        seconds: Mapping[int, float],
        between: bool = False,
        learns: bool = True,
        asking: Mapping[int, float] = NOTHING,
        rounds: Mapping[int, float] = NOTHING,
    ) -> None:
        """`seconds` of empty steps by rows; a step of another number of rows is padded to the next of them.
        `between`: it is not, and costs what lies between. `asking`: seconds for drafts, by requests;
        `rounds`: what is saved with each round fewer.
        """
        self._askers = sorted(asking)
        self._asking = [asking[count] for count in self._askers]
        self._rounds = [rounds.get(count, 0.0) for count in self._askers]
        self._timed = sorted(seconds)
        self._knots = np.maximum.accumulate([seconds[size] for size in self._timed])  # else it is noise
        self._between = between
        self._rows = list(range(1, self._timed[-1] + 1)) if between else self._timed
        self.table = np.array([self._rows, self._rows], np.float64)  # rows, and what they cost
        self.learns = learns
        self._clock = Clocked(self._timed, self._knots)
        self._host = 0.0  # seconds of the host's part of a step, where it runs beside the device
        self._speed = self._each = self._dear = 0.0  # as `clocked` has them; no speed: not known yet
        # size, requests asked for and rounds less of the last step; how many like it
        self._last, self._alike = (0, 0, 0), 0
        self._empty: list[float] = []  # the same, to look up one of them
        self._fill()

    @classmethod
    def guess(cls, most: int) -> RowCosts:
        """Where nothing was measured; the clock is then not asked later either."""
        sizes = {min(1 << power, most) for power in range(most.bit_length() + 1)}
        return cls({size: 1.0 + size / ROWS_FREE for size in sizes}, learns=False)

    def hosted(self, seconds: float) -> None:
        """The host took so long for its part of a step, while the device ran another."""
        if not self._host:
            self._host = min(seconds, self._empty[0])
        self._host += HOSTED * (min(seconds, BURST * self._host) - self._host)

    def least(self, still: float) -> float:
        """What rows cost at least, in a step that costs `still` beside them: the host takes as long."""
        return max(0.0, SURELY * self._host / (self._speed or 1.0) - still)

    def observe(self, rows: int, keys: int, seconds: float, asked: int = 0, fewer: int = 0) -> None:
        """A real step took so long; `asked`: requests that drafts were made for behind it, in so many rounds
        `fewer` than there can be."""
        at = bisect_left(self._rows, rows)
        if not self.learns or at == len(self._rows) or keys <= 0 or seconds <= 0:  # by a clock that was ahead
            return
        self._alike = self._alike + 1 if (at, asked, fewer) == self._last else 0
        self._last = at, asked, fewer
        if self._alike > FIRST and self._alike % EVERY:
            return
        clock = self._clock
        clock.hear(self._parts(rows), keys, self._as_timed(asked, fewer), seconds)
        self._speed, self._each, self._dear = clock.speed, clock.each, clock.dear
        self._fill()

    def _parts(self, rows: int) -> list[tuple[int, float]]:
        """Which of the sizes that were timed a step lies between, and how much of each."""
        at = bisect_left(self._timed, rows)
        if not self._between or self._timed[at] == rows:
            return [(at, 1.0)]
        low, high = self._timed[at - 1], self._timed[at]
        upper = (rows - low) / (high - low)
        return [(at - 1, 1 - upper), (at, upper)]

    def _fill(self) -> None:
        """Prices by rows. A larger step is never quicker."""
        made = np.maximum.accumulate(self._knots * (1 + self._clock.bent))
        self.table[1] = np.interp(self.table[0], self._timed, made) if self._between else made
        self._empty = self.table[1].tolist()

    def still(self, keys: float) -> float:
        """What a step with these keys costs beside its rows."""
        return max(self._each * keys, LEAST_KEYS * self._empty[0])

    def of(self, rows: int) -> float:
        """What rows cost; more than were ever measured, as the most that were."""
        return self._empty[min(bisect_left(self._rows, rows), len(self._rows) - 1)]

    def takes(self, rows: int, keys: float) -> float:
        """Seconds of a step without what asking takes, as quick as the machine is at the moment."""
        return (self.of(rows) + self.still(keys)) * (self._speed or 1.0)

    def another(self, rows: int) -> float:
        """Seconds that a row more takes in a step of so many, as quick as the machine is at the moment."""
        return (self.of(rows + 1) - self.of(rows)) * (self._speed or 1.0)

    def size(self, rows: int) -> int:
        """Rows that a step of so many has room for; none where nothing is known of it."""
        at = bisect_left(self._rows, rows)
        return self._rows[at] if at < len(self._rows) else 0

    def asks(self, requests: int, fewer: int = 0) -> float:
        """Seconds that drafts for so many take, as quick as the machine is at the moment."""
        return self.asking(requests, fewer) * (self._speed or 1.0)

    def asking(self, requests: int, fewer: int = 0) -> float:
        """What drafts for so many requests cost before any of them is verified."""
        timed = self._as_timed(requests, fewer)
        return max(LEAST_DEAR * timed, timed + self._dear) if timed else 0.0

    def round(self, requests: int) -> float:
        """Seconds that are saved with each round fewer of drafts for so many; 0: none, or it is not known."""
        return self._rounds[self._asker(requests)] * (self._speed or 1.0) if self._askers else 0.0

    def _as_timed(self, requests: int, fewer: int = 0) -> float:
        """What drafts for so many took at start."""
        if not self._askers or not requests:
            return 0.0
        at = self._asker(requests)
        return self._asking[at] - fewer * self._rounds[at]

    def _asker(self, requests: int) -> int:
        return min(bisect_left(self._askers, requests), len(self._askers) - 1)

    def knows(self, rows: int) -> bool:
        return rows <= self._rows[-1]
