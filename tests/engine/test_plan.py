"""Planning ahead is right whatever the step under way did: random lives, from chance and from hypothesis."""

from __future__ import annotations

import random

import pytest

from lives import Life, machine


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2), (True, 3)])
def test_random_lives(overlap, depth):
    ends = set()
    aside = cached = 0
    for seed in range(60):
        life = Life(random.Random(seed), overlap, depth)
        life.live()
        ends |= set(life.done.values())
        aside, cached = aside + life.num_aside, cached + life.scheduler.num_cached
    assert ends == {"ended", "aborted"} and aside > 80 and cached > 500


def test_whatever_comes_from_outside():
    machine()
