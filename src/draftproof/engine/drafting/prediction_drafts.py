"""Drafts from the predictions of requests (`SamplingParams.prediction`), beside any proposer.

A step with such a request is read before the next one is planned. Where the prediction continues the output,
its next tokens replace the drafts that the proposer made for the request. This depends on committed tokens
alone, so the drafts that remain keep their distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from draftproof.array_types import Ints
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import StepPlan
from draftproof.engine.step.device_step import DeviceStep
from draftproof.propose.base import Proposer
from draftproof.propose.prediction import PredictionCursors
from draftproof.types import PREDICTION_SOURCE, Draft, Request


def with_prediction_source(proposer: Proposer | None) -> tuple[str, ...]:
    """Return the sources of drafts in an engine with this proposer; predictions come last."""
    if proposer is None or proposer.takes_prediction:
        return proposer.sources if proposer else ()
    return (*proposer.sources, PREDICTION_SOURCE)


class PredictionDrafts:
    """Requests with a prediction, and the slots whose drafts are from one."""

    def __init__(self, scheduler: Scheduler, device: DeviceStep, source: int) -> None:
        """`source`: index of predictions among the sources of drafts."""
        self._scheduler = scheduler
        self._device = device
        self._source = source
        self._cursors = PredictionCursors()
        num_slots, self._k = device.slots.columns.draft.shape
        self._has_drafts = np.zeros(num_slots, np.bool_)  # the slot's drafts are from the prediction

    def __len__(self) -> int:
        """Return the number of requests with a prediction."""
        return len(self._cursors)

    def start(self, slot: int, request: Request) -> None:
        """Begin a request with a prediction."""
        self._cursors.start(slot, request)

    def stop(self, slot: int) -> None:
        """End the request in `slot`."""
        self._cursors.stop(slot)
        self._has_drafts[slot] = False

    def mark_sources(self, slots: Ints, sources: NDArray[np.int8] | None) -> NDArray[np.int8] | None:
        """Return the source [B, K] of each draft that a step verified, predictions included."""
        is_predicted = self._has_drafts[slots]
        self._has_drafts[slots] = False
        if not is_predicted.any():
            return sources
        if sources is None:
            sources = np.zeros((len(slots), self._k), np.int8)
        sources[is_predicted] = self._source
        return sources

    def draft(self, planned: StepPlan, proposer: Proposer) -> None:
        """Replace the drafts of the entries whose prediction continues their output.

        They get as many drafts as the request may have: the search costs nothing on the device.
        """
        entries = [b for b, s in enumerate(planned.sequences) if s.slot >= 0 and s.slot in self._cursors]
        if not entries:
            return
        scheduler, columns, slots = self._scheduler, self._device.slots.columns, planned.slots[entries]
        mirror, room = scheduler.mirror, scheduler.draft_room(slots, planned.is_sampled[entries])
        budget = scheduler.policy.limit[slots]
        budget = budget if room is None else np.minimum(budget, room)
        drafts = self._cursors.next_tokens(
            columns, slots.tolist(), mirror.length[slots].tolist(), budget.tolist()
        )
        found = [b for b, tokens in enumerate(drafts) if tokens]
        if not found:
            return
        slots, drafts = slots[found], [drafts[b] for b in found]
        self._device.store_host_drafts(slots, budget[found], Draft.from_lists(drafts, self._k))
        proposer.discard(self._device.ops.runtime.send(torch.from_numpy(slots)))
        mirror.num_draft[slots] = [len(tokens) for tokens in drafts]
        self._has_drafts[slots] = True
