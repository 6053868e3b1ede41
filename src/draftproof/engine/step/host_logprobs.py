"""Logprobs that the host computes from the tensors of a step, without a log-softmax.

Most logprobs come from `SamplingOps.logprobs` inside the device step. This module serves prompts, drafts,
`logprob_token_ids`, and more than `MAX_DEVICE_TOP` alternatives; the host waits for steps with such requests.
A top list is ordered by value descending, then id ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.engine.step.device_step import DeviceStep, PendingStep
from draftproof.engine.step.result_buffer import HostResults
from draftproof.engine.step.step_results import HostOutput, needs_host_token_logprobs
from draftproof.ops import Ops
from draftproof.outputs import DraftRecord, LogprobRow
from draftproof.sampling_params import top_of
from draftproof.types import FIRST_ROW, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, TOKENS

PROMPT_ROWS = 64  # logits rows held at once for prompt logprobs


def host_logprobs(
    device: DeviceStep,
    step: PendingStep,
    results: HostResults,
    source: NDArray[np.int8] | None,
    lengths: Ints,
    names: Sequence[str],
) -> dict[int, HostOutput]:
    """Return the logprobs that the host computes, by entry.

    source [B, K]: index into `names` of each draft's source. lengths [B]: committed tokens before the step.
    """
    found, planned, vocab = {}, step.planned, device.slots.vocab
    for b, sequence in enumerate(planned.sequences):
        params = sequence.request.params
        has_prompt = params.prompt_logprobs is not None and planned.chunk[b] > 0
        if not has_prompt and not sequence.needs_host_logprobs:
            continue
        entry = HostOutput()
        if has_prompt:
            entry.prompt_logprobs = _prompt_logprobs(device, step, b) or None
        if planned.samples[b] and sequence.needs_host_logprobs:
            logits, sampled, line = step.tensors.logits, step.tensors.sampled, results.table[b]
            assert logits is not None and sampled is not None
            logits = logits if params.logprobs_mode == "raw" else sampled.processed
            if needs_host_token_logprobs(params, vocab):
                count, first = int(line[NUM_OUT]), int(line[FIRST_ROW])
                rows, tokens = range(first, first + count), line[TOKENS : TOKENS + count].tolist()
                ids, top = params.logprob_token_ids or (), top_of(params.logprobs, vocab)
                entry.logprobs = logprob_rows(device.ops, logits, rows, tokens, top, ids)
            if params.include_draft_logprobs:
                start = int(lengths[b]) - len(sequence.request.prompt_token_ids)
                count = int(line[NUM_DRAFT])
                index = [0] * count if source is None else source[b, :count].tolist()
                drafts_from = [names[n] for n in index]
                entry.drafts = _draft_records(device.ops, step, results, b, start, drafts_from, logits)
        if entry != HostOutput():
            found[b] = entry
    return found


def _draft_records(
    ops: Ops,
    step: PendingStep,
    results: HostResults,
    b: int,
    start: int,
    sources: list[str],
    logits: Tensor,
) -> list[DraftRecord]:
    """Return all drafts of a window; `start`: index in the output of the window's first token."""
    line, slot = results.table[b], int(step.planned.slots[b])
    count, first = int(line[NUM_DRAFT]), int(line[FIRST_ROW])
    drafts = step.tensors.windows.draft[first : first + count].tolist()
    own = [] if results.draft_logprobs is None else results.draft_logprobs[slot].tolist()
    target = logprob_rows(ops, logits, range(first, first + count), drafts)
    return [
        DraftRecord(
            token_id=drafts[i],
            position=start + i,
            source=sources[i],
            accepted=i < int(line[NUM_ACCEPTED]),
            draft_logprob=None if own[i] != own[i] else own[i],
            target_logprob=target[i].logprobs[0],
        )
        for i in range(count)
    ]


def _prompt_logprobs(device: DeviceStep, step: PendingStep, b: int) -> list[LogprobRow]:
    """Return logprobs of the prompt tokens behind the rows of a chunk: row i predicts token i + 1."""
    planned, sequence = step.planned, step.planned.sequences[b]
    assert step.hidden is not None and step.computed is not None
    start, end, offset = planned.chunk_rows(b, step.computed)
    prompt = sequence.request.prompt_token_ids
    start = max(start, sequence.num_prompt_logprobs)  # those before were returned before a preemption
    end = min(end, len(prompt) - 1)
    lines: list[LogprobRow] = []
    for low in range(start, end, PROMPT_ROWS):
        high = min(low + PROMPT_ROWS, end)
        logits = device.runner.logits(step.hidden[offset + low : offset + high])
        ids = [int(token) for token in prompt[low + 1 : high + 1]]
        top = top_of(sequence.request.params.prompt_logprobs, logits.shape[1])
        lines += logprob_rows(device.ops, logits, range(high - low), ids, top)
    return lines


def logprob_rows(
    ops: Ops,
    logits: Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    top: int = 0,
    ids: Sequence[int] = (),
) -> list[LogprobRow]:
    """Return the logprobs of tokens [n] at rows [n] of the logits, then of the `top` best, then of `ids`."""
    if not rows:
        return []
    at = torch.tensor(rows, device=logits.device)
    own = torch.tensor(tokens, device=logits.device)
    found = ops.sampling.logprobs(logits, at, own, top)
    columns = found.values.tolist(), found.ids.tolist(), found.ranks.tolist()
    lines = LogprobRow.from_columns(*columns, tokens, top)
    for token in ids:
        named = ops.sampling.logprobs(logits, at, torch.full_like(own, token), 0)
        for line, value, rank in zip(lines, named.values[:, 0].tolist(), named.ranks.tolist(), strict=True):
            line.token_ids.append(token)
            line.logprobs.append(value)
            line.ranks.append(rank)
    return lines
