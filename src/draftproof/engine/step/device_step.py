"""Device program of a step: from a plan to committed tokens, over tensors that never move.

    layout, forward, sample, verify, commit, logprobs, propose

No function here waits for the device unless a request's options need the host in the middle of the step. A
step of decoding requests is one graph, keyed by its rows and features. A step with prompts is two graphs:
layout and forward pass by the number of rows, everything behind it by the number of logits rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.engine.drafting.deferred_kv import DeferredKV
from draftproof.engine.drafting.device_proposer import DraftRunner, check_draft
from draftproof.engine.drafting.policy import DraftDecision, DraftRun
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.engine.step.graph_cache import GraphCache, GraphKey, GraphTask
from draftproof.engine.step.logprob_pass import SeparateLogprobs, do_nothing, logprob_pass
from draftproof.engine.step.result_buffer import PackedResults
from draftproof.engine.step.step_buffers import PlanBuffer, StepBuffers
from draftproof.engine.step.step_features import LOGPROB_WIDTHS
from draftproof.engine.step.step_results import GrammarErrors
from draftproof.models.runner import Runner
from draftproof.ops import GraphPool, Layout, PendingCopy
from draftproof.propose import Proposer
from draftproof.types import (
    NO_DRAFT_COSTS,
    Choice,
    Draft,
    DraftCosts,
    DraftSpec,
    Outcome,
    Request,
    StepFeatures,
    Windows,
)
from draftproof.verify.sampler import Sampled, Sampler

if TYPE_CHECKING:  # it queues behind a step
    from draftproof.engine.step.queued_logprobs import QueuedLogprobs

T = TypeVar("T")
NO_REQUESTS: Mapping[int, Request] = {}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Tensors that a step leaves on the device; valid until the next step."""

    windows: Windows
    outcome: Outcome
    logits: Tensor | None  # [L, V]; None: no entry sampled
    sampled: Sampled | None
    packed: PackedResults  # what the host reads
    write_logprobs: Callable[[], None] | None = None  # the logprob pass, where the step leaves it out


