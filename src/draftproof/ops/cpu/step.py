"""The step's bookkeeping as native loops: a step of few rows is too short for a hundred torch calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof import types
from draftproof.numba_jit import native
from draftproof.ops import STREAM_SAMPLE, Layout
from draftproof.ops.cpu.draft_rounds import CpuFollowing
from draftproof.ops.cpu.draft_search import CpuSuffix
from draftproof.ops.torch.step import Bookkeeping
from draftproof.types import (
    Choice,
    Draft,
    FinishStatus,
    LogitAdjust,
    Outcome,
    PlanColumns,
    SlotColumns,
    Windows,
)

# numba caches compiled loops by this file alone, so what they take from `types` is spelt out here
NUM_OUT, NUM_DRAFT, NUM_ACCEPTED, ENDED, FIRST_ROW, PICK, TOKENS = range(7)
NOT_YET, STOP, LENGTH = 0, 1, 2
MASK = 16
assert int(LogitAdjust.MASK) == MASK
assert (NOT_YET, STOP, LENGTH) == (FinishStatus.RUNNING, FinishStatus.STOP, FinishStatus.LENGTH)
assert (NUM_OUT, PICK, TOKENS) == (types.NUM_OUT, types.PICK, types.TOKENS)
compiled = native(boundscheck=False)


class CpuBookkeeping(CpuSuffix, CpuFollowing, Bookkeeping):
    """Tensors are read and written in place."""

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        _layout(
            *_arrays(plan.slots, plan.chunk, plan.drafts),
            *_arrays(columns.tokens, columns.length, columns.prompt_len, columns.computed, columns.ended),
            *_arrays(columns.draft, columns.num_draft, columns.page_table),
            *_arrays(rows.tokens, rows.positions, rows.slots, rows.kv_index),
            *_arrays(windows.slots, windows.first, windows.num_draft),
            *_arrays(windows.slot, windows.depth, windows.position, windows.draft, out.at),
            page_size,
        )

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        assert windows.allowed is not None
        _mask(*_arrays(windows.slot, windows.depth, windows.columns.adjust, windows.allowed, base))

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        columns = windows.columns
        heat = np.zeros(len(logits), np.float32)
        seeds = np.zeros(len(logits), np.int64)
        hot = _keys(*_arrays(windows.slot, columns.temperature, columns.seed), heat, seeds)
        tokens = self.argmax(logits)
        peak = logits.gather(1, tokens[:, None])[:, 0]
        if not bool(torch.isfinite(peak).all()) or bool(torch.isnan(logits).any()):
            return super().sample(logits, windows, scaled)
        if hot:
            warm = torch.from_numpy(heat)
            divided = logits if scaled else logits / torch.where(warm > 0, warm, 1.0)[:, None]
            keys = torch.from_numpy(seeds), windows.position
            tokens = torch.where(warm > 0, self.gumbel_argmax(divided, *keys, STREAM_SAMPLE), tokens)
        return torch.where(windows.slot >= 0, tokens, 0), torch.zeros_like(tokens)

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        c = windows.columns
        accept = windows.draft == choice.token if choice.accept is None else choice.accept
        recovered = choice.token if choice.recovered is None else choice.recovered
        _commit(
            *_arrays(plan.slots, plan.chunk, windows.slots, windows.first, windows.num_draft, windows.draft),
            *_arrays(choice.token, accept, recovered, bad),
            *_arrays(
                c.tokens, c.length, c.computed, c.ended, c.num_draft, c.max_length, c.logprob_kind, c.ends
            ),
            *_arrays(out.table, out.pick_rows, out.pick_tokens),
        )

    def search_ngram(
        self, columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int
    ) -> tuple[Tensor, Tensor]:
        tokens = np.zeros((len(slots), columns.draft.shape[1]), np.int64)
        count = np.zeros(len(slots), np.int64)
        inputs = _arrays(columns.tokens, columns.length, columns.ended, slots, budget)
        _ngram(*inputs, smallest, largest, tokens, count)
        return torch.from_numpy(tokens), torch.from_numpy(count)

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        logprobs = draft.tokens.new_full((0, 0), 0, dtype=torch.float32)
        sources = draft.tokens.new_full((0, 0), 0, dtype=torch.int8)
        if draft.logprobs is not None:
            logprobs = draft.logprobs.float().contiguous()
        if draft.sources is not None:
            sources = draft.sources.to(torch.int8).contiguous()
        _store_drafts(
            *_arrays(columns.length, columns.max_length, columns.ended, columns.num_draft, columns.draft),
            *_arrays(columns.draft_logprob, columns.draft_source, slots, budget),
            *_arrays(draft.tokens.contiguous(), draft.count.contiguous(), logprobs, sources),
            columns.ends.shape[1],
        )


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


@compiled
def _keys(slot, temperature, seed, heat, seeds):  # type: ignore[no-untyped-def]
    """Temperature and seed of each row; is any row sampled?"""
    hot = False
    for r in range(len(slot)):
        if slot[r] >= 0:
            heat[r], seeds[r] = temperature[slot[r]], seed[slot[r]]
            hot = hot or heat[r] > 0
    return hot


@compiled
def _mask(slot, depth, adjust, allowed, base):  # type: ignore[no-untyped-def]
    for r in range(len(slot)):
        if slot[r] < 0 or adjust[slot[r]] & MASK == 0:
            continue
        words = allowed[slot[r], depth[r]]
        for w in range(len(words)):
            word = words[w]
            if word == -1:
                continue
            for t in range(32 * w, min(32 * w + 32, base.shape[1])):
                if word >> (t - 32 * w) & 1 == 0:
                    base[r, t] = -np.inf


@compiled
def _layout(  # type: ignore[no-untyped-def]
    slots, chunk, drafts, tokens, length, prompt_len, computed, ended, draft, num_draft, page_table,
    to_token, to_position, to_slot, to_kv, to_window, to_first, to_count,
    w_slot, w_depth, w_position, w_draft, w_at, page_size,
):  # fmt: skip
    row, line = 0, 0
    for b in range(len(slots)):
        s = slots[b]
        to_window[b], to_first[b], to_count[b] = -1, line, 0
        if s < 0 or ended[s] != NOT_YET:
            continue
        upto = computed[s] + chunk[b] if chunk[b] > 0 else length[s]
        reaches = upto == length[s]
        guesses = min(drafts[b], num_draft[s]) if reaches and chunk[b] == 0 else 0
        for position in range(computed[s], upto + guesses):
            ahead = position - length[s]
            to_token[row] = tokens[s, position] if ahead < 0 else draft[s, ahead]
            to_position[row] = position
            to_slot[row] = s
            page = np.int64(page_table[s, position // page_size])
            to_kv[row] = page * page_size + position % page_size
            row += 1
        if not reaches:
            continue
        to_window[b], to_count[b] = s, guesses
        for depth in range(guesses + 1):
            w_slot[line], w_depth[line] = s, depth
            w_position[line] = length[s] - prompt_len[s] + depth
            w_draft[line] = draft[s, depth] if depth < guesses else -1
            w_at[line] = row - 1 - guesses + depth
            line += 1
    for r in range(row, len(to_token)):
        to_token[r], to_position[r], to_slot[r], to_kv[r] = 0, 0, -1, 0
    for r in range(line, len(w_slot)):
        w_slot[r], w_depth[r], w_position[r], w_draft[r], w_at[r] = -1, 0, 0, -1, 0


@compiled
def _commit(  # type: ignore[no-untyped-def]
    plan_slots, chunk, slots, first, num_draft, draft, token, accept, recovered, bad,
    tokens, length, computed, ended, slot_drafts, max_length, wants, ends, table, pick_rows, pick_tokens,
):  # fmt: skip
    picks = 0
    table[:] = 0
    for b in range(len(slots)):
        s = slots[b]
        if s < 0:
            if plan_slots[b] >= 0:
                computed[plan_slots[b]] += chunk[b]
            continue
        accepted = 0
        while accepted < num_draft[b] and accept[first[b] + accepted]:
            accepted += 1
        out, end = 0, NOT_YET
        for depth in range(accepted + 1):
            row = first[b] + depth
            if length[s] + out == max_length[s]:
                break
            if bad[row] > 0:
                end = bad[row]
                break
            one = draft[row]
            if depth == accepted:
                one = token[row] if accepted == num_draft[b] else recovered[row]
            tokens[s, length[s] + out] = one
            table[b, TOKENS + out] = one
            if wants[s] > 0:
                pick_rows[picks + out], pick_tokens[picks + out] = row, one
            out += 1
            if ends[s, one]:
                end = STOP
                break
        if end != STOP and length[s] + out == max_length[s]:
            end = LENGTH
        length[s] += out
        computed[s] = length[s] - 1
        slot_drafts[s] = 0
        ended[s] = end
        table[b, NUM_OUT], table[b, NUM_DRAFT] = out, num_draft[b]
        table[b, NUM_ACCEPTED], table[b, ENDED] = min(accepted, out), end
        table[b, FIRST_ROW] = first[b]
        if wants[s] > 0 and out > 0:
            table[b, PICK] = picks
            picks += out
    pick_rows[picks:] = -1
    pick_tokens[picks:] = 0


@compiled
def _ngram(tokens, length, ended, slots, budget, smallest, largest, out, count):  # type: ignore[no-untyped-def]
    for b in range(len(slots)):
        s = slots[b]
        if s < 0 or budget[b] == 0 or ended[s] != NOT_YET:
            continue
        said, size = tokens[s], length[s]
        best, at = smallest - 1, -1
        for e in range(size - 1, 0, -1):  # a match goes on at e; the latest wins a tie
            if said[e - 1] != said[size - 1]:
                continue
            n = 1
            while n < largest and n < e and said[e - 1 - n] == said[size - 1 - n]:
                n += 1
            if n > best:
                best, at = n, e
                if n == largest:
                    break
        if at < 0:
            continue
        count[b] = budget[b]
        for j in range(min(budget[b], out.shape[1])):
            out[b, j] = said[at + j % (size - at)]


@compiled
def _store_drafts(  # type: ignore[no-untyped-def]
    length, max_length, ended, num_draft, draft, draft_logprob, draft_source, slots, budget,
    tokens, count, logprobs, sources, vocab,
):  # fmt: skip
    for b in range(len(slots)):
        s = slots[b]
        if s < 0:
            continue
        legal = 0
        while legal < tokens.shape[1] and 0 <= tokens[b, legal] < vocab:
            legal += 1
        room = max(0, max_length[s] - length[s] - 1)
        least = max(0, min(min(count[b], budget[b]), min(legal, room)))
        num_draft[s] = least if ended[s] == NOT_YET else 0
        for j in range(tokens.shape[1]):
            draft[s, j] = min(max(tokens[b, j], 0), vocab - 1)
            draft_logprob[s, j] = logprobs[b, j] if len(logprobs) else np.nan
            draft_source[s, j] = sources[b, j] if len(sources) else 0
