"""Proposers inside the step: who proposed what, what they thought of it, by which law; with overlap too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import heads
import proposers
from distribution import ALLOWED, ALPHA, engine_distribution, p_value
from draftproof.propose.draft_model import DraftModelProposer
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.propose.head import MtpProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import Draft
from exact import OPTIONS, Batch, Case, Setup, reference_run
from tiny import engine, prompt, request, run


class Twins(proposers.DeviceFlaky):
    """Even tokens are the one's, odd ones the other's; each thinks something of its token and its place."""

    sources = ("even", "odd")

    def draft(self, batch: Any) -> Draft:
        made = super().draft(batch)
        line = batch.slots.clamp(min=0)
        place = (batch.columns.length - batch.columns.prompt_len)[line][:, None]
        place = place + torch.arange(made.tokens.shape[1])
        odd = (made.tokens % 2).to(torch.int8)
        return replace(made, sources=odd, logprobs=-(made.tokens + 1000.0 * place).float())


@pytest.mark.parametrize("overlap", [False, True])
def test_who_proposed_what(overlap):
    """The next drafts are there before the host reads of these."""
    cases = [Case(i, "ignore_eos", 0.7, length=12 + i, prompt=False) for i in range(4)]
    spec = {"method": "test_device_proposers:Twins", "num_speculative_tokens": 4, "adaptive": False}
    batch = Batch(cases, Setup(), spec, arrivals=[0, 0, 1, 3], overlap=overlap)
    assert batch.differences() == []
    seen = set()
    for record in batch.records.values():
        for step in record.steps:
            stood = step.token_ids[: step.num_accepted]
            assert step.sources == [("even", "odd")[token % 2] for token in stood]
            seen.update(step.sources)
    assert seen == {"even", "odd"}


@pytest.mark.parametrize("overlap", [False, True])
def test_what_they_thought(overlap, monkeypatch):
    """Some ask for it, in company of some who do not: their steps are waited for, others are not."""
    monkeypatch.setitem(OPTIONS, "short", {"max_tokens": 6})
    options = ["draft_logprobs", "none", "short", "draft_logprobs"]
    cases = [Case(i, option, 0.7, length=12 + i, prompt=False) for i, option in enumerate(options)]
    spec = {"method": "test_device_proposers:Twins", "num_speculative_tokens": 4, "adaptive": False}
    batch = Batch(cases, Setup(), spec, arrivals=[0, 0, 0, 8], overlap=overlap)
    assert batch.differences() == []
    kinds = set()
    for case in cases:
        place = 0
        for step in batch.records[str(case.index)].steps:
            assert (step.drafts is None) == (case.option != "draft_logprobs")
            for draft in step.drafts or []:
                assert draft.draft_logprob == -(draft.token_id + 1000.0 * draft.position)
                assert draft.source == ("even", "odd")[draft.token_id % 2]
                kinds.add(draft.accepted)
            assert [d.position for d in step.drafts or []] == [
                place + i for i in range(len(step.drafts or []))
            ]
            place += len(step.token_ids)
    assert kinds == {True, False}


@pytest.mark.parametrize("sampling", ["shared", "argmax"])
def test_drafters_logprobs_are_those_of_its_law(sampling, monkeypatch):
    """The target's own weights draft: both sides think the same of a token."""
    fields = {"include_draft_logprobs": True, "logprobs_mode": "processed", "top_k": 20, "ignore_eos": True}
    monkeypatch.setitem(OPTIONS, "thoughts", fields)
    cases = [Case(i, "thoughts", heat, length=20, prompt=False) for i, heat in enumerate((0.0, 0.7, 1.3))]
    spec = {"method": "draft_model", "model": heads.itself("llama", "float32"), "draft_sampling": sampling}
    batch = Batch(cases, Setup(), {**spec, "adaptive": False, "num_speculative_tokens": 3})
    assert batch.differences() == []
    for record in batch.records.values():
        drafts = [draft for step in record.steps for draft in step.drafts or []]
        assert len(drafts) >= 6 and {draft.source for draft in drafts} == {"draft_model"}
        stood = [draft for draft in drafts if draft.accepted]
        for draft in stood:  # its context was the one that was committed
            assert math.isclose(draft.draft_logprob, draft.target_logprob, abs_tol=1e-5)
        assert sampling == "argmax" or len(stood) == len(drafts)


class Fenced(MtpProposer):
    """Knows which tokens are allowed, and one that is not."""

    def __init__(self, env: Any, options: Any) -> None:
        super().__init__(env, options)
        fence, logits = torch.full((env.vocab_size,), -math.inf), self.model.logits
        fence[[*ALLOWED, 8]] = 0.0
        self.model.logits = lambda normed: logits(normed) + fence  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", ["shared", "argmax"])
