"""Step ops in torch, for any device: whole columns at a time.

Reads through a slot of -1 go to row 0 and are discarded. Writes go to the rows of real entries only, which
are counted first; on a device with a queue that synchronizes, so backends that capture have their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof import types
from draftproof.ops.contract.step import StepOps
from draftproof.ops.contract.types import Layout
from draftproof.types import (
    Choice,
    Draft,
    FinishStatus,
    LogprobKind,
    Outcome,
    PlanColumns,
    SlotColumns,
    Windows,
)


class TorchStep(StepOps):
    """Step ops on whole columns."""

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        safe_slot = plan.slots.clamp(min=0)
        live = (plan.slots >= 0) & (columns.finish_status[safe_slot] == FinishStatus.RUNNING)
        length, computed = columns.length[safe_slot], columns.computed[safe_slot]
        fresh = torch.where(plan.chunk > 0, plan.chunk, length - computed)
        reaches = live & (computed + fresh == length)
        num_draft = torch.minimum(plan.drafts, columns.num_draft[safe_slot])
        num_draft = torch.where(reaches & (plan.chunk == 0), num_draft, 0)
        owner, offset, real, first = _ragged(torch.where(live, fresh + num_draft, 0), len(rows.tokens))
        slot = torch.where(real, safe_slot[owner], 0)
        position = torch.where(real, computed[owner] + offset, 0)
        ahead = position - length[owner]
        committed = columns.tokens[slot, position.clamp(max=columns.tokens.shape[1] - 1)]
        drafted = columns.draft[slot, ahead.clamp(0, columns.draft.shape[1] - 1)]
        page = columns.page_table[slot, position // page_size].long()
        rows.tokens.copy_(torch.where(real, torch.where(ahead < 0, committed, drafted), 0))
        rows.positions.copy_(position)
        rows.slots.copy_(torch.where(real, slot, -1))
        rows.kv_index.copy_(torch.where(real, page * page_size + position % page_size, 0))
        last = first + fresh - 1
        owner, depth, real, first = _ragged(torch.where(reaches, num_draft + 1, 0), len(out.at))
        slot = safe_slot[owner]
        windows.slots.copy_(torch.where(reaches, plan.slots, -1))
        windows.first.copy_(first)
        windows.num_draft.copy_(num_draft)
        windows.slot.copy_(torch.where(real, slot, -1))
        windows.depth.copy_(torch.where(real, depth, 0))
        index = (length - columns.prompt_len[safe_slot])[owner] + depth
        windows.position.copy_(torch.where(real, index, 0))
        draft = columns.draft[slot, depth.clamp(max=columns.draft.shape[1] - 1)]
        windows.draft.copy_(torch.where(real & (depth < num_draft[owner]), draft, -1))
        out.at.copy_(torch.where(real, last[owner] + depth, 0))

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        columns = windows.columns
        k, vocab = columns.draft.shape[1], columns.ends.shape[1]
        real = windows.slots >= 0
        safe_slot = windows.slots.clamp(min=0)
        depth = torch.arange(k + 1, device=safe_slot.device)
        inside = real[:, None] & (depth <= windows.num_draft[:, None])  # [B, K + 1]
        rows = (windows.first[:, None] + depth).clamp(max=len(bad) - 1)
        rows = torch.where(inside, rows, 0)
        accept = windows.draft == choice.token if choice.accept is None else choice.accept
        is_accepted = inside & (depth < windows.num_draft[:, None]) & accept[rows]
        accepted = is_accepted.long().cumprod(1).sum(1)
        has_rejected = accepted < windows.num_draft
        token = choice.token[rows]
        if choice.recovered is not None:
            token = torch.where(has_rejected[:, None], choice.recovered[rows], token)
        tokens = torch.where(depth < accepted[:, None], windows.draft[rows], token)
        num_out = accepted + 1
        ends = columns.ends[safe_slot[:, None], tokens.clamp(0, vocab - 1)] & (depth < num_out[:, None])
        before_end = (~ends).long().cumprod(1).sum(1)
        before_bad = (inside & (bad[rows] == 0)).long().cumprod(1).sum(1)
        fails = before_bad <= torch.minimum(accepted, windows.num_draft)  # its token would be committed
        limit = torch.where(fails, before_bad, k + 1)
        length = columns.length[safe_slot]
        room = columns.max_length[safe_slot] - length
        num_out = torch.minimum(torch.minimum(num_out, before_end + 1), torch.minimum(room, limit))
        num_out = torch.where(real, num_out, 0)
        why = bad[rows].gather(1, before_bad.clamp(max=k)[:, None])[:, 0]
        ended = torch.where(fails & (num_out == limit), why, int(FinishStatus.RUNNING))
        ended = torch.where(num_out == room, int(FinishStatus.LENGTH), ended)
        ended = torch.where(before_end < num_out, int(FinishStatus.STOP), ended)
        ended = torch.where(real, ended, int(FinishStatus.RUNNING))
        kept = depth < num_out[:, None]

        index = (safe_slot[:, None] * columns.tokens.shape[1] + length[:, None] + depth)[kept]
        columns.tokens.view(-1)[index] = tokens[kept]
        here, there = safe_slot[real], plan.slots[(plan.slots >= 0) & ~real]
        columns.length[here] = (length + num_out)[real]
        columns.computed[here] = (length + num_out - 1)[real]
        columns.num_draft[here] = 0
        columns.finish_status[here] = ended[real]
        columns.computed[there] += plan.chunk[(plan.slots >= 0) & ~real]

        picked = torch.where(columns.logprob_kind[safe_slot] > LogprobKind.NONE, num_out, 0)
        table = out.table
        table.zero_()
        table[:, types.NUM_OUT], table[:, types.NUM_DRAFT] = num_out, torch.where(real, windows.num_draft, 0)
        table[:, types.NUM_ACCEPTED], table[:, types.FINISH_STATUS] = torch.minimum(accepted, num_out), ended
        table[:, types.FIRST_ROW] = torch.where(real, windows.first, 0)
        table[:, types.PICK] = torch.where(picked > 0, picked.cumsum(0) - picked, 0)
        table[:, types.TOKENS :] = torch.where(kept, tokens, 0)
        owner, depth, real, _ = _ragged(picked, len(out.pick_rows))
        depth = torch.where(real, depth, 0)
        out.pick_rows.copy_(torch.where(real, windows.first[owner] + depth, -1))
        out.pick_tokens.copy_(torch.where(real, tokens[owner, depth], 0))

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        device, vocab = columns.draft.device, columns.ends.shape[1]
        # drafts of a host proposer are on the host
        tokens, count = draft.tokens.to(device), draft.count.to(device)
        real = (slots >= 0).nonzero()[:, 0]
        safe_slot, tokens = slots[real], tokens[real]
        legal = ((tokens >= 0) & (tokens < vocab)).long().cumprod(1).sum(1)
        room = (columns.max_length[safe_slot] - columns.length[safe_slot] - 1).clamp(min=0)
        count = torch.minimum(torch.minimum(count[real], legal), torch.minimum(budget[real], room))
        count = count.clamp(min=0)
        columns.num_draft[safe_slot] = torch.where(
            columns.finish_status[safe_slot] == FinishStatus.RUNNING, count, 0
        )
        columns.draft[safe_slot] = tokens.clamp(0, vocab - 1)  # tokens beyond num_draft may still be read
        own, sources = draft.logprobs, draft.sources
        columns.draft_logprob[safe_slot] = math.nan if own is None else own.to(device)[real]
        columns.draft_source[safe_slot] = 0 if sources is None else sources.to(device)[real]


def _ragged(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay counts [B] out in `size` elements: owner, offset, is real ([size] each), and first [B]."""
    ends = counts.cumsum(0)
    first = ends - counts
    index = torch.arange(size, device=counts.device)
    owner = torch.searchsorted(ends, index, right=True).clamp(max=len(counts) - 1)
    return owner, index - first[owner], index < ends[-1], first
