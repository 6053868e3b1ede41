"""What a step costs by its rows: timed at start without requests, then corrected by real steps.

    seconds = speed * (empty(rows) * (1 + bent(rows)) + each * keys + asking(requests) + dear)

An empty step reads no keys, so it says how costs grow with rows and not what a step of these requests costs
without drafts: the more that is, the less a draft adds to it. `each` is what a key costs (a token that a
request has stored, and that every step reads), with whatever else a step costs beside its rows, in the time
of empty steps. It is less than nothing where it is the rows that cost more than empty ones. `bent` is what
steps of one size cost more than that, or less: with keys they may go another way. How quick the machine is
at the moment (`speed`) cancels out of every choice. It is followed, so that a slow minute is not mistaken for
dear rows or dear keys. `asking` is what a proposer with a model takes behind a step for the next drafts; what
was timed of that at start knows nothing of the driver, nor of what else the machine does (`dear`).

All of these are the state of one Kalman filter, which knows which of them a step says something about, and
how much of that was known: steps that are alike say how quick the machine is, and one of another size, just
after, what that size costs beside it. Sizes near each other are bent alike; what is old is forgotten.

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
NOISE = 0.15  # of a step's time, by which steps of one kind differ
DRIFT = 0.03  # of the machine's speed, by which it changes until the next step that is looked at
WANDER = 0.01  # of what keys cost, and of the smallest step, by which keys and asking may change in a step
BENT = 0.25  # of a size's time, by which it may be bent
ALIKE = 1.0  # octaves between sizes within which they are bent alike
FORGETS = 1 / 4096  # of what a size is bent, at every step
FIRST, EVERY = 3, 4  # steps of one size: these, then every so many are looked at: all they tell is the speed
AT_TIMES = 16  # steps after which that is done
RECOVERS = 1 / 128  # of what asking is dearer than it was timed, at every step without
BUSY = 0.97  # of a step in which the host was busy: the device had nothing to do for some of it
HOSTED = 1 / 16  # of a step in what the host takes
BURST = 2.0  # times what it usually takes: by how much more does not matter
SURELY = 0.85  # of what it usually takes: often it takes less, and then rows are waited for
LEAST_BENT = 0.5  # of an empty step, that any of its size costs
DEAR = 0.3  # of the smallest step, by which asking may be dearer than was timed
LEAST_DEAR = 0.25  # of what was timed: what costs nothing would be asked for always, and never known again
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
        self._knots = np.maximum.accumulate([seconds[size] for size in self._timed])  # else it is noise
        self._between = between
        self._rows = list(range(1, self._timed[-1] + 1)) if between else self._timed
        self._grid = np.array(self._rows)
        self.learns = learns
        self._speed = 0.0  # not known yet
        self._host = 0.0  # seconds of the host's part of a step, where it runs beside the device
        self._each = self._scale = self._dear = 0.0  # of a key; what is much for a key; asking
        self._bent = np.zeros(len(self._timed))
        octaves = np.log2(self._timed)
        # covariances: of `dear` and what is bent before any step; of speed, `each` in `_scale`, and these
        self._prior = np.zeros((1 + len(self._timed),) * 2)
        self._prior[0, 0] = DEAR**2
        self._prior[1:, 1:] = BENT**2 * np.exp(-np.abs(octaves[:, None] - octaves) / ALIKE)
        self._doubt = np.zeros((0, 0))
        self._steps = 0
        self._last, self._alike = (0, 0), 0  # size and requests asked for of the last step; how many like it
        self._empty: list[float] = []  # by `_rows`
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

    def observe(self, rows: int, keys: int, seconds: float, asked: int = 0, host: float = 0.0) -> None:
        """A real step took so long; `asked`: requests that drafts were made for behind it. `host`: seconds of
        it in which the host was busy beside the device."""
        at = bisect_left(self._rows, rows)
        if not self.learns or at == len(self._rows) or keys <= 0 or host > BUSY * seconds:
            return
        self._alike = self._alike + 1 if (at, asked) == self._last else 0
        self._last = at, asked
        if self._alike > FIRST and self._alike % EVERY:
            return
        empty = self._empty[at] + self.asking(asked)
        if not self._speed:  # the table was timed here: what is beyond it is not the rows
            self._each = max(0.0, seconds - empty) / keys
            self._scale = max(self._each, empty / keys)
            self._speed = seconds / (empty + self.still(keys))
            self._doubt = np.zeros((3 + len(self._timed),) * 2)
            self._doubt[2:, 2:] = self._prior
            self._doubt[0, 0] = self._doubt[1, 1] = 1 / 4
        price = empty + self.still(keys)
        off = seconds / (self._speed * price) - 1
        if off <= SLOW - 1:
            says = [(0, 1.0), (1, keys * self._scale / price), *self._parts(rows, price)]
            if asked and self._askers:
                says.append((2, self._knots[0] / price))
            elif (
                self._dear
            ):  # what was dear may be cheap by now, and will not be known as long as nobody asks
                self._dear *= 1 - RECOVERS
                self._doubt[2, 2] += 2 * RECOVERS * DEAR**2
            self._correct(min(off, DISTURBED), says)

    def _parts(self, rows: int, price: float) -> list[tuple[int, float]]:
        """Which of the sizes that were timed are in a step (from 3 on), and their shares of its price."""
        at, knots = bisect_left(self._timed, rows), self._knots
        if not self._between or self._timed[at] == rows:
            return [(3 + at, knots[at] / price)]
        low, high = self._timed[at - 1], self._timed[at]
        upper = (rows - low) / (high - low)
        return [(2 + at, (1 - upper) * knots[at - 1] / price), (3 + at, upper * knots[at] / price)]

    def _correct(self, off: float, says: list[tuple[int, float]]) -> None:
        """A step was off by so much of what it was expected to take, of which these are the shares."""
        doubt = self._doubt
        doubt[0, 0] += DRIFT**2
        doubt[1, 1] += WANDER**2
        doubt[2, 2] += WANDER**2
        known = sum(share * doubt[of] for of, share in says)  # covariance of each with what was expected
        gain = known / (NOISE**2 + sum(share * known[of] for of, share in says))
        doubt -= gain[:, None] * known
        gain *= off
        self._speed *= 1 + float(gain[0])
        self._each += float(gain[1]) * self._scale
        self._dear += float(gain[2]) * self._knots[0]
        self._bent += gain[3:]
        self._steps += 1
        if self._steps % AT_TIMES == 0:
            gone = AT_TIMES * FORGETS
            self._bent *= 1 - gone
            self._dear *= 1 - gone
            doubt[2:, 2:] *= 1 - 2 * gone
            doubt[2:, 2:] += 2 * gone * self._prior
        self._fill()

    def _fill(self) -> None:
        """Prices by rows. A larger step is never quicker, nor any much quicker than an empty one."""
        made = np.maximum.accumulate(self._knots * np.maximum(1 + self._bent, LEAST_BENT))
        self._empty = (np.interp(self._grid, self._timed, made) if self._between else made).tolist()

    def still(self, keys: float) -> float:
        """What a step with these keys costs beside its rows."""
        return max(self._each * keys, LEAST * self._empty[0])

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

    def asks(self, requests: int) -> float:
        """Seconds that drafts for so many take, as quick as the machine is at the moment."""
        return self.asking(requests) * (self._speed or 1.0)

    def asking(self, requests: int) -> float:
        """What drafts for so many requests cost before any of them is verified."""
        if not self._askers or not requests:
            return 0.0
        timed = self._asking[min(bisect_left(self._askers, requests), len(self._askers) - 1)]
        return max(LEAST_DEAR * timed, timed + self._dear)

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
