"""Plans made while steps are in flight are right whatever those steps did."""

import random

import pytest

from scheduler_fuzz import FuzzRun, run_state_machine


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2), (True, 3)])
def test_plans_are_right_for_random_requests(overlap, depth):
    ends = set()
    preempted = cached = 0
    for seed in range(60):
        fuzz = FuzzRun(random.Random(seed), overlap, depth)
        fuzz.serve_all()
        ends |= set(fuzz.done.values())
        preempted, cached = preempted + fuzz.num_preempted, cached + fuzz.scheduler.num_cached
    assert ends == {"ended", "aborted"} and preempted > 80 and cached > 500


def test_plans_are_right_for_any_sequence_of_events():
    run_state_machine()
