"""Logprobs that a request has in rows of its own: named ids, drafts, prompts, and long lists.

The device has computed all of them, within the step or behind it. The other logprobs stay in the columns of
the step, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.step.queued_logprobs import QueuedLogprobs, add_named
from draftproof.engine.step.result_buffer import HostResults
from draftproof.engine.step.step_features import draft_top
from draftproof.engine.step.step_results import HostOutput
from draftproof.outputs import DraftRecord, LogprobRow
from draftproof.sampling_params import top_of
from draftproof.types import FIRST_ROW, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, TOKENS


def own_rows(
    planned: StepPlan,
    queued: QueuedLogprobs,
    results: HostResults,
    source: NDArray[np.int8] | None,
    lengths: Ints,
    names: Sequence[str],
    vocab: int,
) -> dict[int, HostOutput]:
    """Return the rows of the requests that have them, by entry; wait for those behind the step.

    source [B, K]: index into `names` of each draft's source. lengths [B]: committed tokens before the step.
    """
    found = {}
    for b, sequence in enumerate(planned.sequences):
        if not sequence.has_own_rows:
            continue
        params, entry, line = sequence.request.params, HostOutput(), results.table[b]
        if b in queued.prompts:
            entry.prompt_logprobs = _prompt_rows(planned, queued, b, vocab) or None
        if planned.samples[b]:
            tokens = line[TOKENS : TOKENS + int(line[NUM_OUT])].tolist()
            if b in queued.tokens:
                entry.logprobs = queued.tokens[b].read(tokens, top_of(params.logprobs, vocab))
            elif params.logprob_token_ids:
                entry.logprobs = _named_rows(planned, results, b, tokens)
            if params.include_draft_logprobs:
                start = int(lengths[b]) - len(sequence.request.prompt_token_ids)
                top = draft_top(params, vocab)
                entry.drafts = _draft_records(planned, results, b, start, source, names, top)
        if entry != HostOutput():
            found[b] = entry
    return found


def _named_rows(planned: StepPlan, results: HostResults, b: int, tokens: list[int]) -> list[LogprobRow]:
    """Return the rows of the committed tokens: the token itself, then the named ids."""
    if not tokens:
        return []
    columns = results.logprobs[planned.sequences[b].logprob_kind]
    assert columns.named_values is not None and columns.named_ranks is not None
    at = slice(int(results.table[b, PICK]), int(results.table[b, PICK]) + len(tokens))
    values, ids, ranks = (column[at].tolist() for column in (columns.values, columns.ids, columns.ranks))
    rows = LogprobRow.from_columns(values, ids, ranks, tokens, 0)
    named = columns.named_values[at].tolist(), columns.named_ranks[at].tolist()
    add_named(rows, planned.requests[b].params.logprob_token_ids or (), *named)
    return rows


def _draft_records(
    planned: StepPlan,
    results: HostResults,
    b: int,
    start: int,
    source: NDArray[np.int8] | None,
    names: Sequence[str],
    top: int,
) -> list[DraftRecord]:
    """Return all drafts of a window, each with the drafter's `top` likeliest tokens.

    start: index in the output of the window's first token.
    """
    line = results.table[b]
    count, first = int(line[NUM_DRAFT]), int(line[FIRST_ROW])
    if not count:
        return []
    assert results.draft_tokens is not None and results.draft_logprobs is not None
    target = results.draft_targets[planned.sequences[b].draft_kind]
    slot = int(planned.slots[b])
    own = results.draft_logprobs[slot, :count].tolist()
    ranks: list[int] = [0] * count
    tops: list[tuple[tuple[int, float], ...]] = [()] * count
    if results.draft_ranks is not None:
        ranks, tops = results.draft_ranks[slot, :count].tolist(), _draft_tops(results, slot, count, top)
    sources = [0] * count if source is None else source[b, :count].tolist()
    drafts = results.draft_tokens[first : first + count].tolist()
    target_logprobs = target.values[first : first + count, 0].tolist()
    return [
        DraftRecord(
            token_id=drafts[i],
            position=start + i,
            source=names[sources[i]],
            accepted=i < int(line[NUM_ACCEPTED]),
            draft_logprob=None if own[i] != own[i] else own[i],
            target_logprob=target_logprobs[i],
            draft_rank=ranks[i] or None,
            draft_top=tops[i] if ranks[i] else (),
        )
        for i in range(count)
    ]


def _draft_tops(results: HostResults, slot: int, count: int, top: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the drafter's `top` likeliest tokens and their logprobs, of `count` drafts of a slot."""
    assert results.draft_top_ids is not None and results.draft_top_logprobs is not None
    ids = results.draft_top_ids[slot, :count, :top].tolist()
    values = results.draft_top_logprobs[slot, :count, :top].tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


def _prompt_rows(planned: StepPlan, queued: QueuedLogprobs, b: int, vocab: int) -> list[LogprobRow]:
    """Return the rows of the prompt tokens that a chunk has reached."""
    request, rows = planned.requests[b], []
    top = top_of(request.params.prompt_logprobs, vocab)
    for low, high, pending in queued.prompts[b]:
        tokens = [int(token) for token in request.prompt_token_ids[low + 1 : high + 1]]
        rows += pending.read(tokens, top)
    return rows
