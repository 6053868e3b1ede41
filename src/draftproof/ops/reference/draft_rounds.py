"""Reference definition of the draft-round ops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftproof.ops.contract.draft_rounds import DraftRoundOps, DraftRows
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.types import DeviceBatch, FinishStatus, Rows, SlotColumns, Windows


class ReferenceRounds(DraftRoundOps):
    """Draft-round ops as loops over entries."""

    def __init__(self, forward: ForwardOps, sampling: SamplingOps) -> None:
        self._forward, self._sampling = forward, sampling

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        tokens, positions, kv_index = (torch.zeros_like(rows.tokens) for _ in range(3))
        owners, last = torch.full_like(rows.slots, -1), torch.full_like(slots, -1)
        entry = {slot: b for b, slot in enumerate(slots.tolist()) if slot >= 0}
        for r, slot in enumerate(rows.slots.tolist()):
            position = int(rows.positions[r])
            if slot < 0 or position + 1 >= columns.length[slot]:
                continue
            tokens[r] = columns.tokens[slot, position + 1]
            positions[r], owners[r], kv_index[r] = position, slot, rows.kv_index[r]
            if position + 2 == columns.length[slot] and slot in entry:
                last[entry[slot]] = r
        return Rows(tokens, positions, owners, kv_index, rows.page_table), last

    def plan_draft_rows(
        self, batch: DeviceBatch, last: Tensor, rounds: int, lag: int, page_size: int
    ) -> DraftRows:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        size = len(slots)
        count, last_token = torch.zeros_like(slots), torch.zeros_like(slots)
        owners = slots.new_full((rounds, size), -1)
        output_index, positions, kv_index = (slots.new_zeros((rounds, size)) for _ in range(3))
        for b, slot in enumerate(slots.tolist()):
            if slot < 0 or last[b] < 0 or columns.finish_status[slot] != FinishStatus.RUNNING:
                continue
            length = int(columns.length[slot])
            room = int(columns.max_length[slot]) - length - 1
            count[b] = max(0, min(int(budget[b]), room, rounds))
            for j in range(int(count[b])):
                position = max(0, length - 1 - lag + j)
                page = int(columns.page_table[slot, position // page_size])
                owners[j, b], positions[j, b] = slot, position
                output_index[j, b] = length - int(columns.prompt_len[slot]) + j
                kv_index[j, b] = page * page_size + position % page_size
            if count[b]:
                last_token[b] = columns.tokens[slot, length - 1]
        tokens = slots.new_zeros((columns.draft.shape[1], size))
        return DraftRows(count, last_token, owners, output_index, positions, kv_index, tokens)

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
        draft_prob: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        size, vocab = len(windows.slot), windows.columns.ends.shape[1]
        rows = torch.stack([x[b if at is None else max(0, int(at[b]))] for b in range(size)])
        head_ids = torch.arange(vocab) if ids is None else ids
        greedy_columns = replace(windows.columns, temperature=torch.zeros_like(windows.columns.temperature))
        scores = torch.full((size, vocab), -math.inf)
        for b in range(size):
            scores[b, head_ids] = self._forward.linear(
                self._forward.rms_norm(rows[b : b + 1], norm, eps), packed, torch.float32
            )[0]
        if logits is not None:
            logits.copy_(scores[:, head_ids])
        windows = replace(windows, columns=greedy_columns) if greedy else windows
        out.copy_(self._sampling.sample(scores, windows)[0])
        for b, slot in enumerate(windows.slot.tolist() if draft_prob is not None else []):
            assert draft_prob is not None
            temperature = float(windows.columns.temperature[slot]) or 1.0
            draft_prob[b] = (scores[b].double() / temperature).softmax(0)[out[b]]
        return rows
