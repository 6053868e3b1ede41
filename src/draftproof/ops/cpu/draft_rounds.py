"""Draft-round ops as native loops: some seventy torch calls took a third of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.numba_jit import native
from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.ops.cpu.executor import Executor, Recorded
from draftproof.ops.cpu.identity_cache import IdentityCache
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.types import DeviceBatch, FinishStatus, Rows, SlotColumns, Windows

# numba caches compiled loops by this file alone, so constants of other files are repeated here
RUNNING = 0
MAX_RECORDED_ROWS = 16  # rows for which a recorded pass allocates memory
assert FinishStatus.RUNNING == RUNNING
compiled = native(boundscheck=False)


class CpuRounds(TorchRounds):
    """Draft-round ops that read and write tensors in place."""

    def __init__(self, forward: ForwardOps, sampling: SamplingOps, run: Executor) -> None:
        super().__init__(forward, sampling)
        self._joined = IdentityCache(_places_of)
        self._recorded = IdentityCache(lambda *head: Recorded(run, self._scores_of(*head), MAX_RECORDED_ROWS))

    def _scores_of(
        self, norm: Tensor, eps: float, packed: Any, needs_total: bool
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Return a function of rows: their logits, the best column of each, and if needed the logsumexp."""

        def compute(rows: Tensor) -> tuple[Tensor, ...]:
            logits = self._forward.linear(self._forward.rms_norm(rows, norm, eps), packed, torch.float32)
            best = self._sampling.argmax(logits)
            return (logits, best, self._sampling.logsumexp(logits)) if needs_total else (logits, best)

        return compute

    def join_features(self, parts: Sequence[Tensor], out: Tensor) -> None:
        for place, part in self._joined.get(out, *parts):
            place.copy_(part)

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        given = rows.positions, rows.slots, rows.kv_index, columns.tokens, columns.length, slots
        arrays = [part.numpy() for part in given]
        shifted, last = np.zeros((4, len(arrays[0])), np.int64), np.full(len(arrays[-1]), -1, np.int64)
        _shift_rows(*arrays, shifted, last)
        return Rows(*map(torch.from_numpy, shifted), rows.page_table), torch.from_numpy(last)

    def head_rows(
        self, rows: Rows, columns: SlotColumns, slots: Tensor, features: Tensor
    ) -> tuple[Rows, Tensor, Tensor]:
        shifted, last = self.shift_rows(rows, columns, slots)
        is_kept = shifted.slots.numpy() >= 0
        count = np.count_nonzero(is_kept)
        if count in (0, len(is_kept)):
            return shifted, last, features
        kept = is_kept.nonzero()[0]
        at = slice(count) if kept[-1] == count - 1 else torch.from_numpy(kept)
        ints = (shifted.tokens, shifted.positions, shifted.slots, shifted.kv_index)
        found = np.where(last.numpy() < 0, -1, np.searchsorted(kept, last.numpy()))
        shifted = Rows(*(part[at] for part in ints), shifted.page_table)
        return shifted, torch.from_numpy(found), features[at]

    def plan_draft_rows(
        self, batch: DeviceBatch, last: Tensor, rounds: int, lag: int, page_size: int
    ) -> DraftRows:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        size = len(slots)
        each = np.zeros((2, size), np.int64)  # count, last token
        lines = np.zeros((4, rounds, size), np.int64)  # slots, output index, positions, KV index
        given = columns.tokens, columns.length, columns.prompt_len, columns.max_length, columns.finish_status
        inputs = [part.numpy() for part in (*given, columns.page_table, slots, budget, last)]
        _plan_draft_rows(*inputs, lag, page_size, each, lines)
        tokens = slots.new_zeros((columns.draft.shape[1], size))
        return DraftRows(*torch.from_numpy(each), *torch.from_numpy(lines), tokens)

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
        slot, temperature = windows.slot.numpy(), windows.columns.temperature.numpy()
        if ids is None or not (greedy or _is_greedy(slot, temperature)):
            given = x, at, norm, eps, packed, ids, windows, greedy, out, draft_prob, logits
            return super().lm_head_sample(*given)
        # greedy: the argmax over the head's own columns needs no noise, so no scatter to the vocabulary
        rows = x if at is None else x[at.clamp(min=0)]
        is_few = len(rows) <= MAX_RECORDED_ROWS  # host time limits rounds of few rows
        make = self._recorded.get if is_few else self._scores_of
        scores, best, *total = make(norm, eps, packed, draft_prob is not None)(rows)
        _map_ids(*(part.numpy() for part in (windows.slot, scores, best, ids, out)))
        if draft_prob is not None:
            _store_probs(*(part.numpy() for part in (scores, best, *total, draft_prob)))
        if logits is not None:
            logits.copy_(scores)
        return rows


