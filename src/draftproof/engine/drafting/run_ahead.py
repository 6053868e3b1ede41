"""When steps are read, by the clock: what they cost, and how many are queued before one of them is read.

Two are enough while the host is done with its part of a step before the device is with the next. Where some
of its parts take longer than a step (an answer that ends, drafts that are decided anew, a busy processor)
the device would have nothing to do meanwhile, though on average the host is quicker: then three are queued.
Not always: whoever ends is known to have ended one step later, and whoever comes waits for one more.
"""

from __future__ import annotations

import time
from typing import Protocol

from draftproof.engine.scheduler import Scheduler
from draftproof.engine.sequence import StepPlan

SPARE = 0.75  # of a step: a host that took no longer for its own part has time for other things
OFTEN = 0.04  # of the steps: when so many wait for the host, one more is queued
FOLLOW = 1 / 64  # of a step in how often that is
FADES = 1 / 512  # of what is known of it, with a step that says nothing of it


class Queued(Protocol):
    """As much of a step that is under way as is needed here."""

    planned: StepPlan
    follows: bool  # it was queued while another was under way: the device went from one to the next
    started: float
    asked: int
    fewer: int


class Pacing:
    def __init__(self, scheduler: Scheduler, asynchronous: bool) -> None:
        self.scheduler, self.asynchronous = scheduler, asynchronous
        self.shallow, self.deep = 2, 3  # steps that are under way at most
        self._last_read = 0.0
        self._took = 0.0  # seconds of the step that was read then
        self._late = False  # had it come before the host was ready for it?
        self.lateness = 0.0  # of the steps, how many had lately
        self.spare = 0.0  # the same of steps behind which no model drafts: they are shorter

    @property
    def depth(self) -> int:
        return self.deep if self.lateness > OFTEN else self.shallow

    @property
    def has_time(self) -> bool:
        """Is the device likely to be busy for a while with what is queued?"""
        return time.perf_counter() - self._last_read < SPARE * self._took

    def read(self, step: Queued, asked: float, late: bool, weighed: float) -> None:
        """A step was read just now. Until `asked`, when the host was ready for it, both worked; `late`: it
        had come by then. For `weighed` seconds of it drafts were made that have prices of their own.

        A step costs what passes from one read to the next, unless the host came too late for either. One of
        which nobody is left says nothing: it had no rows, and may have lain here since the last request.
        """
        now, timings, planned = time.perf_counter(), self.scheduler.timings, step.planned
        if planned.version != self.scheduler.version and not self._is_anybodys(planned):
            self._last_read, self._took, self._late = now, 0.0, True
            return
        since, self._last_read = self._last_read if step.follows else step.started, now
        self._took = took = now - since
        (timings.prompt_steps if planned.has_prompts else timings.decode_steps).observe(took)
        costs, was_late = self.scheduler.budgets.costs, self._late
        self._late = False
        if step.follows and self.asynchronous:
            self._late = late
            self.lateness += FOLLOW * (late - self.lateness)
            if step.asked:  # that says nothing of it; after a while it is thought to be as for all
                self.spare += FADES * (self.lateness - self.spare)
            else:
                self.spare += FOLLOW * (late - self.spare)
            if costs.learns:
                costs.hosted(asked - since)
        if costs.learns and not planned.has_prompts and not was_late and not self._late:
            keys = int(self.scheduler.mirror.length[planned.slots].sum())
            costs.observe(planned.num_rows, keys, took - weighed, 0 if weighed else step.asked, step.fewer)

    def _is_anybodys(self, planned: StepPlan) -> bool:
        return bool((self.scheduler.mirror.generation[planned.slots] == planned.generations).any())
