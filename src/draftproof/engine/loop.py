"""The loop: one step of every running request, plain or speculative, on one path.

    plan, [ layout, forward, sample, judge, commit, logprobs, propose ], settle

Plain decoding is a window without drafts. What is in brackets is the device's part, `DeviceStep`. With
overlap the next steps are planned and queued before the last one is read (`pacing`), so the device never
waits for the host; a step that needs the host in it is waited for. docs/architecture.md describes a step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from draftproof.arrays import Ints
from draftproof.engine.drafting.host_proposer import batch_of
from draftproof.engine.drafting.policy import DraftDecision, DraftPolicy, StepObservation
from draftproof.engine.drafting.run_ahead import StepTimes
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
from draftproof.engine.pending import PendingStep, PendingSteps
from draftproof.engine.proposer_hooks import ProposerHooks
from draftproof.engine.request_release import RequestRelease
from draftproof.engine.scheduler import Busy, Scheduler
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step import grammar_masks
from draftproof.engine.step.device_step import DeviceStep
from draftproof.engine.step.host_logprobs import Extras
from draftproof.engine.step.step_features import features_of
from draftproof.engine.step.step_results import Finish, StepResults, finish_of
from draftproof.errors import EngineDeadError
from draftproof.propose import Proposer
from draftproof.types import ENDED, NUM_OUT, FinishStatus, StepFeatures

NOTHING = StepResults([], np.zeros((0, 0), np.int64), {})


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
        self.device = device
        self.sources = proposer.sources if proposer else ()
        self.overlap = overlap
        self.debug = debug
        self._background_work: Callable[[], object] = lambda: None
        self._flights: PendingSteps = deque()
        self.hooks = ProposerHooks(proposer, device.drafting, debug)
        self.release = RequestRelease(scheduler, slots, self.hooks, self._flights)
        self._number = 0  # of the last step that was queued
        self._traits: tuple[int, StepFeatures] | None = None
        self._faults = 0  # steps that failed running
        self._extras = Extras(device, slots, self.sources)

    def set_background_work(self, work: Callable[[], object]) -> None:
        """Call `work` while steps are in flight and the device is busy."""
        self._background_work = work

    @property
    def proposer(self) -> Proposer | None:
        """Return the proposer; None after a failure."""
        return self.hooks.proposer

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
            self.hooks.do_idle_work()
        return self._settle(self._flights.popleft()) if self._flights else NOTHING

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
        self.release.drop_unread()
        slots = {s: s.slot for s in self.scheduler.running}
        back = requeue_lost(self.scheduler, lost)
        for sequence in back:
            self.hooks.stop(slots[sequence])
        failed = [s for s in back if s.num_failures >= MAX_REQUEST_RETRIES]
        what = "%s; %d requests try again, %d fail"
        logging.getLogger("draftproof").error(what, reason, len(back) - len(failed), len(failed))
        for sequence in failed:
            self.release.remove(sequence)
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
        waits = self.hooks.drafts_on_host or not self.overlap or self._host_is_needed()
        try:
            if waits and self.hooks.drafts_on_device:
                self._count_drafts()
            planned = scheduler.plan(idle=not self._flights, counted=waits and self.hooks.drafts_on_device)
        except FAULTS as error:  # of what was to be read for it; nobody has begun anything
            raise StepFault([]) from error
        for sequence in scheduler.preempted:
            self.hooks.stop(sequence.last_slot)
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
        self.hooks.check_device_failure()
        return flight

    def _queue(self, planned: StepPlan, computed: Ints | None, waits: bool, started: float) -> PendingStep:
        scheduler, host = self.scheduler, self.scheduler.mirror
        if planned.new_pages or planned.admitted:
            self.slots.grow(planned.new_pages)
            self.slots.fill([sequence.slot_init for sequence in planned.admitted])
        self.hooks.start(planned.admitted)
        decision = self._decide(planned) if self.hooks.drafts_on_device else DraftDecision(planned.zeros)
        middle = {}
        complaints: grammar_masks.GrammarErrors = {}
        if scheduler.num_needing_sync:
            complaints = grammar_masks.send_masks(planned, self.slots, self.device)
            middle = {s.slot: s.request for s in planned.sequences if s.has_host_processors}
        keep = self.hooks.needs_hidden_on_host
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
        self.release.release_finished(flight.number)
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
        if self.hooks.drafts_on_host:
            self._propose(flight)
        self.release.release_if_idle()
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
                self.release.remove(sequence)
            else:
                self.release.finish_keep_pages(sequence)
        return endings

    def _propose(self, flight: PendingStep) -> None:
        proposer, planned = self.hooks.proposer, flight.planned
        assert proposer is not None
        here = [i for i, s in enumerate(planned.sequences) if s.slot >= 0]
        live, lengths = planned.only(here), self.scheduler.mirror.length
        try:
            budget = self._decide(live, refresh=True).drafts  # the device waits anyway
            if not here or not (budget.any() or proposer.needs_hidden):
                return
            hidden = flight.ran.hidden if proposer.needs_hidden else None
            assert flight.computed is not None  # such a step is waited for
            batch = batch_of(self.slots, planned, here, flight.computed, lengths, budget, hidden)
            self.device.put(live, budget, proposer.propose(batch))
            self._count_drafts()
        except Exception as error:  # a plug-in's code may raise anything
            self.hooks.switch_off(error)
