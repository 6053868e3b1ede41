"""Calls into the proposer on the host. One that raises is switched off; decoding goes on without drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.engine.drafting.prediction_drafts import PredictionDrafts
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step.device_step import DeviceStep
from draftproof.propose.base import Proposer
from draftproof.types import ProposeBatch


class ProposerHooks:
    """Owner of the engine's proposer."""

    def __init__(
        self,
        proposer: Proposer | None,
        device: DeviceStep,
        predictions: PredictionDrafts,
        scheduler: Scheduler,
        debug: bool,
    ) -> None:
        """Create the hooks; `debug`: raise the proposer's exception instead of switching the proposer off."""
        self.proposer = proposer
        self._drafting = device.drafting
        self._deferred_kv = device.deferred_kv
        self._predictions = predictions
        self._lengths = scheduler.mirror.length  # [S] tokens of the requests by slot
        self._debug = debug

    @property
    def drafts_on_host(self) -> bool:
        """Return whether drafts are made by code that needs the host."""
        return self.proposer is not None and not self.proposer.graph_safe

    @property
    def drafts_on_device(self) -> bool:
        """Return whether drafts are made on the device, without the host."""
        return self._drafting.proposer is not None

    @property
    def needs_hidden_on_host(self) -> bool:
        """Return whether a proposer on the host reads hidden rows."""
        return self.proposer is not None and not self.proposer.graph_safe and self.proposer.needs_hidden

    def start(self, admitted: Many[Sequence]) -> None:
        """Announce admitted requests, then the next step."""
        for sequence in admitted:
            self._deferred_kv.admit(sequence)
            if self.proposer is not None:
                self.call(self.proposer.start, sequence.slot, sequence.request)
            if self.proposer is not None and sequence.uses_prediction and not self.proposer.takes_prediction:
                self._predictions.start(sequence.slot, sequence.request)
        if self.proposer is not None:
            self.call(self.proposer.prepare)

    def stop(self, slot: int) -> None:
        """Announce that the request in `slot` is gone."""
        self._predictions.stop(slot)
        self._deferred_kv.release(slot, int(self._lengths[slot]))
        if self.proposer is not None:
            self.call(self.proposer.stop, slot)

    def do_idle_work(self) -> None:
        """Let the proposer work while the device is busy."""
        if self.proposer is not None:
            self.call(self.proposer.do_idle_work)

    def call(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Call a hook of the proposer; switch the proposer off if it raises."""
        try:
            hook(*arguments)
        except Exception as error:  # a plug-in's code may raise anything
            self.switch_off(error)

    def draft_predictions(self, planned: StepPlan) -> None:
        """Replace drafts after a step where the predictions of its requests continue the outputs."""
        if self.proposer is not None:
            self.call(self._predictions.draft, planned, self.proposer)

    def check_device_failure(self) -> None:
        """Switch the proposer off if it failed in the device step."""
        if self._drafting.failure is not None and self.proposer is not None:
            self.switch_off(self._drafting.failure)

    def switch_off(self, error: Exception) -> None:
        """Decode without drafts from now on. Committed tokens are not affected."""
        if self._debug:
            raise error
        logging.getLogger("draftproof").error("the proposer failed and is switched off", exc_info=error)
        self.proposer = None
        self._drafting.set_proposer(None, error)


def propose_batch(
    slots: Slots,
    planned: StepPlan,
    entries: Many[int],
    computed: Ints,
    lengths: Ints,
    budget: Ints,
    hidden: Tensor | None,
) -> ProposeBatch:
    """Return the input of a host proposer after a step.

    entries: those of the step whose requests are still there. lengths [S]: committed tokens after the step.
    hidden [R, hidden]: all rows of the step; those with a committed input token are passed on.
    """
    lines = planned.slots[entries]
    starts: list[int] = []
    counts: list[int] = []
    if hidden is not None:
        rows = np.maximum(planned.chunk, 1) + planned.drafts
        index: list[int] = []
        for b in entries:
            first, start = int(rows[:b].sum()), int(computed[b])
            stored = int(lengths[planned.slots[b]]) - 1 - start
            starts.append(start)
            counts.append(min(int(rows[b]), stored))
            index.extend(range(first, first + counts[-1]))
        hidden = hidden[index]
    return ProposeBatch(
        columns=slots.columns,
        slots=lines.tolist(),
        budget=budget.tolist(),
        lengths=lengths[lines].tolist(),
        hidden=hidden,
        hidden_start=starts,
        hidden_count=counts,
    )
