"""Draft policy: `decide` before a step, `observe` after it. The output never depends on it.

docs/drafting.md has the formulas, and every place that limits the number of drafts.

A draft model that is a member of a hybrid runs half of the rounds, rounded up, where a search extends its
drafts. It is skipped while its rounds would lower the mean speed of the requests: one that copies gains
nothing from them, any other one the mean of the model's accepted drafts. A request copies if all drafts
granted to its last window, even a single one, came from a search and were accepted: the model's could not
have added a token. A new request is taken to do what most requests do. Where each round is waited for (the
CPU), the model itself stops when another round costs more than it is expected to gain; `decide` gives it both
costs, in tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Bools, Ints
from draftproof.engine.drafting.acceptance_warning import AcceptanceWarning
from draftproof.engine.drafting.budget import DraftBudget
from draftproof.engine.drafting.run_ahead_depth import RunAhead, StepTimes
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.engine.sequence import StepPlan
from draftproof.propose.base import Proposer
from draftproof.types import FINISH_STATUS, NO_DRAFT_COSTS, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, DraftCosts

MEAN_RATE = 1 / 32  # weight of a step in the means of tokens and seconds
MAX_MEAN_FACTOR = 3.0  # times the mean: larger values count as that
MIN_MODEL_GAIN_TOKENS = 1.0  # per window, expected of a model at least: a lower mean cannot rise
STORE_SHARE = 1 / 8  # of the seconds with rounds that storing KV takes, until it was measured


class DraftDecision(NamedTuple):
    """Drafts to make behind a step."""

    drafts: Ints  # [B] at most, per request
    rounds: int = 0  # of the draft model; 0: it makes no drafts
    costs: DraftCosts = NO_DRAFT_COSTS
    runs_model: bool = True  # over the rows of the step, which stores their KV
    catch_up_rows: int = 0  # tokens of earlier steps, at most, whose KV the model stores before


class DraftRun(NamedTuple):
    """Work of the draft model behind a step."""

    requests: int = 0  # that it drafted for
    rounds: int = 0
    seconds: float = 0.0  # if it was waited for


class StepObservation(NamedTuple):
    """Results and times of one step."""

    plan: StepPlan
    table: Ints  # [B, ...] `Outcome.table`
    sources: NDArray[np.int8] | None  # [B, K] source of each draft; None: there is one source
    is_current: Bools  # [B] entries whose request is still in its slot
    num_keys: int  # tokens that the requests have stored
    times: StepTimes
    draft_run: DraftRun


class DraftModel(NamedTuple):
    """Properties of a draft model that the policy depends on."""

    source: int  # index of its source
    is_member: bool  # other proposers draft beside it
    rounds: int  # per step, if it is a member and the batch is adaptive

    @classmethod
    def of_proposer(cls, proposer: Proposer | None, k: int, asynchronous: bool) -> DraftModel | None:
        """Return the draft model of a proposer, if it has one."""
        if proposer is None or not proposer.runs_behind_steps:
            return None
        is_member = proposer.model_source >= 0
        is_extended = is_member and proposer.extending_source >= 0
        rounds = (k + 1) // 2 if is_extended and asynchronous else k
        return cls(max(0, proposer.model_source), is_member, rounds)


class DraftPolicy:
    """Drafts per request, rounds of the draft model, and run-ahead depth."""

    def __init__(
        self,
        num_slots: int,
        cost: StepCost,
        model: DraftModel | None = None,
        asynchronous: bool = False,
        drafts_before_plan: bool = False,
        sources: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start without observations.

        drafts_before_plan: the drafts of a step are counted before it is planned and cost next to nothing,
        so all are made and the plan chooses which are verified (`select`).
        """
        self.cost = cost
        self.run_ahead = RunAhead(asynchronous)
        self.drafts_before_plan = drafts_before_plan
        self._model = model
        self._is_timed = False
        self._budget = DraftBudget(num_slots, cost, charges_drafting=model is None or not model.is_member)
        self._round_costs = RoundCosts(clock)
        self._warning = AcceptanceWarning(sources)
        self._is_copying = np.zeros(num_slots, np.bool_)  # all drafts granted last were accepted copies
        self._is_copying_common = False  # most requests of the last step with drafts copied
        self._model_gain = 0.0 if model is None else float(model.rounds)  # mean accepted drafts of a window
        self._zeros = np.zeros(0, np.int64)

    @property
    def limit(self) -> Ints:
        """Return the largest number of drafts [S] of the request in each slot."""
        return self._budget.limit

    def set_cost(self, cost: StepCost, adaptive: bool) -> None:
        """Use a timed cost model; `adaptive`: rounds of the draft model are weighed too."""
        self.cost, self._is_timed = cost, adaptive
        self._budget.set_cost(cost)

    def start(self, slot: int, limit: int, adaptive: bool) -> None:
        """Begin a request of at most `limit` drafts; not adaptive: it always gets them."""
        self._budget.start(slot, limit, adaptive)
        self._is_copying[slot] = self._is_copying_common

    def select(self, slots: Ints, drafts: Ints, keys: int, matched: Ints) -> Ints:
        """Return how many of the existing drafts [B] to verify in the step that is being planned.

        matched [B]: tokens that a search has matched; 0: not known.
        """
        return self._budget.choose(slots, drafts, keys, matched)

    def pass_step(self) -> None:
        """Count a step in which no draft exists to select from."""
        self._budget.pass_step()

    def refit(self, slots: Ints, drafts: Ints, rows: int) -> Ints:
        """Return which drafts to keep in a step of `rows` other rows, prompts among them."""
        return self._budget.refit(slots, drafts, rows)

    def decide(self, slots: Ints, room: Ints | None, keys: int, refresh: bool = False) -> DraftDecision:
        """Return the drafts to make behind the coming step.

        room [B]: drafts before a request's last token and on its pages; None: no request is near either.
        keys: tokens that the requests have stored. refresh: decide anew even if the last decision holds.
        """
        drafts = self._num_drafts(slots, room, keys, refresh)
        model = self._model
        if model is None or not np.count_nonzero(drafts):
            return DraftDecision(drafts)
        max_drafts = int(np.maximum.reduce(drafts))
        if not self._is_timed or self._budget.has_fixed(slots):
            return DraftDecision(drafts, max_drafts)
        if not self.run_ahead.asynchronous:
            rows = len(slots) + int(drafts.sum())
            row_seconds = self.cost.row_seconds(rows + 1) - self.cost.row_seconds(rows)
            row_seconds += self.cost.draft_context_seconds(len(slots), keys)
            return DraftDecision(drafts, max_drafts, self._round_costs.in_tokens(len(slots), row_seconds))
        if model.is_member and not self._does_model_raise_speed(slots, drafts, keys):
            return DraftDecision(drafts)
        return DraftDecision(drafts, min(max_drafts, model.rounds))

    def _does_model_raise_speed(self, slots: Ints, drafts: Ints, keys: int) -> bool:
        """Return whether the rounds of a member's model are expected to raise the mean speed of requests.

        The mean is geometric, as in `budget_kernels.best_draft_count`.
        """
        count, cost = len(slots), self.cost
        num_gaining = np.count_nonzero(drafts[~self._is_copying[slots]])
        seconds = cost.row_seconds(count + int(drafts.sum())) + cost.context_seconds(keys, count)
        gain = num_gaining / count * math.log1p(max(MIN_MODEL_GAIN_TOKENS, self._model_gain))
        return bool(gain > math.log1p(cost.draft_seconds(count) / seconds))

    def _num_drafts(self, slots: Ints, room: Ints | None, keys: int, refresh: bool) -> Ints:
        limit = self.limit[slots]
        if not np.count_nonzero(limit):
            if len(self._zeros) != len(slots):
                self._zeros = np.zeros_like(slots)
            return self._zeros
        if self.drafts_before_plan:
            return limit if room is None else np.minimum(limit, room)
        drafts = None if refresh else self._budget.held(slots)
        if room is None:
            return self._budget.choose(slots, limit, keys) if drafts is None else drafts
        if drafts is None:
            drafts = self._budget.choose(slots, np.where(room > 0, limit, 0), keys)
        return np.minimum(drafts, room)

    def observe(self, step: StepObservation) -> float | None:
        """Record a step. Return its seconds; None if none of its requests is still there."""
        plan, current, run = step.plan, step.is_current, step.draft_run
        if not np.count_nonzero(current):
            self.run_ahead.record_orphan(step.times)
            return None
        device, host, is_clean = self.run_ahead.record_step(step.times)
        if self.cost.learns and host is not None:
            self.cost.record_host_seconds(host)
        if self.cost.learns and is_clean and not plan.has_prompts:
            drafting = 0 if run.seconds else run.requests
            seconds, num_drafts = device - run.seconds, plan.num_drafts
            self.cost.observe(plan.num_rows, step.num_keys, seconds, drafting, num_drafts, run.rounds)
        if plan.num_drafts:
            self._observe_drafts(step)
        if self._is_timed and self._model is not None and not self.run_ahead.asynchronous:
            num_tokens = int(np.add.reduce(step.table[:, NUM_OUT])) / len(step.table)
            seconds = self._round_costs.observe(num_tokens, run, plan.has_prompts)
            if self.cost.learns and run.rounds and not plan.has_prompts:
                self.cost.observe_drafting(run.requests, seconds)
        return device

    def _observe_drafts(self, step: StepObservation) -> None:
        plan, slots, table = step.plan, step.plan.slots, step.table
        drafts, accepted = table[:, NUM_DRAFT], table[:, NUM_ACCEPTED]
        if self._warning.is_open:
            self._warning.observe(drafts, accepted, step.sources)
        granted = plan.drafts
        if self._model is not None and self._model.is_member and step.sources is not None:
            self._observe_sources(step, step.sources[:, 0] == self._model.source)
        if np.count_nonzero(step.is_current) < len(slots):
            slots, granted, accepted = (part[step.is_current] for part in (slots, granted, accepted))
        self._budget.record(slots, granted, accepted)

    def _observe_sources(self, step: StepObservation, is_model: Bools) -> None:
        """Record which windows were copies, and the accepted drafts of those that began with the model's."""
        table, granted = step.table, step.plan.drafts
        continues = step.is_current & (granted > 0) & (table[:, FINISH_STATUS] == 0)
        is_copy = ((table[:, NUM_ACCEPTED] >= granted) & ~is_model)[continues]
        if not len(is_copy):
            return
        self._is_copying[step.plan.slots[continues]] = is_copy
        self._is_copying_common = 2 * int(np.count_nonzero(is_copy)) > len(is_copy)
        accepted = table[continues & is_model & (table[:, NUM_DRAFT] > 0), NUM_ACCEPTED]
        if len(accepted):
            self._model_gain += MEAN_RATE * (float(accepted.mean()) - self._model_gain)


