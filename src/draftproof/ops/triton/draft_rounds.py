"""Draft-round ops on the GPU, one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.ops.triton import kernel_utils
from draftproof.ops.triton.gemm.lm_head_sample import LmHeadSample
from draftproof.ops.triton.kernel_utils import check_columns, launch_options, next_power_of_two, pdl_sync
from draftproof.types import DeviceBatch, Rows, SlotColumns, Windows

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
        kv_row = out_row + (3 * rounds + j) * plane
        tl.store(kv_row, tl.where(active, page * PAGE + position % PAGE, 0), mask=ok)
    for j in range(depth):
        tl.store(out_row + (4 * rounds + j) * plane, slot * 0, mask=ok)


class TritonRounds(TorchRounds):
    """Draft-round ops in one launch each."""

    def __init__(
        self, launch: kernel_utils.LaunchContext, forward: ForwardOps, sampling: SamplingOps
    ) -> None:
        super().__init__(forward, sampling)
        self._launch = launch
        self._lm_head_sample = LmHeadSample(launch.device)

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        count, size = len(rows.tokens), len(slots)
        check_columns("the rows", (rows.positions, rows.slots, rows.kv_index), count)
        check_columns("slots", (slots,), size)
        plane = -(-count // ROW_ALIGNMENT) * ROW_ALIGNMENT
        shifted, last = (self._launch.empty(shape, torch.int64) for shape in ((4, plane), (size,)))
        block = min(BLOCK, max(16, next_power_of_two(count)))
        blocks, pdl = triton.cdiv(count, block), self._launch.early(rows.tokens)
        shift_rows_kernel[(blocks + triton.cdiv(size, NUM_ENTRIES),)](
            rows.positions, rows.slots, rows.kv_index, slots, columns.length, columns.tokens, shifted, last,
            count, size, columns.tokens.shape[1], blocks, plane,
            BLOCK=block, NUM_ENTRIES=NUM_ENTRIES, **launch_options(pdl, num_warps=4),
        )  # fmt: skip
        return Rows(*shifted[:, :count], rows.page_table), last

    def plan_draft_rows(
        self, batch: DeviceBatch, last: Tensor, rounds: int, lag: int, page_size: int
    ) -> DraftRows:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        size, depth = len(slots), columns.draft.shape[1]
        check_columns("slots, budget and last rows", (slots, budget, last), size)
        plane = -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
        out = self._launch.empty((2 + 4 * rounds + depth, plane), torch.int64)
        entries = min(64, next_power_of_two(size))
        plan_draft_rows_kernel[(triton.cdiv(size, entries),)](
            slots, budget, last, columns.length, columns.max_length, columns.prompt_len,
            columns.finish_status, columns.tokens, columns.page_table, out, size, columns.tokens.shape[1],
            columns.page_table.shape[1], rounds, depth, plane, lag,
            PAGE=page_size, NUM_ENTRIES=entries, **launch_options(self._launch.pdl, num_warps=1),
        )  # fmt: skip
        parts = out[:, :size].split([1, 1, *[rounds] * 4, depth])
        return DraftRows(parts[0][0], parts[1][0], *parts[2:])

    def lm_head_sample(
        self, x: Tensor, at: Tensor | None, norm: Tensor, eps: float, packed: Any, ids: Tensor | None,
        windows: Windows, greedy: bool, out: Tensor, draft_prob: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if draft_prob is not None or not self._lm_head_sample.supports(x, len(out), packed):
            given = x, at, norm, eps, packed, ids, windows, greedy, out, draft_prob, logits
            return super().lm_head_sample(*given)
        x = kernel_utils.matrix("x", x, packed.weight.shape[1], (packed.weight.dtype,))
        norm = kernel_utils.vector("norm", norm, x.shape[1], (x.dtype,))
        columns = [out, windows.slot, windows.position, *([] if at is None else [at])]
        check_columns("the sampled rows", columns, len(out) if at is not None else len(x))
        if ids is not None:
            ids = kernel_utils.vector("ids", ids, len(packed.weight), kernel_utils.INTS)
        shape = len(out), len(packed.weight)
        if logits is not None and (logits.shape != shape or not logits.is_contiguous()):
            raise ConfigError(f"logits must be {list(shape)} and contiguous, not {list(logits.shape)}")
        pdl = self._launch.early(out)
        return self._lm_head_sample(x, at, norm, eps, packed, ids, windows, greedy, out, logits, pdl)
