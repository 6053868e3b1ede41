"""Layout of the rows of a step from the slots: one launch, a program per entry and some for the padding.

The first row of an entry is the number of rows before it, so each program reads the counts of all B entries
and sums them itself. B is small, and a separate scan kernel would take longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.triton.kernel_utils import pdl_sync

BLOCK = 128  # rows that a program writes at a time


@triton.jit
def _entry_extent(slots, chunk, drafts, ended, length, computed, num_draft, entry, in_batch):
    """Return slot, length, computed tokens, new rows, drafts and has_window of entries (a vector or one).

    An entry without rows has 0 in all but its slot. The columns of an ended slot are loaded and ignored,
    because loads that depend on the `ended` column would take longer.
    """
    slot = tl.load(slots + entry, mask=in_batch, other=-1)
    chunk_len = tl.load(chunk + entry, mask=in_batch, other=0)
    max_drafts = tl.load(drafts + entry, mask=in_batch, other=0)
    has_slot = slot >= 0
    live = tl.load(ended + slot, mask=has_slot, other=1) == 0
    total = tl.where(live, tl.load(length + slot, mask=has_slot, other=0), 0)
    num_computed = tl.where(live, tl.load(computed + slot, mask=has_slot, other=0), 0)
    drafts_held = tl.load(num_draft + slot, mask=has_slot, other=0)
    chunk_len = tl.where(live, chunk_len, 0)
    num_new = tl.where(chunk_len > 0, chunk_len, total - num_computed)
    has_window = live & (num_computed + num_new == total)
    num_drafts = tl.where(has_window & (chunk_len == 0), tl.minimum(max_drafts, drafts_held), 0)
    return slot, total, num_computed, num_new, num_drafts, has_window


@triton.jit(do_not_specialize=["R", "L"])  # R and L vary independently
def layout_kernel(
    slots, chunk, drafts,  # [B] the plan
    ended, length, computed, num_draft, prompt_len, tokens, draft, page_table,  # [S] and [S, ...]
    row_tokens, row_positions, row_slots, row_kv,  # [R] from here on written
    win_slots, win_first, win_drafts,  # [B]
    win_slot, win_depth, win_position, win_draft, win_at,  # [L]
    B, R, L, MAX_LEN, K, PAGES,
    PAGE: tl.constexpr, ENTRIES: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store rows and windows of each entry; programs after the entries store the padding."""
    pdl_sync(PDL)
    program = tl.program_id(0)
    entry = tl.arange(0, ENTRIES)
    # first the entry of this program, so that its loads overlap with those of all entries
    slot, total, num_computed, num_new, num_drafts, has_window = _entry_extent(
        slots, chunk, drafts, ended, length, computed, num_draft, program, program < B
    )
    prompt = tl.load(prompt_len + slot, mask=slot >= 0, other=0)
    _, _, _, all_new, all_drafts, all_windows = _entry_extent(
        slots, chunk, drafts, ended, length, computed, num_draft, entry, entry < B
    )
    # rows in the low half, logits rows in the high half: one sum for both
    counts = all_new + all_drafts + (tl.where(all_windows, all_drafts + 1, 0) << 32)
    before = tl.sum(tl.where(entry < program, counts, 0), axis=0)  # the total for a padding program
    first_row, first_logits = before & 0xFFFFFFFF, before >> 32
    if program < B:
        tl.store(win_slots + program, tl.where(has_window, slot, -1))
        tl.store(win_first + program, first_logits)
        tl.store(win_drafts + program, num_drafts)
        count = num_new + num_drafts
        for start in range(0, count, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            index = first_row + offset
            ok = (offset < count) & (index < R)
            position = num_computed + offset
            draft_index = position - total
            page_at = position // PAGE
            page = tl.load(page_table + slot * PAGES + page_at, mask=ok & (page_at < PAGES), other=0)
            token = tl.load(tokens + slot * MAX_LEN + position, mask=ok & (draft_index < 0), other=0)
            draft_token = tl.load(
                draft + slot * K + draft_index, mask=ok & (draft_index >= 0) & (draft_index < K), other=0
            )
            tl.store(row_tokens + index, tl.where(draft_index < 0, token, draft_token), mask=ok)
            tl.store(row_positions + index, position, mask=ok)
            tl.store(row_slots + index, tl.zeros_like(position) + slot, mask=ok)
            tl.store(row_kv + index, page.to(tl.int64) * PAGE + position % PAGE, mask=ok)
        if has_window:
            depth = tl.arange(0, DEPTHS).to(tl.int64)
            index = first_logits + depth
            ok = (depth <= num_drafts) & (index < L)
            draft_token = tl.load(draft + slot * K + depth, mask=ok & (depth < num_drafts), other=-1)
            output_position = total - prompt + depth
            tl.store(win_slot + index, tl.zeros_like(depth) + slot, mask=ok)
            tl.store(win_depth + index, depth, mask=ok)
            tl.store(win_position + index, output_position, mask=ok)
            tl.store(win_draft + index, draft_token, mask=ok)
            tl.store(win_at + index, first_row + num_new - 1 + depth, mask=ok)
    else:
        index = (program - B).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        zero = tl.zeros_like(index)
        ok = (index >= first_row) & (index < R)
        tl.store(row_tokens + index, zero, mask=ok)
        tl.store(row_positions + index, zero, mask=ok)
        tl.store(row_slots + index, zero - 1, mask=ok)
        tl.store(row_kv + index, zero, mask=ok)
        ok = (index >= first_logits) & (index < L)
        tl.store(win_slot + index, zero - 1, mask=ok)
        tl.store(win_depth + index, zero, mask=ok)
        tl.store(win_position + index, zero, mask=ok)
        tl.store(win_draft + index, zero - 1, mask=ok)
        tl.store(win_at + index, zero, mask=ok)
