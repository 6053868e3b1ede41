"""The rows of a step from the slots: one launch, a program an entry, and a few more for the padding.

An entry's first row is the number of rows before it, so each program reads the counts of all B entries and
adds them up for itself: B is small, and a scan in a launch of its own would cost more than it saves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops import Layout
from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.types import PlanColumns, SlotColumns

BLOCK = 128  # rows that a program writes at a time


@triton.jit
def _extent(slots, chunk, drafts, ended, length, computed, num_draft, entry, there):
    """Of entries (a vector or one): slot, tokens, computed ones, rows of tokens, drafts, has it a window?

    An entry that has no rows has 0 everywhere but in its slot. What one that has ended holds is read with the
    rest and dropped: to wait for the news of its end first would take as long as the reading.
    """
    slot = tl.load(slots + entry, mask=there, other=-1)
    asked = tl.load(chunk + entry, mask=there, other=0)
    most = tl.load(drafts + entry, mask=there, other=0)
    named = slot >= 0
    live = tl.load(ended + slot, mask=named, other=1) == 0
    total = tl.where(live, tl.load(length + slot, mask=named, other=0), 0)
    done = tl.where(live, tl.load(computed + slot, mask=named, other=0), 0)
    held = tl.load(num_draft + slot, mask=named, other=0)
    asked = tl.where(live, asked, 0)
    fresh = tl.where(asked > 0, asked, total - done)
    reaches = live & (done + fresh == total)
    guesses = tl.where(reaches & (asked == 0), tl.minimum(most, held), 0)
    return slot, total, done, fresh, guesses, reaches


@triton.jit(do_not_specialize=["R", "L"])  # any of them may come beside any other, op by op
def layout_kernel(
    slots, chunk, drafts,  # [B] the plan
    ended, length, computed, num_draft, prompt_len, tokens, draft, page_table,  # [S] and [S, ...]
    row_tokens, row_positions, row_slots, row_kv,  # [R] from here on written
    win_slots, win_first, win_drafts,  # [B]
    win_slot, win_depth, win_position, win_draft, win_at,  # [L]
    B, R, L, WIDE, K, PAGES,
    PAGE: tl.constexpr, ENTRIES: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    me = tl.program_id(0)
    entry = tl.arange(0, ENTRIES)
    slot, total, done, fresh, guesses, reaches = _extent(  # before the others': both are under way at once
        slots, chunk, drafts, ended, length, computed, num_draft, me, me < B
    )
    prompt = tl.load(prompt_len + slot, mask=slot >= 0, other=0)
    _, _, _, every_fresh, every_guesses, every_reaches = _extent(
        slots, chunk, drafts, ended, length, computed, num_draft, entry, entry < B
    )
    # rows below, logits rows above: one sum for both
    counts = every_fresh + every_guesses + (tl.where(every_reaches, every_guesses + 1, 0) << 32)
    before = tl.sum(tl.where(entry < me, counts, 0), axis=0)  # all of them for a program past the entries
    first, first_logits = before & 0xFFFFFFFF, before >> 32
    if me < B:
        tl.store(win_slots + me, tl.where(reaches, slot, -1))
        tl.store(win_first + me, first_logits)
        tl.store(win_drafts + me, guesses)
        count = fresh + guesses
        for start in range(0, count, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            at = first + offset
            ok = (offset < count) & (at < R)
            position = done + offset
            ahead = position - total
            page_at = position // PAGE
            page = tl.load(page_table + slot * PAGES + page_at, mask=ok & (page_at < PAGES), other=0)
            token = tl.load(tokens + slot * WIDE + position, mask=ok & (ahead < 0), other=0)
            guess = tl.load(draft + slot * K + ahead, mask=ok & (ahead >= 0) & (ahead < K), other=0)
            tl.store(row_tokens + at, tl.where(ahead < 0, token, guess), mask=ok)
            tl.store(row_positions + at, position, mask=ok)
            tl.store(row_slots + at, tl.zeros_like(position) + slot, mask=ok)
            tl.store(row_kv + at, page.to(tl.int64) * PAGE + position % PAGE, mask=ok)
        if reaches:
            depth = tl.arange(0, DEPTHS).to(tl.int64)
            at = first_logits + depth
            ok = (depth <= guesses) & (at < L)
            guess = tl.load(draft + slot * K + depth, mask=ok & (depth < guesses), other=-1)
            place = total - prompt + depth
            tl.store(win_slot + at, tl.zeros_like(depth) + slot, mask=ok)
            tl.store(win_depth + at, depth, mask=ok)
            tl.store(win_position + at, place, mask=ok)
            tl.store(win_draft + at, guess, mask=ok)
            tl.store(win_at + at, first + fresh - 1 + depth, mask=ok)
    else:
        at = (me - B).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        nothing = tl.zeros_like(at)
        ok = (at >= first) & (at < R)
        tl.store(row_tokens + at, nothing, mask=ok)
        tl.store(row_positions + at, nothing, mask=ok)
        tl.store(row_slots + at, nothing - 1, mask=ok)
        tl.store(row_kv + at, nothing, mask=ok)
        ok = (at >= first_logits) & (at < L)
        tl.store(win_slot + at, nothing - 1, mask=ok)
        tl.store(win_depth + at, nothing, mask=ok)
        tl.store(win_position + at, nothing, mask=ok)
        tl.store(win_draft + at, nothing - 1, mask=ok)
        tl.store(win_at + at, nothing, mask=ok)


def layout(plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout, pdl: bool) -> None:
    rows, windows = out.rows, out.windows
    entries, count, logits = len(plan.slots), len(rows.tokens), len(out.at)
    k = columns.draft.shape[1]
    padding = triton.cdiv(max(count, logits), BLOCK)
    layout_kernel[(entries + padding,)](
        plan.slots, plan.chunk, plan.drafts,
        columns.ended, columns.length, columns.computed, columns.num_draft, columns.prompt_len,
        columns.tokens, columns.draft, columns.page_table,
        rows.tokens, rows.positions, rows.slots, rows.kv_index,
        windows.slots, windows.first, windows.num_draft,
        windows.slot, windows.depth, windows.position, windows.draft, out.at,
        entries, count, logits, columns.tokens.shape[1], k, columns.page_table.shape[1],
        PAGE=page_size, ENTRIES=power_of_two(entries), DEPTHS=power_of_two(k + 1), BLOCK=BLOCK,
        **launch_options(pdl, num_warps=4),
    )  # fmt: skip
