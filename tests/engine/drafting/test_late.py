"""A head that is not asked keeps up later, and drafts like one that always has. And what asking costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import heads
import tiny
from draftproof.engine.drafting.device_proposer import Drafting
from draftproof.engine.drafting.draft_gate import Asking
from draftproof.propose.head import HeadProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import DraftSpec, StepFeatures

HEAD = {"method": "eagle3", **heads.options("eagle3", "llama", "float32")}
BESIDE = {"method": "hybrid", "proposers": [HEAD, {"method": "suffix", "min_match": 32}]}


def drafted(spec: dict[str, Any], waits: bool, monkeypatch: pytest.MonkeyPatch, every: int = 5) -> list[Any]:
    """Drafts of all steps of two requests, one of which comes later, if the head is asked now and then."""
    steps = count()

    def now_and_then(asking: Asking, *given: object) -> None:
        asking.drafting.asks = next(steps) % every == 0

    with monkeypatch.context() as patch:
        patch.setattr(Asking, "weigh", now_and_then)
        engine = tiny.engine(speculative={**spec, "num_speculative_tokens": 3, "adaptive": False})
        engine.loop.device.drafting.waits = waits
        params = SamplingParams(max_tokens=40, ignore_eos=True, include_draft_logprobs=True)
        asked = [tiny.request(i, params) for i in range(2)]
        records = tiny.run(engine, asked)
    told = [step.drafts or [] for record in records.values() for step in record.steps]
    return [[(draft.token_id, draft.draft_logprob) for draft in step] for step in told]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often rows were put off and seen to."""
    found = dict.fromkeys(("put off", "seen to"), 0)
    begin, catch_up = HeadProposer.begin, HeadProposer.catch_up

    def begun(head: HeadProposer, batch: Any) -> Any:
        found["put off"] += batch.spec.is_deferred
        return begin(head, batch)

    def caught_up(head: HeadProposer, columns: Any) -> None:
        found["seen to"] += 1
        catch_up(head, columns)

    monkeypatch.setattr(HeadProposer, "begin", begun)
    monkeypatch.setattr(HeadProposer, "catch_up", caught_up)
    return found


@pytest.mark.parametrize("spec", [HEAD, BESIDE], ids=["head", "hybrid"])
@pytest.mark.parametrize("every", [2, 5, 13])
def test_its_drafts_are_those_of_one_that_keeps_up(
    spec: dict[str, Any], every: int, seen: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = drafted(spec, False, monkeypatch, every)
    assert sum(map(len, usual)) > 6 and seen == {"put off": 0, "seen to": 0}
    assert drafted(spec, True, monkeypatch, every) == usual
    assert seen["put off"] > seen["seen to"] // 2 > 0


def test_rows_do_not_wait_without_end(seen: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    usual = drafted(HEAD, False, monkeypatch, 35)
    monkeypatch.setattr("draftproof.propose.head.PUTS_OFF", 8)
    assert drafted(HEAD, True, monkeypatch, 35) == usual
    assert seen["seen to"] > 8


def test_control_rows_that_are_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = drafted(HEAD, False, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Drafting, "is_late", lambda *given: False)
        assert drafted(HEAD, True, monkeypatch) != usual
    monkeypatch.setattr("draftproof.propose.head.PUTS_OFF", 8)  # some of them have no room
    monkeypatch.setattr(Drafting, "is_late", lambda drafting, planned, rows, wanted: not wanted.is_deferred)
    assert drafted(HEAD, True, monkeypatch) != usual


def test_what_is_read_of_drafts_is_written_whether_rows_wait_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search's drafts are certain also where the model only puts its rows off: rejection reads that."""
    wanted = []
    traits = Drafting.traits

    def noted(drafting: Drafting, *given: Any) -> Any:
        wanted.append(traits(drafting, *given))
        return wanted[-1]

    monkeypatch.setattr(Drafting, "traits", noted)
    drafted({**BESIDE, "verify_strategy": "rejection"}, True, monkeypatch)
    assert {(one.later, one.logprobs, one.probs) for one in wanted if not one.rounds} >= {(True, True, True)}


SEARCH = {"method": "hybrid", "proposers": [{"method": "suffix"}, HEAD]}


@torch.inference_mode()
@pytest.mark.parametrize("spec", [HEAD, BESIDE, SEARCH], ids=["head", "hybrid", "search first"])
def test_what_asking_costs_is_timed_for_somebody(spec: dict[str, Any]) -> None:
    """Rounds for nobody end at once. Afterwards everything is as before."""
    engine = tiny.engine(speculative={**spec, "num_speculative_tokens": 3}, max_num_seqs=4)
    device, timed = engine.loop.device, []
    columns = device.slots.columns
    held = {f.name: getattr(columns, f.name).clone() for f in fields(columns)}

    def seconds(function: Callable[[], object], times: int) -> float:
        found = []
        for _ in range(times):
            columns.num_draft.zero_()
            function()
            found.append(columns.num_draft.tolist())
        timed.append(np.min(found, axis=0).tolist())
        return float(sum(timed[-1]))

    device.ops.seconds = seconds
    assert set(device.asking([1, 2, 4])) == {1, 2, 4}
    least = 1 if engine.loop.proposer.ends_chains else 3
    assert all(
        sum(n >= least for n in some) == count for some, count in zip(timed[::2], (1, 2, 4), strict=True)
    )
    assert not any(map(any, timed[1::2]))  # keeping up makes none
    for name, before in held.items():
        if name not in ("draft_logprob", "draft_source"):  # which nobody reads without drafts
            assert torch.equal(getattr(columns, name), before), name
    assert (device.plan.slots < 0).all() and not device.plan.budget.any()


@torch.inference_mode()
def test_a_rehearsal_stays_within_short_lines() -> None:
    """More drafts than a request may have tokens."""
    engine = tiny.engine(speculative={**HEAD, "num_speculative_tokens": 40}, max_model_len=16, max_num_seqs=2)
    device, longest = engine.loop.device, []
    ahead = device.ops.plan_draft_rows

    def noted(*given: Any) -> Any:
        made = ahead(*given)
        longest.append(int(made.positions.max()) if made.positions.numel() else 0)
        return made

    device.ops.plan_draft_rows = noted
    assert device._seconds(device.max_rows, 2, DraftSpec(40)) > 0
    assert max(longest) < 16


def test_rows_that_have_no_room_do_not_wait() -> None:
    engine = tiny.engine(speculative={**HEAD, "num_speculative_tokens": 3}, max_num_seqs=4)
    drafting = engine.loop.device.drafting
    drafting.waits, drafting.asks = True, False
    ops, none = engine.ops, np.zeros(2, np.int64)
    for rows, later in ((8, True), (128, True), (129, False)):
        planned: Any = SimpleNamespace(slots=none, chunk=none, num_rows=rows, has_prompts=False)
        assert drafting.traits(ops, planned, none, StepFeatures((0,)), False).is_deferred == later
