"""Verification and commit of all windows in one program, as a matrix [entries, depths].

The first logprob row of an entry depends on the number of tokens that all entries before it commit, so one
program handles all entries. The first rejected, bad or end row of a window is a minimum over its depths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof import types
from draftproof.ops.triton.kernel_utils import pdl_sync
from draftproof.types import FinishStatus

STOP, LENGTH = tl.constexpr(int(FinishStatus.STOP)), tl.constexpr(int(FinishStatus.LENGTH))
NUM_OUT, NUM_DRAFT = tl.constexpr(types.NUM_OUT), tl.constexpr(types.NUM_DRAFT)
NUM_ACCEPTED, FINISH_STATUS = tl.constexpr(types.NUM_ACCEPTED), tl.constexpr(types.FINISH_STATUS)
FIRST_ROW, PICK = tl.constexpr(types.FIRST_ROW), tl.constexpr(types.PICK)
TOKENS = tl.constexpr(types.TOKENS)
PICK_BLOCK = 1024  # entries of pick_rows that one store fills


@triton.jit
def _verify_windows(
    draft_tokens, token, accept, recovered, ends, bad, slot, has_window, count, rows, depth, V, K,
    ACCEPT: tl.constexpr, RECOVERED: tl.constexpr,
):  # fmt: skip
    """Verify the drafts of each window [B, D].

    Returns the output tokens [B, D], the number of accepted drafts, the depth of the first end token and of
    the first bad row (K + 1 if there is none), and the code of that row. Entries without a window are masked.
    """
    inside = has_window[:, None] & (depth <= count[:, None])
    has_draft = inside & (depth < count[:, None])
    draft = tl.load(draft_tokens + rows, mask=has_draft, other=-1)
    sampled = tl.load(token + rows, mask=inside, other=0)
    code = tl.load(bad + rows, mask=inside, other=0)
    accepted_here = has_draft & (draft == sampled)
    if ACCEPT:
        accepted_here = tl.load(accept + rows, mask=has_draft, other=0) != 0
    replacement = sampled
    if RECOVERED:
        replacement = tl.load(recovered + rows, mask=inside, other=0)
    accepted = tl.min(tl.where(accepted_here, K + 1, depth), axis=1)
    accepted = tl.where(has_window, accepted, 0)
    sampled = tl.where((accepted < count)[:, None], replacement, sampled)
    output = tl.where(depth < accepted[:, None], draft, sampled)
    id_at = slot[:, None] * V + tl.minimum(tl.maximum(output, 0), V - 1)
    ending = tl.load(ends + id_at, mask=inside & (depth <= accepted[:, None]), other=0) != 0
    first_end = tl.min(tl.where(ending, depth, K + 1), axis=1)
    first_bad = tl.min(tl.where(inside & (code == 0), K + 1, depth), axis=1)
    bad_code = tl.sum(tl.where(depth == first_bad[:, None], code, 0), axis=1)
    return output, accepted, first_end, first_bad, bad_code


@triton.jit
def _store_outcome(
    table, entry, depth, in_batch, num_out, count, accepted, ended, first, pick, output, K, WIDTH
):  # fmt: skip
    """Store a row of the outcome table for every entry."""
    table_row = table + entry * WIDTH
    tl.store(table_row + NUM_OUT, num_out, mask=in_batch)
    tl.store(table_row + NUM_DRAFT, count, mask=in_batch)
    tl.store(table_row + NUM_ACCEPTED, tl.minimum(accepted, num_out), mask=in_batch)
    tl.store(table_row + FINISH_STATUS, ended, mask=in_batch)
    tl.store(table_row + FIRST_ROW, first, mask=in_batch)
    tl.store(table_row + PICK, pick, mask=in_batch)
    written = tl.where(depth < num_out[:, None], output, 0)
    tl.store(table_row[:, None] + TOKENS + depth, written, mask=in_batch[:, None] & (depth <= K))


@triton.jit
def commit_kernel(
    plan_slots, plan_chunk, win_slots, win_first, win_drafts,  # [B]
    draft_tokens, token, accept, recovered, bad,  # [L]
    tokens, length, computed, num_draft, ended, max_length, logprob_kind, ends,  # [S], [S, WIDE], [S, V]
    table, pick_rows, pick_tokens,  # [B, WIDTH], [P], [P]
    B, L, P, V, MAX_LEN, K, WIDTH,
    ACCEPT: tl.constexpr, RECOVERED: tl.constexpr, ENTRIES: tl.constexpr, DEPTHS: tl.constexpr,
    PICK_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Verify all windows, update the slot columns and store the outcome table and the logprob rows."""
    pdl_sync(PDL)
    entry = tl.arange(0, ENTRIES)
    depth = tl.arange(0, DEPTHS).to(tl.int64)[None, :]
    in_batch = entry < B
    slot = tl.load(win_slots + entry, mask=in_batch, other=-1)
    plan_slot = tl.load(plan_slots + entry, mask=in_batch, other=-1)
    has_window = slot >= 0
    first = tl.load(win_first + entry, mask=has_window, other=0)
    count = tl.load(win_drafts + entry, mask=has_window, other=0)
    old_length = tl.load(length + slot, mask=has_window, other=0)
    max_len = tl.load(max_length + slot, mask=has_window, other=0)
    has_logprobs = tl.load(logprob_kind + slot, mask=has_window, other=0) > 0
    prefill_only = (plan_slot >= 0) & (slot < 0)
    new_computed = tl.load(computed + plan_slot, mask=prefill_only, other=0)
    new_computed = new_computed + tl.load(plan_chunk + entry, mask=prefill_only, other=0)
    rows = tl.minimum(first[:, None] + depth, L - 1)
    output, accepted, first_end, first_bad, bad_code = _verify_windows(
        draft_tokens, token, accept, recovered, ends, bad, slot, has_window, count, rows, depth, V, K,
        ACCEPT, RECOVERED,
    )  # fmt: skip
    fails = first_bad <= accepted  # the output would contain the token of a bad row
    limit = tl.where(fails, first_bad, K + 1)
    room = max_len - old_length
    num_out = tl.minimum(tl.minimum(accepted, first_end) + 1, tl.minimum(room, limit))
    num_out = tl.where(has_window, num_out, 0)
    end_reason = tl.where(fails & (num_out == limit), bad_code, 0)
    end_reason = tl.where(num_out == room, LENGTH, end_reason)
    end_reason = tl.where(first_end < num_out, STOP, end_reason)
    end_reason = tl.where(has_window, end_reason, 0)

    kept = depth < num_out[:, None]
    position = old_length[:, None] + depth
    tl.store(tokens + slot[:, None] * MAX_LEN + position, output, mask=kept & (position < MAX_LEN))
    tl.store(length + slot, old_length + num_out, mask=has_window)
    tl.store(computed + slot, old_length + num_out - 1, mask=has_window)
    tl.store(num_draft + slot, tl.zeros_like(slot), mask=has_window)
    tl.store(ended + slot, end_reason, mask=has_window)
    tl.store(computed + plan_slot, new_computed, mask=prefill_only)

    picked = tl.where(has_logprobs, num_out, 0)
    pick_start = tl.cumsum(picked, axis=0) - picked
    pick = tl.where(picked > 0, pick_start, 0)
    _store_outcome(
        table, entry, depth, in_batch, num_out, count, accepted, end_reason, first, pick, output, K, WIDTH
    )
    index = pick_start[:, None] + depth
    ok = (depth < picked[:, None]) & (index < P)
    tl.store(pick_rows + index, first[:, None] + depth, mask=ok)
    tl.store(pick_tokens + index, output, mask=ok)
    total = tl.sum(picked, axis=0)
    for start in range(0, P, PICK_BLOCK):
        padding = start + tl.arange(0, PICK_BLOCK).to(tl.int64)
        none = tl.zeros_like(padding)
        tl.store(pick_rows + padding, none - 1, mask=(padding >= total) & (padding < P))
        tl.store(pick_tokens + padding, none, mask=(padding >= total) & (padding < P))
