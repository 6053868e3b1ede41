"""Write of the drafts of any proposer into the slots: one program per entry."""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.kernel_utils import pdl_sync


@triton.jit(do_not_specialize=["logprob_entry_stride", "logprob_depth_stride"])
def store_drafts_kernel(
    slots, budgets, draft_tokens, counts, logprobs, sources,  # [B], [B], [B, K], [B], [B, K], [B, K]
    draft, num_draft, draft_logprob, draft_source, ended, length, max_length, V, K,
    entry_stride, depth_stride, logprob_entry_stride, logprob_depth_stride,
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
            at = entry * logprob_entry_stride + depth * logprob_depth_stride
            logprob = tl.load(logprobs + at, mask=ok)
        tl.store(draft_logprob + slot * K + depth, logprob, mask=ok)
        source = tl.zeros((DEPTHS,), tl.int8)
        if SOURCES:
            source = tl.load(sources + entry * K + depth, mask=ok)
        tl.store(draft_source + slot * K + depth, source, mask=ok)


STRIDES = [f"{name}_{axis}" for name in ("ranks", "ids", "logprobs") for axis in ("entry", "depth")]


@triton.jit(do_not_specialize=STRIDES)
def store_ranking_kernel(
    slots, ranks, ids, logprobs, held_ranks, held_ids, held_logprobs, K, T, WIDTH,
    ranks_entry, ranks_depth, ids_entry, ids_depth, logprobs_entry, logprobs_depth,  # strides
    HAS_RANKS: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the rank of a draft and its T likeliest tokens, T at most TOP, in the lines of its slot.

    ranks [B, K], ids and logprobs [B, K, T] with contiguous lines [T]; held [S + 1, K] and [S + 1, K, WIDTH].
    """
    pdl_sync(PDL)
    entry, depth = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + entry)
    if slot >= 0:
        line = slot * K + depth
        rank = slot * 0
        if HAS_RANKS:
            rank = tl.load(ranks + entry * ranks_entry + depth * ranks_depth)
        if TOP:
            place = tl.arange(0, TOP)
            ok = place < T
            best = tl.load(ids + entry * ids_entry + depth * ids_depth + place, mask=ok)
            value = tl.load(logprobs + entry * logprobs_entry + depth * logprobs_depth + place, mask=ok)
            tl.store(held_ids + line * WIDTH + place, best, mask=ok)
            tl.store(held_logprobs + line * WIDTH + place, value, mask=ok)
        tl.store(held_ranks + line, rank)
