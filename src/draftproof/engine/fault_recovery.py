"""Recovery from a failed step: memory ran out, or the device raised an error.

Nothing of a failed step counts. If the device still responds, all requests of the step are queued again and
resume from their committed tokens, with the same bits; the pages that the step was to fill are withdrawn from
the prefix cache. A request that makes no progress in several failed steps fails with the reason. If the
device does not respond, the engine is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch

from draftproof.array_types import Ints
from draftproof.engine.drafting.proposer_hooks import ProposerHooks
from draftproof.engine.request_release import RequestRelease
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.step.device_step import DeviceStep
from draftproof.engine.step.step_results import Finish, StepResults
from draftproof.errors import DEVICE_ERRORS, EngineDeadError
from draftproof.ops import Ops

MAX_REQUEST_RETRIES = 3  # failed steps of a request without a token between them
MAX_CONSECUTIVE_FAILURES = 20  # failed steps in a row, even if the device responds


class StepFault(Exception):
    """Lost steps, each with the tokens [B] that had KV before it; None: all but the newest."""

    def __init__(self, lost: list[tuple[StepPlan, Ints | None]]) -> None:
        super().__init__(f"{len(lost)} steps are lost")
        self.lost = lost


class FaultRecovery:
    """Counts failed steps and queues their requests again."""

    def __init__(
        self, scheduler: Scheduler, device: DeviceStep, hooks: ProposerHooks, release: RequestRelease
    ) -> None:
        self._scheduler, self._device, self._hooks, self._release = scheduler, device, hooks, release
        self._num_failures = 0  # consecutive failed steps

    def record_success(self) -> None:
        """Record a step that was read."""
        self._num_failures = 0

    def check_alive(self, fault: StepFault) -> str:
        """Count a failed step and return its reason; EngineDeadError if the engine cannot go on."""
        error = fault.__cause__
        reason = f"{type(error).__name__} in a step: {error}"
        self._device.runner.check_ranks(error)  # ranks that are not in the same step cannot go on
        self._num_failures += 1
        if not responds(self._device.ops):
            raise EngineDeadError(f"the device does not respond after {reason}") from error
        if self._num_failures > MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(
                f"{self._num_failures} consecutive steps have failed, the last by {reason}"
            ) from error
        return reason

    def retry(
        self, lost: Many[tuple[StepPlan, Ints | None]], results: StepResults, reason: str
    ) -> StepResults:
        """Queue the requests of lost steps again; return `results` with those that failed too often."""
        self._release.drop_unread()
        slots = {s: s.slot for s in self._scheduler.running}
        requeued = requeue_lost(self._scheduler, lost)
        for sequence in requeued:
            self._device.deferred_kv.invalidate(slots[sequence])
            self._hooks.stop(slots[sequence])
        failed = [s for s in requeued if s.num_failures >= MAX_REQUEST_RETRIES]
        what = "%s; %d requests are retried, %d fail"
        logging.getLogger("draftproof").error(what, reason, len(requeued) - len(failed), len(failed))
        for sequence in failed:
            self._release.remove(sequence)
        return with_failed(results, failed, self._device.buffers.table_width, reason)


def responds(ops: Ops) -> bool:
    """Return whether the device still responds. After some errors it never does again."""
    try:
        return bool(ops.runtime.fetch(ops.runtime.send(torch.ones(1)))().item())
    except DEVICE_ERRORS:
        return False


def requeue_lost(scheduler: Scheduler, lost: Many[tuple[StepPlan, Ints | None]]) -> list[Sequence]:
    """Queue the requests of lost steps that are still there; return them."""
    computed: dict[Sequence, int] = {}  # before the first lost step of each request
    for planned, before in lost:
        scheduler.pages.unpublish(planned.published)
        is_current = scheduler.mirror.generation[planned.slots] == planned.generations
        before = scheduler.mirror.length[planned.slots] - 1 if before is None else before
        for b in is_current.nonzero()[0].tolist():
            computed.setdefault(planned.sequences[b], int(before[b]))
    for sequence, count in computed.items():
        length = int(scheduler.mirror.length[sequence.slot])
        if length > sequence.length_at_failure:  # it made progress since the last failure
            sequence.num_failures, sequence.length_at_failure = 0, length
        sequence.num_failures += 1
        scheduler.requeue(sequence, count)
    return list(computed)


def with_failed(results: StepResults, failed: Many[Sequence], width: int, reason: str) -> StepResults:
    """Return `results` with the end of failed requests: in their own lines, or in lines without tokens."""
    requests, finishes = list(results.requests), dict(results.finishes)
    place = {request.id: i for i, request in enumerate(requests)}
    for sequence in failed:
        at = place.get(sequence.request.id, len(requests))
        if at == len(requests):
            requests.append(sequence.request)
        finishes[at] = Finish("error", error=reason)
    new = len(requests) - len(results.requests)
    table = np.zeros((len(requests), width), np.int64)
    table[: len(results.requests)] = results.table.reshape(-1, width)
    sources = results.draft_sources
    if sources is not None:
        sources = np.concatenate([sources, np.zeros((new, sources.shape[1]), sources.dtype)])
    return replace(results, requests=requests, table=table, draft_sources=sources, finishes=finishes)
