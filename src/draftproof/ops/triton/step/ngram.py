"""The next drafts: from what followed the last tokens before, and any proposer's into the slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.types import Draft, SlotColumns

BLOCK = 2048  # places that are compared at a time


@triton.jit
def ngram_kernel(
    slots, budgets, ended, length, tokens, out, counts, WIDE, K, smallest,
    LARGEST: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, K], counts [B]: a program an entry, from its newest tokens to its oldest.

    A place is where a match goes on; the best is the one with most tokens matched before it, then the
    latest. Once a block has a match of LARGEST, no older one can be better.
    """
    begin(PDL)
    me = tl.program_id(0).to(tl.int64)
    ahead = tl.arange(0, DEPTHS).to(tl.int64)
    slot, budget = tl.load(slots + me), tl.load(budgets + me)
    named = slot >= 0
    total = tl.load(length + slot, mask=named, other=0)
    live = (budget > 0) & (tl.load(ended + slot, mask=named, other=1) == 0)
    total = tl.where(live, total, 0)
    line = tokens + slot * WIDE
    best = total * 0  # matched tokens above, place below
    stop = total  # places before this one are not yet looked at; the least is 1
    while (stop > 1) & ((best >> 32) < LARGEST):
        place = stop - BLOCK + tl.arange(0, BLOCK)
        still = place >= 1
        matched = tl.zeros((BLOCK,), tl.int64)
        for n in tl.static_range(1, LARGEST + 1):
            still = still & (place >= n)
            # not masked by what has matched so far: the loads of all n are under way at once
            here = tl.load(line + place - n, mask=place >= n, other=-1)
            last = tl.load(line + total - n, mask=total >= n, other=-2)
            still = still & (here == last)
            matched += still.to(tl.int64)
        key = tl.where(place >= 1, (matched << 32) + place, 0)
        best = tl.maximum(best, tl.max(key, axis=0))
        stop = stop - BLOCK
    found = (best >> 32) >= smallest
    start = best & 0xFFFFFFFF
    period = tl.maximum(total - start, 1)
    count = tl.where(found, budget, 0)
    ok = found & (ahead < count)
    guess = tl.load(line + start + ahead % period, mask=ok & (ahead < K), other=0)
    tl.store(out + me * K + ahead, guess, mask=ahead < K)
    tl.store(counts + me, count)


@triton.jit
def put_draft_kernel(
    slots, budgets, guesses, counts, logprobs, sources,  # [B], [B], [B, K], [B], [B, K], [B, K]
    draft, num_draft, draft_logprob, draft_source, ended, length, max_length, V, K, down, across,
    LOGPROBS: tl.constexpr, SOURCES: tl.constexpr, DEPTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Guesses lie `down` from entry to entry and `across` from draft to draft."""
    begin(PDL)
    me = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + me)
    if slot >= 0:
        at = tl.arange(0, DEPTHS).to(tl.int64)
        ok = at < K
        guess = tl.load(guesses + me * down + at * across, mask=ok, other=-1)
        outside = (guess < 0) | (guess >= V)
        legal = tl.min(tl.where(outside, at, K), axis=0)
        room = tl.maximum(tl.load(max_length + slot) - tl.load(length + slot) - 1, 0)
        least = tl.minimum(tl.load(counts + me), tl.load(budgets + me))
        least = tl.maximum(tl.minimum(least, tl.minimum(legal, room)), 0)
        tl.store(num_draft + slot, tl.where(tl.load(ended + slot) == 0, least, 0))
        # what is cut off may still be looked up
        tl.store(draft + slot * K + at, tl.minimum(tl.maximum(guess, 0), V - 1), mask=ok)
        own = tl.full((DEPTHS,), float("nan"), tl.float32)
        if LOGPROBS:
            own = tl.load(logprobs + me * K + at, mask=ok)
        tl.store(draft_logprob + slot * K + at, own, mask=ok)
        source = tl.zeros((DEPTHS,), tl.int8)
        if SOURCES:
            source = tl.load(sources + me * K + at, mask=ok)
        tl.store(draft_source + slot * K + at, source, mask=ok)


def search_ngram(
    columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    entries, k, wide = len(slots), columns.draft.shape[1], columns.tokens.shape[1]
    tokens = torch.empty((entries, k), dtype=torch.int64, device=slots.device)
    counts = torch.empty(entries, dtype=torch.int64, device=slots.device)
    block = min(BLOCK, power_of_two(wide))
    ngram_kernel[(entries,)](
        slots, budget, columns.ended, columns.length, columns.tokens, tokens, counts, wide, k, smallest,
        LARGEST=largest, DEPTHS=power_of_two(k), BLOCK=block, **launch_options(pdl, num_warps=8),
    )  # fmt: skip
    return tokens, counts


def store_drafts(columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft, pdl: bool) -> None:
    """Of a draft on the device."""
    k = columns.draft.shape[1]
    own, sources = draft.logprobs, draft.sources
    put_draft_kernel[(len(slots),)](
        slots, budget, draft.tokens, draft.count,
        columns.draft_logprob if own is None else own,
        columns.draft_source if sources is None else sources,
        columns.draft, columns.num_draft, columns.draft_logprob, columns.draft_source,
        columns.ended, columns.length, columns.max_length, columns.ends.shape[1], k, *draft.tokens.stride(),
        LOGPROBS=own is not None, SOURCES=sources is not None, DEPTHS=power_of_two(k),
        **launch_options(pdl, num_warps=1),
    )  # fmt: skip
