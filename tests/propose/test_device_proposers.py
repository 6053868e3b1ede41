"""Proposers inside the step: sources, draft logprobs and distribution, with overlap too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import heads
import proposers
from distribution import ALLOWED, ALPHA, engine_distribution, p_value
from draftproof.propose import draft_logprobs
from draftproof.propose.draft_logprobs import DraftLogprobs
from draftproof.propose.head import HeadProposer, MtpProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import Draft
from exact import OPTIONS, Batch, Case, Setup, reference_run
from tiny import VOCAB, engine, prompt, request, run


class TwoSources(proposers.DeviceFlaky):
    """Proposer with one source for even and one for odd tokens, and logprobs that name token and place."""

    sources = ("even", "odd")

    def draft(self, batch: Any) -> Draft:
        made = super().draft(batch)
        line = batch.slots.clamp(min=0)
        place = (batch.columns.length - batch.columns.prompt_len)[line][:, None]
        place = place + torch.arange(made.tokens.shape[1])
        odd = (made.tokens % 2).to(torch.int8)
        return replace(made, sources=odd, logprobs=-(made.tokens + 1000.0 * place).float())


@pytest.mark.parametrize("overlap", [False, True])
def test_sources_name_the_proposer_of_each_token(overlap):
    cases = [Case(i, "ignore_eos", 0.7, length=12 + i, prompt=False) for i in range(4)]
    spec = {"method": "test_device_proposers:TwoSources", "num_speculative_tokens": 4, "adaptive": False}
    batch = Batch(cases, Setup(), spec, arrivals=[0, 0, 1, 3], overlap=overlap)
    assert batch.differences() == []
    seen = set()
    for record in batch.records.values():
        for step in record.steps:
            accepted = step.token_ids[: step.num_accepted]
            assert step.sources == [("even", "odd")[token % 2] for token in accepted]
            seen.update(step.sources)
    assert seen == {"even", "odd"}


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_records_hold_logprobs_of_requests_that_want_them(overlap, monkeypatch):
    monkeypatch.setitem(OPTIONS, "short", {"max_tokens": 6})
    options = ["draft_logprobs", "none", "short", "draft_logprobs"]
    cases = [Case(i, option, 0.7, length=12 + i, prompt=False) for i, option in enumerate(options)]
    spec = {"method": "test_device_proposers:TwoSources", "num_speculative_tokens": 4, "adaptive": False}
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
def test_draft_logprobs_equal_target_logprobs_for_equal_weights(sampling, monkeypatch):
    fields = {"include_draft_logprobs": True, "logprobs_mode": "processed", "top_k": 20, "ignore_eos": True}
    monkeypatch.setitem(OPTIONS, "records", {**fields, "logprobs": 3})
    cases = [Case(i, "records", heat, length=20, prompt=False) for i, heat in enumerate((0.0, 0.7, 1.3))]
    spec = {
        "method": "draft_model",
        "model": heads.target_copy("llama", "float32"),
        "draft_sampling": sampling,
    }
    batch = Batch(cases, Setup(), {**spec, "adaptive": False, "num_speculative_tokens": 3})
    assert batch.differences() == []
    compared = 0
    for record in batch.records.values():
        drafts = [draft for step in record.steps for draft in step.drafts or []]
        assert len(drafts) >= 6 and {draft.source for draft in drafts} == {"draft_model"}
        accepted = [draft for draft in drafts if draft.accepted]
        for draft in accepted:  # its context was committed
            assert math.isclose(draft.draft_logprob, draft.target_logprob, abs_tol=1e-5)
        assert sampling == "argmax" or len(accepted) == len(drafts)
        for draft in drafts:
            ids, values = zip(*draft.draft_top, strict=True)
            assert len(ids) == 3 and list(values) == sorted(values, reverse=True)
            assert draft.draft_rank == (1 if sampling == "argmax" else draft.draft_rank) and draft.draft_rank
            if draft.draft_rank <= 3:
                assert draft.draft_top[draft.draft_rank - 1] == (draft.token_id, draft.draft_logprob)
            else:
                assert draft.token_id not in ids and draft.draft_logprob <= values[-1]
        compared += check_tops_equal_target_rows(record)
    assert compared > 12


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_ranks_of_stored_logits_equal_those_in_turn(kind, monkeypatch):
    """Compare logprobs of rounds together and one by one; the EAGLE-3 head has a reduced vocabulary.

    Controls: logits of other entries, and of other rounds.
    """
    fields = {"include_draft_logprobs": True, "logprobs": 3, "ignore_eos": True}
    monkeypatch.setitem(OPTIONS, "ranked", fields)
    cases = [Case(i, "ranked", heat, length=20, prompt=False) for i, heat in enumerate((0.0, 0.7, 1.3))]
    spec = {"method": kind, "model": heads.head(kind), "num_speculative_tokens": 3, "adaptive": False}

    def drafts_of() -> list[Any]:
        batch = Batch(cases, Setup(), spec)
        assert batch.differences() == []
        steps = [step for record in batch.records.values() for step in record.steps]
        return [draft for step in steps for draft in step.drafts or []]

    in_turn = drafts_of()
    monkeypatch.setattr(HeadProposer, "_stores_logits", lambda self, model: model.can_store_logits)
    stored = drafts_of()
    assert len(stored) > 30 and len({draft.draft_rank for draft in stored}) > 3
    for one, other in zip(stored, in_turn, strict=True):  # a sum over fewer columns may round otherwise
        assert math.isclose(one.draft_logprob, other.draft_logprob, abs_tol=1e-5)
        tops = [[token for token, _ in each.draft_top] for each in (one, other)]
        assert tops[0] == tops[1] and (one.token_id, one.draft_rank) == (other.token_id, other.draft_rank)
    for limit in (1, 2 * 4 * 3 * VOCAB):  # one round or two at a time
        monkeypatch.setattr(draft_logprobs, "MAX_STORED_BYTES", limit)
        assert drafts_of() == stored
    monkeypatch.undo()
    monkeypatch.setitem(OPTIONS, "ranked", fields)
    monkeypatch.setattr(HeadProposer, "_stores_logits", lambda self, model: model.can_store_logits)
    add = DraftLogprobs._add
    for other in (lambda logits: logits.flip(0), lambda logits: logits.roll(1, 0)):
        monkeypatch.setattr(
            DraftLogprobs, "_add", lambda self, n, logits, *rest, by=other: add(self, n, by(logits), *rest)
        )
        assert drafts_of() != stored


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_ranks_do_not_depend_on_truncating_neighbours(kind, monkeypatch):
    """Compare drafts of requests alone and beside one with top_k. Control: logits that are scaled twice."""
    fields = {"include_draft_logprobs": True, "logprobs": 3, "ignore_eos": True}
    monkeypatch.setitem(OPTIONS, "ranked", fields)
    monkeypatch.setitem(OPTIONS, "truncated", {**fields, "top_k": 5, "logprobs_mode": "processed"})
    monkeypatch.setattr(HeadProposer, "_stores_logits", lambda self, model: model.can_store_logits)
    spec = {"method": kind, "model": heads.head(kind), "num_speculative_tokens": 3, "adaptive": False}

    def drafts_of(options: Sequence[str]) -> list[Any]:
        cases = [Case(i, name, (0.7, 1.3)[i % 2], length=20, prompt=False) for i, name in enumerate(options)]
        batch = Batch(cases, Setup(), spec)
        assert batch.differences() == []
        records = [batch.records[str(i)] for i in range(2)]
        return [draft for record in records for step in record.steps for draft in step.drafts or []]

    alone = drafts_of(["ranked", "ranked"])
    assert len(alone) > 15
    assert drafts_of(["ranked", "ranked", "truncated"]) == alone
    add = DraftLogprobs.add
    monkeypatch.setattr(DraftLogprobs, "add", lambda self, logits, vocab, is_scaled: add(self, logits, vocab))
    assert drafts_of(["ranked", "ranked", "truncated"]) != alone


def check_tops_equal_target_rows(record: Any) -> int:
    """Compare the drafter's likeliest tokens with those of a target with the same weights; count drafts."""
    place, rows = 0, {}
    for step in record.steps:
        for i, row in enumerate(step.logprobs):
            rows[place + i] = row
        place += len(step.token_ids)
    compared = 0
    for draft in (draft for step in record.steps for draft in step.drafts or []):
        if draft.accepted:
            row = rows[draft.position]
            assert [token for token, _ in draft.draft_top] == row.token_ids[1:4]
            assert draft.draft_rank == row.ranks[0]
            compared += 1
    return compared


