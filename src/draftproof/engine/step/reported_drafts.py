"""Drafts of a step as columns, for the requests with include_draft_logprobs.

The device has computed all of it within the step. A record per draft is made when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Floats32, Ints
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.step.result_buffer import HostResults
from draftproof.outputs import DraftColumns
from draftproof.types import FIRST_ROW, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, LogprobKind


class ReportedDrafts:
    """Collector of the drafts of steps, with what the request in each slot reports."""

    def __init__(self, num_slots: int) -> None:
        self._kinds = np.full(num_slots, LogprobKind.NONE, np.int64)
        self._widths, self._prompt_lengths = np.zeros((2, num_slots), np.int64)
        self._entries = np.arange(num_slots)  # indices, to be repeated for each draft

    def start(self, admitted: Many[Sequence]) -> None:
        """Store what admitted requests report; `StepResults.only` drops results of a slot's last request."""
        for sequence in admitted:
            slot = sequence.slot
            self._kinds[slot], self._widths[slot] = sequence.draft_kind, sequence.draft_top
            self._prompt_lengths[slot] = len(sequence.request.prompt_token_ids)

    def columns(
        self, planned: StepPlan, results: HostResults, source: NDArray[np.int8] | None, lengths: Ints
    ) -> DraftColumns | None:
        """Return the drafts of the requests that report them; None if there are none.

        source [B, K]: index of each draft's source. lengths [S]: committed tokens before the step.
        """
        if results.draft_tokens is None:
            return None
        assert results.draft_logprobs is not None
        table, slots = results.table[: len(planned.slots)], planned.slots
        reports = self._kinds[slots] != LogprobKind.NONE
        counts = table[:, NUM_DRAFT] * (reports & planned.is_sampled & (table[:, NUM_OUT] > 0))
        entry = self._entries[: len(slots)].repeat(counts)
        if not len(entry):
            return None
        place = np.arange(len(entry)) - (counts.cumsum() - counts)[entry]
        row = table[:, FIRST_ROW][entry] + place
        cell = (slots * results.draft_logprobs.shape[1])[entry] + place  # of the flat columns [S * K]
        rank = top_width = np.zeros(len(entry), np.int64)
        top_ids, top_logprobs = np.zeros((len(entry), 0), np.int64), np.zeros((len(entry), 0), np.float32)
        if results.draft_ranks is not None:
            assert results.draft_top_ids is not None and results.draft_top_logprobs is not None
            rank = results.draft_ranks.ravel()[cell]
            if num_top := results.draft_top_ids.shape[2]:
                top_width = self._widths[slots][entry] * (rank > 0)
                top_ids = results.draft_top_ids.reshape(-1, num_top).take(cell, 0)
                top_logprobs = results.draft_top_logprobs.reshape(-1, num_top).take(cell, 0)
        return DraftColumns(
            entry=entry,
            token=results.draft_tokens[row],
            position=(lengths[slots] - self._prompt_lengths[slots])[entry] + place,
            source=np.zeros(len(entry), np.int8) if source is None else source[entry, place],
            accepted=place < table[:, NUM_ACCEPTED][entry],
            draft_logprob=results.draft_logprobs.ravel()[cell],
            target_logprob=self._target_logprobs(results, slots, entry, row),
            rank=rank,
            top_width=top_width,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _target_logprobs(self, results: HostResults, slots: Ints, entry: Ints, row: Ints) -> Floats32:
        """Return the target's logprobs of the drafts at logits rows [D], each of its request's kind."""
        targets = results.draft_targets
        if len(targets) == 1:  # all requests that report drafts have this kind
            (columns,) = targets.values()
            values: Floats32 = columns.values[:, 0][row]
            return values
        found = np.full(len(row), np.nan, np.float32)
        for kind, columns in targets.items():
            at = self._kinds[slots][entry] == kind
            found[at] = columns.values[row[at], 0]
        return found
