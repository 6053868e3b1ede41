"""Drafts of a step as columns, for the requests with include_draft_logprobs.

The device has computed all of it within the step. A record per draft is made when it is read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Floats32, Ints, ragged_indices
from draftproof.engine.sequence import StepPlan
from draftproof.engine.step.result_buffer import HostResults
from draftproof.engine.step.step_features import draft_top
from draftproof.outputs import DraftColumns
from draftproof.types import FIRST_ROW, NUM_ACCEPTED, NUM_DRAFT, LogprobKind


def draft_columns(
    planned: StepPlan, results: HostResults, source: NDArray[np.int8] | None, lengths: Ints, vocab: int
) -> DraftColumns | None:
    """Return the drafts of the requests that report them; None if there are none.

    source [B, K]: index of each draft's source. lengths [S]: committed tokens before the step.
    """
    if results.draft_tokens is None:
        return None
    assert results.draft_logprobs is not None
    table = results.table[: len(planned.slots)]
    kinds = np.array([sequence.draft_kind for sequence in planned.sequences], np.int64)
    entries = ((kinds != LogprobKind.NONE) & planned.samples & (table[:, NUM_DRAFT] > 0)).nonzero()[0]
    if not len(entries):
        return None
    counts = table[entries, NUM_DRAFT]
    owner, place = ragged_indices(counts)  # [D] index into `entries`, and among the drafts of that entry
    entry = entries[owner]
    row, slot = table[entry, FIRST_ROW] + place, planned.slots[entry]
    requests = [planned.requests[b] for b in entries.tolist()]
    starts = lengths[planned.slots[entries]] - np.array(
        [len(request.prompt_token_ids) for request in requests]
    )
    rank, top_width = np.zeros(len(owner), np.int64), np.zeros(len(owner), np.int64)
    top_ids: Ints = np.zeros((len(owner), 0), np.int64)
    top_logprobs: Floats32 = np.zeros((len(owner), 0), np.float32)
    if results.draft_ranks is not None:
        assert results.draft_top_ids is not None and results.draft_top_logprobs is not None
        rank = results.draft_ranks[slot, place]
        widths = np.array([draft_top(request.params, vocab) for request in requests])
        top_width = np.where(rank > 0, widths[owner], 0)
        top_ids, top_logprobs = results.draft_top_ids[slot, place], results.draft_top_logprobs[slot, place]
    return DraftColumns(
        entry=entry,
        token=results.draft_tokens[row],
        position=starts[owner] + place,
        source=np.zeros(len(owner), np.int8) if source is None else source[entry, place],
        accepted=place < table[entry, NUM_ACCEPTED],
        draft_logprob=results.draft_logprobs[slot, place],
        target_logprob=_target_logprobs(results, kinds[entry], row),
        rank=rank,
        top_width=top_width,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _target_logprobs(results: HostResults, kinds: Ints, rows: Ints) -> Floats32:
    """Return the target's logprobs of the drafts at logits rows [D], each of the kind [D] of its request."""
    found = np.full(len(rows), np.nan, np.float32)
    for kind, columns in results.draft_targets.items():
        at = kinds == kind
        found[at] = columns.values[rows[at], 0]
    return found