class AllowedOnly(MtpProposer):
    """Head limited to the allowed tokens and one other."""

    def __init__(self, env: Any, options: Any) -> None:
        super().__init__(env, options)
        bias, logits = torch.full((env.vocab_size,), -math.inf), self.model.logits
        bias[[*ALLOWED, 8]] = 0.0
        self.model.logits = lambda normed: logits(normed) + bias  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["shared", "argmax"])
def test_rejection_keeps_the_distribution(sampling):
    """Serve 2500 seeds with sampled or certain drafts."""
    count = 2500
    options = {**heads.options("mtp", "llama", "float32"), "draft_sampling": sampling}
    spec = {"method": "test_device_proposers:AllowedOnly", "num_speculative_tokens": 2, "adaptive": False}
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "debug": False, "overlap": True}
    target = engine(speculative={**spec, **options, "verify_strategy": "rejection"}, **sizes)
    params = SamplingParams(max_tokens=3, temperature=2.0, allowed_token_ids=ALLOWED)
    records = run(target, [request(i, params, prompt_token_ids=prompt(0)) for i in range(count)])
    samples = [tuple(record.token_ids[:2]) for record in records.values()]
    assert sum(step.num_accepted for record in records.values() for step in record.steps) > count // 40
    assert p_value(samples, engine_distribution(params)) >= ALPHA


