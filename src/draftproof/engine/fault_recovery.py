"""When a step fails under way: memory ran out, or the device raised.

Nothing of such a step counts. If the device still answers, whoever took part waits again and goes on from its
committed tokens, with the same bits; pages that the step was to fill are not found by anybody. Who gets no
further in several such steps fails with the reason, so that nothing goes on for ever. If the device does not
answer, the engine is dead.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch

from draftproof.arrays import Ints
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.step.step_results import Finish, StepResults
from draftproof.ops import Ops

FAULTS = (RuntimeError, MemoryError)  # of devices and allocators; torch's own are kinds of the first
MAX_REQUEST_RETRIES = 3  # steps of a request that fail without a token between them: then it does
MAX_CONSECUTIVE_FAILURES = 20  # steps that fail running: then the engine is dead, whatever the device says


class StepFault(Exception):
    """Steps whose results are lost, with the tokens that each entry had KV of before (None: as one that
    decodes, all that the host knows but the newest); see `__cause__`."""

    def __init__(self, lost: list[tuple[StepPlan, Ints | None]]) -> None:
        super().__init__(f"{len(lost)} steps are lost")
        self.lost = lost


def answers(ops: Ops) -> bool:
    """Does the device still? After some errors it never does again."""
    try:
        return bool(ops.runtime.fetch(ops.runtime.send(torch.ones(1)))().item())
    except FAULTS:
        return False


def requeue_lost(scheduler: Scheduler, lost: Many[tuple[StepPlan, Ints | None]]) -> list[Sequence]:
    """Those who took part, and are still here; they wait again."""
    computed: dict[Sequence, int] = {}  # before the first step that is lost
    for planned, before in lost:
        scheduler.pages.unpublish(planned.published)
        here = scheduler.mirror.generation[planned.slots] == planned.generations
        before = scheduler.mirror.length[planned.slots] - 1 if before is None else before
        for b in here.nonzero()[0].tolist():
            computed.setdefault(planned.sequences[b], int(before[b]))
    for sequence, count in computed.items():
        length = int(scheduler.mirror.length[sequence.slot])
        if length > sequence.length_at_failure:  # it has come further since the last one
            sequence.num_failures, sequence.length_at_failure = 0, length
        sequence.num_failures += 1
        scheduler.requeue(sequence, count)
    return list(computed)


def with_failed(results: StepResults, failed: Many[Sequence], width: int, reason: str) -> StepResults:
    """`results`, and the end of those who failed: in their own lines, or in lines of no tokens."""
    requests, endings = list(results.requests), dict(results.finishes)
    place = {request.id: i for i, request in enumerate(requests)}
    for sequence in failed:
        at = place.get(sequence.request.id, len(requests))
        if at == len(requests):
            requests.append(sequence.request)
        endings[at] = Finish("error", error=reason)
    new = len(requests) - len(results.requests)
    table = np.zeros((len(requests), width), np.int64)
    table[: len(results.requests)] = results.table.reshape(-1, width)
    source = results.source
    if source is not None:
        source = np.concatenate([source, np.zeros((new, source.shape[1]), source.dtype)])
    return replace(results, requests=requests, table=table, source=source, finishes=endings)
