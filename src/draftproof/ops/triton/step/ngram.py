"""N-gram search for drafts, and the write of any proposer's drafts into the slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.triton.runtime import launch_options, next_power_of_two, pdl_sync
from draftproof.types import Draft, SlotColumns

BLOCK = 2048  # positions that are compared at a time


@triton.jit
def ngram_kernel(
    slots, budgets, ended, length, tokens, out, counts, MAX_LEN, K, smallest,
    LARGEST: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store drafts out [B, K] and counts [B]; a program per entry searches from the newest token backwards.

    A candidate is the position after a match. The best one has the most matched tokens before it, then the
    largest position. Once a block has a match of LARGEST tokens, older blocks cannot be better.
    """
    pdl_sync(PDL)
    entry = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, DEPTHS).to(tl.int64)
    slot, budget = tl.load(slots + entry), tl.load(budgets + entry)
    has_slot = slot >= 0
    total = tl.load(length + slot, mask=has_slot, other=0)
    live = (budget > 0) & (tl.load(ended + slot, mask=has_slot, other=1) == 0)
    total = tl.where(live, total, 0)
    slot_tokens = tokens + slot * MAX_LEN
    best = total * 0  # matched tokens in the high half, position in the low half
    end = total  # positions in [1, end) are not compared yet
    while (end > 1) & ((best >> 32) < LARGEST):
        position = end - BLOCK + tl.arange(0, BLOCK)
        matches = position >= 1
        matched = tl.zeros((BLOCK,), tl.int64)
        for n in tl.static_range(1, LARGEST + 1):
            matches = matches & (position >= n)
            # not masked by `matches`, so that the loads of all n overlap
            here = tl.load(slot_tokens + position - n, mask=position >= n, other=-1)
            last = tl.load(slot_tokens + total - n, mask=total >= n, other=-2)
            matches = matches & (here == last)
            matched += matches.to(tl.int64)
        key = tl.where(position >= 1, (matched << 32) + position, 0)
        best = tl.maximum(best, tl.max(key, axis=0))
        end = end - BLOCK
    found = (best >> 32) >= smallest
    start = best & 0xFFFFFFFF
    period = tl.maximum(total - start, 1)
    count = tl.where(found, budget, 0)
    ok = found & (index < count)
    draft_token = tl.load(slot_tokens + start + index % period, mask=ok & (index < K), other=0)
    tl.store(out + entry * K + index, draft_token, mask=index < K)
    tl.store(counts + entry, count)


@triton.jit
def store_drafts_kernel(
    slots, budgets, draft_tokens, counts, logprobs, sources,  # [B], [B], [B, K], [B], [B, K], [B, K]
    draft, num_draft, draft_logprob, draft_source, ended, length, max_length, V, K,
    entry_stride, depth_stride,
    LOGPROBS: tl.constexpr, SOURCES: tl.constexpr, DEPTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the valid drafts of each entry into its slot, cut to budget, vocabulary and maximum length."""
    pdl_sync(PDL)
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + entry)
    if slot >= 0:
        depth = tl.arange(0, DEPTHS).to(tl.int64)
        ok = depth < K
        draft_token = tl.load(draft_tokens + entry * entry_stride + depth * depth_stride, mask=ok, other=-1)
        invalid = (draft_token < 0) | (draft_token >= V)
        num_valid = tl.min(tl.where(invalid, depth, K), axis=0)
        room = tl.maximum(tl.load(max_length + slot) - tl.load(length + slot) - 1, 0)
        count = tl.minimum(tl.load(counts + entry), tl.load(budgets + entry))
        count = tl.maximum(tl.minimum(count, tl.minimum(num_valid, room)), 0)
        tl.store(num_draft + slot, tl.where(tl.load(ended + slot) == 0, count, 0))
        # later kernels may read drafts beyond the count as indices
        tl.store(draft + slot * K + depth, tl.minimum(tl.maximum(draft_token, 0), V - 1), mask=ok)
        logprob = tl.full((DEPTHS,), float("nan"), tl.float32)
        if LOGPROBS:
            logprob = tl.load(logprobs + entry * K + depth, mask=ok)
        tl.store(draft_logprob + slot * K + depth, logprob, mask=ok)
        source = tl.zeros((DEPTHS,), tl.int8)
        if SOURCES:
            source = tl.load(sources + entry * K + depth, mask=ok)
        tl.store(draft_source + slot * K + depth, source, mask=ok)


def search_ngram(
    columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Return drafts [B, K] and counts [B] of the n-gram search."""
    entries, k, max_len = len(slots), columns.draft.shape[1], columns.tokens.shape[1]
    tokens = torch.empty((entries, k), dtype=torch.int64, device=slots.device)
    counts = torch.empty(entries, dtype=torch.int64, device=slots.device)
    block = min(BLOCK, next_power_of_two(max_len))
    ngram_kernel[(entries,)](
        slots, budget, columns.ended, columns.length, columns.tokens, tokens, counts, max_len, k, smallest,
        LARGEST=largest, DEPTHS=next_power_of_two(k), BLOCK=block, **launch_options(pdl, num_warps=8),
    )  # fmt: skip
    return tokens, counts


def store_drafts(columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft, pdl: bool) -> None:
    """Launch `store_drafts_kernel`; the tensors of `draft` are on the device."""
    k = columns.draft.shape[1]
    logprob, sources = draft.logprobs, draft.sources
    store_drafts_kernel[(len(slots),)](
        slots, budget, draft.tokens, draft.count,
        columns.draft_logprob if logprob is None else logprob,
        columns.draft_source if sources is None else sources,
        columns.draft, columns.num_draft, columns.draft_logprob, columns.draft_source,
        columns.ended, columns.length, columns.max_length, columns.ends.shape[1], k, *draft.tokens.stride(),
        LOGPROBS=logprob is not None, SOURCES=sources is not None, DEPTHS=next_power_of_two(k),
        **launch_options(pdl, num_warps=1),
    )  # fmt: skip