def test_draft_probs_are_kept_only_if_a_request_needs_them():
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


def test_rounds_rows_and_entries_are_those_of_the_step(monkeypatch):
    monkeypatch.setattr(Counting, "calls", [])
    spec = {"method": "test_device_proposers:Counting", **heads.options("mtp", "llama", "float32")}
    target = engine(speculative={**spec, "num_speculative_tokens": 6, "adaptive": False}, debug=True)
    speculative = {"num_speculative_tokens": 2}
    run(target, [request(0, SamplingParams(max_tokens=5, ignore_eos=True, speculative=speculative))])
    assert {rounds for rounds, *_ in Counting.calls} <= {0, 1, 2} and (2, 12, 1) in Counting.calls
    assert max(rows for _, rows, _ in Counting.calls[1:]) == 3
    Counting.calls.clear()
    off = SamplingParams(max_tokens=5, ignore_eos=True, speculative={"enabled": False})
    run(target, [request(1, off), request(2, off)])
    assert {rounds for rounds, *_ in Counting.calls} == {0}


def test_draft_kv_is_stored_for_requests_without_speculation():
    model = heads.target_copy("llama", "float32")
    cases = [Case(0, "no_logprobs", 0.0, length=20, prompt=False, enabled=False)]
    setup = Setup()
    target = setup.engine({"method": "draft_model", "model": model, "adaptive": False}, page_size=8)
    assert Batch(cases, setup, engine=target).differences() == []
    ids = [*heads.tiny.prompt(0, 20), *reference_run(cases[0], setup).token_ids]
    again = request(7, SamplingParams(max_tokens=12, ignore_eos=True), prompt_token_ids=[*ids, 9, 9])
    steps = run(target, [again])["7"].steps
    assert target.stats().num_cached_tokens >= 24
    assert sum(step.num_accepted for step in steps) == sum(step.num_draft for step in steps) > 0


def test_steps_without_a_speculating_request_neither_draft_nor_plan_anew(monkeypatch):
    """A request without drafts runs in a drafting engine as in one without a proposer (on the CPU)."""
    made = engine(speculative={"method": "ngram", "num_speculative_tokens": 4})
    calls = {"draft": 0, "select": 0}
    proposer, policy = made.loop.device.drafting.proposer, made.loop.policy

    def counted(target, name):
        real = getattr(target, name)

        def call(*arguments):
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(target, name, call)

    counted(proposer, "draft")
    counted(policy, "select")
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    off = run(made, [request(i, replace(params, speculative=False)) for i in range(3)])
    assert calls["draft"] == 0 and calls["select"] <= 2  # steps with prompts are planned in full
    plain = run(engine(), [request(i, params) for i in range(3)])
    assert [off[i].same() for i in off] == [plain[i].same() for i in plain]
    mixed = [replace(params, speculative=False), params, replace(params, speculative=False)]
    found = run(made, [request(i, each) for i, each in enumerate(mixed)], arrivals=[0, 5, 5])
    assert calls["draft"] > 0 and calls["select"] > 0
    assert [found[i].same() for i in found] == [plain[i].same() for i in plain]
    assert sum(step.num_draft for step in found["1"].steps) > 0
    assert sum(step.num_draft for i in "02" for step in found[i].steps) == 0
