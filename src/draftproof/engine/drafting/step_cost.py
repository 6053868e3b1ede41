"""Cost model of a step: seconds by rows and context, timed at start-up and corrected by observed steps.

    seconds = base[rows] * (1 + correction[rows]) + per_key[requests] * keys + per_draft_key * draft_keys

`base` is timed at start-up on empty steps, so it has no cost of context: `keys` is the number of stored
tokens that the requests of a step read. The other terms are exponentially weighted averages of the error of
past predictions. A share of each error goes to the correction of the step's size and, less, of sizes near
it. Of a step without drafts a share also goes to `per_key`, the more the larger the context's part of the
prediction is. Other kernels read the keys of more requests, so each number of requests has a cost of its own;
one without observations has that of the nearest. A step with drafts corrects neither `per_key` nor smaller
sizes: its rows read the same keys several times. A step without drafts would seem as slow, and drafts free.

On the CPU attention computes each row with each of its keys, so a draft costs more the longer the context is.
`draft_keys` is the number of drafts times the keys of a request, and a share of the error of a step with
drafts goes to `per_draft_key`. Without it a draft behind a short context would seem as slow as behind a long
one.

A draft model that runs behind a step adds the seconds timed for it and an average of what it took longer.

With overlap a step never ends before the host's part of it: up to that floor rows cost nothing. Steps for
which the device waited are not observed here (`run_ahead`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

from draftproof.array_types import Floats64

NO_DRAFT_SECONDS: Mapping[int, float] = {}
CONTEXT_RATE = 1 / 4  # share of an error added to the cost of a key, if the step were context alone
MIN_CONTEXT_WEIGHT = 1 / 8  # minimum factor of `CONTEXT_RATE`, so that a cost of zero can rise
FIRST_CONTEXT_STEPS = 4  # observed steps without drafts that set the cost of a key; with drafts: of a draft
DRAFT_CONTEXT_RATE = 1 / 4  # share of an error added to `per_draft_key`, in steps with drafts
SIZE_RATE = 1 / 16  # share of an error added to the correction of the step's size; more in its first steps
DRAFT_RATE = 1 / 16  # share of an error added to the overhead of the draft model, if it ran
CORRECTION_DECAY = 1 / 1024  # decay of all corrections, per observed step
MAX_DRAFT_ERROR_FACTOR = 4.0  # longer draft seconds count as so many times the predicted ones
DRAFT_DECAY = 1 / 128  # decay of the draft overhead, per observed step without the draft model
NEIGHBOUR_OCTAVES = 1.0  # distance between sizes at which a correction counts for 1/e
MIN_CORRECTION = -0.5
MAX_ERROR_SHARE = 0.5  # largest counted error, as a share of the predicted seconds
PAUSE_FACTOR = 5.0  # a step of so many times the predicted seconds contains a pause of the caller
MAX_PAUSES = 16  # pauses in a row after which the prediction is taken to be wrong
FIRST_OBSERVED_STEPS = 3  # of equal steps in a row
OBSERVE_INTERVAL_STEPS = 4  # of equal steps after the first ones, every 4th is observed
HOST_RATE = 1 / 16  # weight of a step in the mean host seconds
MAX_HOST_FACTOR = 2.0  # longer host parts count as so many times the mean
HOST_FLOOR_SHARE = 0.85  # lower bound of a step, as a share of the mean host seconds
MIN_DRAFT_SHARE = 0.25  # minimum predicted draft seconds, as a share of the timed ones; 0: it always runs
COST_DOUBLING_ROWS = 64  # extra rows that double the cost of a step, where nothing was timed


class StepCost:
    """Seconds of steps. `table` [2, sizes]: numbers of rows, and the seconds of a step without context."""

    def __init__(
        self,
        seconds: Mapping[int, float],
        interpolate: bool = False,
        learns: bool = True,
        draft_seconds: Mapping[int, float] = NO_DRAFT_SECONDS,
        draft_rounds: int = 1,
    ) -> None:
        """Build the table from timed steps.

        seconds: of an empty step by rows. Steps of other sizes are padded to the next of them, or, with
        `interpolate`, run as they are. draft_seconds: of `draft_rounds` rounds of the draft model by
        requests, besides storing KV.
        """
        self.learns = learns
        self._sizes = sorted(seconds)
        self._base = np.maximum.accumulate([seconds[size] for size in self._sizes])  # less would be noise
        self._interpolate = interpolate
        self._rows = list(range(1, self._sizes[-1] + 1)) if interpolate else self._sizes
        self._timed: list[float] = np.interp(self._rows, self._sizes, self._base).tolist()
        self.table = np.array([self._rows, self._rows], np.float64)
        octaves = np.log2(self._sizes)
        self._distances = np.abs(octaves[:, None] - octaves)
        self._influence = np.exp(-self._distances / NEIGHBOUR_OCTAVES)
        self._draft_influence = np.triu(self._influence)  # of a step with drafts: not on smaller sizes
        self._draft_requests = sorted(draft_seconds)
        self._draft_seconds = [draft_seconds[count] for count in self._draft_requests]
        self.draft_rounds = draft_rounds
        self._host_seconds = 0.0
        self._last_kind, self._num_alike = (0, 0, False, 0), 0
        self._reset()

    @classmethod
    def unmeasured(cls, max_rows: int) -> StepCost:
        """Return a fixed default model for an engine without warm-up; observed steps do not correct it."""
        sizes = {min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)}
        return cls({size: 1.0 + size / COST_DOUBLING_ROWS for size in sizes}, learns=False)

    def _reset(self) -> None:
        self._num_pauses = 0
        self._num_plain_steps = np.zeros(len(self._sizes), np.int64)  # observed without drafts, by requests
        self._per_key = np.zeros(len(self._sizes))
        self._per_draft_key = self._draft_overhead = 0.0
        self._num_draft_steps = 0  # observed steps with drafts
        self._correction = np.zeros(len(self._sizes))
        self._num_seen = [0] * len(self._sizes)  # observed steps of each size
        self._fill_table()
        self._fill_context()

    def _fill_table(self) -> None:
        """Write the corrected seconds; a larger step is never cheaper."""
        seconds = np.maximum.accumulate(self._base * (1 + self._correction))
        self.table[1] = np.interp(self._rows, self._sizes, seconds) if self._interpolate else seconds
        self._seconds: list[float] = self.table[1].tolist()

    def _fill_context(self) -> None:
        """Write the seconds of a key; sizes without observations have those of the nearest."""
        distances = np.where(self._num_plain_steps > 0, self._distances, np.inf)
        self._key_seconds: list[float] = self._per_key[distances.argmin(axis=1)].tolist()

    def record_host_seconds(self, seconds: float) -> None:
        """Record the host's part of a step that ran beside the device."""
        if not self._host_seconds:
            self._host_seconds = min(seconds, self._seconds[0])
        seconds = min(seconds, MAX_HOST_FACTOR * self._host_seconds)
        self._host_seconds += HOST_RATE * (seconds - self._host_seconds)

    def observe(
        self,
        rows: int,
        keys: int,
        seconds: float,
        num_drafting: int = 0,
        num_drafts: int = 0,
        rounds: int = 0,
    ) -> None:
        """Record a step with `num_drafts` drafts.

        num_drafting: requests that the draft model ran for behind it. rounds: of it; 0: as many as timed.
        """
        at = bisect_left(self._rows, rows)
        if not self.learns or at == len(self._rows) or keys <= 0 or seconds <= 0:
            return
        kind = at, num_drafting, num_drafts > 0, rounds
        self._num_alike = self._num_alike + 1 if kind == self._last_kind else 0
        self._last_kind = kind
        if self._num_alike <= FIRST_OBSERVED_STEPS or self._num_alike % OBSERVE_INTERVAL_STEPS == 0:
            self._correct(rows, keys, seconds, num_drafts, self.draft_seconds(num_drafting, rounds))

    def observe_drafting(self, requests: int, seconds: float) -> None:
        """Record the seconds of the draft model besides storing KV, where a step does not include them."""
        expected = self.draft_seconds(requests)
        self._draft_overhead += DRAFT_RATE * min(seconds - expected, MAX_DRAFT_ERROR_FACTOR * expected)

    def _correct(self, rows: int, keys: int, seconds: float, num_drafts: int, draft_seconds: float) -> None:
        """Correct the model by the error of its prediction for an observed step."""
        requests, has_drafts = rows - num_drafts, num_drafts > 0
        context, draft_keys = self.context_seconds(keys, requests), 0.0
        if self._interpolate:
            draft_keys = num_drafts * keys / requests
        expected = self.row_seconds(rows) + context + draft_seconds + self._per_draft_key * draft_keys
        error = seconds - expected
        if self._num_plain_steps.any() and error > (PAUSE_FACTOR - 1) * expected:
            self._num_pauses += 1
            if self._num_pauses == MAX_PAUSES:
                self._reset()
            return
        self._num_pauses = 0
        if not has_drafts and self.num_plain_steps(requests) < FIRST_CONTEXT_STEPS:
            self._start_context(requests, keys, context + error)
            return
        if draft_keys and self._num_draft_steps < FIRST_CONTEXT_STEPS:
            self._start_draft_context(draft_keys, error + self._per_draft_key * draft_keys)
            return
        error = min(error, MAX_ERROR_SHARE * expected)
        if not has_drafts:
            weight = max(context / expected, MIN_CONTEXT_WEIGHT)
            moved = max(CONTEXT_RATE * weight * error, -context)
            self._per_key[self._index(requests)] += moved / keys
            self._fill_context()
            error -= moved
        elif draft_keys:
            moved = max(DRAFT_CONTEXT_RATE * error, -self._per_draft_key * draft_keys)
            self._per_draft_key += moved / draft_keys
            error -= moved
        self._correction *= 1 - CORRECTION_DECAY
        size = bisect_left(self._sizes, rows)
        self._num_seen[size] += 1
        rate = max(SIZE_RATE, 1 / (1 + self._num_seen[size]))
        influence = self._draft_influence if has_drafts else self._influence
        self._correction += rate * error / self._base[size] * influence[size]
        np.maximum(self._correction, MIN_CORRECTION, out=self._correction)
        if draft_seconds:
            self._draft_overhead += DRAFT_RATE * error
        else:  # it may be cheaper by now, which is not observed while the model does not run
            self._draft_overhead *= 1 - DRAFT_DECAY
        self._fill_table()

    def _start_context(self, requests: int, keys: int, seconds: float) -> None:
        """Set `per_key` from the first steps: the smallest, because a first step is often slow.

        The table was timed on empty steps, so that the rest of a step without drafts is context.
        """
        at, found = self._index(requests), max(0.0, seconds) / keys
        self._per_key[at] = min(self._per_key[at], found) if self._num_plain_steps[at] else found
        self._num_plain_steps[at] += 1
        self._fill_context()

    def _start_draft_context(self, draft_keys: float, seconds: float) -> None:
        """Set `per_draft_key` from the first steps with drafts once `per_key` is known: the smallest."""
        if not self._num_plain_steps.any():
            return
        found = max(0.0, seconds) / draft_keys
        self._per_draft_key = found if not self._num_draft_steps else min(self._per_draft_key, found)
        self._num_draft_steps += 1

    def table_for(self, rows: int, draft_context_seconds: float) -> Floats64:
        """Return the table with the context of drafts, where `rows` rows of a step are no drafts."""
        if not draft_context_seconds:
            return self.table
        made = self.table.copy()
        made[1] += draft_context_seconds * np.maximum(made[0] - rows, 0)
        return made

    def draft_context_seconds(self, requests: int, keys: int) -> float:
        """Return the seconds that the context of a request adds to one of its drafts, as a mean."""
        return self._per_draft_key * keys / requests if requests else 0.0

    def row_seconds(self, rows: int) -> float:
        """Return the seconds of a step without context; more rows than timed cost as many as timed."""
        return self._seconds[min(bisect_left(self._rows, rows), len(self._rows) - 1)]

    def _index(self, rows: int) -> int:
        return min(bisect_left(self._sizes, rows), len(self._sizes) - 1)

    def num_plain_steps(self, requests: int) -> int:
        """Return how many steps without drafts have set the cost of a key, up to FIRST_CONTEXT_STEPS."""
        return int(self._num_plain_steps[self._index(requests)])

    def context_seconds(self, keys: float, requests: int) -> float:
        """Return the seconds that do not depend on the number of rows."""
        return self._key_seconds[self._index(requests)] * keys

    def host_floor(self, context_seconds: float) -> float:
        """Return the seconds up to which the rows of a step are hidden behind the host's part."""
        return max(0.0, HOST_FLOOR_SHARE * self._host_seconds - context_seconds)

    def draft_seconds(self, requests: int, rounds: int = 0) -> float:
        """Return the seconds of the draft model for so many requests, besides storing KV.

        rounds: 0: as many as were timed.
        """
        if not self._draft_requests or not requests:
            return 0.0
        at = min(bisect_left(self._draft_requests, requests), len(self._draft_requests) - 1)
        timed = self._draft_seconds[at]
        share = rounds / self.draft_rounds if rounds else 1.0
        return share * max(MIN_DRAFT_SHARE * timed, timed + self._draft_overhead) if timed else 0.0

    def size(self, rows: int) -> int:
        """Return the rows of the timed step that `rows` fit into; 0 if none is that large."""
        at = bisect_left(self._rows, rows)
        return self._rows[at] if at < len(self._rows) else 0
