"""What surrounds the passes of a drafting model, in torch, for any device: whole columns at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftproof.ops import Ops
from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.types import FinishStatus, Rows, SlotColumns, Windows

ALIGN = 16  # int64s: each line begins at an address that any kernel likes


class TorchFollowing(Ops):
    """Compositions of torch ops and of the backend's own primitives."""

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        slot, after = rows.slots.clamp(min=0), rows.positions + 1
        length = columns.length[slot]
        known = (rows.slots >= 0) & (after < length)
        tokens = columns.tokens[slot, after.clamp(max=columns.tokens.shape[1] - 1)]
        shifted = Rows(
            torch.where(known, tokens, 0),
            torch.where(known, rows.positions, 0),
            torch.where(known, rows.slots, -1),
            torch.where(known, rows.kv_index, 0),
            rows.page_table,
        )
        scrap = len(columns.length)
        last = torch.full((scrap + 1,), -1, dtype=torch.int64, device=slot.device)
        place = torch.arange(len(slot), device=slot.device)
        last[torch.where(known & (after + 1 == length), rows.slots, scrap)] = place
        return shifted, torch.where(slots >= 0, last[slots.clamp(min=0)], -1)

    def plan_draft_rows(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        last: Tensor,
        rounds: int,
        lag: int,
        page_size: int,
    ) -> DraftRows:
        size = len(slots)
        slots, budget, last = (pad(column, (0, -size % ALIGN), value=-1) for column in (slots, budget, last))
        line = slots.clamp(min=0)
        length = columns.length[line]
        room = columns.max_length[line] - length - 1
        live = (slots >= 0) & (last >= 0) & (columns.ended[line] == FinishStatus.RUNNING)
        count = torch.where(live, torch.minimum(budget, room), 0).clamp(0, rounds)
        j = torch.arange(rounds, device=slots.device)[:, None]
        on = count > j  # [rounds, B]
        positions = torch.where(on, length - 1 - lag + j, 0).clamp(min=0)
        page = columns.page_table[line, positions // page_size].long()
        newest = columns.tokens[line, (length - 1).clamp(0, columns.tokens.shape[1] - 1)]
        return DraftRows(
            count[:size],
            torch.where(count > 0, newest, 0)[:size],
            torch.where(on, slots, -1)[:, :size],
            torch.where(on, length - columns.prompt_len[line] + j, 0)[:, :size],
            positions[:, :size],
            torch.where(on, page * page_size + positions % page_size, 0)[:, :size],
            slots.new_zeros((columns.draft.shape[1], len(slots)))[:, :size],
        )

    def lm_head_sample(
        self,
        x: Tensor,
        at: Tensor | None,
        norm: Tensor,
        eps: float,
        packed: Any,
        ids: Tensor | None,
        windows: Windows,
        greedy: bool,
        out: Tensor,
        sure: Tensor | None = None,
    ) -> Tensor:
        rows = x if at is None else x[at.clamp(min=0)]
        logits = self.linear(self.rms_norm(rows, norm, eps), packed, torch.float32)
        vocab = windows.columns.ends.shape[1]
        if ids is not None:
            logits = torch.full((len(rows), vocab), -math.inf, device=x.device).index_copy_(1, ids, logits)
        if greedy:
            out.copy_(torch.where(windows.slot >= 0, self.argmax(logits), 0))
        else:
            out.copy_(self.sample(logits, windows)[0])
        if sure is not None:
            heat = windows.columns.temperature[windows.slot.clamp(min=0)]
            law = logits if greedy else logits / torch.where(heat > 0, heat, 1.0)[:, None]
            sure.copy_((law.gather(1, out[:, None])[:, 0] - self.logsumexp(law)).exp())
        return rows
