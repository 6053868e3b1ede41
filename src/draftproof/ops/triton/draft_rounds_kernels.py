"""Kernels around the draft rounds of a model: shifted rows and the rows of each round."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.ops.triton.runtime import launch_options, next_power_of_two, pdl_sync
from draftproof.types import Rows, SlotColumns

BLOCK = 512  # rows of a program, and rows that one step of the search for entries reads
NUM_ENTRIES = 8  # of a program
ROW_ALIGNMENT = 16  # int64 elements, so that each row of a matrix begins at an aligned address


@triton.jit(do_not_specialize=["R", "B", "blocks", "plane"])
def shift_rows_kernel(
    positions, slots, kv_index, entries, length, tokens, shifted, last, R, B, MAX_LEN, blocks, plane,
    BLOCK: tl.constexpr, NUM_ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store tokens shifted by one, positions, slots and KV places, shifted [4, R], and the last rows [B].

    The rows of `shifted` are `plane` elements apart. The first `blocks` programs shift rows, the others find
    the last rows of their entries.
    """
    pdl_sync(PDL)
    program = tl.program_id(0)
    if program < blocks:
        r = program * BLOCK + tl.arange(0, BLOCK)
        ok = r < R
        slot = tl.load(slots + r, mask=ok, other=-1)
        position = tl.load(positions + r, mask=ok, other=0)
        known = slot >= 0
        known = known & (position + 1 < tl.load(length + slot, mask=known, other=0))
        token = tl.load(tokens + slot * MAX_LEN + position + 1, mask=known, other=0)
        kv_place = tl.load(kv_index + r, mask=known, other=0)
        tl.store(shifted + r, token, mask=ok)
        tl.store(shifted + plane + r, tl.where(known, position, 0), mask=ok)
        tl.store(shifted + 2 * plane + r, tl.where(known, slot, -1), mask=ok)
        tl.store(shifted + 3 * plane + r, kv_place, mask=ok)
    else:
        e = (program - blocks) * NUM_ENTRIES + tl.arange(0, NUM_ENTRIES)
        entry_slot = tl.load(entries + e, mask=e < B, other=-1)
        last_position = tl.load(length + entry_slot, mask=entry_slot >= 0, other=0) - 2
        found = tl.full((NUM_ENTRIES,), -1, tl.int32)
        for first in range(0, R, BLOCK):
            r = first + tl.arange(0, BLOCK)
            slot = tl.load(slots + r, mask=r < R, other=-1)
            position = tl.load(positions + r, mask=r < R, other=-1)
            same = (slot[None, :] == entry_slot[:, None]) & (position[None, :] == last_position[:, None])
            same = same & (entry_slot >= 0)[:, None]
            found = tl.maximum(found, tl.max(tl.where(same, r[None, :], -1), axis=1))
        tl.store(last + e, found.to(tl.int64), mask=e < B)


def shift_rows(rows: Rows, columns: SlotColumns, slots: Tensor, pdl: bool) -> tuple[Rows, Tensor]:
    """Return the rows with the token that follows each, and the last row of each entry [B]."""
    count, size = len(rows.tokens), len(slots)
    plane = -(-count // ROW_ALIGNMENT) * ROW_ALIGNMENT
    shifted = torch.empty((4, plane), dtype=torch.int64, device=slots.device)
    last = torch.empty(size, dtype=torch.int64, device=slots.device)
    block = min(BLOCK, max(16, next_power_of_two(count)))
    blocks = triton.cdiv(count, block)
    shift_rows_kernel[(blocks + triton.cdiv(size, NUM_ENTRIES),)](
        rows.positions, rows.slots, rows.kv_index, slots, columns.length, columns.tokens, shifted, last,
        count, size, columns.tokens.shape[1], blocks, plane,
        BLOCK=block, NUM_ENTRIES=NUM_ENTRIES, **launch_options(pdl, num_warps=4),
    )  # fmt: skip
    return Rows(*shifted[:, :count], rows.page_table), last


@triton.jit(do_not_specialize=["B", "rounds", "plane"])
def plan_draft_rows_kernel(
    slots, budget, last, length, max_length, prompt_len, ended, tokens, page_table, out,
    B, MAX_LEN, PAGES, rounds, depth, plane, lag,
    PAGE: tl.constexpr, NUM_ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store count, newest token, slots, outputs, positions and KV places of each round, then zeros.

    The rows of `out` are `plane` elements apart: 1, 1, four times `rounds`, and `depth` rows.
    """
    pdl_sync(PDL)
    e = tl.program_id(0) * NUM_ENTRIES + tl.arange(0, NUM_ENTRIES)
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
    newest = tl.load(tokens + slot * MAX_LEN + total - 1, mask=count > 0, other=0)
    tl.store(out + plane + e, newest, mask=ok)
    out_row = out + 2 * plane + e
    for j in range(rounds):
        active = count > j
        position = tl.where(active, tl.maximum(total - 1 - lag + j, 0), 0)
        page = tl.load(page_table + slot * PAGES + position // PAGE, mask=active, other=0).to(tl.int64)
        tl.store(out_row + j * plane, tl.where(active, slot, -1), mask=ok)
        tl.store(out_row + (rounds + j) * plane, tl.where(active, total - prompt + j, 0), mask=ok)
        tl.store(out_row + (2 * rounds + j) * plane, position, mask=ok)
        tl.store(
            out_row + (3 * rounds + j) * plane, tl.where(active, page * PAGE + position % PAGE, 0), mask=ok
        )
    for j in range(depth):
        tl.store(out_row + (4 * rounds + j) * plane, slot * 0, mask=ok)


def plan_draft_rows(
    columns: SlotColumns, slots: Tensor, budget: Tensor, last: Tensor, rounds: int, lag: int, page_size: int,
    pdl: bool,
) -> DraftRows:  # fmt: skip
    """Return the rows of each draft round."""
    size, depth = len(slots), columns.draft.shape[1]
    plane = -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
    out = torch.empty((2 + 4 * rounds + depth, plane), dtype=torch.int64, device=slots.device)
    entries = min(64, next_power_of_two(size))
    plan_draft_rows_kernel[(triton.cdiv(size, entries),)](
        slots, budget, last, columns.length, columns.max_length, columns.prompt_len, columns.ended,
        columns.tokens, columns.page_table, out, size, columns.tokens.shape[1],
        columns.page_table.shape[1], rounds, depth, plane, lag,
        PAGE=page_size, NUM_ENTRIES=entries, **launch_options(pdl, num_warps=1),
    )  # fmt: skip
    parts = out[:, :size].split([1, 1, *[rounds] * 4, depth])
    return DraftRows(parts[0][0], parts[1][0], *parts[2:])
