"""Behind a step: its rows with the tokens that follow them, and where the next drafts come to stand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.types import Rows, SlotColumns

BLOCK = 512  # rows of a program, and rows that entries are looked for in at a time
ENTRIES = 8  # of a program
ALIGN = 16  # int64s: each line begins at an address that any kernel likes


@triton.jit(do_not_specialize=["R", "B", "blocks", "plane"])
def follow_kernel(
    positions, slots, kv_index, entries, length, tokens, made, last, R, B, WIDE, blocks, plane,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """made [4, R]: tokens, positions, slots, places, lines `plane` apart; last [B]. `blocks` programs have
    rows, the others look for the rows of their entries."""
    begin(PDL)
    me = tl.program_id(0)
    if me < blocks:
        r = me * BLOCK + tl.arange(0, BLOCK)
        ok = r < R
        slot = tl.load(slots + r, mask=ok, other=-1)
        position = tl.load(positions + r, mask=ok, other=0)
        known = slot >= 0
        known = known & (position + 1 < tl.load(length + slot, mask=known, other=0))
        token = tl.load(tokens + slot * WIDE + position + 1, mask=known, other=0)
        place = tl.load(kv_index + r, mask=known, other=0)
        tl.store(made + r, token, mask=ok)
        tl.store(made + plane + r, tl.where(known, position, 0), mask=ok)
        tl.store(made + 2 * plane + r, tl.where(known, slot, -1), mask=ok)
        tl.store(made + 3 * plane + r, place, mask=ok)
    else:
        e = (me - blocks) * ENTRIES + tl.arange(0, ENTRIES)
        mine = tl.load(entries + e, mask=e < B, other=-1)
        wanted = tl.load(length + mine, mask=mine >= 0, other=0) - 2
        found = tl.full((ENTRIES,), -1, tl.int32)
        for first in range(0, R, BLOCK):
            r = first + tl.arange(0, BLOCK)
            slot = tl.load(slots + r, mask=r < R, other=-1)
            position = tl.load(positions + r, mask=r < R, other=-1)
            same = (slot[None, :] == mine[:, None]) & (position[None, :] == wanted[:, None])
            same = same & (mine >= 0)[:, None]
            found = tl.maximum(found, tl.max(tl.where(same, r[None, :], -1), axis=1))
        tl.store(last + e, found.to(tl.int64), mask=e < B)


def shift_rows(rows: Rows, columns: SlotColumns, slots: Tensor, pdl: bool) -> tuple[Rows, Tensor]:
    count, size = len(rows.tokens), len(slots)
    plane = -(-count // ALIGN) * ALIGN
    made = torch.empty((4, plane), dtype=torch.int64, device=slots.device)
    last = torch.empty(size, dtype=torch.int64, device=slots.device)
    block = min(BLOCK, max(16, power_of_two(count)))
    blocks = triton.cdiv(count, block)
    follow_kernel[(blocks + triton.cdiv(size, ENTRIES),)](
        rows.positions, rows.slots, rows.kv_index, slots, columns.length, columns.tokens, made, last,
        count, size, columns.tokens.shape[1], blocks, plane,
        BLOCK=block, ENTRIES=ENTRIES, **launch_options(pdl, num_warps=4),
    )  # fmt: skip
    return Rows(*made[:, :count], rows.page_table), last


@triton.jit(do_not_specialize=["B", "rounds", "plane"])
def ahead_kernel(
    slots, budget, last, length, max_length, prompt_len, ended, tokens, page_table, out,
    B, WIDE, PAGES, rounds, depth, plane, lag,
    PAGE: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: lines `plane` apart: count, newest, then `rounds` each of slots, outputs, positions, places, then
    `depth` of zeros."""
    begin(PDL)
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    ok = e < B
    slot = tl.load(slots + e, mask=ok, other=-1)
    live = slot >= 0
    live = live & (tl.load(last + e, mask=ok, other=-1) >= 0)
    live = live & (tl.load(ended + slot, mask=live, other=1) == 0)
    total = tl.load(length + slot, mask=live, other=0)
    room = tl.load(max_length + slot, mask=live, other=0) - total - 1
    count = tl.minimum(tl.minimum(tl.load(budget + e, mask=live, other=0), room), rounds)
    count = tl.maximum(tl.where(live, count, 0), 0)
    prompt = tl.load(prompt_len + slot, mask=live, other=0)
    tl.store(out + e, count, mask=ok)
    newest = tl.load(tokens + slot * WIDE + total - 1, mask=count > 0, other=0)
    tl.store(out + plane + e, newest, mask=ok)
    line = out + 2 * plane + e
    for j in range(rounds):
        on = count > j
        position = tl.where(on, tl.maximum(total - 1 - lag + j, 0), 0)
        page = tl.load(page_table + slot * PAGES + position // PAGE, mask=on, other=0).to(tl.int64)
        tl.store(line + j * plane, tl.where(on, slot, -1), mask=ok)
        tl.store(line + (rounds + j) * plane, tl.where(on, total - prompt + j, 0), mask=ok)
        tl.store(line + (2 * rounds + j) * plane, position, mask=ok)
        tl.store(line + (3 * rounds + j) * plane, tl.where(on, page * PAGE + position % PAGE, 0), mask=ok)
    for j in range(depth):
        tl.store(line + (4 * rounds + j) * plane, slot * 0, mask=ok)


def plan_draft_rows(
    columns: SlotColumns, slots: Tensor, budget: Tensor, last: Tensor, rounds: int, lag: int, page_size: int,
    pdl: bool,
) -> DraftRows:  # fmt: skip
    size, depth = len(slots), columns.draft.shape[1]
    plane = -(-size // ALIGN) * ALIGN
    out = torch.empty((2 + 4 * rounds + depth, plane), dtype=torch.int64, device=slots.device)
    entries = min(64, power_of_two(size))
    ahead_kernel[(triton.cdiv(size, entries),)](
        slots, budget, last, columns.length, columns.max_length, columns.prompt_len, columns.ended,
        columns.tokens, columns.page_table, out, size, columns.tokens.shape[1],
        columns.page_table.shape[1], rounds, depth, plane, lag,
        PAGE=page_size, ENTRIES=entries, **launch_options(pdl, num_warps=1),
    )  # fmt: skip
    parts = out[:, :size].split([1, 1, *[rounds] * 4, depth])
    return DraftRows(parts[0][0], parts[1][0], *parts[2:])
