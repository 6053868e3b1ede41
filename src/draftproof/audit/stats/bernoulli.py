"""E-process of yes-or-no events whose probability was reported before each event.

Under the null hypothesis event t has the probability `probs[t]`, whatever came before. For any other
probability q the product of the likelihood ratios q / p (event) and (1 - q) / (1 - p) (no event) is then a
martingale. A weighted mean of such products over several alternatives is one too, so the test may stop at
any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from draftproof.audit.stats.array_types import Bools, Floats

# Logprobs are often rounded to 4 digits; probabilities nearer to 0 or 1 are moved to this distance.
PROBABILITY_MARGIN = 1e-4
KEPT_SHARE = 0.1  # of the smaller probability that an alternative leaves

Alternative = Callable[[Floats], Floats]


def shift(points: float) -> Alternative:
    """Return the alternative in which the probability is larger (or smaller) by a constant."""

    def shifted(probs: Floats) -> Floats:
        room = (1 - KEPT_SHARE) * ((1 - probs) if points > 0 else probs)
        step: Floats = np.minimum(abs(points), room)
        return probs + step if points > 0 else probs - step

    return shifted


def mix(share: float) -> Alternative:
    """Return the alternative in which a share of events is certain (or, if negative, impossible)."""
    if share >= 0:
        return lambda probs: probs + share * (1 - probs)
    return lambda probs: probs * (1 + share)


TOP1_ALTERNATIVES: Mapping[Alternative, float] = {
    shift(0.005): 0.06,
    shift(0.01): 0.20,
    shift(0.02): 0.10,
    shift(0.04): 0.10,
    shift(0.12): 0.04,
    shift(-0.005): 0.03,
    shift(-0.01): 0.08,
    shift(-0.03): 0.08,
    shift(-0.12): 0.04,
    mix(0.03): 0.08,
    mix(0.10): 0.08,
    mix(0.30): 0.06,
    mix(0.90): 0.05,
}
DRAFT_ALTERNATIVES: Mapping[Alternative, float] = {
    mix(0.01): 0.15,
    mix(0.03): 0.20,
    mix(0.10): 0.20,
    mix(0.30): 0.20,
    mix(0.90): 0.15,
    mix(-0.10): 0.10,
}


class BernoulliTest:
    """Weighted mean of likelihood ratio products, with its largest value so far."""

    def __init__(self, alternatives: Mapping[Alternative, float]) -> None:
        self._alternatives = list(alternatives)
        weights = np.array(list(alternatives.values()))
        self._log_values = np.log(weights / weights.sum())  # [A]
        self.log_peak = 0.0
        self.events = 0

    @property
    def log_value(self) -> float:
        """Return the logarithm of the e-value now."""
        return float(np.logaddexp.reduce(self._log_values))

    def update(self, hits: Bools, probs: Floats) -> None:
        """Add events in their order. `hits`: [N], `probs`: [N]."""
        if not len(hits):
            return
        path = self._log_values + np.cumsum(log_ratios(hits, probs, self._alternatives), axis=0)  # [N, A]
        self._log_values = path[-1]
        self.log_peak = max(self.log_peak, float(np.logaddexp.reduce(path, axis=1).max()))
        self.events += len(hits)


def log_ratios(hits: Bools, probs: Floats, alternatives: list[Alternative]) -> Floats:
    """Return log likelihood ratios of events, [N, A]."""
    base = np.clip(probs, PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    other = np.stack([alternative(base) for alternative in alternatives], axis=1)  # [N, A]
    base = base[:, None]
    return np.where(hits[:, None], np.log(other / base), np.log((1 - other) / (1 - base)))


class BoundedTest:
    """E-process of events whose probability is only known to lie between two bounds.

    The bet on more events uses the upper bound and the bet on fewer the lower bound. Both products are
    then supermartingales for any probability between the bounds.
    """

    def __init__(self) -> None:
        self._more = BernoulliTest({mix(0.1): 0.25, mix(0.3): 0.25, mix(0.9): 0.5})
        self._fewer = BernoulliTest({mix(-0.1): 0.25, mix(-0.3): 0.25, mix(-0.9): 0.5})
        self.log_peak = 0.0

    @property
    def log_value(self) -> float:
        """Return the logarithm of the e-value now: the mean of both."""
        return float(np.logaddexp(self._more.log_value, self._fewer.log_value) - np.log(2))

    @property
    def events(self) -> int:
        """Return the number of events."""
        return self._more.events

    def update(self, hits: Bools, lower: Floats, upper: Floats) -> None:
        """Add events in their order, all arrays [N]."""
        self._more.update(hits, upper)
        self._fewer.update(hits, lower)
        self.log_peak = max(self.log_peak, self.log_value)
