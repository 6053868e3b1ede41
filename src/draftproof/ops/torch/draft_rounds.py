"""Draft-round ops in torch, for any device: whole columns at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftproof.ops.contract.draft_rounds import DraftRoundOps, DraftRows
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.types import DeviceBatch, FinishStatus, Rows, SlotColumns, Windows

ALIGNMENT_INT64 = 16  # int64 values; each row of `DraftRows` starts at an address aligned for any kernel


class TorchRounds(DraftRoundOps):
    """Draft-round ops composed of torch calls and a backend's forward and sampling ops."""

    def __init__(self, forward: ForwardOps, sampling: SamplingOps) -> None:
        self._forward, self._sampling = forward, sampling

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        slot, after = rows.slots.clamp(min=0), rows.positions + 1
        length = columns.length[slot]
        committed = (rows.slots >= 0) & (after < length)
        tokens = columns.tokens[slot, after.clamp(max=columns.tokens.shape[1] - 1)]
        shifted = Rows(
            torch.where(committed, tokens, 0),
            torch.where(committed, rows.positions, 0),
            torch.where(committed, rows.slots, -1),
            torch.where(committed, rows.kv_index, 0),
            rows.page_table,
        )
        scrap = len(columns.length)
        last = torch.full((scrap + 1,), -1, dtype=torch.int64, device=slot.device)
        place = torch.arange(len(slot), device=slot.device)
        last[torch.where(committed & (after + 1 == length), rows.slots, scrap)] = place
        return shifted, torch.where(slots >= 0, last[slots.clamp(min=0)], -1)

    def plan_draft_rows(
        self, batch: DeviceBatch, last: Tensor, rounds: int, lag: int, page_size: int
    ) -> DraftRows:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        size = len(slots)
        slots, budget, last = (
            pad(column, (0, -size % ALIGNMENT_INT64), value=-1) for column in (slots, budget, last)
        )
        safe_slot = slots.clamp(min=0)
        length = columns.length[safe_slot]
        room = columns.max_length[safe_slot] - length - 1
        live = (slots >= 0) & (last >= 0) & (columns.finish_status[safe_slot] == FinishStatus.RUNNING)
        count = torch.where(live, torch.minimum(budget, room), 0).clamp(0, rounds)
        j = torch.arange(rounds, device=slots.device)[:, None]
        on = count > j  # [rounds, B]
        positions = torch.where(on, length - 1 - lag + j, 0).clamp(min=0)
        page = columns.page_table[safe_slot, positions // page_size].long()
        last_token = columns.tokens[safe_slot, (length - 1).clamp(0, columns.tokens.shape[1] - 1)]
        return DraftRows(
            count[:size],
            torch.where(count > 0, last_token, 0)[:size],
            torch.where(on, slots, -1)[:, :size],
            torch.where(on, length - columns.prompt_len[safe_slot] + j, 0)[:, :size],
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
        draft_prob: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        rows = x if at is None else x[at.clamp(min=0)]
        scores = self._forward.linear(self._forward.rms_norm(rows, norm, eps), packed, torch.float32)
        if logits is not None:
            logits.copy_(scores)
        vocab = windows.columns.ends.shape[1]
        if ids is not None:
            scores = torch.full((len(rows), vocab), -math.inf, device=x.device).index_copy_(1, ids, scores)
        if greedy:
            out.copy_(torch.where(windows.slot >= 0, self._sampling.argmax(scores), 0))
        else:
            out.copy_(self._sampling.sample(scores, windows)[0])
        if draft_prob is not None:
            temperature = windows.columns.temperature[windows.slot.clamp(min=0)]
            scaled = scores if greedy else scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
            draft_prob.copy_((scaled.gather(1, out[:, None])[:, 0] - self._sampling.logsumexp(scaled)).exp())
        return rows
