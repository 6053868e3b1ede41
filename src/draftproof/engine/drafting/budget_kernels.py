"""Numba kernels that choose how many drafts each request verifies.

NumPy over whole columns is ten times slower here, because call overhead dominates. For the same reason the
state of all slots is two arrays: integers [COLUMNS, N], and posteriors [N + CLASSES, RATES] over acceptance
rates. N is CLASSES lines for each slot: line CLASSES * slot + class. The last CLASSES posteriors are the
priors of a new request.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from draftproof.array_types import Ints
from draftproof.numba_jit import native
from draftproof.speculative_config import MAX_SPECULATIVE_TOKENS

# numba's cache key is this file alone, so values of other modules are repeated here
MAX_DRAFTS = 64
assert MAX_SPECULATIVE_TOKENS == MAX_DRAFTS
# Rows of the integers. NEW_*: windows since the last update, drafts accepted in them, windows with a rejected
# draft. ASSIGNED: drafts of the last decision, without probes. PROBE_LENGTH: drafts of the next probe.
LIMIT, IS_FIXED, NUM_WINDOWS, PROBE_LENGTH, IS_PROBED = range(5)
NEW_WINDOWS, NEW_ACCEPTED, NEW_REJECTED, ASSIGNED, COLUMNS = range(5, 10)
# A posterior has one weight for each of these probabilities that a draft is accepted if those before it were.
RATES = np.array([0.005, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99])
NUM_RATES = len(RATES)
POWERS = RATES[:, None] ** np.arange(1, MAX_DRAFTS + 1)  # [rates, n - 1]: n drafts are accepted
MAX_EXPONENT = 255  # more results at a time count as this many
ACCEPTED_POWERS, REJECTED_POWERS = (
    rate ** np.arange(MAX_EXPONENT + 1)[:, None] for rate in (RATES, 1 - RATES)
)
CLASSES = 2  # of drafts, each with an acceptance of its own
MIN_PRIOR = 0.002  # weight of any rate in the prior
PRIOR_RATE = 1 / 32  # weight of a new request's window in the prior
NEW_REQUEST_WINDOWS = 32  # windows of a request that count for the prior: a long request is still one
MIN_SURVIVAL = 0.01  # a less likely draft is not assigned, except as a probe

compiled = native(boundscheck=False, error_model="numpy")


class Assignment(NamedTuple):
    """Drafts of a step."""

    drafts: Ints  # [B] with probes
    assigned: Ints  # [B] without
    num_assigned: int
    has_probes: bool
    new_request_drafts: int  # drafts of a request that starts before the next decision
    speedup: float  # expected tokens per second, over those of the step without drafts


@compiled
def prior_of(posteriors, line):  # type: ignore[no-untyped-def]
    """Return the prior [RATES] of the class of a line."""
    return posteriors[len(posteriors) - CLASSES + line % CLASSES]


@compiled
def update_posteriors(columns, posteriors, lines):  # type: ignore[no-untyped-def]
    """Multiply in the results since the last update, and move the priors by those of new requests."""
    means, num_windows = np.zeros((CLASSES, NUM_RATES)), np.zeros(CLASSES, np.int64)
    for line in lines:
        new_windows = columns[NEW_WINDOWS, line]
        if new_windows == 0:
            continue
        accepted = min(columns[NEW_ACCEPTED, line], MAX_EXPONENT)
        rejected = min(columns[NEW_REJECTED, line], MAX_EXPONENT)
        total = 0.0
        for r in range(NUM_RATES):
            posteriors[line, r] *= ACCEPTED_POWERS[accepted, r] * REJECTED_POWERS[rejected, r]
            total += posteriors[line, r]
        counted = new_windows if columns[NUM_WINDOWS, line] < NEW_REQUEST_WINDOWS else 0
        for r in range(NUM_RATES):
            posteriors[line, r] /= total
            means[line % CLASSES, r] += counted * posteriors[line, r]
        num_windows[line % CLASSES] += counted
        columns[NUM_WINDOWS, line] += new_windows
        columns[NEW_WINDOWS, line] = columns[NEW_ACCEPTED, line] = columns[NEW_REJECTED, line] = 0
    for c in range(CLASSES):
        if num_windows[c] == 0:
            continue
        prior = prior_of(posteriors, c)
        keep, total = (1 - PRIOR_RATE) ** num_windows[c], 0.0
        for r in range(NUM_RATES):
            prior[r] = max(keep * prior[r] + (1 - keep) / num_windows[c] * means[c, r], MIN_PRIOR)
            total += prior[r]
        for r in range(NUM_RATES):
            prior[r] /= total


@compiled
def expected_survival(weights, n):  # type: ignore[no-untyped-def]
    """Return the probability that draft `n`, counted from 0, is reached and accepted; weights [RATES]."""
    survival = 0.0
    for r in range(NUM_RATES):
        survival += weights[r] * POWERS[r, n]
    return survival


@compiled
def draft_gains(columns, posteriors, lines, max_drafts, rows):  # type: ignore[no-untyped-def]
    """Return the gains of drafts, for up to `max_drafts` [B] drafts beside `rows` rows.

    gains [B, K]: logarithm of the factor by which a draft raises the expected tokens of its request; 0 for
    fixed requests and for drafts below MIN_SURVIVAL. flat_gains [N]: those above 0. rows: rows that do not
    depend on the choice. A probe gets a low gain of its own: it takes a free row, but no larger step.
    """
    width = 1
    for b in range(len(max_drafts)):
        width = max(width, max_drafts[b])
    gains, flat_gains, count = np.zeros((len(lines), width)), np.empty(len(lines) * width), 0
    for b in range(len(lines)):
        line, tokens = lines[b], 1.0
        if columns[IS_FIXED, line]:
            rows += max_drafts[b]
            continue
        for n in range(max_drafts[b]):
            survival = expected_survival(posteriors[line], n)
            if columns[IS_PROBED, line]:
                survival = max(survival, 2 * MIN_SURVIVAL)
            if survival <= MIN_SURVIVAL:
                break
            gains[b, n] = np.log1p(survival / tokens)
            tokens += survival
            flat_gains[count] = gains[b, n]
            count += 1
    return gains, flat_gains[:count], rows


@compiled
def expected_gains(columns, posteriors, lines, max_drafts, decay):  # type: ignore[no-untyped-def]
    """Update the posteriors, move a share `decay` of each to the prior, and return `draft_gains`."""
    update_posteriors(columns, posteriors, lines)
    for line in lines:
        columns[IS_PROBED, line], prior = 0, prior_of(posteriors, line)
        for r in range(NUM_RATES):
            posteriors[line, r] += decay * (prior[r] - posteriors[line, r])
    return draft_gains(columns, posteriors, lines, max_drafts, len(lines))


@compiled
def best_draft_count(  # type: ignore[no-untyped-def]
    table, flat_gains, rows, requests, context, floor, draft_cost, width
):
    """Return the number of drafts with the highest mean speed, and that speed over the one without drafts.

    The mean is geometric, over the requests: a step that takes longer slows those without drafts too, and
    the slowest request of a batch ends it. flat_gains [N], ascending: of `draft_gains`. context: seconds
    besides rows. floor: seconds that rows take at least. draft_cost: seconds of the draft model for windows
    of `width` drafts; fewer drafts than that need fewer rounds.
    """
    num_drafts, count, gained, best, best_score = len(flat_gains), 0, 0.0, 0, 0.0
    smallest, end = 0, table.shape[1]
    while smallest < end:  # the searchsorted of numba imports scipy in every process
        middle = (smallest + end) // 2
        if table[0, middle] < rows:
            smallest = middle + 1
        else:
            end = middle
    plain_seconds = max(table[1, min(smallest, table.shape[1] - 1)], floor) + context
    for at in range(smallest, table.shape[1]):
        room = min(int(table[0, at]) - rows, num_drafts)
        while count < room:
            count += 1
            gained += flat_gains[num_drafts - count]
        rounds_share = min(count, width) / width
        seconds = max(table[1, at] + rounds_share * draft_cost, floor) + context
        score = gained / requests - np.log(seconds / plain_seconds)
        if score > best_score:
            best, best_score = count, score
        if count == num_drafts:  # a larger step has no more drafts
            break
    return best, np.exp(best_score)


@compiled
def choose_drafts(  # type: ignore[no-untyped-def]
    columns, lines, max_drafts, gains, flat_gains, rows, table, context, floor, draft_cost
):
    """Return the drafts [B] with the highest mean speed.

    Also returned: the gain of the least likely of them, and the speed-up of `best_draft_count`.
    gains, flat_gains, rows: of `draft_gains`, flat_gains ascending. A fixed request gets all its drafts.
    """
    drafts = np.zeros(len(lines), np.int64)
    count, speedup = best_draft_count(
        table, flat_gains, rows, len(lines), context, floor, draft_cost, gains.shape[1]
    )
    threshold, excess = np.inf, -count
    if count:
        threshold = flat_gains[len(flat_gains) - count]
        for b in range(len(lines)):
            while drafts[b] < gains.shape[1] and gains[b, drafts[b]] >= threshold:
                drafts[b] += 1
            excess += drafts[b]
        for b in range(len(lines) - 1, -1, -1):  # of equally likely drafts the last ones are left out
            while excess and drafts[b] and gains[b, drafts[b] - 1] == threshold:
                drafts[b] -= 1
                excess -= 1
    for b in range(len(lines)):
        if columns[IS_FIXED, lines[b]]:
            drafts[b] = max_drafts[b]
    return drafts, threshold, speedup


@compiled
def plan_drafts(  # type: ignore[no-untyped-def]
    columns,
    posteriors,
    lines,
    max_drafts,
    gains,
    flat_gains,
    rows,
    table,
    context,
    floor,
    draft_cost,
    is_probe_due,
):
    """Compute the `Assignment` of a step: `choose_drafts`, then probes for requests without drafts.

    A probe is one draft for each of them when probes are due. After a probe that was accepted the next one
    follows at once, with twice the length.
    """
    assigned, threshold, speedup = choose_drafts(
        columns, lines, max_drafts, gains, flat_gains, rows, table, context, floor, draft_cost
    )
    drafts, num_assigned, has_probes = assigned.copy(), 0, False
    for b in range(len(lines)):
        line = lines[b]
        columns[ASSIGNED, line] = assigned[b]
        num_assigned += assigned[b]
        length = columns[PROBE_LENGTH, line]
        if assigned[b] == 0 and max_drafts[b] > 0 and (is_probe_due or length > 1):
            drafts[b], has_probes = min(length, max_drafts[b]), True
            columns[IS_PROBED, line], columns[PROBE_LENGTH, line] = 1, 1
    first = new_request_drafts(prior_of(posteriors, 0), threshold)
    return Assignment(drafts, assigned, num_assigned, has_probes, first, speedup)


@compiled
def new_request_drafts(prior, threshold):  # type: ignore[no-untyped-def]
    """Return how many drafts of a new request have a gain of at least `threshold`."""
    count, tokens, gain = 0, 1.0, np.inf
    while count < MAX_DRAFTS and gain >= threshold:
        survival = expected_survival(prior, count)
        gain = np.log1p(survival / tokens)
        tokens += survival
        count += gain >= threshold
    return count


@compiled
def record_windows(columns, lines, granted, accepted, had_probes):  # type: ignore[no-untyped-def]
    """Count the results of windows with drafts, and set the length of the next probe after a probe."""
    for b in range(len(lines)):
        if granted[b] == 0:
            continue
        line, is_rejected = lines[b], accepted[b] < granted[b]
        columns[NEW_WINDOWS, line] += 1
        columns[NEW_ACCEPTED, line] += accepted[b]
        columns[NEW_REJECTED, line] += is_rejected
        if had_probes and columns[ASSIGNED, line] == 0:
            columns[PROBE_LENGTH, line] = 1 if is_rejected else min(2 * granted[b], columns[LIMIT, line])


@cache
def compile_kernels() -> None:
    """Compile the kernels, or read them from the disk, before the first step.

    The signatures allow any memory layout of what changes from step to step: nothing is compiled later.
    """
    state, ints, reals, matrix = "i8[:,::1],f8[:,::1]", "i8[:]", "f8[::1]", "f8[:,::1]"
    choice = f"{matrix},{reals},i8,{matrix},f8,f8,f8"
    signatures: list[tuple[Any, str]] = [
        (expected_gains, f"{state},{ints},{ints},f8"),
        (draft_gains, f"{state},{ints},{ints},i8"),
        (best_draft_count, f"{matrix},{reals},i8,i8,f8,f8,f8,i8"),
        (choose_drafts, f"i8[:,::1],{ints},{ints},{choice}"),
        (plan_drafts, f"{state},{ints},{ints},{choice},b1"),
        (record_windows, f"i8[:,::1],{ints},{ints},{ints},b1"),
    ]
    for kernel, signature in signatures:
        kernel.compile(f"({signature})")
        kernel.disable_compile()
