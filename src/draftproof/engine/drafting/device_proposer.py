"""Runs a device proposer: its input after a commit, and where its drafts are stored.

A proposer that reads committed tokens alone drafts at the end of the step. One with a model of its own
(`runs_behind_steps`) drafts behind the step, from the step's rows and their features, in a graph of its own.
Graphs are kept by rows, entries and `DraftSpec`; `step/warmup` captures and times them at start-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from draftproof.engine.drafting.budget import round_counts
from draftproof.engine.drafting.policy import DraftDecision, DraftRun
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.errors import ConfigError
from draftproof.ops import Runtime
from draftproof.propose.base import DeviceProposer, Proposer
from draftproof.types import (
    NO_DRAFT_COSTS,
    DeviceBatch,
    Draft,
    DraftCosts,
    DraftRanking,
    DraftSpec,
    PlanColumns,
    Rows,
    StepFeatures,
)
from draftproof.verify.base import Strategy

T = TypeVar("T")
MAX_FEW_ENTRIES = 8  # entries up to which drafts are captured for nearly any number of rounds


class DraftRunner:
    """Owner of the device proposer, the features of a step's rows, and the distributions of drafts."""

    def __init__(self, proposer: Proposer | None, slots: Slots, max_rows: int, hidden_row: Tensor) -> None:
        """Allocate the features; `hidden_row` gives width, dtype and device of a hidden row."""
        self.proposer = proposer if isinstance(proposer, DeviceProposer) else None
        if proposer is not None and proposer.graph_safe and self.proposer is None:
            raise ConfigError(f"{type(proposer).__name__} is graph_safe: it must be a DeviceProposer")
        self.failure: Exception | None = None  # of the proposer, which is then switched off
        self.k: int = slots.columns.draft.shape[1]
        self.num_sources = len(proposer.sources) if proposer is not None else 0
        self.reports_probs = proposer is not None and proposer.reports_probs
        self.slots = slots
        self._queued_rounds = 0  # behind the last step, where it is not waited for
        self._seconds = 0.0  # of the model behind the last step, where it is waited for
        self._probs: Tensor | None = None  # [S + 1, K, V]; padding writes to the last line
        self._slot_probs: Tensor | None = None  # [S, K, V] of it
        self._ranking: DraftRanking | None = None  # [S + 1, K]; padding writes to the last line
        self.match_lengths = np.zeros(len(slots.requests) + 1, np.int64)  # padding writes to the last one
        count = 0
        if self.proposer is not None and self.proposer.runs_behind_steps:
            count = self.proposer.needs_hidden + len(self.proposer.taps)
        size = (max_rows, count * hidden_row.shape[-1])
        self._target_features = hidden_row.new_zeros(size) if count else None

    @property
    def runs_behind_steps(self) -> bool:
        """Return whether the proposer has a model that runs behind steps."""
        return self.proposer is not None and self.proposer.runs_behind_steps

    @property
    def drafts_in_step(self) -> bool:
        """Return whether drafts are made at the end of the step, from committed tokens alone."""
        return self.proposer is not None and not self.proposer.runs_behind_steps

    @property
    def is_hybrid_member(self) -> bool:
        """Return whether the model is a member of a hybrid."""
        return self.proposer is not None and self.proposer.model_source >= 0

    @property
    def defers_kv(self) -> bool:
        """Return whether the model does not run behind steps without drafts and prompts."""
        return self.proposer is not None and self.proposer.defers_kv

    @property
    def depends_on_prompts(self) -> bool:
        """Return whether drafts behind a step with prompts are computed in another way."""
        return self.proposer is not None and self.proposer.depends_on_prompts

    @property
    def timed_rounds(self) -> int:
        """Return how many rounds are timed at start-up."""
        if self.proposer is not None and self.proposer.stops_early:
            return 1
        return (self.k + 1) // 2 if self.is_hybrid_member else self.k

    def run_parallel(self, function: Callable[[], T], features: StepFeatures) -> Callable[[], T]:
        """Run the logprobs of a step beside the drafts at its end, which do not need them."""
        ops = self.slots.ops
        if self.drafts_in_step and features.has_logprobs:
            return ops.runtime.run_parallel(function)
        return Runtime.run_parallel(ops.runtime, function)  # at once

    def last_run(self, num_requests: int, decision: DraftDecision) -> DraftRun:
        """Return what the draft model did behind the last step."""
        if not self.runs_behind_steps:
            return DraftRun()
        asynchronous = self.slots.ops.runtime.asynchronous
        rounds = self._queued_rounds
        if not asynchronous:
            assert self.proposer is not None
            rounds = min(decision.rounds, self.proposer.num_rounds_run)
        return DraftRun(num_requests if rounds else 0, rounds, 0.0 if asynchronous else self._seconds)

    @property
    def probs(self) -> Tensor | None:
        """Return the distributions [S, K, V] of drafts; None until a strategy needs them."""
        return self._slot_probs

    def needs_probs(self, features: StepFeatures, strategies: Sequence[Strategy]) -> bool:
        """Return whether a step reads draft distributions; they are allocated when first needed."""
        needed = self.reports_probs and any(strategies[i].needs_draft_probs for i in features.strategies)
        if needed and self._probs is None:
            shape = (len(self.slots.requests) + 1, self.k, self.slots.vocab)
            self._probs = torch.zeros(shape, device=self.slots.device)
            self._slot_probs = self._probs[:-1]
        return needed

    def store(self, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        """Store drafts and what is known of them, for the slots [B]."""
        self.slots.ops.step.store_drafts(self.slots.columns, slots, budget, draft)
        self._store_probs(slots, draft)
        if self._ranking is not None:
            self.slots.ops.step.store_ranking(self._ranking, slots, draft.ranking)
        self._store_matches(slots, draft)

    def _store_probs(self, slots: Tensor, draft: Draft) -> None:
        """Store the distributions of drafts; a draft without one was certain."""
        if self._probs is None:
            return
        lines = torch.where(slots < 0, len(self._probs) - 1, slots)
        probs = draft.probs
        if probs is None:
            tokens = self.slots.columns.draft[slots.clamp(min=0)]
            probs = torch.zeros_like(self._probs[lines]).scatter_(2, tokens[..., None], 1.0)
        self._probs[lines] = probs.to(self._probs.device)

    def reserve_ranking(self, features: StepFeatures, max_top: int) -> None:
        """Allocate ranks and likeliest tokens of drafts before the first step that reports them."""
        if self._ranking is None and features.needs_draft_logprobs and self.runs_behind_steps:
            lines, device = len(self.slots.requests) + 1, self.slots.device
            ids = torch.zeros((lines, self.k, max_top), dtype=torch.int64, device=device)
            ranks = torch.zeros((lines, self.k), dtype=torch.int64, device=device)
            self._ranking = DraftRanking(ranks, ids, torch.zeros(ids.shape, device=device))

    def ranking(self, top: int) -> DraftRanking | None:
        """Return ranks [S, K] of the stored drafts and the `top` likeliest tokens [S, K, top] of each."""
        held = self._ranking
        if held is None:
            return None
        return DraftRanking(held.ranks[:-1], held.top_ids[:-1, :, :top], held.top_logprobs[:-1, :, :top])

    def _store_matches(self, slots: Tensor, draft: Draft) -> None:
        """Store how many tokens drafts have matched, where the next step is planned behind them."""
        if not self.slots.ops.runtime.asynchronous:
            matched = 0 if draft.matched is None else draft.matched.cpu().numpy()
            self.match_lengths[slots.cpu().numpy()] = matched

    def store_target_features(self, hidden: Tensor, *tapped: Tensor) -> None:
        """Copy the rows [R, hidden] that the proposer needs: other graphs run before it reads them."""
        if self._target_features is not None and self.proposer is not None:
            needed = (hidden, *tapped) if self.proposer.needs_hidden else tapped
            self.slots.ops.rounds.join_features(needed, self._target_features)

    def begin_step(self) -> None:
        """Reset the rounds and the seconds of the draft model."""
        self._queued_rounds, self._seconds = 0, 0.0

    def spec(
        self, planned: StepPlan, decision: DraftDecision, features: StepFeatures, needs_probs: bool
    ) -> DraftSpec:
        """Return what the proposer has to compute behind a step."""
        assert self.proposer is not None
        rounds = decision.rounds
        if self.slots.ops.runtime.asynchronous:
            rounds = self.captured_rounds(len(planned.slots), rounds, planned.has_prompts)
            self._queued_rounds = rounds
        return DraftSpec(
            rounds,
            decision.runs_model,
            has_prompts=self.proposer.depends_on_prompts and planned.has_prompts,
            needs_processed=features.needs_processed,
            needs_logprobs=features.needs_draft_logprobs,
            top=features.draft_top,
            needs_probs=needs_probs,
        )

    def captured_entries(self, count: int, rows: int) -> int:
        """Return for how many entries drafts are captured, for `count` of them behind a step of `rows`."""
        if not self.slots.ops.runtime.asynchronous:
            return count
        return min(1 << (count - 1).bit_length(), len(self.slots.requests), rows)

    def captured_rounds(self, count: int, rounds: int, has_prompts: bool = False) -> int:
        """Return the smallest captured number of rounds that is at least `rounds`.

        Of few entries powers of two and 3/4 of them are captured. Of more entries, or beside prompts, those
        are that the policy chooses from: `round_counts`, or for a member of a hybrid half of K and all K.
        """
        if not rounds:
            return 0
        if count > MAX_FEW_ENTRIES or has_prompts:
            counts = ((self.k + 1) // 2, self.k) if self.is_hybrid_member else round_counts(self.k)
            return min(count for count in counts if count >= rounds)
        power = 1 << (rounds - 1).bit_length()
        return min(self.k, power * 3 // 4 if rounds <= power * 3 // 4 else power)

    def set_stored(self, slot: int, count: int | None) -> None:
        """Set how many tokens of the request in `slot` have KV; None: all that come from the prefix cache."""
        try:
            if self.proposer is not None:
                self.proposer.set_stored(slot, count)
        except Exception as error:  # a plug-in may raise anything
            self.proposer, self.failure = None, error

    def catch_up(self, slots: Tensor, num_rows: int) -> None:
        """Store the KV of at most `num_rows` tokens. A failure switches the proposer off, as in `draft`."""
        if self.proposer is None:
            return
        begin = time.perf_counter()
        try:
            self.proposer.catch_up(self.slots.columns, slots, num_rows)
        except Exception as error:  # a plug-in may raise anything
            self.proposer, self.failure = None, error
        self._seconds += time.perf_counter() - begin

    def draft(
        self,
        plan: PlanColumns,
        rows: Rows | None = None,
        entries: int = -1,
        spec: DraftSpec | None = None,
        costs: DraftCosts = NO_DRAFT_COSTS,
    ) -> None:
        """Make and store the next drafts. A proposer that fails is switched off; the commit stays."""
        if self.proposer is None:
            return
        columns = self.slots.columns
        slots, budget = plan.slots, plan.budget
        if rows is None and not self.slots.ops.runtime.asynchronous and not budget.any():
            return  # none is needed; the commit has removed the last ones
        batch = DeviceBatch(columns, slots, budget)
        if rows is not None:
            slots, budget, chunk = slots[:entries], budget[:entries], plan.chunk[:entries]
            features = None if self._target_features is None else self._target_features[: len(rows.tokens)]
            batch = DeviceBatch(columns, slots, budget, chunk, rows, features, spec, costs)
        begin = time.perf_counter()
        try:
            draft = self.proposer.draft(batch)
            if spec is None or spec.rounds or self.is_hybrid_member:  # the commit has removed the last drafts
                num_sources = 0 if self.slots.ops.runtime.asynchronous else self.num_sources
                self.store(slots, budget, check_draft(draft, columns.draft[: len(slots)], num_sources))
        except Exception as error:  # a plug-in may raise anything
            self.proposer, self.failure = None, error
            columns.num_draft.zero_()
        if not self.slots.ops.runtime.asynchronous:
            self._seconds += time.perf_counter() - begin

    def set_proposer(self, proposer: DeviceProposer | None, failure: Exception | None = None) -> None:
        """Replace the proposer; None: make no drafts, because of the failure."""
        self.proposer, self.failure = proposer, failure


def check_draft(draft: Draft, like: Tensor, num_sources: int = 0) -> Draft:
    """Return a plug-in's drafts if their shape is that of `like`; with `num_sources` check values too."""
    for part in (draft.tokens, draft.logprobs, draft.sources):
        if part is not None and part.shape != like.shape:
            raise ValueError(f"drafts must have the shape {tuple(like.shape)}, not {tuple(part.shape)}")
    if draft.matched is not None and draft.matched.shape != like.shape[:1]:
        raise ValueError("match lengths of drafts must be one number for each request")
    if draft.count.shape != like.shape[:1] or torch.is_floating_point(draft.tokens):
        raise ValueError("a draft needs a count for each request, and integer tokens")
    if num_sources and len(like):
        if int(draft.count.min()) < 0:
            raise ValueError("a request has a negative number of drafts")
        if draft.sources is not None:
            low, high = (int(x) for x in torch.aminmax(draft.sources))
            if low < 0 or high >= num_sources:
                raise ValueError(f"the source of a draft is not one of the {num_sources} sources")
    return draft
