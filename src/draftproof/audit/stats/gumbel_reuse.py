"""Likelihood ratio of noise for each token (Gumbel noise) that an earlier position has used.

Sampling with Gumbel noise is a race: token y arrives after the time E(y) / p(y), E exponential, and the
first is sampled. Let x have won the race with the probabilities q at the time T. T is exponential with
mean 1, and E(y) is q(y) T for x and later than q(y) T by an exponential time for all others. If the same E
race with the probabilities p, the clock of y starts at the time r(y) T, r = q / p, and x arrives at r(x) T.
With H(v) = sum of max(0, p(z) v - q(z)) over z other than x:

    P(x) = 1 / (1 + H(r(x)))        P(y) = p(y) * integral of dv / (1 + H(v))^2 from r(y) to r(x)
"""

from __future__ import annotations

import numpy as np

from draftproof.audit.stats.array_types import Array, Floats, Ints
from draftproof.audit.stats.reported_distributions import Listed

RACE_LAGS = 2
SMALLEST_PROBABILITY = 1e-9
LATEST_START = 1e12


def race_ratios(found: Listed, numbers: Ints) -> Floats:
    """Return P(sampled) / p(sampled) for the noise of 1, 2 ... positions before, [N, RACE_LAGS].

    `numbers`: identity of each listed token, [N, K]. Tokens that are not listed are one token. NaN: the
    earlier position is no event, or its token is not listed.
    """
    made = np.full((len(found.numbers), RACE_LAGS), np.nan)
    places = np.array(found.numbers)
    rest = np.maximum(0.0, 1 - found.probs.sum(axis=1, keepdims=True))
    probs = np.concatenate([found.probs, rest], axis=1)  # [N, K + 1]
    probs = np.maximum(probs, SMALLEST_PROBABILITY) / probs.sum(axis=1, keepdims=True)
    for lag in range(1, RACE_LAGS + 1):
        rows: Ints = np.flatnonzero(places[lag:] - places[:-lag] == lag) + lag
        rows = rows[found.sampled[rows - lag] >= 0]
        made[rows, lag - 1] = _ratios(found, numbers, probs, rows, lag)
    return made


def _ratios(found: Listed, numbers: Ints, probs: Floats, rows: Array, lag: int) -> Floats:
    """Return the ratios of some rows, [R]."""
    now, before = numbers[rows], numbers[rows - lag]  # [R, K]
    same = (now[:, :, None] == before[:, None, :]) & ~found.ends[rows][:, :, None]
    earlier = (same * probs[rows - lag, None, :-1]).sum(axis=2)  # [R, K] q of the tokens listed now
    earlier = np.concatenate([earlier, np.maximum(0.0, 1 - earlier.sum(axis=1, keepdims=True))], axis=1)
    winner = before[np.arange(len(rows)), found.sampled[rows - lag]]
    matches = (now == winner[:, None]) & ~found.ends[rows]
    place = np.where(
        matches.any(axis=1), matches.argmax(axis=1), now.shape[1]
    )  # the first, if texts are equal
    is_winner = np.arange(earlier.shape[1]) == place[:, None]
    ratios = race(probs[rows], earlier, is_winner)  # [R, K + 1]
    sampled = np.where(found.sampled[rows] < 0, now.shape[1], found.sampled[rows])
    return ratios[np.arange(len(rows)), sampled]


def race(probs: Floats, earlier: Floats, is_winner: Array) -> Floats:
    """Return P / p of each token, all arrays [R, K]; `is_winner` marks the token of the earlier race."""
    start = np.minimum(earlier / probs, LATEST_START)  # r
    finish = np.where(is_winner, start, 0).max(axis=1, keepdims=True)  # r(x)
    order = np.argsort(start, axis=1)
    times = np.minimum(np.take_along_axis(start, order, axis=1), finish)  # [R, K] ascending
    rates = np.take_along_axis(np.where(is_winner, 0.0, probs), order, axis=1)
    slope = np.cumsum(rates, axis=1)  # of H after each start
    length = np.diff(np.concatenate([times, finish], axis=1), axis=1)  # [R, K]
    height = np.cumsum(slope * length, axis=1)  # H at the end of each piece
    low, high = 1 + height - slope * length, 1 + height
    # the integral of a piece; equal to length / low^2 where H is constant
    piece = length / (low * high)
    tail = np.cumsum(piece[:, ::-1], axis=1)[:, ::-1]  # from each start to the finish
    made = np.empty_like(start)
    np.put_along_axis(made, order, tail, axis=1)
    return np.where(is_winner, 1 / (np.maximum(probs, SMALLEST_PROBABILITY) * high[:, -1:]), made)
