"""The smallest bias that a test would have found with the tokens it used."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from draftproof.audit.stats.array_types import Floats, Ints
from draftproof.audit.stats.bernoulli import PROBABILITY_MARGIN, Alternative, log_ratios, shift

POWER_QUANTILE = 1.2816  # of the normal distribution, for a power of 0.9
LARGEST_BIAS = 0.5
BISECTION_STEPS = 20
PROBABILITY_STEP = 1e-3  # probabilities that are equal after rounding are counted together


def smallest_bias(
    probs: Floats, alternatives: Mapping[Alternative, float], log_threshold: float
) -> float | None:
    """Return the smallest shift of a probability that is found with power 0.9; None above 0.5.

    The logarithm of each component's product under the shift is close to normal. Its mean and variance
    are sums over the events. The shift is found if the best component passes the threshold.
    """
    rounded = PROBABILITY_STEP * np.round(probs / PROBABILITY_STEP)
    values, counts = np.unique(rounded, return_counts=True)  # [U], [U]
    if not len(probs) or _margin(values, counts, LARGEST_BIAS, alternatives, log_threshold) < 0:
        return None
    low, high = 0.0, LARGEST_BIAS
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if _margin(values, counts, middle, alternatives, log_threshold) < 0:
            low = middle
        else:
            high = middle
    return high


def _margin(
    probs: Floats,
    counts: Ints,
    bias: float,
    alternatives: Mapping[Alternative, float],
    log_threshold: float,
) -> float:
    """Return how far the best component passes the threshold, at the quantile of the power."""
    base = np.clip(probs, PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    true = shift(bias)(base)[:, None]  # [U, 1]
    names = list(alternatives)
    yes = log_ratios(np.ones(len(base), dtype=bool), base, names)  # [U, A]
    no = log_ratios(np.zeros(len(base), dtype=bool), base, names)
    mean = counts @ (true * yes + (1 - true) * no)  # [A]
    spread = np.sqrt(counts @ (true * (1 - true) * (yes - no) ** 2))  # [A]
    total = sum(alternatives.values())
    shares = np.array([math.log(weight / total) for weight in alternatives.values()])
    return float((mean - POWER_QUANTILE * spread + shares).max() - log_threshold)
