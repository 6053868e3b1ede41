"""Replay of closed batches: all requests start together, and none follows one that has ended.

The draft policy serves batches of several sizes one after another and keeps what it has learned. Step times
are those of SmolLM2-135M on an H200, n-gram drafts on Spec-Bench (2026-11-18): base and cost of a key depend
on the rows and on whether the step has drafts, which one table of empty steps cannot show.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from draftproof.engine.drafting.budget import DraftBudget
from draftproof.engine.drafting.step_cost import StepCost

# Microseconds of an empty step by rows, as timed at start-up.
EMPTY = {1: 352, 2: 352, 4: 352, 8: 379, 16: 389, 24: 434, 32: 434, 48: 470, 64: 573, 80: 594, 96: 647}
EMPTY |= {128: 748, 160: 748, 192: 749, 256: 790, 320: 800, 384: 850, 512: 1000, 768: 1144, 1024: 1310}
EMPTY |= {1280: 1500, 1536: 1700, 2304: 2500}
# Rows -> microseconds, and nanoseconds of a key; fitted to observed steps.
PLAIN = {1: (471, 33), 2: (462, 40), 4: (443, 23), 8: (516, 13), 16: (521, 15), 24: (540, 16), 32: (560, 16)}
PLAIN |= {48: (590, 16), 64: (611, 16), 80: (680, 14), 96: (760, 13), 128: (850, 13), 160: (900, 12.5)}
PLAIN |= {192: (950, 12), 256: (1000, 11.5)}
DRAFTS = {2: (462, 44), 4: (489, 17), 8: (540, 6), 16: (521, 15), 24: (549, 16), 32: (561, 16), 48: (599, 16)}
DRAFTS |= {64: (714, 9), 80: (758, 12), 96: (910, 11), 128: (1330, 4), 160: (1744, 0), 192: (1759, 0)}
DRAFTS |= {256: (1800, 1), 320: (1743, 3), 384: (1800, 3), 512: (1743, 4.5), 768: (1836, 8.6)}
DRAFTS |= {1024: (2177, 6), 1280: (2400, 6), 1536: (2650, 6), 2304: (3400, 6)}
SIZES = sorted(EMPTY)
BATCHES = (8, 64, 256, 8, 1, 256, 64)  # in turn
ROUNDS = 4  # batches of each size; the first one does not count
NOISE = 0.03


def step_microseconds(rows: int, keys: int, has_drafts: bool) -> float:
    """Return the time of a step of `rows` rows whose requests have stored `keys` tokens."""
    size = SIZES[bisect_left(SIZES, rows)]
    base, per_key = (DRAFTS if has_drafts else PLAIN)[size]
    return base + per_key * keys / 1e3


def serve(
    policy: DraftBudget | int, batch: int, k: int, recorded: Any, draw: np.random.Generator, seed: int
) -> float:
    """Return tokens per second of one batch; policy: draft budget, or a fixed number of drafts.

    recorded: drafts and accepted drafts of every request after every number of output tokens.
    """
    who = np.random.default_rng(seed).integers(0, len(recorded.prompt), batch)
    place, given, slots = np.ones(batch, np.int64), np.zeros(batch, np.int64), np.arange(batch)
    adaptive = policy if isinstance(policy, DraftBudget) else None
    results: tuple[np.ndarray, ...] = ()
    total = 0.0
    for slot in slots if adaptive else ():
        adaptive.start(slot, k, True)  # type: ignore[union-attr]
    while len(slots):
        requests, at = who[slots], place[slots]
        drafts = np.minimum(given[slots], recorded.tokens - at - 1)
        accepted = np.minimum(
            np.minimum(recorded.accepted[requests, at], recorded.drafts[requests, at]), drafts
        )
        rows, keys = len(slots) + int(drafts.sum()), int((recorded.prompt[requests] + at).sum())
        microseconds = step_microseconds(rows, keys, bool(drafts.any()))
        total += microseconds
        place[slots] += accepted + 1
        is_open = place[slots] < recorded.tokens
        if adaptive is None:
            given[slots] = policy
        else:
            noisy = microseconds * (1 + NOISE * abs(draw.normal()))
            adaptive._cost.observe(rows, keys, noisy * 1e-6, num_drafts=int(drafts.sum()))
            if results:  # read after the next step was queued
                adaptive.record(*results)
            held = adaptive.held(slots)
            most = np.full(len(slots), k)
            given[slots] = adaptive.choose(slots, most, keys) if held is None else held
            results = tuple(column[is_open] for column in (slots, drafts, accepted))
        if not is_open.all():
            slots = slots[is_open]
    return batch * recorded.tokens / total * 1e6


def closed_batches(recorded: Any, k: int) -> dict[str, list[float]]:
    """Return speeds over those without drafts, by BATCHES: of the policy, and of one draft a request."""
    draw, found = np.random.default_rng(5), {"adaptive": [], "k=1": []}  # type: ignore[var-annotated]
    policy = DraftBudget(max(BATCHES), StepCost({rows: 1e-6 * each for rows, each in EMPTY.items()}))
    for batch in BATCHES:
        for name, side in (("adaptive", policy), ("k=1", 1)):
            ratios = [
                serve(side, batch, k, recorded, draw, seed) / serve(0, batch, k, recorded, draw, seed)
                for seed in range(ROUNDS)
            ]
            found[name].append(round(float(np.mean(ratios[1:])), 3))
    return found
