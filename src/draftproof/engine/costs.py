"""What a step costs by its rows: timed at start without requests, then corrected by real steps.

    seconds = speed * (empty(rows) + each * keys + asking(requests))

An empty step reads no keys, so it says how costs grow with rows and not what a step of these requests costs
without drafts: the more that is, the less a draft adds to it. `each` is what a key costs (a token that a
request has stored, and that every step reads), with whatever else a step costs beside its rows, in the time
of empty steps. It is less than nothing where it is the rows that cost more than empty ones. How quick the
machine is at the moment cancels out of every choice. It is followed, so that a slow minute is not mistaken
for dear rows or dear keys. `asking` is what a proposer with a model takes behind a step for the next drafts.

Where steps are queued ahead the host works beside the device, and a step is never done sooner than the host:
up to that time rows cost nothing, and steps in which the device waited say nothing of rows or keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
NOTHING: Mapping[int, float] = {}

SLOW = 5.0  # times what was expected: a pause of whoever calls, not a step's time any more
DISTURBED = 0.5  # above what was expected: by how much does not matter
FOLLOW = 1 / 8  # of a step in the speed: what it says of the machine is old after some ten
NOISE = 0.15  # of a step's time, by which steps of one kind differ
WANDER = 0.01  # of what keys cost, by which that may change in a step
SHAPE = 1 / 64  # of what a step is off in the table itself
BUSY = 0.97  # of a step in which the host was busy: the device had nothing to do for some of it
HOSTED = 1 / 16  # of a step in what the host takes
BURST = 2.0  # times what it usually takes: by how much more does not matter
SURELY = 0.85  # of what it usually takes: often it takes less, and then rows are waited for
LEAST = -0.8  # of the smallest step: what keys cost at least
ROWS_FREE = 64  # rows that cost as much as all that a step costs without them, where nothing was measured


class RowCosts:
    """Prices of steps, in the time of empty ones."""

    def __init__(
        self,
        seconds: Mapping[int, float],
        between: bool = False,
        learns: bool = True,
        asking: Mapping[int, float] = NOTHING,
    ) -> None:
        """`seconds` of empty steps by rows; a step of another number of rows is padded to the next of them.
        `between`: it is not, and costs what lies between. `asking`: seconds for drafts, by requests.
        """
        self._askers = sorted(asking)
        self._asking = [asking[count] for count in self._askers]
        self._timed = sorted(seconds)
        # a larger step is never quicker: what the clock says to the contrary is noise
        self._knots: list[float] = np.maximum.accumulate([seconds[size] for size in self._timed]).tolist()
        self._between = between
        self._rows = list(range(1, self._timed[-1] + 1)) if between else self._timed
        self._grid = np.array(self._rows)
        self._empty: list[float] = self._knots  # by `_rows`
        self._fill()
        self.learns = learns
        self._speed = 0.0  # not known yet
        self._host = 0.0  # seconds of the host's part of a step, where it runs beside the device
        self._each = self._doubt = self._scale = 0.0  # of a key; its variance; what is much for a key
        self._before = 0.0  # by how much the steps before were off
        self._usual = 0.0, 0.0  # an empty step of as many rows as steps had lately, and their keys

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

    def observe(self, rows: int, keys: int, seconds: float, asked: int = 0, host: float = 0.0) -> None:
        """A real step took so long; `asked`: requests that drafts were made for behind it. `host`: seconds of
        it in which the host was busy beside the device."""
        at = bisect_left(self._rows, rows)
        if not self.learns or at == len(self._rows) or keys <= 0 or host > BUSY * seconds:
            return
        empty = self._empty[at] + self.asking(asked)
        if not self._speed:  # the table was timed here: what is beyond it is not the rows
            self._each = max(0.0, seconds - empty) / keys
            self._scale = max(self._each, empty / keys)
            self._doubt = (self._scale / 2) ** 2
            self._usual = empty, keys
            self._speed = seconds / (empty + self.still(keys))
            return
        price = empty + self.still(keys)
        off = seconds / (self._speed * price) - 1
        if off > SLOW - 1:
            return
        off = min(off, DISTURBED)
        self._speed *= 1 + FOLLOW * off
        off, self._before = off - self._before, (off + self._before) / 2  # beside the steps just before it
        # With more keys for its price than those, and slower: keys are dearer than was thought. This is a
        # Kalman filter of one number; from steps that are alike it learns nothing.
        empties, usual_keys = self._usual
        usual = empties + self.still(usual_keys)
        lean = keys / price - usual_keys / usual
        gain = self._doubt * lean / (NOISE**2 + self._doubt * lean**2)
        self._each = max(self._each + gain * off, LEAST * self._empty[0] / keys)
        self._doubt = min(self._doubt * (1 - gain * lean) + (WANDER * self._scale) ** 2, self._scale**2)
        self._speed *= usual / (empties + self.still(usual_keys))  # the usual step takes as long as before
        self._usual = empties + FOLLOW * (empty - empties), usual_keys + FOLLOW * (keys - usual_keys)
        self._bend(rows, 1 + SHAPE * off)

    def _bend(self, rows: int, factor: float) -> None:
        """Steps of about so many rows cost that much more, or less, than was thought beside others."""
        at, knots = bisect_left(self._timed, rows), self._knots
        if self._between and at and 2 * rows < self._timed[at - 1] + self._timed[at]:
            at -= 1
        seconds = knots[at] = knots[at] * factor
        larger, smaller = range(at + 1, len(knots)), range(at - 1, -1, -1)
        for other in larger if factor > 1 else smaller:
            if knots[other] >= seconds if factor > 1 else knots[other] <= seconds:
                break
            knots[other] = seconds
        self._usual = self._usual[0] * factor, self._usual[1]
        self._fill()

    def _fill(self) -> None:
        if self._between:
            self._empty = np.interp(self._grid, self._timed, self._knots).tolist()

    def still(self, keys: float) -> float:
        """What a step with these keys costs beside its rows."""
        return max(self._each * keys, LEAST * self._empty[0])

    def of(self, rows: int) -> float:
        """What rows cost; more than were ever measured, as the most that were."""
        return self._empty[min(bisect_left(self._rows, rows), len(self._rows) - 1)]

    def another(self, rows: int) -> float:
        """Seconds that a row more takes in a step of so many, as quick as the machine is at the moment."""
        return (self.of(rows + 1) - self.of(rows)) * (self._speed or 1.0)

    def size(self, rows: int) -> int:
        """Rows that a step of so many has room for; none where nothing is known of it."""
        at = bisect_left(self._rows, rows)
        return self._rows[at] if at < len(self._rows) else 0

    def asking(self, requests: int) -> float:
        """What drafts for so many requests cost before any of them is verified."""
        if not self._askers or not requests:
            return 0.0
        return self._asking[min(bisect_left(self._askers, requests), len(self._askers) - 1)]

    def knows(self, rows: int) -> bool:
        return rows <= self._rows[-1]

    def best(
        self,
        rows: int,
        still: float,
        tokens: float,
        gains: Reals,
        asking: float = 0.0,
        least: float = 0.0,
    ) -> int:
        """How many drafts to add to `rows` rows that commit `tokens`, if the n-th adds gains[n - 1].

        `asking`: what it costs to have any; `least`: what rows cost at least.
        """
        total: list[float] = gains.cumsum().tolist()
        most, best, best_rate = len(total), 0, 0.0
        for at in range(bisect_left(self._rows, rows), len(self._rows)):
            count = min(self._rows[at] - rows, most)
            more = total[count - 1] if count else 0.0
            rate = (tokens + more) / (max(self._empty[at] + (asking if count else 0.0), least) + still)
            if rate > best_rate:
                best, best_rate = count, rate
            if count == most:  # a larger step would bring no more
                break
        return best

    def beyond(self, rows: int) -> int:
        """Rows that a step has room for beside these: at no cost, unless it is of one of the sizes exactly;
        then the next size has."""
        at = bisect_right(self._rows, rows)
        return self._rows[at] - rows if at < len(self._rows) else 0
