"""How likely a model's drafts are to stand, by how likely the model itself thinks them to be.

Where drafts are waited for, a chain can end when it is no longer likely enough to be worth another round. At
temperature 0 what a head says of its draft is nearly the chance that it stands. Above that the target's noise
is shared, so drafts stand more often than they are likely, and by how much is found out: for a few ranges of
what was said it is counted, over all requests, what became of such drafts. Of that the committed tokens tell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftproof.types import SlotColumns

Reals = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

RANGES = 10  # of what was said, each for requests without and with a temperature
SHARED = 0.25  # of the drafts that are as good as ruled out, by which shared noise makes them stand
FIRM = 8  # drafts that must be heard of before they count as much as what was said
MANY = 256  # drafts of a range that are remembered
GOES_ON = 2.0, 1.0  # drafts behind another that stood and fell, while nothing is known


class Sureness:
    """Of one model. A line a slot: what it drafted last."""

    def __init__(self, num_slots: int, k: int) -> None:
        self._stood, self._fell = np.zeros((2, 2 * RANGES))
        self._drafts, self._ranges = np.zeros((2, num_slots, k), np.int64)
        self._seed, self._length, self._count = np.zeros((3, num_slots), np.int64)

    def chances(self, said: Reals, hot: Bools) -> tuple[Reals, Ints]:
        """How likely drafts [B] are to stand of which the model says that, and the range of each."""
        said = np.nan_to_num(said).clip(0.0, 1.0)
        ranges: Ints = np.minimum((said * RANGES).astype(np.int64), RANGES - 1) + np.where(hot, RANGES, 0)
        expected = np.where(hot, SHARED + (1 - SHARED) * said, said)
        stood, fell = self._stood[ranges], self._fell[ranges]
        return (stood + FIRM * expected) / (stood + fell + FIRM), ranges

    def further(self) -> float:
        """How likely a draft is to stand whose predecessors do, before it is made."""
        stood, fell = self._stood.sum() + GOES_ON[0], self._fell.sum() + GOES_ON[1]
        return float(stood / (stood + fell))

    def note(self, columns: SlotColumns, slots: Ints, drafts: Ints, ranges: Ints, count: Ints) -> None:
        """Drafts [B, K] were made, so many of each."""
        real = slots >= 0
        slots = slots[real]
        self._drafts[slots], self._ranges[slots] = drafts[real], ranges[real]
        self._count[slots] = count[real]
        for mine, column in ((self._seed, columns.seed), (self._length, columns.length)):
            mine[slots] = column.cpu().numpy()[slots]

    def learn(self, columns: SlotColumns, slots: Ints) -> None:
        """What became of the drafts that these requests [B] were given last: all up to the first that is not
        what was committed stood, whether it was verified or not."""
        slots = slots[slots >= 0]
        length, seed, tokens = (part.cpu().numpy() for part in (columns.length, columns.seed, columns.tokens))
        same = (self._seed[slots] == seed[slots]) & (self._count[slots] > 0)
        place = np.arange(self._drafts.shape[1])
        at = self._length[slots][:, None] + place
        known = same[:, None] & (at < length[slots][:, None]) & (place < self._count[slots][:, None])
        right = tokens[slots[:, None], np.minimum(at, tokens.shape[1] - 1)] == self._drafts[slots]
        stood = np.logical_and.accumulate(known & right, axis=1)
        fell = known & ~right & np.pad(stood, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
        self._count[slots] = 0
        for counts, these in ((self._stood, stood), (self._fell, fell)):
            counts += np.bincount(self._ranges[slots][these], minlength=len(counts))
        full = self._stood + self._fell > MANY
        self._stood[full] /= 2
        self._fell[full] /= 2
