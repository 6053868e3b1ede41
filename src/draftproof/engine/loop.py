"""Step loop: one path for every step, plain or speculative.

    plan, [ layout, forward, sample, verify, commit, logprobs, propose ], read results

Plain decoding is a window without drafts. The part in brackets is the device program, `DeviceStep`. With
overlap the next steps are planned and queued before the last one is read, so the device does not wait for
the host. A step that needs the host is read before another is planned. See docs/architecture.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from draftproof.array_types import Bools, Ints
from draftproof.engine.drafting.policy import DraftDecision, StepObservation
from draftproof.engine.drafting.prediction_drafts import PredictionDrafts, with_prediction_source
from draftproof.engine.drafting.proposer_hooks import ProposerHooks, propose_batch
from draftproof.engine.drafting.run_ahead_depth import StepTimes
from draftproof.engine.fault_recovery import FaultRecovery, StepFault
from draftproof.engine.invariants import check_step
from draftproof.engine.request_release import RequestRelease
from draftproof.engine.scheduler import Scheduler, StepsInFlightError
from draftproof.engine.sequence import PooledRows, SlotMirror, StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step import grammar_masks
from draftproof.engine.step.device_step import DeviceStep, PendingStep
from draftproof.engine.step.mask_thread import MaskThread
from draftproof.engine.step.pooling import pool_rows
from draftproof.engine.step.queued_logprobs import queue_logprobs, read_logprobs
from draftproof.engine.step.reported_drafts import ReportedDrafts
from draftproof.engine.step.step_features import features_of
from draftproof.engine.step.step_results import GrammarErrors, HostOutput, StepResults
from draftproof.errors import DEVICE_ERRORS
from draftproof.propose import Proposer
from draftproof.types import NUM_OUT, StepFeatures

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
        grammar_seconds: float,
        debug: bool = False,
    ) -> None:
        """Set the parts; grammar_seconds: CPU seconds for masks; debug: check invariants at every step."""
        self.scheduler = scheduler
        self.slots = slots
        self.device = device
        self.policy = scheduler.policy
        self.sources = with_prediction_source(proposer)
        self.overlap = overlap
        self.debug = debug
        self._background_work: Callable[[], object] = lambda: None
        self.pending: deque[PendingStep] = deque()  # oldest first
        self.predictions = PredictionDrafts(scheduler, device, source=len(self.sources) - 1)
        self.hooks = ProposerHooks(proposer, device, self.predictions, scheduler, debug)
        self.release = RequestRelease(scheduler, slots, self.hooks, self.pending)
        self._mask_thread = MaskThread(grammar_seconds)
        self._reported_drafts = ReportedDrafts(len(slots.requests))
        self._recovery = FaultRecovery(scheduler, device, self.hooks, self.release)
        self.is_paused = False  # steps in flight are read, and none is queued
        self._number = 0  # number of the last queued step
        self._features: tuple[int, StepFeatures] | None = None

    def set_background_work(self, work: Callable[[], object]) -> None:
        """Call `work` while steps are in flight and the device is busy."""
        self._background_work = work

    @property
    def proposer(self) -> Proposer | None:
        """Return the proposer; None after a failure."""
        return self.hooks.proposer

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
        """Queue a step, or read the oldest one in flight; return the results of a step that was read."""
        if self.is_paused:
            return self._read_step(self.pending.popleft()) if self.pending else NOTHING
        run_ahead = self.policy.run_ahead
        if self.pending and (len(self.pending) >= run_ahead.depth or self._needs_sync()):
            return self._read_step(self.pending.popleft())
        try:
            pending_step = self._launch()
        except StepsInFlightError:  # preemption needs the results of all steps in flight
            return self._read_step(self.pending.popleft())
        if pending_step is not None:
            self.pending.append(pending_step)
            if self.overlap and not pending_step.needs_sync and len(self.pending) < run_ahead.depth:
                return NOTHING
        if len(self.pending) > 1 and run_ahead.is_device_busy(time.perf_counter()):
            self._background_work()
            self.scheduler.do_idle_work()
            self.hooks.do_idle_work()
        return self._read_step(self.pending.popleft()) if self.pending else NOTHING

    def _recover(self, fault: StepFault) -> StepResults:
        """Requeue the requests of lost steps; return the results of the oldest step still in flight."""
        reason, lost, results = self._recovery.check_alive(fault), fault.lost, NOTHING
        try:
            if self.pending:
                results = self._read_step(self.pending.popleft())
        except StepFault as earlier:
            lost = earlier.lost + lost
        return self._recovery.retry(lost, results, reason)

    def _needs_sync(self) -> bool:
        """Return whether a running or waiting request needs the host in its next step."""
        scheduler = self.scheduler
        if not scheduler.num_needing_sync:
            return False
        # A waiting request matters once a slot is free: the next plan may admit it.
        waiting = scheduler.waiting if self.slots.num_free else ()
        return any(sequence.needs_sync for sequence in (*scheduler.running, *waiting))

    def _launch(self) -> PendingStep | None:
        """Plan the next step and queue it; None if no request has a row. StepFault: the step is lost."""
        scheduler, host, started = self.scheduler, self.scheduler.mirror, time.perf_counter()
        needs_sync = self.hooks.drafts_on_host or not self.overlap or self._needs_sync()
        try:
            has_exact_drafts = needs_sync and self.hooks.drafts_on_device
            if has_exact_drafts and scheduler.may_have_drafts:
                self._count_drafts()
            planned = scheduler.plan(is_idle=not self.pending, has_exact_drafts=has_exact_drafts)
        except DEVICE_ERRORS as error:  # reading failed before the step began
            raise StepFault([]) from error
        for sequence in scheduler.preempted:
            self.hooks.stop(sequence.last_slot)
        if planned is None:
            return None
        computed = computed_before(planned, host) if planned.has_prompts or needs_sync else None
        try:
            pending_step = self._queue(planned, computed, needs_sync, started)
        except DEVICE_ERRORS as error:
            raise StepFault([(planned, computed)]) from error
        self.hooks.check_device_failure()
        return pending_step

    def _queue(self, planned: StepPlan, computed: Ints | None, sync: bool, started: float) -> PendingStep:
        """Fill the slots of admitted requests, send masks, queue the step, its drafts and its copy."""
        scheduler, host = self.scheduler, self.scheduler.mirror
        if planned.new_pages or planned.admitted:
            self.slots.grow(planned.new_pages)
            self.slots.fill(planned.admitted)
        self._reported_drafts.start(planned.admitted)
        self.hooks.start(planned.admitted)
        decision, host_processed = DraftDecision(planned.zeros), {}
        if self.hooks.drafts_on_device:
            decision = self.device.deferred_kv.plan(planned, self._decide(planned.slots, planned.is_sampled))
        grammar_errors: GrammarErrors = {}
        if scheduler.num_needing_sync:
            grammar_errors = grammar_masks.send_masks(planned, self.slots, self.device, self._mask_thread)
            host_processed = {s.slot: s.request for s in planned.sequences if s.has_host_processors}
        keep = self.hooks.needs_hidden_on_host
        features = self._current_features()
        tensors, hidden = self.device.run(planned, decision, features, host_processed, keep)
        queued = None
        if scheduler.num_with_queued_logprobs:
            queued = queue_logprobs(self.device, planned, computed, tensors, hidden)
        read = self.device.ops.runtime.fetch(tensors.packed.data)
        host.num_draft[planned.slots] = decision.drafts
        self._number += 1
        return PendingStep(
            number=self._number,
            planned=planned,
            computed=computed,
            tensors=tensors,
            hidden=hidden,
            read=read,
            needs_sync=sync,
            is_queued_behind=bool(self.pending),
            started=started,
            grammar_errors=grammar_errors,
            draft_run=self.device.drafting.last_run(len(planned.slots), decision),
            queued_logprobs=queued,
        )

    def _decide(self, slots: Ints, is_sampled: Bools, refresh: bool = False) -> DraftDecision:
        """Return the drafts to make behind the step; is_sampled [B]: of `StepPlan`."""
        scheduler = self.scheduler
        keys = 0 if scheduler.drafts_before_plan else int(np.add.reduce(scheduler.mirror.length[slots]))
        return self.policy.decide(slots, scheduler.draft_room(slots, is_sampled), keys, refresh)

    def _count_drafts(self) -> None:
        """Read the exact number of drafts from the device. No step may be in flight."""
        counts = self.device.ops.runtime.fetch(self.slots.columns.num_draft)().numpy()
        slots, host = np.array([s.slot for s in self.scheduler.running], np.int64), self.scheduler.mirror
        host.num_draft[slots], host.matched[slots] = counts[slots], self.device.drafting.match_lengths[slots]

    def _current_features(self) -> StepFeatures:
        """Return the features of the running requests, cached while the running set stays the same."""
        version = self.scheduler.version
        if self._features is None or self._features[0] != version:
            given = self.scheduler.running, self.device.sampler.strategies, self.slots.vocab
            self._features = version, features_of(*given)
        return self._features[1]

    def _read_step(self, step: PendingStep) -> StepResults:
        """Wait for a step, record its tokens, finish ended requests, and return the results."""
        planned, scheduler = step.planned, self.scheduler
        from_host: dict[int, HostOutput] = {}
        pooled: dict[int, PooledRows] = {}
        try:
            wait_began_at, was_ready = time.perf_counter(), step.read.is_ready()
            found = step.tensors.packed.unpack(step.read(), planned.num_drafts > 0)
            table, source = found.table[: len(planned.slots)], found.draft_sources
            source = None if source is None else source[planned.slots]
            has_predictions = len(self.predictions) > 0
            if has_predictions:
                source = self.predictions.mark_sources(planned.slots, source)
            drafts = self._reported_drafts.columns(planned, found, source, scheduler.mirror.length)
            if step.queued_logprobs is not None:
                from_host = read_logprobs(planned, step.queued_logprobs, found, self.slots.vocab)
            if step.needs_sync and scheduler.num_needing_sync and step.computed is not None:
                pooled = pool_rows(self.device, step, table)
        except DEVICE_ERRORS as error:  # steps queued behind it used its lost results
            lost = [step, *self.pending]
            self.pending.clear()
            raise StepFault([(f.planned, f.computed) for f in lost]) from error
        self._recovery.record_success()
        read_at = time.perf_counter()
        times = StepTimes(step.started, wait_began_at, read_at, step.is_queued_behind, was_ready)
        self.release.release_finished(step.number)
        record_prompt_results(planned, from_host, pooled)
        is_same = planned.version == scheduler.version  # the running set has not changed since the plan
        is_current = scheduler.settle(planned, table[:, NUM_OUT])
        self._observe(step, table, source, is_current, times)
        if step.needs_sync and scheduler.num_needing_sync:
            grammar_masks.commit_tokens(planned, table, is_current)
        finishes = self.release.finish_ended(step, table, is_current)
        results = StepResults(
            planned.requests, table, found.logprobs, self.sources, source, finishes, from_host, drafts
        )
        if not is_same or planned.has_prompts:
            is_reported = is_current & planned.is_sampled
            is_reported[list(from_host)] |= is_current[list(from_host)]
            results = results.only(is_reported.nonzero()[0])
        if self.hooks.drafts_on_host:
            self._propose(step)
        if has_predictions:
            self.hooks.draft_predictions(planned)
        self.release.release_if_idle()
        return results

    def _observe(
        self, step: PendingStep, table: Ints, sources: np.ndarray | None, is_current: Bools, times: StepTimes
    ) -> None:
        """Record results and times of a step in the draft policy."""
        planned, scheduler = step.planned, self.scheduler
        keys = int(np.add.reduce(scheduler.mirror.length[planned.slots]))
        observed = StepObservation(planned, table, sources, is_current, keys, times, step.draft_run)
        seconds = self.policy.observe(observed)
        if seconds is not None:
            timings = scheduler.timings
            (timings.prompt_steps if planned.has_prompts else timings.decode_steps).observe(seconds)

    def _propose(self, step: PendingStep) -> None:
        """Make the next drafts with a host proposer and store them on the device."""
        proposer, planned = self.hooks.proposer, step.planned
        assert proposer is not None
        entries = [i for i, s in enumerate(planned.sequences) if s.slot >= 0]
        slots, lengths = planned.slots[entries], self.scheduler.mirror.length
        try:
            budget = self._decide(slots, planned.is_sampled[entries], refresh=True).drafts
            if not entries or not (budget.any() or proposer.needs_hidden):
                return
            hidden = step.hidden if proposer.needs_hidden else None
            assert step.computed is not None  # set for every step that needs the host
            batch = propose_batch(self.slots, planned, entries, step.computed, lengths, budget, hidden)
            self.device.store_host_drafts(slots, budget, proposer.propose(batch))
            self._count_drafts()
        except Exception as error:  # a plug-in's code may raise anything
            self.hooks.switch_off(error)


def computed_before(planned: StepPlan, host: SlotMirror) -> Ints:
    """Return the tokens [B] with KV before a step that was just planned; a prompt has no step in flight."""
    slots = planned.slots
    before = host.length[slots] - host.prompt_left[slots] - planned.chunk
    return np.where(planned.chunk > 0, before, host.length[slots] - 1)


def record_prompt_results(
    planned: StepPlan, from_host: dict[int, HostOutput], pooled: dict[int, PooledRows]
) -> None:
    """Record prompt logprobs and pooled rows of a step by entry; add embeddings to `from_host`."""
    for b, one in from_host.items():
        planned.sequences[b].num_prompt_logprobs += len(one.prompt_logprobs or ())
    for b, rows in pooled.items():
        planned.sequences[b].pooled = rows
        if planned.is_sampled[b]:
            from_host[b] = HostOutput(embedding=rows.mean())
