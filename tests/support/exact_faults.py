"""Shared parts of test_exact_controls and the tests that reuse them."""

from __future__ import annotations

from dataclasses import replace


def one_too_many(decide):
    """A strategy's `decide` that lets the draft after one that stands stand too."""

    def broken(self, windows, scores):
        choice = decide(self, windows, scores)
        stands = windows.draft == choice.token
        return replace(choice, accept=stands | (stands.roll(1) & (windows.depth > 0)))

    return broken
