"""Which drafts a step can afford: native loops over what is believed of requests and what rows cost.

Some microseconds for a large batch, where whole columns at a time take ten times as long: at this size most
of that is not arithmetic. Columns are lines of one array each for integers and reals, since what is handed
over costs as much as what is done with it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from draftproof.numba_jit import native
from draftproof.speculative_config import MAX_SPECULATIVE_TOKENS

# numba caches compiled loops by this file alone, so what they take from elsewhere is spelt out here
MAX_DRAFTS = 64
assert MAX_SPECULATIVE_TOKENS == MAX_DRAFTS

# Lines of the integers [COLUMNS, S]. Since the last decision: windows that were TOLD, drafts that STOOD, and
# windows of which one FELL. HELD: what was decided.
LIMIT, FIXED, WINDOWS, TURN, REACH, PROBED, TOLD, STOOD, FELL, HELD, COLUMNS = range(11)
# A belief is one weight for each of these chances that a draft stands whose predecessors stood. The reals
# [S + 1, RATES + 1] are a belief a slot, with how likely the last draft that it HELD is to stand (LAST); the
# last line is what is expected of a newcomer.
RATES = np.array([0.005, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99])
LAST = len(RATES)
POWERS = RATES[:, None] ** np.arange(1, MAX_DRAFTS + 1)  # [rates, n - 1]: n drafts stand
MANY = 255  # more are not counted: a belief is as firm with these
SO_STOOD, SO_FELL = (chance ** np.arange(MANY + 1)[:, None] for chance in (RATES, 1 - RATES))
LEAST = 0.002  # what is never quite ruled out of what the engine expects of a newcomer
LEARN = 1 / 32  # weight of a newcomer's window in that
NEW = 32  # windows for which a request counts as a newcomer: a long one is still one request
WORTH = 0.01  # a draft that is less likely to stand is not given, but for a probe
AT_ONCE = -1  # a turn before everybody whose turn it is
SHARE = 0.01  # of the time, for probes
SAVED = 64  # steps for which the purse may fill up
REST = 8  # steps in which nothing is decided anew, at most

compiled = native(boundscheck=False, error_model="numpy")


@compiled
def learn(columns, minds, slots):  # type: ignore[no-untyped-def]
    """What was told since the last time, and of newcomers as well."""
    newcomer, seen, windows = minds[len(minds) - 1], np.zeros(LAST), 0
    for s in slots:
        told = columns[TOLD, s]
        if told == 0:
            continue
        stood, fell, total = min(columns[STOOD, s], MANY), min(columns[FELL, s], MANY), 0.0
        for r in range(LAST):
            minds[s, r] *= SO_STOOD[stood, r] * SO_FELL[fell, r]
            total += minds[s, r]
        new = told if columns[WINDOWS, s] < NEW else 0
        for r in range(LAST):
            minds[s, r] /= total
            seen[r] += new * minds[s, r]
        windows += new
        columns[WINDOWS, s] += told
        columns[TOLD, s] = columns[STOOD, s] = columns[FELL, s] = 0
    if windows:
        keep, total = (1 - LEARN) ** windows, 0.0
        for r in range(LAST):
            newcomer[r] = max(keep * newcomer[r] + (1 - keep) / windows * seen[r], LEAST)
            total += newcomer[r]
        for r in range(LAST):
            newcomer[r] /= total


@compiled
def believe(columns, minds, slots, most, fades):  # type: ignore[no-untyped-def]
    """[B, K] how likely each draft is to be reached and to stand, which falls along K; 0 for those that are
    not to be decided on. Those of them that are worth a row, as they come; the rows and the tokens that there
    are in any case. Beliefs have learned by then, and `fades` of each of them is a newcomer's again."""
    learn(columns, minds, slots)
    newcomer, wide = minds[len(minds) - 1], 1
    for b in range(len(most)):
        wide = max(wide, most[b])
    survival, gains = np.zeros((len(slots), wide)), np.empty(len(slots) * wide)
    rows, tokens, count = len(slots), float(len(slots)), 0
    for b in range(len(slots)):
        s = slots[b]
        for r in range(LAST):
            belief = minds[s, r] + fades * (newcomer[r] - minds[s, r])
            minds[s, r] = belief
            for n in range(most[b]):
                survival[b, n] += belief * POWERS[r, n]
        if columns[FIXED, s]:
            rows += most[b]
            for n in range(most[b]):
                tokens, survival[b, n] = tokens + survival[b, n], 0.0
        for n in range(most[b]):
            if survival[b, n] <= WORTH:
                break
            gains[count] = survival[b, n]
            count += 1
    return survival, gains[:count], rows, tokens


