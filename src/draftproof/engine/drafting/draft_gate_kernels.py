"""What a model has brought each request, and whether asking it again is worth its price: native loops.

A step of a small model takes half a millisecond, and the host does this beside every one of them. Signatures
are given so that they are compiled, or read from the disk, before the first step.
"""

from __future__ import annotations

from typing import Any

from draftproof import types
from draftproof.numba_jit import native

# numba caches compiled loops by this file alone, so what they take from elsewhere is spelt out here
OUT, DRAFTED, ACCEPTED = 0, 1, 2
assert (OUT, DRAFTED, ACCEPTED) == (types.NUM_OUT, types.NUM_DRAFT, types.NUM_ACCEPTED)
ALONE = 0.85  # of what the model brings nobody else would have brought
HEARD = 1 / 16  # of a window in what it brings a request
FORGETS = 1 / 128  # of what is known, at a window that it was not asked for
CHAIN, STEP = 1 / 128, 1 / 8  # of a draft in how many stand, and of all windows of a step at most


@native("f8(i8[:],i8[:],b1[::1],f8[::1])")
def hoped(slots, budget, copies, brings) -> Any:  # type: ignore[no-untyped-def]
    """Tokens that the model is thought to bring those who may have drafts and do not copy."""
    total = 0.0
    for b in range(len(slots)):
        if budget[b] > 0 and not copies[slots[b]]:
            total += brings[slots[b]]
    return total


@native("i8(f8[::1],i8,f8)")
def worth_it(chain, most, price) -> Any:  # type: ignore[no-untyped-def]
    """Rounds of the model, of `most` drafts of a request, with which most is left of what they bring: a
    search goes on behind them. Fewer than half are not looked at, since of its drafts later ones are known.
    """
    best, rounds = -1.0, most
    for count in range(most, (most + 1) // 2 - 1, -1):
        chance, value = 1.0, -price * count
        for n in range(most):
            chance *= chain[0] if n < count else chain[1]
            value += chance
        if count == most or value > best:
            best, rounds = value, count
    return rounds


@native("UniTuple(f8,3)(i8[:,:],i1[:,:],i8[:],b1[:],i8[:],i8,b1,f8,f8[::1],b1[::1],i8[:],f8[::1])")
def heard(  # type: ignore[no-untyped-def]
    table, sources, slots, here, limit, model, was_asked, hope, brings, copies, granted, chain
) -> Any:
    """A step's windows into `brings` and `copies`, by slot, and `chain`, of the drafts in windows that the
    model began and of those behind; tokens of all, windows with drafts, and what the model brought them.
    `here` [B]: entries that are still those that were planned; `granted` [B]: rows for drafts."""
    tokens, windows, total, share = 0, 0, 0.0, min(CHAIN, STEP / max(1, len(slots)))
    for b in range(len(slots)):
        tokens += table[b, OUT]
        if not here[b]:
            continue
        slot, drafts, accepted = slots[b], table[b, DRAFTED], table[b, ACCEPTED]
        its = sources[b, 0] == model
        copies[slot] = drafts > 0 and not its and accepted == drafts and drafts >= limit[slot]
        if not was_asked:
            brings[slot] += FORGETS * max(hope - brings[slot], 0.0)
        elif drafts > 0:
            brought = ALONE * accepted if its else 0.0
            brings[slot] += HEARD * (brought - brings[slot])
            windows += 1
            total += brought
        if its and drafts > 0:
            made = 0
            while made < drafts and sources[b, made] == model:
                made += 1
            stood, further = min(accepted, made), granted[b] - made
            chain[0] += share * (stood - (stood + (accepted < made)) * chain[0])
            if accepted >= made and further > 0:
                stood = accepted - made
                chain[1] += share * (stood - (stood + (stood < further)) * chain[1])
    return float(tokens), float(windows), total
