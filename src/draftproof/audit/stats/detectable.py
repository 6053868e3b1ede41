"""The smallest bias that a test would have found with the tokens it used."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from draftproof.audit.stats.arrays import Floats
from draftproof.audit.stats.bernoulli import PROBABILITY_MARGIN, Alternative, log_ratios, shift

POWER_QUANTILE = 1.2816  # of the normal distribution, for a power of 0.9
LARGEST_BIAS = 0.5
BISECTION_STEPS = 20


def smallest_bias(
    probs: Floats, alternatives: Mapping[Alternative, float], log_threshold: float
) -> float | None:
    """Return the smallest shift of a probability that is found with power 0.9; None above 0.5.

    The logarithm of each component's product under the shift is close to normal. Its mean and variance
    are sums over the events. The shift is found if the best component passes the threshold.
    """
    if not len(probs) or _margin(probs, LARGEST_BIAS, alternatives, log_threshold) < 0:
        return None
    low, high = 0.0, LARGEST_BIAS
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if _margin(probs, middle, alternatives, log_threshold) < 0:
            low = middle
        else:
            high = middle
    return high


def _margin(
    probs: Floats, bias: float, alternatives: Mapping[Alternative, float], log_threshold: float
) -> float:
    """Return how far the best component passes the threshold, at the quantile of the power."""
    base = np.clip(probs, PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    true = shift(bias)(base)[:, None]  # [N, 1]
    names = list(alternatives)
    yes = log_ratios(np.ones(len(base), dtype=bool), base, names)  # [N, A]
    no = log_ratios(np.zeros(len(base), dtype=bool), base, names)
    mean = (true * yes + (1 - true) * no).sum(axis=0)  # [A]
    spread = np.sqrt((true * (1 - true) * (yes - no) ** 2).sum(axis=0))  # [A]
    total = sum(alternatives.values())
    shares = np.array([math.log(weight / total) for weight in alternatives.values()])
    return float((mean - POWER_QUANTILE * spread + shares).max() - log_threshold)