@compiled
def sized(table, rows):  # type: ignore[no-untyped-def]
    """Which of the sizes of a step is the least that has room for so many; table [2, sizes]: rows, prices."""
    low, high = 0, table.shape[1]
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if table[0, middle] < rows else (low, middle)
    return low


@compiled
def price(table, rows, least):  # type: ignore[no-untyped-def]
    return max(table[1, min(sized(table, rows), table.shape[1] - 1)], least)


@compiled
def beyond(table, rows):  # type: ignore[no-untyped-def]
    """Rows that a step has room for beside these: at no cost, unless it is of one of the sizes exactly; then
    the next size has."""
    at = sized(table, rows + 1)
    return int(table[0, at]) - rows if at < table.shape[1] else 0


@compiled
def best(table, gains, rows, tokens, still, least, asking):  # type: ignore[no-untyped-def]
    """How many drafts to add to `rows` rows that commit `tokens`, and what they bring; gains [n] rise.

    `still`: what the step costs beside rows; `least`: what these cost at least; `asking`: what it costs to
    have any.
    """
    most, count, more, best, gained, best_rate = len(gains), 0, 0.0, 0, 0.0, 0.0
    for at in range(sized(table, rows), table.shape[1]):
        room = min(int(table[0, at]) - rows, most)
        while count < room:
            count += 1
            more += gains[most - count]
        rate = (tokens + more) / (max(table[1, at] + (asking if count else 0.0), least) + still)
        if rate > best_rate:
            best, gained, best_rate = count, more, rate
        if count == most:  # a larger step would bring no more
            break
    return best, gained


@compiled
def choose(survival, table, gains, rows, tokens, still, least, asking):  # type: ignore[no-untyped-def]
    """[B] the drafts that make the most tokens a second, beside `rows` rows that bring `tokens`; what they
    bring, and how likely the least of them is to stand."""
    budget = np.zeros(len(survival), np.int64)
    count, gained = best(table, gains, rows, tokens, still, least, asking)
    if count == 0:
        return budget, 0.0, np.inf
    bar, over = gains[len(gains) - count], -count
    for b in range(len(survival)):
        while budget[b] < survival.shape[1] and survival[b, budget[b]] >= bar:
            budget[b] += 1
        over += budget[b]
    for b in range(len(survival) - 1, -1, -1):
        while over and budget[b] and survival[b, budget[b] - 1] == bar:  # ties: the last of them go without
            budget[b] -= 1
            over -= 1
    return budget, gained, bar


@compiled
def probe(columns, minds, slots, most, given, room, urgent, step):  # type: ignore[no-untyped-def]
    """[B] what was given, and drafts for those who have none and waited longest, as many as there is `room`
    for; `urgent`: for those alone whose last probe stood. And is there anybody who is probed?"""
    idle, turns, count = np.empty_like(given), np.empty_like(given), 0  # in the order of turns
    for b in range(len(slots)):
        turn = columns[TURN, slots[b]]
        if given[b] or most[b] == 0 or (urgent and turn != AT_ONCE):
            continue
        at = count
        while at and turns[at - 1] > turn:
            idle[at], turns[at], at = idle[at - 1], turns[at - 1], at - 1
        idle[at], turns[at], count = b, turn, count + 1
    if count == 0:
        return given, False
    budget, left = given.copy(), room
    for i in range(count):
        b = idle[i]
        s = slots[b]
        reach = min(min(columns[REACH, s], most[b]), room)
        if reach > left:
            break
        budget[b], left = reach, left - reach
        columns[TURN, s], columns[PROBED, s] = step, 1
        minds[s, LAST] = 2 * WORTH  # it is worth no rows of its own, but those that are left over
    return budget, True


