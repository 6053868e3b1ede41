"""Draft budget: how many drafts each request gets in a step. The output never depends on it.

Each request has a posterior over acceptance rates. It starts as the prior, which is learned from earlier
requests, is updated by every window with drafts, and decays towards the prior in every step. With the cost
model (`step_cost`) the posteriors give the drafts with the highest mean speed of the requests
(`budget_kernels`). Where drafts exist before they are chosen, those behind a long match have a posterior and
a prior of their own: they are accepted far more often than those behind a short one.

A request that gets no drafts would never be observed again, though a free text may turn into a copy. So
every 8 to 64 steps each such request gets one draft, and after an accepted probe more at once. While less
than 10 % of the drafts are expected to be accepted, a new request is not probed at once, and probes of a head
or a draft model alone are four times as rare.

A batch that always gets drafts would never run a step without them, and the cost model could not correct
the seconds of such a step. So some of the first steps run without drafts, and later one in 32, or one in 128
where drafts are expected to gain much.
"""

from __future__ import annotations

import numpy as np

from draftproof.array_types import Floats64, Ints
from draftproof.engine.drafting import budget_kernels
from draftproof.engine.drafting.budget_kernels import (
    ASSIGNED,
    CLASSES,
    COLUMNS,
    IS_FIXED,
    LIMIT,
    PROBE_LENGTH,
    RATES,
)
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.speculative_config import MAX_SPECULATIVE_TOKENS

POSTERIOR_DECAY_PER_STEP = 0.02  # share by which a posterior moves to the prior
MIN_PROBE_INTERVAL_STEPS, MAX_PROBE_INTERVAL_STEPS = 8, 64
FIRST_PROBE_LENGTH = 2  # drafts of a new request's first step with drafts, while such drafts are accepted
MIN_PROMISING_RATE = 0.1  # acceptance rate that the prior expects; below it there are fewer probes
PROBE_TIME_SHARE = 0.01  # share of the time spent on probes; it sets the interval within its limits
RARE_PROBE_INTERVAL_FACTOR = 4  # for a head or draft model, below MIN_PROMISING_RATE
FIRST_PLAIN_STEPS = 2  # steps without drafts at first, for each number of requests
FIRST_PLAIN_INTERVAL_STEPS = 4  # between these first steps without drafts
PLAIN_INTERVAL_STEPS = 32  # steps between steps without drafts
LONG_PLAIN_INTERVAL_STEPS = 128  # where drafts are expected to gain more than MIN_LONG_INTERVAL_SPEEDUP
MIN_LONG_INTERVAL_SPEEDUP = 1.3
MIN_LONG_MATCH_TOKENS = 6
HOLD_STEPS = 3  # steps for which a decision holds while the batch stays the same
MAX_HOLD_STEPS = 8  # if the host is the bottleneck: also while requests start and end
HOST_BOUND_SHARE = 0.7  # of a step's seconds: a slower host is the bottleneck