def test_rejection_keeps_the_law(sampling):
    """2500 seeds through the engine, drafts sampled, or certain, at every step."""
    count = 2500
    options = {**heads.options("mtp", "llama", "float32"), "draft_sampling": sampling}
    spec = {"method": "test_device_proposers:Fenced", "num_speculative_tokens": 2, "adaptive": False}
    target = engine(
        speculative={**spec, **options, "verify_strategy": "rejection"},
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        debug=False,
        overlap=True,
    )
    params = SamplingParams(max_tokens=3, temperature=2.0, allowed_token_ids=ALLOWED)
    records = run(target, [request(i, params, prompt_token_ids=prompt(0)) for i in range(count)])
    samples = [tuple(record.token_ids[:2]) for record in records.values()]
    assert sum(step.num_accepted for record in records.values() for step in record.steps) > count // 40
    assert p_value(samples, engine_distribution(params)) >= ALPHA


def test_control_a_law_that_is_not_the_drafts(monkeypatch):
    take = DraftRounds.sample

    def lies(self: Any, j: int, logits: Any) -> None:
        take(self, j, logits)
        self._probs[-1] = torch.full_like(self._probs[-1], 1 / logits.shape[1])

    monkeypatch.setattr(DraftRounds, "sample", lies)
    with pytest.raises(AssertionError):
        test_rejection_keeps_the_law("shared")


def test_probabilities_are_kept_only_for_those_who_need_them():
    target = engine(speculative={"method": "mtp", **heads.options("mtp", "llama", "float32")})
    run(target, [request(0, SamplingParams(max_tokens=6))])
    assert target.loop.device.drafting.probs is None
    late = SamplingParams(max_tokens=6, temperature=1.0, speculative={"verify_strategy": "rejection"})
    run(target, [request(1, late)])
    assert target.loop.device.drafting.probs is not None


class Counting(MtpProposer):
    calls: Any = []  # rounds, rows and entries of each call

    def draft(self, batch: Any) -> Draft:
        Counting.calls.append((batch.spec.rounds, len(batch.rows.tokens), len(batch.slots)))
        return super().draft(batch)


def test_no_more_rounds_than_somebody_may_use(monkeypatch):
    """Rows, entries and rounds are those of the step, not of the engine."""
    monkeypatch.setattr(Counting, "calls", [])
    spec = {"method": "test_device_proposers:Counting", **heads.options("mtp", "llama", "float32")}
    target = engine(speculative={**spec, "num_speculative_tokens": 6, "adaptive": False}, debug=True)
    wish = {"num_speculative_tokens": 2}
    run(target, [request(0, SamplingParams(max_tokens=5, ignore_eos=True, speculative=wish))])
    assert {rounds for rounds, *_ in Counting.calls} <= {0, 1, 2} and (2, 12, 1) in Counting.calls
    assert max(rows for _, rows, _ in Counting.calls[1:]) == 3
    Counting.calls.clear()
    off = SamplingParams(max_tokens=5, ignore_eos=True, speculative={"enabled": False})
    run(target, [request(1, off), request(2, off)])
    assert {rounds for rounds, *_ in Counting.calls} == {0}


def test_one_that_was_off_has_missed_nothing():
    """Side by side with one that drafts, and before others begin where it ended."""
    model = heads.itself("llama", "float32")
    cases = [Case(0, "no_logprobs", 0.0, length=20, prompt=False, enabled=False)]
    setup = Setup()
    target = setup.engine({"method": "draft_model", "model": model, "adaptive": False}, page_size=8)
    assert Batch(cases, setup, engine=target).differences() == []
    said = [*heads.tiny.prompt(0, 20), *reference_run(cases[0], setup).token_ids]
    again = request(7, SamplingParams(max_tokens=12, ignore_eos=True), prompt_token_ids=[*said, 9, 9])
    steps = run(target, [again])["7"].steps
    assert target.stats().num_cached_tokens >= 24
    assert sum(step.num_accepted for step in steps) == sum(step.num_draft for step in steps) > 0


def test_a_head_that_raises_costs_drafts_and_no_tokens(caplog, monkeypatch):
    setup = Setup()
    cases = [Case(i, "none", 0.7, length=12, prompt=False) for i in range(2)]
    spec = {"method": "draft_model", "model": heads.itself("llama", "float32")}
    target = setup.engine(spec, debug=False)
    real, calls = DraftModelProposer.draft, []

    def breaks(self: Any, batch: Any) -> Draft:
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return real(self, batch)

    monkeypatch.setattr(DraftModelProposer, "draft", breaks)
    assert Batch(cases, setup, engine=target).differences() == []
    assert len(calls) == 3 and "switched off" in caplog.text
