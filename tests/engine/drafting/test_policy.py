"""Draft policy through decide and observe: counts, probes, rounds of a draft model, costs, warnings."""

from __future__ import annotations

import logging
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import heads
import tiny
from draftproof.engine.drafting.acceptance_warning import MIN_DRAFTS
from draftproof.engine.drafting.budget import (
    FIRST_PROBE_LENGTH,
    MAX_HOLD_STEPS,
    MAX_PROBE_INTERVAL_STEPS,
    RARE_PROBE_INTERVAL_FACTOR,
    DraftBudget,
    round_counts,
)
from draftproof.engine.drafting.budget_kernels import CLASSES, RATES
from draftproof.engine.drafting.device_proposer import MAX_FEW_ENTRIES, DraftRunner
from draftproof.engine.drafting.policy import DraftModel, DraftPolicy, DraftRun, StepObservation
from draftproof.engine.drafting.run_ahead_depth import StepTimes
from draftproof.engine.drafting.step_cost import StepCost
from draftproof.sampling_params import SamplingParams
from draftproof.types import FINISH_STATUS, NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, FinishStatus

K = 4
FLAT = {1: 1.0, 8: 1.0, 64: 1.0}  # rows are free
STEEP = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 8: 8.0, 16: 16.0, 64: 64.0}  # rows cost as much as a step
STEPS = {1: 1.0, 16: 2.0}
MEMBER = DraftModel(source=0, is_member=True, rounds=2)


class Steps:
    """A policy that serves `count` requests, with given results of their drafts."""

    def __init__(
        self,
        seconds: dict[int, float],
        count: int = 2,
        adaptive: bool = True,
        timed: bool = True,
        draft_seconds: float = 0.0,
        draft_rounds: int = 1,
        **options: Any,
    ) -> None:
        """Start the requests."""
        drafting = {count: draft_seconds}
        cost = StepCost(seconds, learns=False, draft_seconds=drafting, draft_rounds=draft_rounds)
        self.policy = DraftPolicy(count, cost, sources=("head", "search"), **options)
        self.policy.set_cost(cost, timed)
        self.slots, self.count, self.clock = np.arange(count), count, 0.0
        for slot in self.slots:
            self.policy.start(int(slot), K, adaptive)

    def step(self, accepted: Any = 1.0, source: int = 0, drafted: int = K, ended: int = 0) -> Any:
        """Decide, run and observe one step; return the decision.

        accepted: share of the drafts, of all requests or [B]. drafted: at most so many of the granted drafts
        exist. ended: the requests' `FinishStatus` behind the step.
        """
        decision = self.policy.decide(self.slots, None, keys=100)
        drafts = decision.drafts.copy()
        table = np.zeros((self.count, 6), np.int64)
        table[:, NUM_DRAFT], table[:, FINISH_STATUS] = np.minimum(drafts, drafted), ended
        table[:, NUM_ACCEPTED] = np.floor(accepted * table[:, NUM_DRAFT])
        table[:, NUM_OUT] = 1 + table[:, NUM_ACCEPTED]
        plan = SimpleNamespace(
            slots=self.slots,
            drafts=drafts,
            num_drafts=int(drafts.sum()),
            num_rows=self.count + int(drafts.sum()),
            has_prompts=False,
        )
        self.clock += 1.0
        times = StepTimes(self.clock - 1, self.clock, self.clock, True, False)
        run = DraftRun(self.count if decision.rounds else 0, decision.rounds, 0.25)
        sources = np.full((self.count, K), source, np.int8)
        current = np.ones(self.count, np.bool_)
        self.policy.observe(StepObservation(plan, table, sources, current, 100, times, run))  # type: ignore[arg-type]
        return decision


def test_free_rows_give_every_request_its_limit() -> None:
    assert Steps(FLAT).step().drafts.tolist() == [K, K]


def test_expensive_rows_give_no_drafts_and_probes_at_the_interval() -> None:
    steps = Steps(STEEP)
    assert steps.step(accepted=0).drafts.tolist() == [FIRST_PROBE_LENGTH] * 2
    drafts = [int(steps.step(accepted=0).drafts.sum()) for _ in range(4 * MAX_PROBE_INTERVAL_STEPS)]
    at = np.flatnonzero(drafts)
    assert set(np.unique(drafts)) == {0, 2}  # one draft each
    assert 3 <= len(at) <= 4 and (np.diff(at) >= MAX_PROBE_INTERVAL_STEPS).all()


def test_new_request_is_not_probed_at_once_where_drafts_were_rejected() -> None:
    steps = Steps(STEEP)
    for _ in range(100):
        for _ in range(10):  # results count in the next decision
            steps.step(accepted=0)
        for slot in steps.slots:
            steps.policy.start(int(slot), K, True)
    assert not steps.step(accepted=0).drafts.any()


