"""Step ops as native loops: a step of few rows is too short for a hundred torch calls."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from draftproof import types
from draftproof.numba_jit import CompiledLoop, native
from draftproof.ops.contract.step import StepOps
from draftproof.ops.contract.types import Layout
from draftproof.ops.cpu.identity_cache import IdentityCache
from draftproof.ops.cpu.jit.parallel_compile import LoopCompilation
from draftproof.types import Choice, Draft, FinishStatus, Outcome, PlanColumns, SlotColumns, Windows

# numba caches compiled loops by this file alone, so constants of `types` are repeated here
NUM_OUT, NUM_DRAFT, NUM_ACCEPTED, FINISH_STATUS, FIRST_ROW, PICK, TOKENS = range(7)
RUNNING, STOP, LENGTH = 0, 1, 2
assert (RUNNING, STOP, LENGTH) == (FinishStatus.RUNNING, FinishStatus.STOP, FinishStatus.LENGTH)
assert (NUM_OUT, PICK, TOKENS) == (types.NUM_OUT, types.PICK, types.TOKENS)
compiled = native(boundscheck=False)


class CpuStep(StepOps):
    """Step ops that read and write tensors in place."""

    def __init__(self, compilation: LoopCompilation) -> None:
        """Create the ops; `compilation`: that of `LOOPS`, which a call waits for."""
        self._layout_arrays = IdentityCache(_layout_arrays)
        self._commit_arrays = IdentityCache(_commit_arrays)
        self._compilation = compilation

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        self._compilation.wait_for(LAYOUT)
        _layout(*self._layout_arrays.get(plan, columns, out), page_size)

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        accept = windows.draft == choice.token if choice.accept is None else choice.accept
        recovered = choice.token if choice.recovered is None else choice.recovered
        self._compilation.wait_for(COMMIT)
        _commit(
            *self._commit_arrays.get(plan, windows),
            *_arrays(choice.token, accept, recovered, bad),
            *_arrays(out.table, out.pick_rows, out.pick_tokens),
        )

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        none = draft.tokens[:0]
        logprobs = (none if draft.logprobs is None else draft.logprobs).float().contiguous()
        sources = (none if draft.sources is None else draft.sources).to(torch.int8).contiguous()
        _store_drafts(
            *_arrays(
                columns.length, columns.max_length, columns.finish_status, columns.num_draft, columns.draft
            ),
            *_arrays(columns.draft_logprob, columns.draft_source, slots, budget),
            *_arrays(draft.tokens.contiguous(), draft.count.contiguous(), logprobs, sources),
            columns.ends.shape[1],
        )


def _layout_arrays(plan: PlanColumns, columns: SlotColumns, out: Layout) -> list[Any]:
    rows, windows = out.rows, out.windows
    return [
        *_arrays(plan.slots, plan.chunk, plan.drafts),
        *_arrays(columns.tokens, columns.length, columns.prompt_len, columns.computed, columns.finish_status),
        *_arrays(columns.draft, columns.num_draft, columns.page_table),
        *_arrays(rows.tokens, rows.positions, rows.slots, rows.kv_index),
        *_arrays(windows.slots, windows.first, windows.num_draft),
        *_arrays(windows.slot, windows.depth, windows.position, windows.draft, out.at),
    ]


def _commit_arrays(plan: PlanColumns, windows: Windows) -> list[Any]:
    c = windows.columns
    return [
        *_arrays(plan.slots, plan.chunk, windows.slots, windows.first, windows.num_draft, windows.draft),
        *_arrays(c.tokens, c.length, c.computed, c.finish_status, c.num_draft, c.max_length),
        *_arrays(c.logprob_kind, c.ends),
    ]


def _arrays(*tensors: Tensor) -> list[Any]:
    """Return numpy views of tensors."""
    return [tensor.numpy() for tensor in tensors]


@compiled
def _layout(  # type: ignore[no-untyped-def]
    slots, chunk, drafts, tokens, length, prompt_len, computed, ended, draft, num_draft, page_table,
    to_token, to_position, to_slot, to_kv, to_window, to_first, to_count,
    w_slot, w_depth, w_position, w_draft, w_at, page_size,
):  # fmt: skip
    """Write the rows and windows of a step; see `StepOps.layout`."""
    row, logits_row = 0, 0
    for b in range(len(slots)):
        s = slots[b]
        to_window[b], to_first[b], to_count[b] = -1, logits_row, 0
        if s < 0 or ended[s] != RUNNING:
            continue
        upto = computed[s] + chunk[b] if chunk[b] > 0 else length[s]
        reaches = upto == length[s]
        count = min(drafts[b], num_draft[s]) if reaches and chunk[b] == 0 else 0
        for position in range(computed[s], upto + count):
            ahead = position - length[s]
            to_token[row] = tokens[s, position] if ahead < 0 else draft[s, ahead]
            to_position[row] = position
            to_slot[row] = s
            page = np.int64(page_table[s, position // page_size])
            to_kv[row] = page * page_size + position % page_size
            row += 1
        if not reaches:
            continue
        to_window[b], to_count[b] = s, count
        for depth in range(count + 1):
            w_slot[logits_row], w_depth[logits_row] = s, depth
            w_position[logits_row] = length[s] - prompt_len[s] + depth
            w_draft[logits_row] = draft[s, depth] if depth < count else -1
            w_at[logits_row] = row - 1 - count + depth
            logits_row += 1
    for r in range(row, len(to_token)):
        to_token[r], to_position[r], to_slot[r], to_kv[r] = 0, 0, -1, 0
    for r in range(logits_row, len(w_slot)):
        w_slot[r], w_depth[r], w_position[r], w_draft[r], w_at[r] = -1, 0, 0, -1, 0


@compiled
def _commit(  # type: ignore[no-untyped-def]
    plan_slots, chunk, slots, first, num_draft, draft,
    tokens, length, computed, ended, slot_drafts, max_length, logprob_kind, ends,
    token, accept, recovered, bad, table, pick_rows, pick_tokens,
):  # fmt: skip
    """Commit the tokens of every window; see `StepOps.commit`."""
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
        out, end = 0, RUNNING
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
            if logprob_kind[s] > 0:
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
        table[b, NUM_ACCEPTED], table[b, FINISH_STATUS] = min(accepted, out), end
        table[b, FIRST_ROW] = first[b]
        if logprob_kind[s] > 0 and out > 0:
            table[b, PICK] = picks
            picks += out
    pick_rows[picks:] = -1
    pick_tokens[picks:] = 0


_INTS, _TABLE, _FLAGS = numba.int64[::1], numba.int64[:, ::1], numba.boolean[::1]
LAYOUT = CompiledLoop(
    _layout,
    (*[_INTS] * 3, _TABLE, *[_INTS] * 4, _TABLE, _INTS, numba.int32[:, ::1], *[_INTS] * 12, numba.int64),
)
COMMIT = CompiledLoop(
    _commit,
    (*[_INTS] * 6, _TABLE, *[_INTS] * 6, numba.boolean[:, ::1], _INTS, _FLAGS)
    + (_INTS, _INTS, _TABLE, _INTS, _INTS),
)
LOOPS = (LAYOUT, COMMIT)  # of every step, in the order of their first calls


@compiled
def _store_drafts(  # type: ignore[no-untyped-def]
    length, max_length, ended, num_draft, draft, draft_logprob, draft_source, slots, budget,
    tokens, count, logprobs, sources, vocab,
):  # fmt: skip
    """Store drafts in their slots; see `StepOps.store_drafts`."""
    for b in range(len(slots)):
        s = slots[b]
        if s < 0:
            continue
        legal = 0
        while legal < tokens.shape[1] and 0 <= tokens[b, legal] < vocab:
            legal += 1
        room = max(0, max_length[s] - length[s] - 1)
        least = max(0, min(min(count[b], budget[b]), min(legal, room)))
        num_draft[s] = least if ended[s] == RUNNING else 0
        for j in range(tokens.shape[1]):
            draft[s, j] = min(max(tokens[b, j], 0), vocab - 1)
            draft_logprob[s, j] = logprobs[b, j] if len(logprobs) else np.nan
            draft_source[s, j] = sources[b, j] if len(sources) else 0