class DraftBudget:
    """Drafts per request, for all requests of a step at once. A slot has a line for each class of drafts."""

    def __init__(self, num_slots: int, cost: StepCost, charges_drafting: bool = True) -> None:
        """Start with equal weights of all rates; `charges_drafting`: drafts cost the draft model's time."""
        self._cost = cost
        self._charges_drafting = charges_drafting
        self._columns = np.zeros((COLUMNS, CLASSES * num_slots), np.int64)
        self._posteriors = np.full((CLASSES * (num_slots + 1), len(RATES)), 1 / len(RATES))
        self._is_long = np.zeros(num_slots, np.int64)  # class of the last drafts
        self._is_promising = np.ones(CLASSES, np.bool_)  # the prior of a class expects MIN_PROMISING_RATE
        self._results: list[tuple[Ints, Ints, Ints, bool]] = []  # not in the columns yet
        self._has_fixed = False  # a request with a fixed number of drafts has started
        self._num_steps = 0
        self._last_probe = 0  # step
        self._last_probe_result = 0  # step until which results of the last probes may come
        self._last_plain_step = 0
        # The decision that holds: since which step, for how many more, for which slots, with which drafts.
        self._decided_at = self._hold_left = 0
        self._held_slots = self._held_drafts = np.zeros(0, np.int64)
        self._held_size = 0  # rows of the step that the held decision was made for
        self._has_drafts = self._is_host_bound = False
        self._new_request_drafts = 0
        self._context = self._floor = 0.0  # seconds of that step
        self._draft_context = 0.0  # seconds, of each draft

    @property
    def limit(self) -> Ints:
        """Return the largest number of drafts [S] of the request in each slot."""
        limit: Ints = self._columns[LIMIT, ::CLASSES]
        return limit

    def _lines(self, slots: Ints) -> Ints:
        """Return the lines of the requests' last drafts."""
        return CLASSES * slots + self._is_long[slots]

    def set_cost(self, cost: StepCost) -> None:
        """Replace the cost model, when steps have been timed."""
        self._cost = cost

    def has_fixed(self, slots: Ints) -> bool:
        """Return whether one of these requests has a fixed number of drafts."""
        return self._has_fixed and bool(self._columns[IS_FIXED, CLASSES * slots].any())

    def start(self, slot: int, limit: int, adaptive: bool) -> None:
        """Begin a request of at most `limit` drafts; not adaptive: it always gets them."""
        if limit:
            budget_kernels.compile_kernels()
        self._apply_results()  # those of the slot's last request
        self._has_fixed |= not adaptive
        lines, priors = slice(CLASSES * slot, CLASSES * (slot + 1)), self._posteriors[-CLASSES:]
        self._is_long[slot] = 0
        self._columns[:, lines] = 0
        self._columns[LIMIT, lines] = limit
        self._columns[PROBE_LENGTH, lines] = np.where(self._is_promising, FIRST_PROBE_LENGTH, 1)
        self._columns[IS_FIXED, lines] = not adaptive
        self._posteriors[lines] = priors
        self._columns[ASSIGNED, lines] = min(self._new_request_drafts, limit) if adaptive else limit
        if not self._has_drafts:
            self._hold_left = 0

    def held(self, slots: Ints) -> Ints | None:
        """Return the drafts of the last decision if it still holds; None: `choose` again.

        While the batch stays the same, so that `slots` is the same array, the result is the same array too.
        """
        if not self._hold_left or (slots is not self._held_slots and not self._is_host_bound):
            return None
        self._hold_left -= 1
        self._num_steps += 1
        if slots is not self._held_slots:
            self._held_slots, self._held_drafts = slots, self._columns[ASSIGNED, self._lines(slots)]
        return self._held_drafts

    def choose(self, slots: Ints, max_drafts: Ints, keys: int, matched: Ints | None = None) -> Ints:
        """Return the drafts [B] for the coming step, up to `max_drafts` [B].

        keys: tokens that these requests have stored. matched [B]: tokens that a search has matched for drafts
        that exist; 0: not known.
        """
        self._num_steps += 1
        self._apply_results()
        if matched is not None:
            self._is_long[slots] = matched >= MIN_LONG_MATCH_TOKENS
        lines = self._lines(slots)
        num_fixed = int(np.count_nonzero(self._columns[IS_FIXED, lines])) if self._has_fixed else 0
        if num_fixed == len(slots):
            return self._choose_all(slots, max_drafts)
        cost = self._cost
        self._context = context = cost.context_seconds(keys, len(slots))
        self._floor = floor = cost.host_floor(context)
        self._draft_context = cost.draft_context_seconds(len(slots), keys)
        draft_cost = cost.draft_seconds(len(slots)) if self._charges_drafting and not num_fixed else 0.0
        if not draft_cost and cost.row_seconds(len(slots) + int(max_drafts.sum())) <= floor:
            self._new_request_drafts = MAX_SPECULATIVE_TOKENS
            return self._choose_all(slots, max_drafts)
        decay = 1 - (1 - POSTERIOR_DECAY_PER_STEP) ** (self._num_steps - self._decided_at)
        gains, flat_gains, rows = budget_kernels.expected_gains(
            self._columns, self._posteriors, lines, max_drafts, decay
        )
        self._is_promising = self._posteriors[-CLASSES:] @ RATES > MIN_PROMISING_RATE
        flat_gains.sort()  # NumPy's sort is faster than numba's
        table = cost.table_for(len(slots), self._draft_context)
        width = gains.shape[1]
        if draft_cost and len(slots) > 1 and cost.draft_rounds > 1:
            width, gains, flat_gains, draft_cost = self._choose_rounds(gains, flat_gains, rows, table)
            max_drafts = np.minimum(max_drafts, width)
        next_probe = self._last_probe + self._probe_interval(len(slots), draft_cost)
        is_probe_due = self._num_steps >= next_probe
        found: budget_kernels.Assignment = budget_kernels.plan_drafts(
            self._columns, self._posteriors, lines, max_drafts, gains, flat_gains, rows,
            table, context, floor, draft_cost, is_probe_due,
        )  # fmt: skip
        self._new_request_drafts = min(found.new_request_drafts, width)
        self._hold(slots, found.assigned, found.num_assigned)
        if is_probe_due:
            self._last_probe = self._num_steps
        if found.has_probes:
            self._last_probe_result = self._num_steps + MAX_HOLD_STEPS
        if self._is_plain_step_due(found, len(slots), num_fixed):
            self._last_plain_step, self._hold_left = self._num_steps, 0
            return np.zeros_like(found.drafts)
        if not found.num_assigned:
            self._last_plain_step = self._num_steps
            self._hold_left = min(MAX_HOLD_STEPS, max(0, next_probe - self._num_steps - 1))
        return found.drafts

    def _choose_rounds(
        self, gains: Floats64, flat_gains: Floats64, rows: int, table: Floats64
    ) -> tuple[int, Floats64, Floats64, float]:
        """Return the drafts that a request may have, their gains, flat too, and the draft model's seconds.

        Of many requests one is likely to gain from all rounds, and a round takes as long for it as for all.
        """
        num_requests, best, best_speedup = len(gains), (0, gains, flat_gains, 0.0), 0.0
        for rounds in round_counts(self._cost.draft_rounds):
            seconds, width = self._cost.draft_seconds(num_requests, rounds), min(rounds, gains.shape[1])
            some = (gains, flat_gains) if width == gains.shape[1] else _first_drafts(gains, width)
            _, speedup = budget_kernels.best_draft_count(
                table, some[1], rows, num_requests, self._context, self._floor, seconds, width
            )
            if speedup > best_speedup:
                best, best_speedup = (width, *some, seconds), speedup
            if width == gains.shape[1]:
                break
        return best

    def pass_step(self) -> None:
        """Count a step without a choice and without drafts."""
        self._num_steps += 1
        self._last_plain_step = self._num_steps

    def _is_plain_step_due(self, found: budget_kernels.Assignment, num_requests: int, num_fixed: int) -> bool:
        """Return whether the coming step is to run without drafts, so that its seconds are observed."""
        if not found.num_assigned or num_fixed or not self._cost.learns:
            return False
        num_steps = self._num_steps - self._last_plain_step
        if self._cost.num_plain_steps(num_requests) < FIRST_PLAIN_STEPS:
            return num_steps >= FIRST_PLAIN_INTERVAL_STEPS
        is_slight = found.speedup < MIN_LONG_INTERVAL_SPEEDUP
        return num_steps >= (PLAIN_INTERVAL_STEPS if is_slight else LONG_PLAIN_INTERVAL_STEPS)

    def _probe_interval(self, num_requests: int, draft_cost: float) -> int:
        """Return the steps between probes, so that one draft for each request takes PROBE_TIME_SHARE."""
        seconds = self._bounded_seconds(num_requests)
        extra = self._bounded_seconds(2 * num_requests) - seconds + draft_cost
        interval = extra / (PROBE_TIME_SHARE * (seconds + self._context))
        is_rare = draft_cost > 0 and not self._is_promising[0]
        factor = RARE_PROBE_INTERVAL_FACTOR if is_rare else 1
        return factor * int(min(max(interval, MIN_PROBE_INTERVAL_STEPS), MAX_PROBE_INTERVAL_STEPS))

    def _bounded_seconds(self, rows: int) -> float:
        return max(self._cost.row_seconds(rows), self._floor)

    def _choose_all(self, slots: Ints, max_drafts: Ints) -> Ints:
        drafts = max_drafts.copy()
        self._columns[ASSIGNED, self._lines(slots)] = drafts
        self._hold(slots, drafts, int(drafts.sum()))
        return drafts

    def _hold(self, slots: Ints, drafts: Ints, num_drafts: int) -> None:
        """Keep a decision for some steps; probes in it are for one step."""
        self._held_slots, self._held_drafts, self._decided_at = slots, drafts, self._num_steps
        rows = len(slots) + num_drafts
        self._has_drafts, self._held_size = num_drafts > 0, self._cost.size(rows)
        seconds, host_seconds = self._cost.row_seconds(rows) + self._context, self._floor + self._context
        self._is_host_bound = host_seconds > HOST_BOUND_SHARE * seconds
        self._hold_left = MAX_HOLD_STEPS if self._is_host_bound else HOLD_STEPS

    def refit(self, slots: Ints, drafts: Ints, rows: int) -> Ints:
        """Return which of the drafts to keep in a step of `rows` other rows, prompts among them.

        The drafts were chosen for a step without prompts. With them it may be just above a step size.
        """
        num_rows = rows + int(drafts.sum())
        room = max(self._held_size, self._cost.size(rows))
        is_free = self._cost.row_seconds(num_rows) <= self._floor  # the host takes longer
        if num_rows <= room or is_free or not self._cost.size(rows):
            return drafts
        lines = self._lines(slots)
        gains, flat_gains, rows = budget_kernels.draft_gains(
            self._columns, self._posteriors, lines, drafts, rows
        )
        flat_gains.sort()
        kept, _, _ = budget_kernels.choose_drafts(
            self._columns, lines, drafts, gains, flat_gains, rows,
            self._cost.table_for(rows, self._draft_context), self._context, self._floor, 0.0,
        )  # fmt: skip
        return kept  # type: ignore[no-any-return]

    def record(self, slots: Ints, granted: Ints, accepted: Ints) -> None:
        """Collect the results of a step: rows granted for drafts, and drafts accepted.

        A granted row without a draft counts as rejected.
        """
        had_probes = self._num_steps <= self._last_probe_result
        self._results.append((self._lines(slots), granted, accepted.copy(), had_probes))
        if not self._has_drafts and np.count_nonzero(granted):
            self._hold_left = 0  # a probe has a result

    def _apply_results(self) -> None:
        for lines, granted, accepted, had_probes in self._results:
            budget_kernels.record_windows(self._columns, lines, granted, accepted, had_probes)
        self._results.clear()


def round_counts(k: int) -> tuple[int, ...]:
    """Return the numbers of rounds of a draft model that are chosen from: 2, 3, half of `k`, and `k`."""
    return tuple(sorted({min(2, k), min(3, k), (k + 1) // 2, k}))


def _first_drafts(gains: Floats64, count: int) -> tuple[Floats64, Floats64]:
    """Return the gains of the first `count` drafts of each request, and those above 0, ascending."""
    first = gains[:, :count].copy()
    flat = np.sort(first, axis=None)
    return first, flat[np.searchsorted(flat, 0.0, "right") :]
