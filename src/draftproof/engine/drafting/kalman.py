"""One measurement of a Kalman filter, as a native loop: it is beside every step of a small model.

Signatures are given so that it is compiled, or read from the disk, before the first step.
"""

from __future__ import annotations

import numpy as np

from draftproof.numba_jit import native


@native("void(f8[::1],f8[:,::1],f8,f8[::1],i8,f8)")
def drift(state, doubt, share, wander, at, most) -> None:  # type: ignore[no-untyped-def]
    """All of the state [n] may have changed by this `share`, which is common to all of it, and some parts by
    `wander` [n] of their own. What is known of the part `at` is never less than `most` says."""
    for i in range(len(state)):
        for j in range(len(state)):
            doubt[i, j] += share * share * state[i] * state[j]
        doubt[i, i] += wander[i] * wander[i]
    if doubt[at, at] > most * most:
        less = most / doubt[at, at] ** 0.5
        for i in range(len(state)):
            doubt[at, i] *= less
        for i in range(len(state)):
            doubt[i, at] *= less


@native("void(f8[::1],f8[:,::1],f8[::1],f8,f8)")
def correct(state, doubt, says, off, noise) -> None:  # type: ignore[no-untyped-def]
    """What was measured was `off` by so much, with this variance; `says` [n]: how much of each part is in
    it."""
    known = np.zeros_like(says)  # covariance of each with what was expected
    total = noise
    for j in range(len(state)):
        if says[j] == 0:  # most are
            continue
        for i in range(len(state)):
            known[i] += doubt[i, j] * says[j]
    for j in range(len(state)):
        total += says[j] * known[j]
    for i in range(len(state)):
        state[i] += off * known[i] / total
        for j in range(len(state)):
            doubt[i, j] -= known[i] * known[j] / total