def _places_of(out: Tensor, *parts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each of `parts` [R, …] its place in the first R rows of `out`, and the part."""
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    return [(out[: len(x), end - x.shape[1] : end], x) for x, end in zip(parts, ends, strict=True)]


@compiled
def _shift_rows(positions, row_slots, kv_index, tokens, length, slots, out, last):  # type: ignore[no-untyped-def]
    """Write the shifted rows and the last row of each entry; see `DraftRoundOps.shift_rows`."""
    for r in range(len(row_slots)):
        s, after = row_slots[r], positions[r] + 1
        if s < 0 or after >= length[s]:
            out[2, r] = -1
            continue
        out[0, r], out[1, r], out[2, r], out[3, r] = tokens[s, after], positions[r], s, kv_index[r]
        if after + 1 == length[s]:
            for b in range(len(slots)):
                if slots[b] == s:
                    last[b] = r


@compiled
def _plan_draft_rows(  # type: ignore[no-untyped-def]
    tokens, length, prompt_len, max_length, ended, page_table, slots, budget, last, lag, page_size,
    each, lines,
):  # fmt: skip
    """Write the rows of all rounds; see `DraftRoundOps.plan_draft_rows`."""
    rounds = lines.shape[1]
    for b in range(len(slots)):
        s = slots[b]
        count = 0
        if s >= 0 and last[b] >= 0 and ended[s] == RUNNING:
            count = max(0, min(min(budget[b], max_length[s] - length[s] - 1), rounds))
        each[0, b] = count
        if count > 0:
            each[1, b] = tokens[s, length[s] - 1]
        for j in range(rounds):
            if j >= count:
                lines[0, j, b] = -1
                continue
            position = max(0, length[s] - 1 - lag + j)
            page = np.int64(page_table[s, position // page_size])
            lines[0, j, b], lines[1, j, b] = s, length[s] - prompt_len[s] + j
            lines[2, j, b], lines[3, j, b] = position, page * page_size + position % page_size


@compiled
def _is_greedy(slot, temperature):  # type: ignore[no-untyped-def]
    """Return whether no row is sampled."""
    sampled = 0
    for r in range(len(slot)):
        sampled += slot[r] >= 0 and temperature[slot[r]] > 0
    return sampled == 0


@compiled
def _map_ids(slot, logits, best, ids, out):  # type: ignore[no-untyped-def]
    """Write the vocabulary id of the best column of each row; the lowest id wins a tie."""
    for r in range(len(slot)):
        out[r] = 0
        if slot[r] < 0:
            continue
        top, found = logits[r, best[r]], ids[best[r]]
        for n in range(logits.shape[1]):
            if logits[r, n] == top and ids[n] < found:
                found = ids[n]
        out[r] = found


@compiled
def _store_probs(logits, best, total, prob):  # type: ignore[no-untyped-def]
    """Write the probability of the best column of each row; total: logsumexp of the rows."""
    for r in range(len(best)):
        prob[r] = math.exp(logits[r, best[r]] - total[r])
