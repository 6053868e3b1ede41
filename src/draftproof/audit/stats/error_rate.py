"""One error rate over all statistical tests of an audit."""

from __future__ import annotations

import math

ERROR_RATE = 0.001  # of an audit of an honest endpoint that reports any statistical finding

# Shares of the error rate. A test that cannot run leaves its share unused.
WEIGHTS = {
    "top1": 0.40,
    "drafts": 0.15,
    "ranks": 0.10,
    "deciles": 0.10,
    "reuse": 0.05,
    "reuse_chunks": 0.05,
    "chunks": 0.05,
    "repeats": 0.10,
}
assert abs(sum(WEIGHTS.values()) - 1) < 1e-9


def log_threshold(test: str, error_rate: float = ERROR_RATE) -> float:
    """Return the logarithm of the e-value at which a test rejects.

    An e-process exceeds 1 / a with probability at most a at any time (Ville's inequality). The shares
    add up to one, so the probability that any test rejects is at most the error rate.
    """
    return -math.log(error_rate * WEIGHTS[test])
