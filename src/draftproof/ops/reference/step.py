"""Reference definition of the step ops: one entry, one row, one token at a time, on the host."""

from __future__ import annotations

import math

from torch import Tensor

from draftproof import types
from draftproof.ops.contract.step import StepOps
from draftproof.ops.contract.types import Layout
from draftproof.types import Choice, Draft, FinishStatus, Outcome, PlanColumns, SlotColumns, Windows


class ReferenceStep(StepOps):
    """Step ops as loops; columns are read and written one element at a time."""

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        for column, padding in (
            (rows.tokens, 0), (rows.positions, 0), (rows.slots, -1), (rows.kv_index, 0),
            (windows.slot, -1), (windows.depth, 0), (windows.position, 0), (windows.draft, -1), (out.at, 0),
        ):  # fmt: skip
            column.fill_(padding)
        row = logits_row = 0
        for b, slot in enumerate(plan.slots.tolist()):
            windows.slots[b], windows.first[b], windows.num_draft[b] = -1, logits_row, 0
            if slot < 0 or columns.finish_status[slot] != FinishStatus.RUNNING:
                continue
            length, computed = int(columns.length[slot]), int(columns.computed[slot])
            chunk = int(plan.chunk[b])
            upto = computed + chunk if chunk > 0 else length
            reaches = upto == length
            drafts = columns.draft[slot].tolist()
            num_draft = min(int(plan.drafts[b]), int(columns.num_draft[slot]))
            if not reaches or chunk > 0:
                num_draft = 0
            for position in range(computed, upto + num_draft):
                ahead = position - length
                page = int(columns.page_table[slot, position // page_size])
                rows.tokens[row] = columns.tokens[slot, position] if ahead < 0 else drafts[ahead]
                rows.positions[row] = position
                rows.slots[row] = slot
                rows.kv_index[row] = page * page_size + position % page_size
                row += 1
            if not reaches:
                continue
            windows.slots[b], windows.num_draft[b] = slot, num_draft
            for depth in range(num_draft + 1):
                windows.slot[logits_row] = slot
                windows.depth[logits_row] = depth
                windows.position[logits_row] = length - int(columns.prompt_len[slot]) + depth
                windows.draft[logits_row] = drafts[depth] if depth < num_draft else -1
                out.at[logits_row] = row - 1 - num_draft + depth
                logits_row += 1

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        columns, table = windows.columns, out.table.zero_()
        out.pick_rows.fill_(-1)
        out.pick_tokens.fill_(0)
        picks = 0
        for b, slot in enumerate(windows.slots.tolist()):
            planned = int(plan.slots[b])
            if slot < 0:
                if planned >= 0:
                    columns.computed[planned] += plan.chunk[b]
                continue
            first, num_draft = int(windows.first[b]), int(windows.num_draft[b])
            tokens = _accepted_tokens(windows, choice, first, num_draft)
            accepted, old = len(tokens) - 1, int(columns.length[slot])
            ended, kept = FinishStatus.RUNNING, 0
            for depth, token in enumerate(tokens):
                if old + kept == columns.max_length[slot]:
                    break
                if bad[first + depth] > 0:
                    ended = FinishStatus(int(bad[first + depth]))
                    break
                columns.tokens[slot, old + kept] = token
                table[b, types.TOKENS + kept] = token
                kept += 1
                if columns.ends[slot, token]:
                    ended = FinishStatus.STOP
                    break
            if ended != FinishStatus.STOP and old + kept == columns.max_length[slot]:
                ended = FinishStatus.LENGTH
            columns.length[slot] = old + kept
            columns.computed[slot] = old + kept - 1
            columns.num_draft[slot] = 0
            columns.finish_status[slot] = ended
            table[b, types.NUM_OUT], table[b, types.NUM_DRAFT] = kept, num_draft
            table[b, types.NUM_ACCEPTED] = min(accepted, kept)
            table[b, types.FINISH_STATUS], table[b, types.FIRST_ROW] = ended, first
            if columns.logprob_kind[slot] > 0 and kept:
                table[b, types.PICK] = picks
                for depth in range(kept):
                    out.pick_rows[picks], out.pick_tokens[picks] = first + depth, tokens[depth]
                    picks += 1

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        vocab = columns.ends.shape[1]
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            legal = 0
            tokens = draft.tokens[b].tolist()
            while legal < len(tokens) and 0 <= tokens[legal] < vocab:
                legal += 1
            room = max(0, int(columns.max_length[slot] - columns.length[slot]) - 1)
            count = max(0, min(int(draft.count[b]), int(budget[b]), legal, room))
            columns.num_draft[slot] = count if columns.finish_status[slot] == FinishStatus.RUNNING else 0
            for j, token in enumerate(tokens):
                columns.draft[slot, j] = min(max(token, 0), vocab - 1)
                columns.draft_logprob[slot, j] = math.nan if draft.logprobs is None else draft.logprobs[b, j]
                columns.draft_source[slot, j] = 0 if draft.sources is None else draft.sources[b, j]


def _accepted_tokens(windows: Windows, choice: Choice, first: int, num_draft: int) -> list[int]:
    """Return the accepted drafts of a window and the token after them."""
    tokens: list[int] = []
    for depth in range(num_draft):
        row = first + depth
        draft, target = int(windows.draft[row]), int(choice.token[row])
        accepted = draft == target if choice.accept is None else bool(choice.accept[row])
        if not accepted:
            return [*tokens, target if choice.recovered is None else int(choice.recovered[row])]
        tokens.append(draft)
    return [*tokens, int(choice.token[first + num_draft])]
