"""Logprobs that are queued behind a step: prompts, and lists longer than a step holds.

Such passes are too large and too rare to be captured. They read the tensors of the step before the next step
overwrites them, because the device runs both in one queue, and the host reads their results with those of the
step. So no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.step.device_step import DeviceStep, StepTensors
from draftproof.engine.step.result_buffer import HostResults
from draftproof.engine.step.step_results import HostOutput, add_named
from draftproof.ops import NamedIds, PendingCopy, TokenLogprobs
from draftproof.outputs import LogprobRow
from draftproof.sampling_params import top_of
from draftproof.types import FIRST_ROW, NUM_OUT, TOKENS

MAX_PROMPT_BYTES = 1 << 26  # of logits and results that are computed at once for a prompt ...
MIN_PROMPT_ROWS = 64  # ... if that is at least as many rows


class PendingRows(NamedTuple):
    """Logprobs of n rows that are being copied to the host."""

    copies: Sequence[PendingCopy]  # the tensors of a TokenLogprobs
    named_ids: Sequence[int]

    def read(self, tokens: Sequence[int], top: int) -> list[LogprobRow]:
        """Wait for the copies; return the rows of `tokens`, of which there may be fewer than n."""
        count = len(tokens)
        values, ids, ranks, *named = (copy()[:count].tolist() for copy in self.copies)
        rows = LogprobRow.from_columns(values, ids, ranks, tokens, top)
        if self.named_ids:
            add_named(rows, self.named_ids, *named)
        return rows


class QueuedLogprobs(NamedTuple):
    """Logprobs behind one step, by entry."""

    tokens: dict[int, PendingRows]
    prompts: dict[int, list[tuple[int, int, PendingRows]]]  # first and end position of the rows of each part


def queue_logprobs(
    device: DeviceStep, planned: StepPlan, computed: Ints | None, tensors: StepTensors, hidden: Tensor | None
) -> QueuedLogprobs:
    """Queue the logprobs behind a step. computed [B]: tokens with KV before it; hidden [R, hidden] rows."""
    queued = QueuedLogprobs({}, {})
    for b, sequence in enumerate(planned.sequences):
        if sequence.has_long_logprobs and planned.is_sampled[b]:
            queued.tokens[b] = _queue_tokens(device, planned, b, tensors)
        if sequence.request.params.prompt_logprobs is not None and planned.chunk[b] > 0:
            assert hidden is not None and computed is not None
            queued.prompts[b] = _queue_prompt(device, planned, b, int(computed[b]), hidden)
    return queued


def read_logprobs(
    planned: StepPlan, queued: QueuedLogprobs, results: HostResults, vocab: int
) -> dict[int, HostOutput]:
    """Wait for the logprobs behind a step; return them by entry."""
    found: dict[int, HostOutput] = {}
    for b, parts in queued.prompts.items():
        request, rows = planned.requests[b], []
        top = top_of(request.params.prompt_logprobs, vocab)
        for low, high, pending in parts:
            rows += pending.read([int(token) for token in request.prompt_token_ids[low + 1 : high + 1]], top)
        if rows:
            found[b] = HostOutput(prompt_logprobs=rows)
    for b, pending in queued.tokens.items():
        line, top = results.table[b], top_of(planned.requests[b].params.logprobs, vocab)
        tokens = line[TOKENS : TOKENS + int(line[NUM_OUT])].tolist()
        found.setdefault(b, HostOutput()).logprobs = pending.read(tokens, top)
    return found


def _queue_tokens(device: DeviceStep, planned: StepPlan, b: int, tensors: StepTensors) -> PendingRows:
    """Queue the logprobs of the tokens that an entry commits: at most one more than its drafts."""
    params = planned.requests[b].params
    assert tensors.logits is not None and tensors.sampled is not None
    scores = tensors.logits if params.logprobs_mode == "raw" else tensors.sampled.processed
    line = tensors.outcome.table[b]
    depth = torch.arange(1 + int(planned.drafts[b]), device=line.device)
    rows = torch.where(depth < line[NUM_OUT], line[FIRST_ROW] + depth, -1)
    tokens = line[TOKENS : TOKENS + len(depth)].contiguous()
    ids, named = params.logprob_token_ids or (), None
    if ids:
        table = device.ops.runtime.send(torch.tensor([ids]))
        named = NamedIds(table, torch.zeros_like(tensors.windows.slot), len(ids))
    top = top_of(params.logprobs, scores.shape[1])
    found = device.ops.sampling.logprobs(scores, rows, tokens, top, None, named)
    return _fetched(device, found, ids)


def _queue_prompt(
    device: DeviceStep, planned: StepPlan, b: int, computed: int, hidden: Tensor
) -> list[tuple[int, int, PendingRows]]:
    """Queue the logprobs of the prompt tokens behind the rows of a chunk: row i predicts token i + 1."""
    sequence, slot = planned.sequences[b], int(planned.slots[b])
    prompt_len, vocab = len(sequence.request.prompt_token_ids), device.slots.vocab
    top = top_of(sequence.request.params.prompt_logprobs, vocab)
    start = max(computed, sequence.num_prompt_logprobs)  # those before were returned before a preemption
    end = min(computed + int(planned.chunk[b]), prompt_len - 1)
    # Drafts of the entries before it are bounds while steps are in flight: the device knows the first row.
    slots = _row_slots(device, len(hidden))
    index = torch.arange(len(slots), device=slots.device)
    first = torch.where(slots == slot, index, len(slots) - 1).amin()
    size, parts = max(MIN_PROMPT_ROWS, MAX_PROMPT_BYTES // (4 * vocab + 12 * top)), []
    for low in range(start, end, size):
        high = min(low + size, end)
        at = (first + index[: high - low] + (low - computed)).clamp(max=len(slots) - 1)
        tokens = device.slots.columns.tokens[slot, low + 1 : high + 1]
        logits = device.runner.logits(hidden[at])
        found = device.ops.sampling.logprobs(logits, index[: high - low], tokens, top)
        parts.append((low, high, _fetched(device, found, ())))
    return parts


def _row_slots(device: DeviceStep, rows: int) -> Tensor:
    """Return the slot of each row [rows] of the last step; -1: padding."""
    return device.buffers.layout(rows, 0, None).rows.slots


def _fetched(device: DeviceStep, found: TokenLogprobs, named_ids: Sequence[int]) -> PendingRows:
    return PendingRows([device.ops.runtime.fetch(tensor) for tensor in found.tensors], named_ids)
