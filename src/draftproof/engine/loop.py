"""Step loop: one path for every step, plain or speculative.

    plan, [ layout, forward, sample, verify, commit, logprobs, propose ], read results

Plain decoding is a window without drafts. The part in brackets is the device program, `DeviceStep`. With
overlap the next steps are planned and queued before the last one is read, so the device does not wait for
the host. A step that needs the host is read before another is planned. See docs/architecture.md.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from draftproof.arrays import Ints
from draftproof.engine.drafting.host_proposer import propose_batch
from draftproof.engine.drafting.policy import DraftDecision, DraftPolicy, StepObservation
from draftproof.engine.drafting.prediction_drafts import PredictionDrafts, with_prediction_source
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
    """Plans, queues and reads steps."""

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
        self.sources = with_prediction_source(proposer)
        self.overlap = overlap
        self.debug = debug
        self._background_work: Callable[[], object] = lambda: None
        self.pending: PendingSteps = deque()
        self.predictions = PredictionDrafts(scheduler, device, source=len(self.sources) - 1)
        self.hooks = ProposerHooks(proposer, device.drafting, self.predictions, debug)
        self.release = RequestRelease(scheduler, slots, self.hooks, self.pending)
        self._number = 0  # number of the last queued step
        self._features: tuple[int, StepFeatures] | None = None
        self._faults = 0  # consecutive failed steps
        self._host_logprobs = Extras(device, slots, self.sources)

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
        """Run the loop once; return the results of one step, with overlap of an earlier one."""
        try:
            results = self._step()
        except StepFault as fault:
            results = self._recover(fault)
        if self.debug and not self.pending:
            check_step(self.scheduler, self.slots)
        return results

    def _step(self) -> StepResults:
        if self.pending and (self._needs_sync() or len(self.pending) >= self.policy.run_ahead.depth):
            return self._read_step(self.pending.popleft())
        try:
            pending_step = self._launch()
        except Busy:  # preemption needs the results of all steps in flight
            return self._read_step(self.pending.popleft())
        if pending_step is not None:
            self.pending.append(pending_step)
            if self.overlap and not pending_step.waits and len(self.pending) < self.policy.run_ahead.depth:
                return NOTHING
        if len(self.pending) > 1 and self.policy.run_ahead.is_device_busy(time.perf_counter()):
            self._background_work()
            self.scheduler.meanwhile()
            self.hooks.do_idle_work()
        return self._read_step(self.pending.popleft()) if self.pending else NOTHING

    def _recover(self, fault: StepFault) -> StepResults:
        """Requeue the requests of lost steps; return the results of the oldest step still in flight."""
        error, lost, results = fault.__cause__, fault.lost, NOTHING
        reason = f"{type(error).__name__} in a step: {error}"
        self._faults += 1
        if not answers(self.device.ops):
            raise EngineDeadError(f"the device does not respond after {reason}") from error
        if self._faults > MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(
                f"{self._faults} consecutive steps have failed, the last by {reason}"
            ) from error
        try:
            if self.pending:
                results = self._read_step(self.pending.popleft())
        except StepFault as earlier:
            lost = earlier.lost + lost
        self.release.drop_unread()
        slots = {s: s.slot for s in self.scheduler.running}
        back = requeue_lost(self.scheduler, lost)
        for sequence in back:
            self.hooks.stop(slots[sequence])
        failed = [s for s in back if s.num_failures >= MAX_REQUEST_RETRIES]
        what = "%s; %d requests are retried, %d fail"
        logging.getLogger("draftproof").error(what, reason, len(back) - len(failed), len(failed))
        for sequence in failed:
            self.release.remove(sequence)
        return with_failed(results, failed, self.device.table_width, reason)

    # --- planning and queueing ----------------------------------------------------------------------

    def _needs_sync(self) -> bool:
        """Return whether a running or waiting request needs the host in its next step."""
        scheduler = self.scheduler
        if not scheduler.num_needing_sync:
            return False
        return any(s.needs_sync or s.needs_prompt_logprobs for s in (*scheduler.running, *scheduler.waiting))

    def _launch(self) -> PendingStep | None:
        scheduler, host, started = self.scheduler, self.scheduler.mirror, time.perf_counter()
        waits = self.hooks.drafts_on_host or not self.overlap or self._needs_sync()
        try:
            if waits and self.hooks.drafts_on_device:
                self._count_drafts()
            planned = scheduler.plan(idle=not self.pending, counted=waits and self.hooks.drafts_on_device)
        except FAULTS as error:  # reading failed before the step began
            raise StepFault([]) from error
        for sequence in scheduler.preempted:
            self.hooks.stop(sequence.last_slot)
        if planned is None:
            return None
        computed, lines = None, planned.slots
        if planned.has_prompts or waits:
            # a prompt has no step in flight
            before = host.length[lines] - host.prompt_left[lines] - planned.chunk
            computed = np.where(planned.chunk > 0, before, host.length[lines] - 1)
        try:
            pending_step = self._queue(planned, computed, waits, started)
        except FAULTS as error:
            raise StepFault([(planned, computed)]) from error
        self.hooks.check_device_failure()
        return pending_step

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
        ran = self.device.run(planned, decision, self._current_features(), middle, keep)
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
            follows=bool(self.pending),
            started=started,
            complaints=complaints,
            draft_run=draft_run,
        )

    def _decide(self, planned: StepPlan, refresh: bool = False) -> DraftDecision:
        scheduler, slots = self.scheduler, planned.slots
        keys = 0 if scheduler.drafts_before_plan else int(scheduler.mirror.length[slots].sum())
        return self.policy.decide(slots, scheduler.draft_room(planned), keys, refresh)

    def _count_drafts(self) -> None:
        """Read the exact number of drafts from the device. No step may be in flight."""
        counts = self.device.ops.runtime.fetch(self.slots.columns.num_draft)().numpy()
        lines = np.array([s.slot for s in self.scheduler.running], np.int64)
        self.scheduler.mirror.num_draft[lines] = counts[lines]

    def _current_features(self) -> StepFeatures:
        """Return the features of the running requests, cached while the running set stays the same."""
        version = self.scheduler.version
        if self._features is None or self._features[0] != version:
            given = self.scheduler.running, self.device.sampler.strategies, self.slots.vocab
            self._features = version, features_of(*given)
        return self._features[1]

    # --- reading results -----------------------------------------------------------------------------------

    def _read_step(self, pending_step: PendingStep) -> StepResults:
        planned = pending_step.planned
        try:
            waited, was_ready = time.perf_counter(), pending_step.read.is_ready()
            found = pending_step.ran.tensors.packed.unpack(pending_step.read())
            table, columns = found.table[: len(planned.slots)], found.logprobs
            own, source = found.draft_logprobs, found.draft_sources
            own = None if own is None else own[planned.slots]
            source = None if source is None else source[planned.slots]
            if len(self.predictions):
                source = self.predictions.mark_sources(planned.slots, source)
            host_logprobs = {}
            if pending_step.waits and self.scheduler.num_needing_sync and pending_step.computed is not None:
                starts = self.scheduler.mirror.length[planned.slots]
                host_logprobs = self._host_logprobs.of(
                    planned, pending_step.computed, starts, pending_step.ran, table, own, source
                )
        except FAULTS as error:  # steps queued behind it used its lost results
            lost = [pending_step, *self.pending]
            self.pending.clear()
            raise StepFault([(f.planned, f.computed) for f in lost]) from error
        self._faults = 0
        times = StepTimes(pending_step.started, waited, time.perf_counter(), pending_step.follows, was_ready)
        self.release.release_finished(pending_step.number)
        for b, one in host_logprobs.items():
            planned.sequences[b].num_prompt_logprobs += len(one.prompt_logprobs or ())
        same = planned.version == self.scheduler.version  # the running set has not changed since the plan
        is_current = self.scheduler.settle(planned, table[:, NUM_OUT])
        self._observe(pending_step, table, source, is_current, times)
        if pending_step.waits and self.scheduler.num_needing_sync:
            grammar_masks.commit_tokens(planned, table, is_current)
        finishes = self._finish_requests(pending_step, table, is_current) if table[:, ENDED].any() else {}
        requests = planned.requests
        if not same or planned.has_prompts:
            reported = is_current & planned.samples
            reported[list(host_logprobs)] |= is_current[list(host_logprobs)]
            at = reported.nonzero()[0]
            place = {b: i for i, b in enumerate(at.tolist())}
            host_logprobs = {place[b]: x for b, x in host_logprobs.items() if b in place}
            finishes = {place[b]: x for b, x in finishes.items()}
            requests = [requests[b] for b in place]
            table, source = table[at], None if source is None else source[at]
        results = StepResults(requests, table, columns, self.sources, source, finishes, host_logprobs)
        if self.hooks.drafts_on_host:
            self._propose(pending_step)
        if len(self.predictions):
            self.hooks.draft_predictions(planned)
        self.release.release_if_idle()
        return results

    def _observe(
        self,
        pending_step: PendingStep,
        table: Ints,
        sources: np.ndarray | None,
        is_current: np.ndarray,
        times: StepTimes,
    ) -> None:
        planned, scheduler = pending_step.planned, self.scheduler
        keys = int(scheduler.mirror.length[planned.slots].sum())
        step = StepObservation(planned, table, sources, is_current, keys, times, pending_step.draft_run)
        seconds = self.policy.observe(step)
        if seconds is not None:
            timings = scheduler.timings
            (timings.prompt_steps if planned.has_prompts else timings.decode_steps).observe(seconds)

    def _finish_requests(
        self, pending_step: PendingStep, table: Ints, is_current: np.ndarray
    ) -> dict[int, Finish]:
        """Release finished requests; return how each finished, by entry."""
        sampled, finishes = pending_step.ran.tensors.sampled, {}
        errors = sampled.errors if sampled else {}
        for b in (is_current & (table[:, ENDED] > 0)).nonzero()[0].tolist():
            sequence = pending_step.planned.sequences[b]
            mine = grammar_masks.errors_by_row(table[b], errors, pending_step.complaints.get(b))
            finish = finish_of(sequence.request, table[b], mine)
            assert finish is not None
            finishes[b] = finish
            if finish.reason == "error":
                if table[b, ENDED] == FinishStatus.NOT_FINITE:  # its KV must not be reused
                    self.scheduler.pages.unpublish(sequence.pages)
                self.release.remove(sequence)
            else:
                self.release.finish_keep_pages(sequence)
        return finishes

    def _propose(self, pending_step: PendingStep) -> None:
        proposer, planned = self.hooks.proposer, pending_step.planned
        assert proposer is not None
        entries = [i for i, s in enumerate(planned.sequences) if s.slot >= 0]
        live, lengths = planned.only(entries), self.scheduler.mirror.length
        try:
            budget = self._decide(live, refresh=True).drafts  # the device is idle anyway
            if not entries or not (budget.any() or proposer.needs_hidden):
                return
            hidden = pending_step.ran.hidden if proposer.needs_hidden else None
            assert pending_step.computed is not None  # set for every step that needs the host
            batch = propose_batch(
                self.slots, planned, entries, pending_step.computed, lengths, budget, hidden
            )
            self.device.put(live, budget, proposer.propose(batch))
            self._count_drafts()
        except Exception as error:  # a plug-in's code may raise anything
            self.hooks.switch_off(error)