class PreparedDecode(NamedTuple):
    """What runs a decode step of a size, kept while the features of the running requests are the same object.

    Host time limits small models, and most steps repeat the size and the features of an earlier one.
    """

    features: StepFeatures
    run: Callable[[], StepTensors]
    write_logprobs: Callable[[], object] | None  # captured logprob pass that runs beside the drafts


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step in flight: queued on the device and not read yet."""

    number: int
    planned: StepPlan
    computed: Ints | None  # [B] tokens with KV before the step; None: all entries decode
    tensors: StepTensors
    hidden: Tensor | None  # [R, hidden], if the host needs it
    read: PendingCopy
    needs_sync: bool  # the host must read the step before it plans another
    is_queued_behind: bool  # queued while another step was in flight: the device went from one to the next
    started: float  # `time.perf_counter` when planning began
    grammar_errors: GrammarErrors
    draft_run: DraftRun  # of the draft model behind the step
    queued_logprobs: QueuedLogprobs | None  # rows of single requests; None: no request has any


class DeviceStep:
    """Runs steps on the device. Owns their buffers and captured graphs."""

    def __init__(
        self,
        runner: Runner,
        slots: Slots,
        sampler: Sampler,
        proposer: Proposer | None,
        max_rows: int,
        enforce_eager: bool = False,
    ) -> None:
        """`enforce_eager`: run every step op by op, without graphs."""
        self.ops = runner.ops
        self.runner = runner
        self.slots = slots
        self.sampler = sampler
        num_slots, k = slots.columns.draft.shape
        self.max_rows = self.ops.runtime.bucket(max_rows)
        self.max_logits = self.ops.runtime.bucket(min(max_rows, num_slots * (k + 1)))
        hidden_size = runner.model.config.hidden_size
        hidden_row = torch.zeros(hidden_size, dtype=runner.dtype, device=slots.device)
        self.plan_buffer = PlanBuffer(num_slots, slots.device, self.ops)
        self.plan = self.plan_buffer.columns
        self.buffers = StepBuffers(slots, self.max_rows, self.max_logits, hidden_row)
        self.drafting = DraftRunner(proposer, slots, self.max_rows, hidden_row)
        self.graphs = GraphCache(self.ops, self.load_empty_plan, enabled=not enforce_eager)
        self.logprobs = SeparateLogprobs(self.ops, self.graphs, self.drafting)
        self.deferred_kv = DeferredKV(self.graphs, self.drafting, self.max_rows, runner.page_size)
        self._prepared: dict[int, PreparedDecode] = {}  # by the rows of the step

    # --- running ------------------------------------------------------------------------------------

    def run(
        self,
        planned: StepPlan,
        decision: DraftDecision,
        features: StepFeatures,
        host_processed: Mapping[int, Request],
        keep_hidden: bool,
    ) -> tuple[StepTensors, Tensor | None]:
        """Queue a step; return its tensors, and its hidden rows [R, hidden] with `keep_hidden`.

        host_processed: requests, by slot, whose logits the host processes within the step.
        """
        rows = self.ops.runtime.bucket(planned.num_rows)
        if features.has_grammar:
            self.buffers.masks()
        draft = self._draft_after(rows, planned, decision, features)
        if not host_processed and not keep_hidden and not planned.has_prompts:
            prepared = self._prepared.get(rows)
            if prepared is None or prepared.features is not features:
                prepared = self._prepare_decode(rows, features)
            self.plan_buffer.load(planned, decision.drafts)
            tensors = prepared.run()
            logprobs = self.logprobs.start(prepared.write_logprobs, tensors)
            draft()
            logprobs()
            return tensors, None
        logits, usual = self.ops.runtime.bucket(max(1, planned.num_logits)), self.num_output_rows(rows)
        output_rows = 0 if keep_hidden or planned.needs_prompt_rows else usual
        forward_task = self.forward_task(rows, output_rows)
        forward = forward_task.function
        if output_rows == usual:
            forward = self.graphs.get(forward_task)
        elif planned.needs_prompt_rows:
            forward = self.graphs.get_repeated(forward_task)
        task = self.verify_task(logits, features)
        if not planned.num_logits:
            verify: Callable[[], StepTensors] = partial(self._advance_prompts, features)
        elif host_processed:
            verify = partial(self._verify, logits, features, host_processed)
        else:
            verify = self.capture(task)
        self.plan_buffer.load(planned, decision.drafts)
        hidden, picked = forward(), self.buffers.picked[:logits]
        if output_rows:
            picked.copy_(hidden[:logits])
        else:
            torch.index_select(hidden, 0, self.buffers.logits_rows[:logits], out=picked)
        tensors = verify()
        write = None if host_processed or tensors.logits is None else self.logprobs.captured(task.key)
        logprobs = self.logprobs.start(write, tensors)
        draft()
        logprobs()
        return tensors, None if output_rows else hidden

    def capture(self, task: GraphTask[T]) -> Callable[[], T]:
        """Return the captured function of a task, after its logprob pass is captured, if that is apart."""
        graph = self.graphs.get(task)
        if self.logprobs.is_missing(task.key):
            self.load_empty_plan()
            tensors = graph()
            assert isinstance(tensors, StepTensors)
            self.logprobs.capture(task.key, tensors)
        return graph

    def _prepare_decode(self, rows: int, features: StepFeatures) -> PreparedDecode:
        """Capture a decode step, if it is not captured yet, and keep what runs it."""
        task = self.decode_task(rows, features)
        prepared = PreparedDecode(features, self.capture(task), self.logprobs.captured(task.key))
        self._prepared[rows] = prepared
        return prepared

    def _draft_after(
        self, rows: int, planned: StepPlan, decision: DraftDecision, features: StepFeatures
    ) -> Callable[[], object]:
        """Return the call that makes drafts behind the step, for a proposer with a model of its own."""
        needs_probs = self.drafting.needs_probs(features, self.sampler.strategies)
        if not self.drafting.runs_behind_steps:
            return do_nothing
        self.drafting.reserve_ranking(features, min(LOGPROB_WIDTHS[-1], self.slots.vocab))
        self.drafting.begin_step()
        if not (decision.runs_model or decision.catch_up_rows or self.drafting.is_hybrid_member):
            return do_nothing
        entries = self.drafting.captured_entries(len(planned.slots), rows)
        spec = self.drafting.spec(planned, decision, features, needs_probs)
        task = self.draft_task(rows, entries, spec, decision.costs)
        # drafts beside prompts are of many sizes
        draft = self.graphs.get_repeated(task) if planned.has_prompts else self.graphs.get(task)
        if not decision.catch_up_rows:
            return draft
        catch_up = self.deferred_kv.catch_up(decision.catch_up_rows)
        return lambda: (catch_up(), draft())

    def store_host_drafts(self, slots: Ints, budget: Ints, draft: Draft) -> None:
        """Store the drafts of a proposer on the host, for the requests in `slots`."""
        send, columns = self.ops.runtime.send, self.slots.columns
        draft = check_draft(draft, columns.draft[: len(slots)], self.drafting.num_sources)
        sent_slots, sent_budget = send(torch.from_numpy(slots)), send(torch.from_numpy(budget))
        self.drafting.store(sent_slots, sent_budget, draft)

    def set_masks(self, places: Tensor, masks: Tensor) -> None:
        """Store grammar masks [n, words] of the next step, for the rows at slot * (K + 1) + depth."""
        lines = self.buffers.masks().view(-1, masks.shape[1])
        lines[self.ops.runtime.send(places)] = self.ops.runtime.send(masks)

    def load_empty_plan(self) -> None:
        """Load and lay out an empty plan: a step that runs now has no effect."""
        self.plan_buffer.load(None)
        self._lay_out(self.max_rows, self.max_logits)

    # --- what can be captured -----------------------------------------------------------------------

    def decode_task(self, rows: int, features: StepFeatures) -> GraphTask[StepTensors]:
        """Return the whole step of `rows` rows in which every request decodes."""
        function = partial(self._decode_step, rows, features)
        return GraphTask(GraphKey("decode", rows, variant=features), function)

    def forward_task(self, rows: int, output_rows: int) -> GraphTask[Tensor]:
        """Return layout and forward pass of a step with prompts, with all rows if `output_rows` is 0."""
        function = partial(self._forward_only, rows, output_rows)
        return GraphTask(GraphKey("forward", rows, output_rows), function)

    def verify_task(self, logits: int, features: StepFeatures) -> GraphTask[StepTensors]:
        """Return everything behind the forward pass, for `logits` logits rows."""
        function = partial(self._verify, logits, features, NO_REQUESTS)
        return GraphTask(GraphKey("verify", logits, variant=features), function)

    def draft_task(
        self, rows: int, entries: int, spec: DraftSpec, costs: DraftCosts = NO_DRAFT_COSTS
    ) -> GraphTask[None]:
        """Return the drafts behind a step of `rows` rows."""

        def draft() -> None:
            self.drafting.draft(self.plan, self._layout(rows, 0).rows, entries, spec, costs)

        return GraphTask(GraphKey("draft", rows, entries, spec), draft, GraphPool.DRAFT)

    # --- the stages ---------------------------------------------------------------------------------

    def _lay_out(self, rows: int, logits: int) -> Layout:
        layout = self._layout(rows, logits)
        self.ops.step.layout(self.plan, self.slots.columns, self.runner.page_size, layout)
        return layout

    def _layout(self, rows: int, logits: int) -> Layout:
        return self.buffers.layout(rows, logits, self.drafting.probs)

    def _decode_step(self, size: int, features: StepFeatures) -> StepTensors:
        layout = self._lay_out(size, size)  # every row of a decoding entry has logits
        logits, hidden, *tapped = self.runner.forward_logits(layout.rows)
        self.drafting.store_target_features(hidden, *tapped)
        return self._sample_and_commit(logits, layout.windows, features, NO_REQUESTS)

    def num_output_rows(self, rows: int) -> int:
        """Return how many rows the last layer of a pass with prompts keeps; 0: all.

        Only the last row of a prompt has logits. The number leaves room for all requests that may decode,
        with all their drafts, so a step never needs another pass than the one captured for its size.
        """
        gathers = 0 < self.ops.forward.gather_last_layer_from_rows <= rows and 2 * self.max_logits <= rows
        return self.max_logits if gathers and not self.drafting.runs_behind_steps else 0

    def _forward(self, size: int, output_rows: int = 0) -> Tensor:
        """Return hidden rows [size, hidden]; with `output_rows`, of the logits rows [output_rows, hidden]."""
        layout = self._layout(size, output_rows)
        if output_rows:
            return self.runner.forward_selected(layout.rows, layout.at)
        hidden, *tapped = self.runner.forward_tapped(layout.rows)
        self.drafting.store_target_features(hidden, *tapped)
        return hidden

    def _forward_only(self, size: int, output_rows: int) -> Tensor:
        """Run layout and forward pass; the result lies outside the graphs' memory pool."""
        self._lay_out(size, self.max_logits)
        hidden, kept = self._forward(size, output_rows), self.buffers.hidden
        return hidden if kept is None else kept[: len(hidden)].copy_(hidden)

    def _verify(
        self, size: int, features: StepFeatures, host_processed: Mapping[int, Request]
    ) -> StepTensors:
        """Sample and commit from the hidden rows in `buffers.picked`."""
        logits, windows = self.runner.logits(self.buffers.picked[:size]), self._layout(0, size).windows
        return self._sample_and_commit(logits, windows, features, host_processed)

    def _advance_prompts(self, features: StepFeatures) -> StepTensors:
        """Commit a step in which no entry has reached the end of its prompt."""
        windows = self._layout(0, 1).windows
        none = torch.zeros_like(windows.slot)
        outcome, packed = self.buffers.outcome(len(self.plan.slots), len(none))
        self.ops.step.commit(self.plan, windows, Choice(none), none, outcome)
        return StepTensors(
            windows, outcome, None, None, _pack_drafts(packed, features, windows, self.drafting)
        )

    def _sample_and_commit(
        self, logits: Tensor, windows: Windows, features: StepFeatures, host_processed: Mapping[int, Request]
    ) -> StepTensors:
        """Run every stage behind the logits [L, V] of the windows' rows."""
        sampled = self.sampler(logits, windows, features, host_processed)
        outcome, packed = self.buffers.outcome(self.plan.slots.shape[0], logits.shape[0])
        self.ops.step.commit(self.plan, windows, sampled.choice, sampled.bad, outcome)

        write = logprob_pass(self.ops, features, logits, sampled.processed, windows, outcome, packed)
        if self.drafting.runs_behind_steps:  # the pass runs beside the drafts behind the step
            _pack_drafts(packed, features, windows, self.drafting)
            return StepTensors(windows, outcome, logits, sampled, packed, write)
        logprobs = self.drafting.run_parallel(write, features)
        _pack_drafts(packed, features, windows, self.drafting)
        if self.drafting.drafts_in_step:
            self.drafting.draft(self.plan)
        logprobs()
        return StepTensors(windows, outcome, logits, sampled, packed)


def _pack_drafts(
    packed: PackedResults, features: StepFeatures, windows: Windows, drafting: DraftRunner
) -> PackedResults:
    """Add what is known of the verified drafts, before the next drafts overwrite it."""
    columns = drafting.slots.columns
    if features.needs_draft_logprobs:
        packed.add_copy("draft_tokens", windows.draft)
        packed.add_copy("draft_logprobs", columns.draft_logprob)
        if (ranking := drafting.ranking(features.draft_top)) is not None:
            packed.add_copy("draft_ranks", ranking.ranks)
            packed.add_copy("draft_top_ids", ranking.top_ids)
            packed.add_copy("draft_top_logprobs", ranking.top_logprobs)
    if drafting.num_sources > 1:
        packed.add_copy("draft_sources", columns.draft_source)
    return packed.complete()
