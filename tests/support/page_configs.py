"""Shared parts of test_pages and the tests that reuse them."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

STEADY = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a failure is a bug here, found as it is: no time goes into a smaller one
    suppress_health_check=list(HealthCheck),
)