@compiled
def decide(  # type: ignore[no-untyped-def]
    columns, minds, slots, most, survival, table, gains, rows, tokens, still, least, asking, paid, purse, step
):
    """`choose`, and fixed ones have what they always have: that is HELD. Then probes, if there is money for
    as many as a step has room for that is one size larger. `asking`: for drafts; `paid`: for probes alone.

    [B] what is held, and its sum; [B] what is given, with probes, and whether there are any; the tokens of
    the step, how likely the least of them is, what a newcomer would have had; what is left in the purse, and
    in how many steps there is enough for a probe.
    """
    held, gained, likely = choose(survival, table, gains, rows, tokens, still, least, asking)
    total, first, newcomer, called = 0, 0, minds[len(minds) - 1], False
    for b in range(len(slots)):
        s = slots[b]
        if columns[FIXED, s]:
            held[b], minds[s, LAST] = most[b], np.inf
        else:
            minds[s, LAST] = survival[b, max(held[b], 1) - 1]
        columns[HELD, s] = held[b]
        total += held[b]
        called |= columns[TURN, s] == AT_ONCE
    chance = np.inf
    while first < MAX_DRAFTS and chance >= likely:
        chance = 0.0
        for r in range(LAST):
            chance += POWERS[r, first] * newcomer[r]
        first += chance >= likely
    requests, rows = len(slots), len(slots) + total
    room, saves = beyond(table, rows), SHARE * (price(table, requests, least) + still)
    costs = price(table, rows + room, least) - price(table, rows, least) + (0.0 if total else paid)
    purse, budget, probing, wait = min(purse, max(2 * costs, SAVED * saves)), held, False, 0
    if room and costs <= purse:
        budget, probing = probe(columns, minds, slots, most, held, room, 2 * costs > purse, step)
    if not called:
        costs *= 2
    if room and costs > purse and saves > 0 and not probing:
        wait = min(REST, int((costs - purse) / saves))
    return held, total, budget, probing, tokens + gained, likely, first, purse, wait


@compiled
def hear(columns, slots, granted, accepted, probing):  # type: ignore[no-untyped-def]
    """What became of windows that had drafts, and of probes if there were any."""
    for b in range(len(slots)):
        if granted[b] == 0:
            continue
        s, fell = slots[b], accepted[b] < granted[b]
        columns[TOLD, s] += 1
        columns[STOOD, s] += accepted[b]
        columns[FELL, s] += fell
        if probing and columns[HELD, s] == 0:
            columns[REACH, s] = 1
            if not fell:  # another at once, of twice the length
                columns[REACH, s], columns[TURN, s] = min(2 * granted[b], columns[LIMIT, s]), AT_ONCE


@cache
def ready() -> None:
    """Compiled once and kept on disk, or read from there: before the first step, which is no time for it."""
    ints, columns, lines, reals = "i8[:]", "i8[:,::1]", "f8[:,::1]", "f8[::1]"
    prices = f"{lines},{reals},i8,f8,f8,f8,f8"
    given: list[tuple[Any, str]] = [
        (believe, f"{columns},{lines},{ints},{ints},f8"),
        (choose, f"{lines},{prices}"),
        (decide, f"{columns},{lines},{ints},{ints},{lines},{prices},f8,f8,i8"),
        (hear, f"{columns},{ints},{ints},{ints},b1"),
    ]
    for loop, signature in given:
        loop.compile(f"({signature})")
        loop.disable_compile()  # nor later, for arrays that are laid out otherwise
