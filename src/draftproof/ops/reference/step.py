"""The definition of the step's bookkeeping: one entry, one row, one token after another, on the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE, Layout, TokenLogprobs
from draftproof.ops.reference.draft_rounds import ReferenceFollowing
from draftproof.ops.reference.draft_search import ReferenceSuffix
from draftproof.types import (
    ENDED,
    FIRST_ROW,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    Choice,
    Draft,
    FinishStatus,
    LogitAdjust,
    Outcome,
    PlanColumns,
    SlotColumns,
    Windows,
)


class ReferenceStep(ReferenceSuffix, ReferenceFollowing):
    """Loops; columns are read and written one element at a time."""

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
            if slot < 0 or columns.ended[slot] != FinishStatus.RUNNING:
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

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        columns, out = windows.columns, logits.clone()
        for r, slot in enumerate(windows.slot.tolist()):
            flags = int(columns.adjust[slot]) if slot >= 0 else 0
            if flags & LogitAdjust.PENALTY:
                prompt, depth = int(columns.prompt_len[slot]), int(windows.depth[r])
                length = prompt + int(windows.position[r]) - depth
                said = columns.tokens[slot, prompt:length].tolist() + columns.draft[slot, :depth].tolist()
                seen = set(columns.tokens[slot, :prompt].tolist() + said)
                penalty = columns.repetition[slot]
                for token in range(logits.shape[1]):
                    x = logits[r, token]
                    if token in seen:
                        x = x / penalty if x > 0 else x * penalty
                    x = x - columns.frequency[slot] * said.count(token)
                    out[r, token] = x - columns.presence[slot] * float(token in said)
            if flags & LogitAdjust.BIAS:
                out[r] += columns.bias[slot]
        return out

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        columns = windows.columns
        for r, slot in enumerate(windows.slot.tolist()):
            flags = int(columns.adjust[slot]) if slot >= 0 else 0
            if flags & LogitAdjust.ALLOWED_IDS:
                base[r, columns.banned[slot]] = -math.inf
            if flags & LogitAdjust.MIN_TOKENS:
                length = int(columns.prompt_len[slot]) + int(windows.position[r])
                if length < int(columns.min_length[slot]):
                    base[r, columns.ends[slot]] = -math.inf

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        assert windows.allowed is not None
        for r, slot in enumerate(windows.slot.tolist()):
            if slot < 0 or not int(windows.columns.adjust[slot]) & LogitAdjust.MASK:
                continue
            words = windows.allowed[slot, int(windows.depth[r])].tolist()
            for token in range(base.shape[1]):
                if not words[token // 32] >> token % 32 & 1:
                    base[r, token] = -math.inf

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        columns = windows.columns
        tokens, bad = torch.zeros_like(windows.slot), torch.zeros_like(windows.slot)
        for r, slot in enumerate(windows.slot.tolist()):
            if slot < 0:
                continue
            row = logits[r : r + 1]
            if bool((row == -math.inf).all()):
                bad[r] = FinishStatus.NO_ALLOWED_TOKEN
            elif bool((row.isnan() | (row == math.inf)).any()):
                bad[r] = FinishStatus.NOT_FINITE
            elif columns.temperature[slot] > 0:
                heated = row if scaled else row / columns.temperature[slot].expand_as(row)
                key = columns.seed[slot : slot + 1], windows.position[r : r + 1]
                tokens[r] = self.gumbel_argmax(heated, *key, STREAM_SAMPLE)[0]
            else:
                tokens[r] = self.argmax(row)[0]
        return tokens, bad

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        columns, table = windows.columns, out.table.zero_()
        out.pick_rows.fill_(-1)
        out.pick_tokens.fill_(0)
        picks = 0
        for b, slot in enumerate(windows.slots.tolist()):
            named = int(plan.slots[b])
            if slot < 0:
                if named >= 0:
                    columns.computed[named] += plan.chunk[b]
                continue
            first, num_draft = int(windows.first[b]), int(windows.num_draft[b])
            said = _said(windows, choice, first, num_draft)
            accepted, old = len(said) - 1, int(columns.length[slot])
            ended, kept = FinishStatus.RUNNING, 0
            for depth, token in enumerate(said):
                if old + kept == columns.max_length[slot]:
                    break
                if bad[first + depth] > 0:
                    ended = FinishStatus(int(bad[first + depth]))
                    break
                columns.tokens[slot, old + kept] = token
                table[b, TOKENS + kept] = token
                kept += 1
                if columns.ends[slot, token]:
                    ended = FinishStatus.STOP
                    break
            if ended != FinishStatus.STOP and old + kept == columns.max_length[slot]:
                ended = FinishStatus.LENGTH
            columns.length[slot] = old + kept
            columns.computed[slot] = old + kept - 1
            columns.num_draft[slot] = 0
            columns.ended[slot] = ended
            table[b, NUM_OUT], table[b, NUM_DRAFT], table[b, NUM_ACCEPTED] = (
                kept,
                num_draft,
                min(accepted, kept),
            )
            table[b, ENDED], table[b, FIRST_ROW] = ended, first
            if columns.logprob_kind[slot] > 0 and kept:
                table[b, PICK] = picks
                for depth in range(kept):
                    out.pick_rows[picks], out.pick_tokens[picks] = first + depth, said[depth]
                    picks += 1

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int, out: TokenLogprobs | None = None
    ) -> TokenLogprobs:
        values = torch.zeros((len(rows), 1 + top))
        ids = torch.zeros((len(rows), top), dtype=torch.int64)
        ranks = torch.zeros(len(rows), dtype=torch.int64)
        for n, (r, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            if r < 0:
                continue
            row = logits[r : r + 1]
            norm = self.logsumexp(row)[0]
            ranks[n] = self.rank(row, torch.tensor([token]))[0]
            values[n, 0] = row[0, token] - norm
            if top:
                best, ids[n] = (x[0] for x in self.top(row, top))
                values[n, 1:] = best - norm
        found = TokenLogprobs(values, ids, ranks)
        return found if out is None else out.put(found)

    def search_ngram(
        self, columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int
    ) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros((len(slots), columns.draft.shape[1]), dtype=torch.int64)
        count = torch.zeros(len(slots), dtype=torch.int64)
        for b, (slot, wanted) in enumerate(zip(slots.tolist(), budget.tolist(), strict=True)):
            if slot < 0 or wanted == 0 or columns.ended[slot] != FinishStatus.RUNNING:
                continue
            said = columns.tokens[slot, : int(columns.length[slot])].tolist()
            at = _latest_match(said, smallest, largest)
            if at < 0:
                continue
            for j in range(wanted):
                said.append(said[at + j])
                tokens[b, j] = said[-1]
            count[b] = wanted
        return tokens, count

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        vocab = columns.ends.shape[1]
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            legal = 0
            guess = draft.tokens[b].tolist()
            while legal < len(guess) and 0 <= guess[legal] < vocab:
                legal += 1
            room = max(0, int(columns.max_length[slot] - columns.length[slot]) - 1)
            least = max(0, min(int(draft.count[b]), int(budget[b]), legal, room))
            columns.num_draft[slot] = least if columns.ended[slot] == FinishStatus.RUNNING else 0
            for j, token in enumerate(guess):
                columns.draft[slot, j] = min(max(token, 0), vocab - 1)
                columns.draft_logprob[slot, j] = math.nan if draft.logprobs is None else draft.logprobs[b, j]
                columns.draft_source[slot, j] = 0 if draft.sources is None else draft.sources[b, j]


def _said(windows: Windows, choice: Choice, first: int, num_draft: int) -> list[int]:
    """The drafts of a window that stand, and the token after them."""
    said: list[int] = []
    for depth in range(num_draft):
        row = first + depth
        guess, own = int(windows.draft[row]), int(choice.token[row])
        stands = guess == own if choice.accept is None else bool(choice.accept[row])
        if not stands:
            return [*said, own if choice.recovered is None else int(choice.recovered[row])]
        said.append(guess)
    return [*said, int(choice.token[first + num_draft])]


def _latest_match(said: list[int], smallest: int, largest: int) -> int:
    """Where the last n tokens, said before, went on: the longest n, of those the latest; -1: nowhere."""
    for n in range(largest, smallest - 1, -1):
        for at in range(len(said) - 1, n - 1, -1):
            if said[at - n : at] == said[len(said) - n :]:
                return at
    return -1
