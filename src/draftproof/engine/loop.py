"""The loop: one step of every running request, plain or speculative, on one path.

    plan, [ layout, forward, sample, judge, commit, logprobs, propose ], settle

Plain decoding is a window without drafts. What is in brackets is the device's part, `DeviceStep`. With
overlap the next steps are planned and queued before the last one is read (`pacing`), so the device never
waits for the host; a step that needs the host in it is waited for. docs/architecture.md describes a step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from draftproof.arrays import Ints
from draftproof.engine.drafting.host_proposer import batch_of
from draftproof.engine.drafting.policy import DraftDecision, DraftPolicy, DraftRun, StepObservation
from draftproof.engine.drafting.run_ahead import StepTimes
from draftproof.engine.drafting.token_feedback import Lessons
from draftproof.engine.fault_recovery import (
    FAULTS,
    MAX_CONSECUTIVE_FAILURES,
    MAX_REQUEST_RETRIES,
    StepFault,
    answers,
    requeue_lost,
    with_failed,
)
from draftproof.engine.invariants import check_step
from draftproof.engine.scheduler import Busy, Scheduler
from draftproof.engine.sequence import Sequence, StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step import grammar_masks
from draftproof.engine.step.device_step import DeviceStep, QueuedStep
from draftproof.engine.step.host_logprobs import Extras
from draftproof.engine.step.step_features import features_of
from draftproof.engine.step.step_results import Finish, StepResults, finish_of
from draftproof.errors import EngineDeadError
from draftproof.ops import PendingCopy
from draftproof.propose import Proposer
from draftproof.types import ENDED, NUM_OUT, FinishStatus, StepFeatures

NOTHING = StepResults([], np.zeros((0, 0), np.int64), {})


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that was queued and not read yet; it carries who took part in it."""

    number: int
    planned: StepPlan
    computed: Ints | None  # [B] tokens with KV before it, as far as the host knew; None: all decode
    ran: QueuedStep
    read: PendingCopy
    waits: bool  # the host is needed before anything else is planned
    follows: bool  # it was queued while another was under way: the device went from one to the next
    started: float  # by the clock
    complaints: grammar_masks.GrammarErrors = field(default_factory=dict)
    draft_run: DraftRun = DraftRun()  # of the draft model behind it


