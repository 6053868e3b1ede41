"""E-process of events with several outcomes whose probabilities were reported before each event."""

from __future__ import annotations

import numpy as np

from draftproof.audit.stats.array_types import Floats, Ints

PRIOR_EVENTS = 20.0  # expected events of a category that count as observed as expected
SMALLEST_PROBABILITY = 1e-9


class CategoryTest:
    """Likelihood ratio product against an alternative estimated from the earlier events.

    The alternative multiplies the reported probability of each category by the ratio of observed to
    expected events so far. It is fixed before a block of events, so the product is a martingale.
    """

    def __init__(self, categories: int) -> None:
        self.observed = np.zeros(categories)
        self.expected = np.zeros(categories)
        self.log_value = 0.0
        self.log_peak = 0.0
        self.events = 0

    def update(self, outcomes: Ints, probs: Floats) -> None:
        """Add a block of events. `outcomes`: [N], `probs`: [N, C]."""
        if not len(outcomes):
            return
        probs = np.maximum(probs, SMALLEST_PROBABILITY)
        probs = probs / probs.sum(axis=1, keepdims=True)
        factors = (self.observed + PRIOR_EVENTS) / (self.expected + PRIOR_EVENTS)  # [C]
        ratios = factors[outcomes] / (probs @ factors)  # [N]
        path = self.log_value + np.cumsum(np.log(ratios))
        self.log_value = float(path[-1])
        self.log_peak = max(self.log_peak, float(path.max()))
        self.observed += np.bincount(outcomes, minlength=len(self.observed))
        self.expected += probs.sum(axis=0)
        self.events += len(outcomes)