def test_model_whose_drafts_are_rejected_is_probed_rarely() -> None:
    """Compare the intervals of a model's probes before and after requests whose drafts were all rejected."""
    model = DraftModel(0, is_member=False, rounds=K)
    steps = Steps(STEEP, draft_seconds=1.0, draft_rounds=K, model=model)
    intervals = []
    for _ in range(40):
        drafts = [int(steps.step(accepted=0).drafts.sum()) for _ in range(8 * MAX_PROBE_INTERVAL_STEPS)]
        intervals.append(np.diff(np.flatnonzero(drafts)))
        for slot in steps.slots:
            steps.policy.start(int(slot), K, True)
    assert (intervals[0][1:] <= MAX_PROBE_INTERVAL_STEPS + MAX_HOLD_STEPS).all() and len(intervals[0]) > 4
    assert (intervals[-1] >= RARE_PROBE_INTERVAL_FACTOR * MAX_PROBE_INTERVAL_STEPS).all()


def test_accepted_probe_is_followed_at_once_with_twice_the_length() -> None:
    steps = Steps({1: 1.0, 2: 1.0, 4: 1.9, 8: 3.5, 64: 40.0})
    for _ in range(300):  # the prior learns that drafts are rejected
        steps.step(accepted=0)
    lengths = [int(steps.step(accepted=1).drafts.max()) for _ in range(2 * MAX_PROBE_INTERVAL_STEPS)]
    first = next(i for i, length in enumerate(lengths) if length)
    assert lengths[first] == 1 and max(lengths[first : first + 12]) >= 2


def test_rejected_drafts_are_given_up_and_accepted_ones_kept() -> None:
    seconds = {2: 1.0, 4: 1.3, 6: 1.6, 8: 1.9, 10: 2.2, 64: 20.0}
    for accepted, expected in ((1.0, K), (0.0, 0)):
        steps = Steps(seconds)
        for _ in range(40):
            drafts = steps.step(accepted).drafts
        assert drafts.tolist() == [expected] * 2


def test_fixed_request_always_gets_its_limit() -> None:
    steps = Steps(STEEP, adaptive=False)
    assert all(steps.step(accepted=0).drafts.tolist() == [K, K] for _ in range(20))


def test_room_limits_drafts() -> None:
    steps = Steps(FLAT)
    assert steps.policy.decide(steps.slots, np.array([1, 0]), keys=1).drafts.tolist() == [1, 0]


@pytest.mark.parametrize(("milliseconds_of_a_draft", "kept"), [(0.0, 8), (30.0, 0)])
def test_drafts_beside_a_prompt_include_the_cost_of_context(
    milliseconds_of_a_draft: float, kept: int
) -> None:
    """Check drafts that were chosen while rows were cheap, when a prompt joins their step."""
    cost = StepCost({1: 10.0, 64: 11.0}, interpolate=True, learns=False)
    budget, slots = DraftBudget(1, cost), np.zeros(1, np.int64)
    budget.start(0, 8, adaptive=True)
    for _ in range(8):
        budget.record(slots, np.array([8]), np.array([8]))
        budget.choose(slots, np.array([8]), 1000)
    cost._per_draft_key = milliseconds_of_a_draft / 1000
    budget.choose(slots, np.array([8]), 1000)
    assert budget.refit(slots, np.array([8]), 33).tolist() == [kept]


@pytest.mark.parametrize("has_lengths", [True, False])
def test_drafts_behind_long_matches_have_an_acceptance_of_their_own(has_lengths: bool) -> None:
    """Check short matches whose drafts are all rejected; without lengths those of long ones hide that."""
    budget, slots, most = DraftBudget(2, StepCost(STEPS, learns=False)), np.arange(2), np.full(2, K)
    for slot in slots:
        budget.start(int(slot), K, adaptive=True)
    for step in range(200):
        is_long = step % 8 > 0
        matched = np.full(2, 6 if is_long else 5) if has_lengths else None
        granted = budget.choose(slots, most, 100, matched)
        budget.record(slots, granted, granted if is_long else np.zeros_like(granted))
    short, long = budget.choose(slots, most, 100, np.array([5, 6]) if has_lengths else None).tolist()
    assert long == K and (short <= 1) == has_lengths  # 1: a probe
    budget.start(0, K, adaptive=True)  # a new request has the prior of each class
    rates = budget._posteriors[:CLASSES] @ RATES
    assert (
        np.array_equal(rates, budget._posteriors[-CLASSES:] @ RATES) and (rates[0] < rates[1]) == has_lengths
    )