class Loop:
    """Runs steps. Knows nothing of text, transport, or who the proposer is."""

    def __init__(
        self,
        scheduler: Scheduler,
        slots: Slots,
        device: DeviceStep,
        proposer: Proposer | None,
        overlap: bool,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.slots = slots
        self.device, self.proposer = device, proposer
        self.sources = proposer.sources if proposer else ()
        self.overlap = overlap
        self.debug = debug
        self._background_work: Callable[[], object] = lambda: None
        self._flights: deque[PendingStep] = deque()
        self._number = 0  # of the last step that was queued
        # whose tokens are still to be read, and the step behind which they come
        self._retiring: deque[tuple[Sequence, Callable[[], Tensor], int]] = deque()
        self._traits: tuple[int, StepFeatures] | None = None
        self._faults = 0  # steps that failed running
        self._lessons = Lessons(slots)
        self._extras = Extras(device, slots, self.sources)

    def set_background_work(self, work: Callable[[], object]) -> None:
        """Call `work` while steps are in flight and the device is busy."""
        self._background_work = work

    @property
    def policy(self) -> DraftPolicy:
        """Return the draft policy."""
        return self.scheduler.policy

    def step(self) -> StepResults:
        """One step's results: of the one before, while the next is under way, if steps overlap."""
        try:
            results = self._step()
        except StepFault as fault:
            results = self._recover(fault)
        if self.debug and not self._flights:
            check_step(self.scheduler, self.slots)
        return results

    def _step(self) -> StepResults:
        if self._flights and (self._host_is_needed() or len(self._flights) >= self.policy.run_ahead.depth):
            return self._settle(self._flights.popleft())
        try:
            flight = self._launch()
        except Busy:  # somebody must be put aside, and for that all must be known
            return self._settle(self._flights.popleft())
        if flight is not None:
            self._flights.append(flight)
            if self.overlap and not flight.waits and len(self._flights) < self.policy.run_ahead.depth:
                return NOTHING
        if len(self._flights) > 1 and self.policy.run_ahead.is_device_busy(time.perf_counter()):
            self._background_work()
            self.scheduler.meanwhile()
            if self.proposer is not None:
                self._tell(self.proposer.do_idle_work)
        return self._settle(self._flights.popleft()) if self._flights else NOTHING

    def end(self, sequence: Sequence) -> None:
        """Remove a request, finished or not; what is still under way of it is nobody's."""
        if sequence.slot >= 0:
            length = int(self.scheduler.mirror.length[sequence.slot])
            self._lessons.hear(self.proposer, sequence.slot, length, self._behind)
            self._stop(sequence.slot)
        self.scheduler.remove(sequence)
        self._rest()

    def leave(self, sequence: Sequence) -> None:
        """It is told to end, by a stop string or a caller; it may be in the middle of anything."""
        if sequence.slot >= 0 and self.scheduler.mirror.prompt_left[sequence.slot] == 0:
            self._finish_keep_pages(sequence)
            self._rest()
        else:
            self.end(sequence)

    def _stop(self, slot: int) -> None:
        if self.proposer is not None:
            self._tell(self.proposer.stop, slot)

    @property
    def _host_drafts(self) -> bool:
        return self.proposer is not None and not self.proposer.graph_safe

    @property
    def _device_drafts(self) -> bool:
        return self.device.drafting.proposer is not None

    def _recover(self, fault: StepFault) -> StepResults:
        """Go on without the steps that are lost; the first of those queued before is read. See `faults`."""
        error, lost, results = fault.__cause__, fault.lost, NOTHING
        reason = f"{type(error).__name__} in a step: {error}"
        self._faults += 1
        if not answers(self.device.ops):
            raise EngineDeadError(f"the device does not answer any more after {reason}") from error
        if self._faults > MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(
                f"{self._faults} steps have failed running, the last by {reason}"
            ) from error
        try:
            if self._flights:
                results = self._settle(self._flights.popleft())
        except StepFault as earlier:
            lost = earlier.lost + lost
        for sequence, *_ in self._retiring:  # its last step may be among those that are lost
            self.scheduler.release_pages(sequence, None)
        self._retiring.clear()
        self._lessons.forget()
        slots = {s: s.slot for s in self.scheduler.running}
        back = requeue_lost(self.scheduler, lost)
        for sequence in back:
            self._stop(slots[sequence])
        failed = [s for s in back if s.num_failures >= MAX_REQUEST_RETRIES]
        what = "%s; %d requests try again, %d fail"
        logging.getLogger("draftproof").error(what, reason, len(back) - len(failed), len(failed))
        for sequence in failed:
            self.end(sequence)
        return with_failed(results, failed, self.device.table_width, reason)

    # --- planning and queueing ----------------------------------------------------------------------

    def _host_is_needed(self) -> bool:
        """By a request that runs, or may run in the next step."""
        scheduler = self.scheduler
        if not scheduler.num_needing_sync:
            return False
        return any(s.needs_sync or s.needs_prompt_logprobs for s in (*scheduler.running, *scheduler.waiting))

    def _launch(self) -> PendingStep | None:
        scheduler, host, started = self.scheduler, self.scheduler.mirror, time.perf_counter()
        waits = self._host_drafts or not self.overlap or self._host_is_needed()
        try:
            if waits and self._device_drafts:
                self._count_drafts()
            planned = scheduler.plan(idle=not self._flights, counted=waits and self._device_drafts)
        except FAULTS as error:  # of what was to be read for it; nobody has begun anything
            raise StepFault([]) from error
        for sequence in scheduler.preempted:
            self._stop(sequence.last_slot)
        if planned is None:
            return None
        computed, lines = None, planned.slots
        if planned.has_prompts or waits:
            # of a prompt nothing is under way
            before = host.length[lines] - host.prompt_left[lines] - planned.chunk
            computed = np.where(planned.chunk > 0, before, host.length[lines] - 1)
        try:
            flight = self._queue(planned, computed, waits, started)
        except FAULTS as error:
            raise StepFault([(planned, computed)]) from error
        if self.device.drafting.failure is not None and self.proposer is not None:
            self._give_up(self.device.drafting.failure)
        return flight

    def _queue(self, planned: StepPlan, computed: Ints | None, waits: bool, started: float) -> PendingStep:
        scheduler, host = self.scheduler, self.scheduler.mirror
        if planned.new_pages or planned.admitted:
            self.slots.grow(planned.new_pages)
            self.slots.fill([sequence.slot_init for sequence in planned.admitted])
        self._start(planned.admitted)
        decision = self._decide(planned) if self._device_drafts else DraftDecision(planned.zeros)
        middle = {}
        complaints: grammar_masks.GrammarErrors = {}
        if scheduler.num_needing_sync:
            complaints = grammar_masks.send_masks(planned, self.slots, self.device)
            middle = {s.slot: s.request for s in planned.sequences if s.has_host_processors}
        keep = self._host_drafts and self.proposer is not None and self.proposer.needs_hidden
        ran = self.device.run(planned, decision, self._traits_now(), middle, keep)
        read = self.device.ops.runtime.fetch(ran.tensors.packed.data)
        host.num_draft[planned.slots] = decision.drafts
        draft_run = self.device.drafting.last_run(len(planned.slots), decision)
        self._number += 1
        return PendingStep(
            number=self._number,
            planned=planned,
            computed=computed,
            ran=ran,
            read=read,
            waits=waits,
            follows=bool(self._flights),
            started=started,
            complaints=complaints,
            draft_run=draft_run,
        )

    def _decide(self, planned: StepPlan, refresh: bool = False) -> DraftDecision:
        scheduler, slots = self.scheduler, planned.slots
        keys = 0 if scheduler.drafts_before_plan else int(scheduler.mirror.length[slots].sum())
        return self.policy.decide(slots, scheduler.draft_room(planned), keys, refresh)

    def _count_drafts(self) -> None:
        """Nothing is under way: the device can say how many drafts there are, not how many there may be."""
        counts = self.device.ops.runtime.fetch(self.slots.columns.num_draft)().numpy()
        lines = np.array([s.slot for s in self.scheduler.running], np.int64)
        self.scheduler.mirror.num_draft[lines] = counts[lines]

    def _traits_now(self) -> StepFeatures:
        """Of all that run: they change seldom."""
        version = self.scheduler.version
        if self._traits is None or self._traits[0] != version:
            given = self.scheduler.running, self.device.sampler.strategies, self.slots.vocab
            self._traits = version, features_of(*given)
        return self._traits[1]

    # --- settling -----------------------------------------------------------------------------------

    def _settle(self, flight: PendingStep) -> StepResults:
        planned = flight.planned
        try:
            waited, was_ready = time.perf_counter(), flight.read.is_ready()
            found = flight.ran.tensors.packed.unpack(flight.read())
            table, columns = found.table[: len(planned.slots)], found.logprobs
            own, source = found.draft_logprobs, found.draft_sources
            own = None if own is None else own[planned.slots]
            source = None if source is None else source[planned.slots]
            extras_of = {}
            if flight.waits and self.scheduler.num_needing_sync and flight.computed is not None:
                starts = self.scheduler.mirror.length[planned.slots]
                extras_of = self._extras.of(planned, flight.computed, starts, flight.ran, table, own, source)
        except FAULTS as error:  # those that were queued behind it went on from what nobody knows
            lost = [flight, *self._flights]
            self._flights.clear()
            raise StepFault([(f.planned, f.computed) for f in lost]) from error
        self._faults = 0
        times = StepTimes(flight.started, waited, time.perf_counter(), flight.follows, was_ready)
        self._release_finished(flight.number)
        for b, extra in extras_of.items():
            planned.sequences[b].num_prompt_logprobs += len(extra.prompt_logprobs or ())
        same = planned.version == self.scheduler.version  # nobody came or went since it was planned
        here = self.scheduler.settle(planned, table[:, NUM_OUT])
        self._observe(flight, table, source, here, times)
        if flight.waits and self.scheduler.num_needing_sync:
            grammar_masks.commit_tokens(planned, table, here)
        endings = self._endings(flight, table, here) if table[:, ENDED].any() else {}
        requests = planned.requests
        if not same or planned.has_prompts:
            told = here & planned.samples
            told[list(extras_of)] |= here[list(extras_of)]
            at = told.nonzero()[0]
            place = {b: i for i, b in enumerate(at.tolist())}
            extras_of = {place[b]: x for b, x in extras_of.items() if b in place}
            endings = {place[b]: x for b, x in endings.items()}
            requests = [requests[b] for b in place]
            table, source = table[at], None if source is None else source[at]
        results = StepResults(requests, table, columns, self.sources, source, endings, extras_of)
        if self._host_drafts:
            self._propose(flight)
        self._rest()
        return results

    def _observe(
        self,
        flight: PendingStep,
        table: Ints,
        sources: np.ndarray | None,
        is_current: np.ndarray,
        times: StepTimes,
    ) -> None:
        planned, scheduler = flight.planned, self.scheduler
        keys = int(scheduler.mirror.length[planned.slots].sum())
        step = StepObservation(planned, table, sources, is_current, keys, times, flight.draft_run)
        seconds = self.policy.observe(step)
        if seconds is not None:
            timings = scheduler.timings
            (timings.prompt_steps if planned.has_prompts else timings.decode_steps).observe(seconds)

    def _endings(self, flight: PendingStep, table: Ints, here: np.ndarray) -> dict[int, Finish]:
        """Let the ended requests go."""
        sampled, endings = flight.ran.tensors.sampled, {}
        errors = sampled.errors if sampled else {}
        for b in (here & (table[:, ENDED] > 0)).nonzero()[0].tolist():
            sequence = flight.planned.sequences[b]
            mine = grammar_masks.errors_by_row(table[b], errors, flight.complaints.get(b))
            ending = finish_of(sequence.request, table[b], mine)
            assert ending is not None
            endings[b] = ending
            if ending.reason == "error":
                if table[b, ENDED] == FinishStatus.NOT_FINITE:  # nobody shall build on its numbers
                    self.scheduler.pages.unpublish(sequence.pages)
                self.end(sequence)
            else:
                self._finish_keep_pages(sequence)
        return endings

    def _finish_keep_pages(self, sequence: Sequence) -> None:
        """It ended by itself: what it said may be asked again. Its pages are free once that is read."""
        scheduler = self.scheduler
        length = int(scheduler.mirror.length[sequence.slot])
        tokens = self.slots.columns.tokens[sequence.slot, :length]
        if (
            not scheduler.prefix_cache.enabled
            or not length // scheduler.page_size > sequence.num_published_pages
        ):
            self.end(sequence)
            return
        try:
            read = self.device.ops.runtime.fetch(tokens)
        except FAULTS:
            self.end(sequence)
            return
        self._retiring.append((sequence, read, self._behind))
        self._lessons.hear(self.proposer, sequence.slot, length, self._behind, read)
        self._stop(sequence.slot)
        scheduler.finish_keep_pages(sequence)

    def _rest(self) -> None:
        """Nothing is under way, or nobody is left to whom it matters: leave no page behind."""
        if not self._flights or not (self.scheduler.running or self.scheduler.waiting):
            self._release_finished()

    @property
    def _behind(self) -> int:
        """The last of the steps that are under way: what is read from the device now comes behind it."""
        return self._flights[-1].number if self._flights else 0

    def _release_finished(self, number: float = math.inf) -> None:
        """Those whose tokens have come by now: the step of this number was read, or nothing is under way."""
        while self._retiring and self._retiring[0][2] <= number:
            sequence, read, _ = self._retiring.popleft()
            ids: list[int] | None = None
            with suppress(*FAULTS):  # then nobody can find it; a device that is gone shows in the next step
                ids = read().tolist()
            self.scheduler.release_pages(sequence, ids)
        if self.proposer is not None:
            self._tell(self._lessons.teach, self.proposer, number)

    # --- the proposer -------------------------------------------------------------------------------

    def _start(self, newcomers: list[Sequence]) -> None:
        for sequence in newcomers:
            if self.proposer is not None:
                self._tell(self.proposer.start, sequence.slot, sequence.request)
        if self.proposer is not None:
            self._tell(self.proposer.prepare)

    def _tell(self, proposer: Callable[..., None], *what: Any) -> None:
        try:
            proposer(*what)
        except Exception as error:  # a plug-in's code may raise anything
            self._give_up(error)

    def _propose(self, flight: PendingStep) -> None:
        assert self.proposer is not None
        planned = flight.planned
        here = [i for i, s in enumerate(planned.sequences) if s.slot >= 0]
        live, lengths = planned.only(here), self.scheduler.mirror.length
        try:
            budget = self._decide(live, refresh=True).drafts  # the device waits anyway
            if not here or not (budget.any() or self.proposer.needs_hidden):
                return
            hidden = flight.ran.hidden if self.proposer.needs_hidden else None
            assert flight.computed is not None  # such a step is waited for
            batch = batch_of(self.slots, planned, here, flight.computed, lengths, budget, hidden)
            self.device.put(live, budget, self.proposer.propose(batch))
            self._count_drafts()
        except Exception as error:  # a plug-in's code may raise anything
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A proposer that fails costs its drafts alone: what was committed goes out, and decoding goes on."""
        if self.debug:
            raise error
        logging.getLogger("draftproof").error("the proposer failed and is switched off", exc_info=error)
        self.proposer = None
        self.device.drafting.switch_off()
