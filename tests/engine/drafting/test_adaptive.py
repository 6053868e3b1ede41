"""Gain and cost of adaptive drafts in a simulation: requests of many kinds, step times of real machines.

The batch is always full: a finished request is replaced by the next one, whose prompt has a few rows in a
step. Step times come from a table and the keys that are read, so no clock is involved. The cost model knows
the table and has to learn the cost of keys. With overlap the results of a step are observed when two more
were planned.
"""

from __future__ import annotations

import numpy as np
import pytest

from draftproof.engine.drafting.budget import DraftBudget
from draftproof.engine.drafting.step_cost import StepCost

K = 8
FIXED = (0, 1, 3, 5, 8)
# milliseconds by rows: 2 cores with AMX, SmolLM2; an H200, SmolLM2; an H200, the Llama-8B shape
CPU = {1: 12.5, 2: 12.6, 4: 13, 8: 13.8, 12: 14.4, 16: 15.5, 24: 21, 32: 24, 48: 33, 64: 42, 96: 62, 288: 170}
SMALL = {1: 0.56, 8: 0.58, 16: 0.76, 24: 1.05, 64: 1.17, 128: 1.3, 256: 1.75, 512: 2.3, 1024: 2.9, 2304: 4.6}
LARGE = {1: 4.5, 16: 4.7, 64: 5.8, 128: 7.2, 256: 10.6, 384: 13, 512: 16, 1024: 27, 2304: 58}
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 1024, 1536, 2048, 2304)


def graphs(table):
    """A step is captured for some sizes alone."""
    sizes = sorted(table)
    return {n: float(np.interp(n, sizes, [table[size] for size in sizes])) for n in GRAPHS}


def prices(name):
    """As of an engine that was just started; on a CPU any number of rows runs as it is."""
    tables = {"cpu": CPU, "small": graphs(SMALL), "large": graphs(LARGE)}
    return StepCost(tables[name], interpolate=name == "cpu")


EACH = {"cpu": 0.0027, "small": 6e-6, "large": 3e-5}  # milliseconds that a key costs
CONTEXT, CHUNK = 300, 8  # tokens of a prompt, and its rows: the rest of it was found in the cache
TASKS = ("copy", "edit", "chat", "free")
CELLS = [
    (*at, task) for at in (("cpu", 8), ("large", 256)) for task in (0.0, 0.5, 0.97, "chat", "turn", "mix")
]
CELLS += [("small", 64, task) for task in (0.0, 0.97, "chat", "turn", "mix")]
CELLS += [
    (*at, task) for at in (("cpu", 1), ("cpu", 32), ("small", 256), ("large", 1)) for task in (0.0, "mix")
]
CELLS += [("cpu", 32, 0.5), ("cpu", 32, 0.97), ("large", 64, 0.0), ("large", 64, "turn")]


def chances(task, index, length, draw):
    """[length] that the draft of each token stands, if there is one and those before it stood."""
    if isinstance(task, float):
        return np.full(length, task)
    if task == "mix":
        return chances(TASKS[index % 4], index, length, draw)
    if task == "turn":
        return np.where(np.arange(length) < 150, 0.02, 0.97)
    if task in ("copy", "free"):
        return np.full(length, 0.97 if task == "copy" else 0.02)
    spans = {"edit": ((50, 0.97), (25, 0.05)), "chat": ((8, 0.1), (4, 0.85))}[task]
    made = []
    while len(made) < length:
        span, chance = spans[(len(made) > 0 and made[-1] == spans[0][1]) * 1]
        made += [chance] * int(draw.geometric(1 / span))
    return np.array(made[:length])


class Always:
    """A fixed number of drafts."""

    def __init__(self, k):
        self.k = k

    def start(self, *_):
        pass

    record = start

    def held(self, _):
        return None

    def choose(self, slots, *_):
        return np.full(len(slots), self.k)

    def refit(self, _, drafts, __):
        return drafts


