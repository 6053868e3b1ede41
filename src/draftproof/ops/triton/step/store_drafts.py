"""Write of the drafts of any proposer into the slots: one program per entry."""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.kernel_utils import pdl_sync


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