def test_policy_gets_the_match_lengths_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(speculative={"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1})
    policy, found = engine.loop.policy, []
    select = policy.select

    def watched(slots: Any, drafts: Any, keys: int, matched: Any) -> Any:
        found.extend(zip(drafts.tolist(), matched.tolist(), strict=True))
        return select(slots, drafts, keys, matched)

    monkeypatch.setattr(policy, "select", watched)
    engine.add(tiny.request(0, SamplingParams(max_tokens=24), length=40))
    while engine.has_work:
        engine.step()
    assert any(drafts for drafts, _ in found)
    assert all((matched >= 1) == (drafts > 0) for drafts, matched in found)


def test_requests_without_drafts_get_the_same_array() -> None:
    policy = DraftPolicy(2, StepCost.unmeasured(8))
    slots = np.arange(2)
    assert policy.decide(slots, None, 0).drafts is policy.decide(slots, None, 0).drafts


def test_member_model_runs_half_the_rounds_and_a_fixed_batch_all() -> None:
    assert Steps(FLAT, model=MEMBER, asynchronous=True).step().rounds == 2
    assert Steps(FLAT, model=MEMBER, asynchronous=True, adaptive=False).step().rounds == K
    assert Steps(FLAT, model=MEMBER, asynchronous=True, timed=False).step().rounds == K
    alone = DraftModel(source=0, is_member=False, rounds=K)
    assert Steps(FLAT, model=alone, asynchronous=True).step().rounds == K


@pytest.mark.parametrize(("accepted", "rounds"), [(1.0, K), (0.5, 2)])
def test_head_runs_fewer_rounds_where_later_drafts_are_seldom_accepted(accepted: float, rounds: int) -> None:
    """A round takes a quarter of a step, so two rounds gain more than four unless all drafts are accepted."""
    alone = DraftModel(source=0, is_member=False, rounds=K)
    steps = Steps(
        FLAT | {128: 1.0}, count=16, model=alone, asynchronous=True, draft_seconds=1.0, draft_rounds=K
    )
    for _ in range(100):
        steps.step(accepted=accepted)
    chosen = [steps.step(accepted=accepted) for _ in range(8)]
    assert {decision.rounds for decision in chosen} == {rounds}
    assert all(decision.drafts.max() <= rounds for decision in chosen)


def test_one_request_for_which_all_rounds_pay_does_not_make_them_run_for_all() -> None:
    alone = DraftModel(source=0, is_member=False, rounds=K)
    steps = Steps(
        FLAT | {128: 1.0}, count=16, model=alone, asynchronous=True, draft_seconds=1.0, draft_rounds=K
    )
    accepted = np.array([1.0] + [0.5] * 15)
    for _ in range(100):
        decision = steps.step(accepted=accepted)
    assert decision.rounds == 2


def test_captured_rounds_hold_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = object.__new__(DraftRunner)
    for k, member in product((1, 2, 3, 4, 5, 8, 16), (False, True)):
        monkeypatch.setattr(DraftRunner, "is_hybrid_member", member)
        runner.k = k
        choices = ((k + 1) // 2, k) if member else round_counts(k)
        for count, has_prompts in product((1, MAX_FEW_ENTRIES, MAX_FEW_ENTRIES + 1), (False, True)):
            captured = [runner.captured_rounds(count, rounds, has_prompts) for rounds in range(k + 1)]
            assert captured[0] == 0 and all(rounds <= found <= k for rounds, found in enumerate(captured))
            assert all(captured[rounds] == rounds for rounds in choices if count > MAX_FEW_ENTRIES)


def test_member_model_is_skipped_while_all_granted_drafts_are_accepted_copies() -> None:
    steps = Steps(FLAT, model=MEMBER, asynchronous=True)
    steps.step(source=1)
    assert steps.step(source=1).rounds == 0
    steps.step(source=1, accepted=0.5)
    assert steps.step(source=1).rounds == 2
    steps.step(source=0)  # all accepted, but the model's own
    assert steps.step().rounds == 2


def test_member_model_runs_if_the_requests_that_do_not_copy_gain_its_cost() -> None:
    for draft_seconds, rounds in ((0.05, 2), (0.25, 0)):
        steps = Steps(FLAT, count=8, model=MEMBER, asynchronous=True, draft_seconds=draft_seconds)
        assert steps.step(source=1).rounds == 2  # none is known to copy
        assert steps.step(source=1).rounds == 0
        steps.step(source=1, accepted=np.array([0] + [1] * 7))
        assert steps.step(source=1, accepted=0).rounds == rounds  # for one of eight
        assert steps.step().rounds == 2


def test_member_model_runs_for_fewer_requests_if_more_of_its_drafts_are_accepted() -> None:
    steps = Steps(FLAT, count=8, model=MEMBER, asynchronous=True, draft_seconds=0.5)
    some = np.array([0] * 4 + [1] * 4)
    for accepted, rounds in ((0.25, 0), (1.0, 2)):
        for _ in range(100):
            steps.step(source=0, accepted=accepted)
        steps.step(source=1, accepted=some)
        assert steps.step(source=0).rounds == rounds


def test_member_model_runs_for_a_quarter_of_the_requests_if_its_rounds_take_a_fifth_of_a_step() -> None:
    steps = Steps(FLAT, count=8, model=MEMBER, asynchronous=True, draft_seconds=0.2)
    for num_gaining, rounds in ((1, 0), (2, 2)):
        steps.step(source=1)
        steps.step(source=1, accepted=np.array([0] * num_gaining + [1] * (8 - num_gaining)))
        assert steps.step(source=1).rounds == rounds


def test_new_request_is_taken_to_copy_where_most_requests_do() -> None:
    steps = Steps(FLAT, model=MEMBER, asynchronous=True)
    for source, rounds in ((1, 0), (0, 2)):
        steps.step(source=source)
        for slot in steps.slots:
            steps.policy.start(int(slot), K, True)
        assert steps.step(source=source).rounds == rounds


def test_request_does_not_copy_if_fewer_drafts_exist_than_were_granted() -> None:
    steps = Steps(FLAT, model=MEMBER, asynchronous=True)
    steps.step(source=1)
    assert steps.step(source=1, drafted=K - 1).rounds == 0  # the step before was a copy
    assert steps.step(source=1).rounds == 2


def test_window_in_which_a_request_ended_does_not_count_for_new_requests() -> None:
    steps = Steps(FLAT, model=MEMBER, asynchronous=True)
    steps.step(source=1)
    steps.step(source=1, accepted=0.5, ended=FinishStatus.STOP)  # drafts behind the end are not accepted
    for slot in steps.slots:
        steps.policy.start(int(slot), K, True)
    assert steps.step(source=1).rounds == 0


def test_costs_of_rounds_are_given_where_they_are_waited_for() -> None:
    clock = iter(range(1000))
    seconds = {n: float(n) for n in range(1, 20)}
    options = {"model": MEMBER, "drafts_before_plan": True, "draft_seconds": 0.01}
    steps = Steps(seconds, **options, clock=lambda: float(next(clock)))
    assert steps.step().costs.round == 0.0
    for _ in range(10):
        decision = steps.step(accepted=0)
    assert 0 < decision.costs.round < 1 and decision.costs.row > 0
    assert steps.policy._round_costs._round_seconds == pytest.approx(0.875 * 0.25 / K)
    assert steps.policy.cost.draft_seconds(2) == 0.01  # a cost model that does not learn stays as it is


def test_low_acceptance_is_logged_once_with_what_to_check(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "draftproof"):
        steps = Steps(FLAT, adaptive=False)
        for _ in range(MIN_DRAFTS // (2 * K) + 50):
            steps.step(accepted=0)
    (record,) = caplog.records
    assert "'head'" in record.getMessage() and "these weights" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "draftproof"):
        steps = Steps(FLAT, adaptive=False)
        for _ in range(MIN_DRAFTS // (2 * K) + 50):
            steps.step(accepted=0.5)
    assert not caplog.records


@pytest.mark.parametrize("accept_policy", ["reject_all", "synthetic"])
def test_accept_policies_that_force_results_keep_the_number_of_drafts(accept_policy: str) -> None:
    more = {"synthetic_acceptance_length": 1.5} if accept_policy == "synthetic" else {}
    head = {"method": "mtp", **heads.options("mtp", "llama", "float32"), "num_speculative_tokens": 3}
    engine = tiny.engine(speculative={**head, "accept_policy": accept_policy, **more}, warm_up=True)
    params = SamplingParams(max_tokens=80, ignore_eos=True, speculative={"adaptive": True})
    steps = tiny.run(engine, [tiny.request(0, params)])["0"].steps
    assert {step.num_draft for step in steps[1:-3]} == {3}


def test_warm_up_times_recorded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record each pass once: timings that include a recording make one row as slow as many."""
    executor = pytest.importorskip("draftproof.ops.cpu.executor")
    record, recorded = executor.Recorded._record, []

    def counted(self, inputs):  # type: ignore[no-untyped-def]
        recorded.append(self)
        return record(self, inputs)

    monkeypatch.setattr(executor.Recorded, "_record", counted)
    engine = tiny.engine(speculative={"method": "ngram"}, backend="cpu", warm_up=True)
    assert recorded
    tiny.run(engine, [tiny.request(0, SamplingParams(max_tokens=4))])
    assert len(recorded) == len(set(recorded)) == 2  # without and with logits
