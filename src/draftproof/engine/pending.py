"""Steps that are queued on the device and not read yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from draftproof.arrays import Ints
from draftproof.engine.drafting.policy import DraftRun
from draftproof.engine.sequence import StepPlan
from draftproof.engine.step.device_step import QueuedStep
from draftproof.engine.step.grammar_masks import GrammarErrors
from draftproof.ops import PendingCopy


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step in flight, with its plan."""

    number: int
    planned: StepPlan
    computed: Ints | None  # [B] tokens with KV before the step; None: all entries decode
    ran: QueuedStep
    read: PendingCopy
    waits: bool  # the host must read the step before it plans another
    follows: bool  # queued while another step was in flight: the device went from one to the next
    started: float  # `time.perf_counter` when planning began
    complaints: GrammarErrors = field(default_factory=dict)
    draft_run: DraftRun = DraftRun()  # of the draft model behind the step


PendingSteps = deque[PendingStep]  # oldest first


def last_number(pending: PendingSteps) -> int:
    """Return the number of the last queued step; a copy queued now is complete after that step."""
    return pending[-1].number if pending else 0
