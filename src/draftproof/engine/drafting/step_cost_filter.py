"""What real steps say of the parts that a step's time is made of, noise and all.

    seconds = speed * (knots(rows) + asking) + bent(rows) * knots(rows) + each * keys + dear (if it asked)

`knots` were timed by rows at start, without requests, and `asking` too. The rest is the state of one Kalman
filter, in seconds, so that a step is a sum of its parts and noise pushes none of them one way. The filter
knows which parts a step says something about and how much of that was known: steps that are alike say how
quick the machine is, and one of another size, just after, what that size costs beside it. Sizes near each
other are bent alike. A machine that gets slower makes every part slower. What is old is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftproof.engine.drafting.kalman import correct, drift

Reals = NDArray[np.float64]

SLOW = 5.0  # times what was expected: a pause of whoever calls, not a step's time any more
PAUSES = 16  # in a row, after which it is what was expected that was wrong
DISTURBED = 0.5  # above what was expected: by how much does not matter
NOISE = 0.15  # of a step's time, by which steps of one kind differ
USUAL = 1 / 64  # of a step in what such steps usually take beside an empty one
DRIFT = 0.03  # of everything, by which the machine's speed changes from one step to the next
WANDER = (
    0.001  # of a step, by which what its keys cost changes: it is the machine's, and much the same always
)
WAVERS = 0.005  # of the smallest step, by which what asking costs does
BENT = 0.25  # of a size's time, by which it may be bent
ALIKE = 1.0  # octaves between sizes within which they are bent alike
DEAR = 0.3  # of the smallest step, by which asking may be dearer than was timed
FORGETS = 1 / 4096  # of what a size is bent, at every step
AT_TIMES = 16  # steps after which that is done
RECOVERS = 1 / 128  # of what asking is dearer than it was timed, at every step without
LEAST_BENT = -0.5  # of an empty step, that one of its size is bent at least
LEAST_KEYS = -0.8  # of the smallest step: what keys cost at least
MOST_DOUBT = 0.5  # of a step, in what its keys cost

SPEED, KEYS, ASKED, SIZES = 0, 1, 2, 3  # places in the state; from the last on one for each size


class Clocked:
    """The parts, as they are believed to be."""

    def __init__(self, sizes: Sequence[int], knots: Reals) -> None:
        """`knots`: seconds of empty steps of these `sizes`."""
        self.knots = knots
        octaves = np.log2(sizes)
        self._prior = np.zeros((1 + len(sizes),) * 2)  # of what is dear and bent, where the speed is 1
        self._prior[0, 0] = (DEAR * knots[0]) ** 2
        self._prior[1:, 1:] = BENT**2 * np.exp(-np.abs(octaves[:, None] - octaves) / ALIKE)
        self._state = np.zeros(SIZES + len(sizes))
        self._doubt = np.zeros((len(self._state),) * 2)
        self._wander = np.zeros(len(self._state))  # of each part by itself, from one step to the next
        self._usual = 0.0  # what steps take, beside empty ones
        self._steps = self._pauses = 0
        self._asks = False  # has anybody been asked?

    @property
    def speed(self) -> float:
        """0: nothing is known yet."""
        return float(self._state[SPEED])

    @property
    def each(self) -> float:
        """Of a key, in the time of empty steps."""
        return float(self._state[KEYS] / self._state[SPEED]) if self._steps else 0.0

    @property
    def dear(self) -> float:
        return float(self._state[ASKED] / self._state[SPEED]) if self._steps else 0.0

    @property
    def bent(self) -> Reals:
        """[sizes] of an empty step."""
        return self._state[SIZES:] / self._state[SPEED] if self._steps else self._state[SIZES:]

    def hear(self, rows: Sequence[tuple[int, float]], keys: int, asking: float, seconds: float) -> None:
        """A step took so long. `rows`: the sizes that it lies between, and how much of each; `asking`: what
        was timed for the drafts behind it, 0 if there were none."""
        empty = float(sum(share * self.knots[size] for size, share in rows)) + asking
        if not self._steps:
            self._begin(empty, keys, seconds)
        says = np.zeros_like(self._state)  # how much of each part is in it
        says[SPEED], says[KEYS] = empty, keys
        for size, share in rows:
            says[SIZES + size] = share * self.knots[size]
        if asking:
            says[ASKED], self._asks = 1.0, True
        elif self._asks:  # what was dear may be cheap by now, and will not be known as long as nobody asks
            self._fade(slice(ASKED, SIZES), RECOVERS)
        expected = max(float(says @ self._state), 0.1 * empty * self.speed)
        off = seconds - expected
        if off > (SLOW - 1) * expected:
            self._pauses += 1
            if self._pauses == PAUSES:  # the first step was far too quick, say: the next one is the first
                self._steps = self._pauses = 0
                self._state[:], self._doubt[:] = 0.0, 0.0
            return
        self._pauses = 0
        off = min(off, DISTURBED * expected)
        self._usual += USUAL * ((expected + off) / empty - self._usual)
        self._drift(expected, keys)
        correct(self._state, self._doubt, says, off, (NOISE * self._usual * empty) ** 2)
        self._keep_within(keys)

    def _begin(self, empty: float, keys: int, seconds: float) -> None:
        """The table was timed here: what is beyond it is not the rows. A first step may have been a pause."""
        seconds = min(seconds, SLOW * empty)
        beyond = max(0.0, seconds - empty)
        self._state[SPEED], self._state[KEYS] = (seconds - beyond) / empty, beyond / keys
        speed = self._state[SPEED]
        self._doubt[SPEED, SPEED], self._doubt[KEYS, KEYS] = (
            (speed / 2) ** 2,
            (MOST_DOUBT * seconds / keys) ** 2,
        )
        self._doubt[ASKED:, ASKED:] = self._prior * speed**2
        self._usual = seconds / empty

    def _drift(self, expected: float, keys: int) -> None:
        self._wander[KEYS] = WANDER * expected / keys
        self._wander[ASKED] = WAVERS * self._state[SPEED] * self.knots[0]
        drift(self._state, self._doubt, DRIFT, self._wander, KEYS, MOST_DOUBT * expected / keys)
        self._steps += 1
        if self._steps % AT_TIMES == 0:
            self._fade(slice(ASKED, None), AT_TIMES * FORGETS)

    def _fade(self, which: slice, share: float) -> None:
        """So much of what is dear or bent is forgotten, and as much less is known."""
        stays, prior = 1 - share, slice(which.start - ASKED, which.stop and which.stop - ASKED)
        self._state[which] *= stays
        self._doubt[which] *= stays
        self._doubt[:, which] *= stays
        self._doubt[which, which] += (1 - stays**2) * self._state[SPEED] ** 2 * self._prior[prior, prior]

    def _keep_within(self, keys: int) -> None:
        state = self._state
        state[SPEED] = max(state[SPEED], 1e-3 * self._usual)
        state[KEYS] = max(state[KEYS], LEAST_KEYS * state[SPEED] * self.knots[0] / keys)
        np.maximum(state[SIZES:], LEAST_BENT * state[SPEED], out=state[SIZES:])