class RoundCosts:
    """Costs of a draft model's round and of a verified row in tokens, where rounds are waited for.

    The cost of some seconds is the number of tokens that the engine commits in them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_time = 0.0
        self._tokens = self._seconds = 0.0  # means per step; tokens per request
        self._store_seconds: float | None = None  # mean without rounds; None: not measured
        self._round_seconds = 0.0  # mean of one round

    def in_tokens(self, requests: int, row_seconds: float) -> DraftCosts:
        """Return the costs in a step of so many requests; zeros until they are known."""
        if not self._seconds:
            return NO_DRAFT_COSTS
        rate = requests * self._tokens / self._seconds
        return DraftCosts(self._round_seconds * rate, row_seconds * rate)

    def observe(self, tokens: float, run: DraftRun, has_prompts: bool) -> float:
        """Record a step that committed `tokens` per request, and the draft model's run behind it.

        Return the seconds of the run besides storing KV.
        """
        now, last = self._clock(), self._last_time
        self._last_time = now
        store_seconds = self._store_seconds
        seconds = run.seconds - (STORE_SHARE * run.seconds if store_seconds is None else store_seconds)
        seconds = max(0.0, seconds)
        if has_prompts:
            return seconds
        if run.rounds:
            self._round_seconds = _updated(self._round_seconds, seconds / run.rounds)
        else:
            self._store_seconds = _updated(store_seconds or 0.0, run.seconds)
        self._seconds = _updated(self._seconds, now - last)
        self._tokens = _updated(self._tokens, tokens)
        return seconds


def _updated(mean: float, value: float) -> float:
    return mean + MEAN_RATE * (min(value, MAX_MEAN_FACTOR * mean) - mean) if mean else value
