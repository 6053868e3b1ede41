"""What surrounds the passes of a drafting model, defined by plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftproof.ops import Ops
from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.types import FinishStatus, Rows, SlotColumns, Windows


class ReferenceFollowing(Ops):
    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        tokens, positions, places = (torch.zeros_like(rows.tokens) for _ in range(3))
        owners, last = torch.full_like(rows.slots, -1), torch.full_like(slots, -1)
        entry = {slot: b for b, slot in enumerate(slots.tolist()) if slot >= 0}
        for r, slot in enumerate(rows.slots.tolist()):
            position = int(rows.positions[r])
            if slot < 0 or position + 1 >= columns.length[slot]:
                continue
            tokens[r] = columns.tokens[slot, position + 1]
            positions[r], owners[r], places[r] = position, slot, rows.kv_index[r]
            if position + 2 == columns.length[slot] and slot in entry:
                last[entry[slot]] = r
        return Rows(tokens, positions, owners, places, rows.page_table), last

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
        count, newest = torch.zeros_like(slots), torch.zeros_like(slots)
        owners = slots.new_full((rounds, size), -1)
        outputs, positions, places = (slots.new_zeros((rounds, size)) for _ in range(3))
        for b, slot in enumerate(slots.tolist()):
            if slot < 0 or last[b] < 0 or columns.ended[slot] != FinishStatus.RUNNING:
                continue
            length = int(columns.length[slot])
            room = int(columns.max_length[slot]) - length - 1
            count[b] = max(0, min(int(budget[b]), room, rounds))
            for j in range(int(count[b])):
                position = max(0, length - 1 - lag + j)
                page = int(columns.page_table[slot, position // page_size])
                owners[j, b], positions[j, b] = slot, position
                outputs[j, b] = length - int(columns.prompt_len[slot]) + j
                places[j, b] = page * page_size + position % page_size
            if count[b]:
                newest[b] = columns.tokens[slot, length - 1]
        tokens = slots.new_zeros((columns.draft.shape[1], size))
        return DraftRows(count, newest, owners, outputs, positions, places, tokens)

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
        size, vocab = len(windows.slot), windows.columns.ends.shape[1]
        rows = torch.stack([x[b if at is None else max(0, int(at[b]))] for b in range(size)])
        known = torch.arange(vocab) if ids is None else ids
        cold = replace(windows.columns, temperature=torch.zeros_like(windows.columns.temperature))
        logits = torch.full((size, vocab), -math.inf)
        for b in range(size):
            logits[b, known] = self.linear(self.rms_norm(rows[b : b + 1], norm, eps), packed, torch.float32)[
                0
            ]
        windows = replace(windows, columns=cold) if greedy else windows
        out.copy_(self.sample(logits, windows)[0])
        for b, slot in enumerate(windows.slot.tolist() if sure is not None else []):
            assert sure is not None
            heat = float(windows.columns.temperature[slot]) or 1.0
            sure[b] = (logits[b].double() / heat).softmax(0)[out[b]]
        return rows