def rate(policy, name, batch, task, longest=256, seed=0, host=0.0):
    """Tokens a millisecond, as long as the batch is full. Prices of a policy are told what steps took.

    `host`: milliseconds that the host takes for a step, beside the device.
    """
    draw, costs = np.random.default_rng(seed), prices(name)
    learning, overlap = getattr(policy, "_cost", StepCost.unmeasured(1)), name != "cpu"
    total = batch * {1: 8, 8: 5, 32: 4}.get(batch, 3)
    lengths = draw.integers(longest // 2, longest + 1, total)
    likely = np.stack([chances(task, i, longest + K, draw) for i in range(total)])
    stands = draw.random(likely.shape) < likely
    who, place, tenant = np.arange(batch), np.ones(batch, np.int64), np.zeros(batch, np.int64)
    slots, drafts, flights, waiting = np.arange(batch), np.zeros(batch, np.int64), [], batch
    seconds, tokens, ahead, most, prompts = 0.0, 0, np.arange(K), np.full(batch, K), 0
    for slot in slots:
        policy.start(slot, K, True)
    while True:
        drafts = np.minimum(drafts, np.maximum(lengths[who] - place - 1, 0))
        keys = batch * CONTEXT + int(place.sum())
        if prompts and overlap:
            drafts = policy.refit(slots, drafts, batch + prompts)
        stood = np.minimum(np.cumprod(stands[who[:, None], place[:, None] + ahead], 1).sum(1), drafts)
        rows = batch + int(drafts.sum())
        took = max(costs.row_seconds(rows + prompts) + EACH[name] * keys, host)
        learning.record_host_seconds(host)
        seconds += took
        if not prompts and took > host:
            learning.observe(rows, keys, took * (1 + draw.random() / 10))
        prompts = 0
        tokens += int(stood.sum()) + batch
        place += stood + 1
        flights.append((tenant.copy(), drafts, stood))
        if len(flights) > overlap:
            before, granted, accepted = flights.pop(0)
            here = np.flatnonzero(before == tenant)
            policy.record(here, granted[here], accepted[here])
        drafts = policy.held(slots)
        drafts = policy.choose(slots, most, keys) if drafts is None else drafts.copy()
        for slot in np.flatnonzero(place >= lengths[who]):
            if waiting == total:
                return tokens / seconds
            who[slot], place[slot], drafts[slot] = waiting, 1, 0
            tenant[slot] += 1
            waiting, prompts = waiting + 1, prompts + CHUNK
            policy.start(slot, K, True)
            slots = slots.copy()  # as of the scheduler's, when somebody comes


def compared(name, batch, task, host=0.0):
    """Adaptive over the best fixed number and over none; and over none in the first minute of its life."""
    fixed = [rate(Always(k), name, batch, task, host=host) for k in FIXED]
    made = DraftBudget(batch, prices(name))
    first, adaptive = (rate(made, name, batch, task, host=host) for _ in range(2))
    return adaptive / max(fixed), adaptive / fixed[0], first / fixed[0]


@pytest.mark.parametrize(("name", "batch", "task"), CELLS)
def test_adaptive_drafts_match_the_best_fixed_number_and_never_lose_to_none(name, batch, task):
    best, none, first = compared(name, batch, task)
    assert best >= 0.97 and none >= 0.98 and first >= 0.98


@pytest.mark.parametrize("host", [1.5, 2.5, 3.5])
def test_drafts_fill_rows_hidden_behind_a_slow_host(host, monkeypatch):
    """A step of 64 takes from 1.2 ms, of all their drafts 2.9. Control: prices without the host."""
    best, none, first = compared("small", 64, "mix", host)
    assert best >= 0.99 and none >= 0.98 and first >= 0.98
    if host > 3:
        monkeypatch.setattr(StepCost, "host_floor", lambda *_: 0.0)
        assert compared("small", 64, "mix", host)[0] < best - 0.02


@pytest.mark.control
def test_control_optimistic_prior_with_full_probes_is_too_slow(monkeypatch):
    """Control: as it was. Newcomers are trusted, and all are tried at once every 64 steps."""
    start, choose = DraftBudget.start, DraftBudget.choose

    def hopeful(self, slot, limit, adaptive):
        self._posteriors[-1] = 1 / self._posteriors.shape[1]
        start(self, slot, limit, adaptive)

    def together(self, slots, most, keys):
        budget = choose(self, slots, most, keys)
        return np.full_like(budget, K) if self._num_steps % 64 == 0 else budget

    monkeypatch.setattr(DraftBudget, "start", hopeful)
    monkeypatch.setattr(DraftBudget, "choose", together)
    monkeypatch.setattr(DraftBudget, "held", lambda *_: None)
    assert compared("large", 64, 0.0)[1] < 0.98
    assert compared("cpu", 32, 0.0)[1] < 0.98


@pytest.mark.control
def test_control_cost_without_context_is_too_slow(monkeypatch):
    """Control: without the cost of keys, drafts seem to add more to a step; the EWMA corrects most of it."""
    intact = compared("cpu", 32, 0.5)[0]
    monkeypatch.setattr(StepCost, "context_seconds", lambda *_: 0.0)
    assert compared("cpu", 32, 0.5)[0] < intact - 0.002


@pytest.mark.control
def test_control_drafts_kept_beside_prompts_are_too_slow(monkeypatch):
    """Control: they filled a size of a step, and with a prompt it is of the next size."""
    monkeypatch.setattr(DraftBudget, "refit", lambda _, __, drafts, ___: drafts)
    assert compared("large", 256, 0.5)[1] < 0.98
