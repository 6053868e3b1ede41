"""Endings inside a draft window: tokens, logprobs and drafts agree, and plain and speculative are equal."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache

import pytest
import torch

import proposers
import tiny
from draftproof.metrics import SpecStats
from draftproof.sampling_params import SamplingParams
from draftproof.types import NUM_OUT, TOKENS, Request, StepOutput
from draftproof.verify.sampler import Sampler
from exact import Batch, Case, Setup, bits, check_empty, compare, count_errors, plant

K = 8
SPEC = {"method": "proposers:Perfect", "num_speculative_tokens": K, "adaptive": False}
# the next step is under way before it is known that this one ended
AHEAD = {**SPEC, "method": "proposers:DevicePerfect", "overlap": True}
both_ways = pytest.mark.parametrize("spec", [SPEC, AHEAD], ids=["read at once", "overlap"])
# The first token comes from the prompt's last row; the first window then decides positions 1 to K + 1.
PLACES = {"prefill": 0, "first draft": 1, "middle draft": 4, "last draft": K, "bonus": K + 1, "recovered": 5}


def make_request(seed: int, fields: dict | None = None, **options) -> Request:
    values = {"max_tokens": 20, "temperature": 1.3, "logprobs": 5, **options}
    return tiny.request(0, SamplingParams(**values), 20, seed=seed, **(fields or {}))


@cache
def stream() -> tuple[int, tuple[int, ...]]:
    """A seed whose output has no token twice, and that output: any token of it can be made the end."""
    for seed in range(200):
        tokens = tiny.run(tiny.engine(), [make_request(seed, ignore_eos=True)])["0"].token_ids
        if len(set(tokens)) == len(tokens) and 2 not in tokens:
            return seed, tuple(tokens)
    raise AssertionError("no seed gives twenty different tokens")


def both(request: Request, answer, spec=SPEC, **options) -> tuple[tiny.Record, tiny.Record]:
    """(plain, speculative) with drafts from `answer`; they must agree, and nothing may be left."""
    proposers.set_answers({"0": list(answer)})
    spec = dict(spec)
    overlap = spec.pop("overlap", False)
    records = []
    for speculative, ahead in ((None, False), *([(None, True)] if overlap else []), (spec, overlap)):
        engine = tiny.engine(speculative=speculative, overlap=ahead, **options)
        records.append(tiny.run(engine, [request])["0"])
        check_empty(engine)
        assert compare("0", records[0], records[-1]) == []
    assert all(len(r.logprobs) == len(r.token_ids) for r in records)
    return records[0], records[-1]


def statistics(record: tiny.Record) -> SpecStats:
    stats = SpecStats()
    for step in record.steps:
        if step.token_ids:
            stats.record(step.num_draft, step.num_accepted, len(step.token_ids))
    assert stats.num_emitted_tokens == len(record.token_ids)
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    return stats


@both_ways
@pytest.mark.parametrize("kind", ["eos", "stop token", "both"])
@pytest.mark.parametrize("place", PLACES)
def test_an_end_token_anywhere_in_a_window(place, kind, spec):
    seed, answer = stream()
    at = PLACES[place]
    end = answer[at]
    drafts = list(answer)
    if place == "recovered":
        drafts[at] = 3
    fields = {"eos_token_ids": (end,)} if kind != "stop token" else {}
    options = {"stop_token_ids": [end]} if kind != "eos" else {}
    _, record = both(make_request(seed, fields, **options), drafts, spec)
    assert record.token_ids == list(answer[: at + 1])
    assert record.finish == ("stop", None if kind == "eos" else end, None)
    last = record.steps[-1]
    want = {"prefill": (0, 0), "bonus": (K, K), "recovered": (K, at - 1)}.get(place, (K, at))
    assert (last.num_draft, last.num_accepted) == want
    stats = statistics(record)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == want


@both_ways
@pytest.mark.parametrize("place", PLACES)
def test_an_ignored_end(place, spec):
    seed, answer = stream()
    fields = {"eos_token_ids": (answer[PLACES[place]],)}
    _, record = both(make_request(seed, fields, ignore_eos=True), answer, spec)
    assert record.token_ids == list(answer) and record.finish[0] == "length"


@both_ways
@pytest.mark.parametrize("max_tokens", [1, 2, 5, K + 1, K + 2, K + 3, 19])
def test_max_tokens_anywhere(max_tokens, spec):
    seed, answer = stream()
    _, record = both(make_request(seed, max_tokens=max_tokens), answer, spec)
    assert record.token_ids == list(answer[:max_tokens])
    assert record.finish == ("length", None, None)
    left = max_tokens
    for step in record.steps:  # a draft that could not be committed is never made
        assert step.num_draft <= left - 1
        left -= len(step.token_ids)
    statistics(record)


@both_ways
@pytest.mark.parametrize("room", [1, 2, 5, K + 1, K + 2])
def test_max_model_len_anywhere(room, spec):
    seed, answer = stream()
    _, record = both(make_request(seed, max_tokens=None), answer, spec, max_model_len=20 + room)
    assert record.token_ids == list(answer[:room])
    assert record.finish == ("length", None, None)
    statistics(record)


@both_ways
def test_an_end_token_at_the_very_limit_is_a_stop(spec):
    seed, answer = stream()
    _, record = both(make_request(seed, {"eos_token_ids": (answer[6],)}, max_tokens=7), answer, spec)
    assert record.finish == ("stop", None, None) and len(record.token_ids) == 7


@both_ways
@pytest.mark.parametrize("minimum", [0, 1, 4, 5, 9])
def test_min_tokens_is_met_inside_a_window(minimum, spec):
    """The end is the likeliest token everywhere: the answer ends as soon as it may."""
    request = make_request(5, min_tokens=minimum, logit_bias={2: 50.0})
    answer = tiny.run(tiny.engine(), [request])["0"].token_ids
    assert len(answer) == minimum + 1
    _, record = both(request, answer, spec)
    assert record.finish == ("stop", None, None)


@both_ways
@pytest.mark.parametrize("drafts", [[2] * 20, [3] * 20], ids=["ends", "others"])
def test_drafts_of_an_end_token_that_fall(drafts, spec):
    """An end token that was only guessed ends nothing."""
    seed, answer = stream()
    _, record = both(make_request(seed), drafts, spec)
    assert record.token_ids == list(answer)


def test_reject_all_and_accept_all_still_end():
    seed, answer = stream()
    request = make_request(seed, {"eos_token_ids": (answer[4],)})
    _, record = both(request, answer, {**SPEC, "accept_policy": "reject_all"})
    assert statistics(record).num_accepted_tokens == 0 and len(record.token_ids) == 5
    proposers.set_answers({"0": [9, 9, 9, answer[4], 9, 9, 9, 9, 9]})
    engine = tiny.engine(speculative={**SPEC, "accept_policy": "accept_all"})
    record = tiny.run(engine, [request])["0"]
    assert record.token_ids[1:] == [9, 9, answer[4]] and record.finish[0] == "stop"
    assert count_errors("0", record) == [] and statistics(record).num_accepted_tokens == 3
    check_empty(engine)


# --- errors inside a window ---


def failing_at(count: int):
    """Raises at the row that would decide output token `count`."""

    def processor(tokens, row):
        if len(tokens) == 20 + count:
            raise ValueError("no more")
        return row

    return processor


@both_ways
@pytest.mark.parametrize("place", PLACES)
def test_an_error_inside_a_window_delivers_what_came_before(place, spec):
    seed, answer = stream()
    at = PLACES[place]
    drafts = list(answer)
    if place == "recovered":
        drafts[at] = 3
    _, record = both(make_request(seed, logits_processors=[failing_at(at)]), drafts, spec)
    assert record.token_ids == list(answer[:at])
    assert record.finish[0] == "error" and "no more" in record.finish[2]
    statistics(record)


@both_ways
def test_an_end_before_the_error_wins(spec):
    seed, answer = stream()
    request = make_request(seed, {"eos_token_ids": (answer[4],)}, logits_processors=[failing_at(5)])
    _, record = both(request, answer, spec)
    assert record.finish == ("stop", None, None) and len(record.token_ids) == 5


@pytest.mark.parametrize("method", ["proposers:Flaky", "proposers:Junk"])
def test_an_error_on_drafts_that_fall_is_no_error(method):
    """A processor that cannot bear a context that plain decoding never has."""
    seed, answer = stream()

    def strict(tokens, row):
        if tuple(tokens[20:]) != answer[: len(tokens) - 20]:
            raise ValueError("I do not know this text")
        return row

    _, record = both(make_request(seed, logits_processors=[strict]), answer, {**SPEC, "method": method})
    assert record.token_ids == list(answer) and record.finish[0] == "length"
    assert sum(step.num_draft - step.num_accepted for step in record.steps) > 5


@both_ways
def test_nothing_left_to_sample(spec):
    """Two tokens are allowed, and bad words run out of ways to place them."""
    words = [(10, 10), (11, 11), (10, 11, 10), (10, 11, 11)]
    request = make_request(3, {"bad_word_ids": words}, allowed_token_ids=[10, 11])
    answer = tiny.run(tiny.engine(), [request])["0"].token_ids
    assert answer in ([10, 11], [11, 10, 11])
    _, record = both(request, [*answer, 10, 11, 10], spec)
    assert record.finish[0] == "error" and "forbid every one" in record.finish[2]
    _, record = both(make_request(3, {"bad_word_ids": [(10,)]}, allowed_token_ids=[10]), answer, spec)
    assert record.finish[0] == "error" and record.token_ids == []


# --- leaving ---


@pytest.mark.parametrize("when", range(7))
def test_an_abort_leaves_a_beginning_and_no_trace(when):
    """At any step: queued, in its prompt, decoding. Its neighbour notices nothing."""
    cases = [Case(1, "frequency", 0.7, length=20), Case(2, "mix", 0.7, length=40)]
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 3}
    batch = Batch(cases, Setup(), spec, chunk=16, arrivals=[0, 1], aborts={2: when})
    assert batch.differences() == []


# --- slack ---


def poisoned(engine):
    """Whatever nobody has written yet is impossible."""
    with torch.inference_mode():
        engine.loop.slots.poison()
        for cache_ in engine.runner.caches:
            cache_.fill_(math.nan)
    return engine


@pytest.mark.parametrize("arch", list(tiny.ARCHITECTURES))
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_slack_is_never_read(arch, backend):
    setup = Setup(arch, "float32", backend)
    cases = [
        Case(0, "mix", 0.7, length=20),
        Case(1, "frequency", 0.0, length=40),
        Case(2, "none", 1.3, length=1),
    ]
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5}
    engine = poisoned(setup.engine(spec, max_num_batched_tokens=16))
    batch = Batch(cases, setup, engine=engine, arrivals=[0, 0, 3])
    assert batch.differences() == []
    poisoned(engine)  # used slots and pages as well: nothing old is read either
    assert batch.differences() == []


def test_poison_is_seen_where_it_matters():
    """The control: NaN in the page of a running request does change it."""
    engine = tiny.engine()
    engine.add(make_request(1))
    engine.step()
    poisoned(engine)
    outputs = engine.step()
    assert outputs[0].finish_reason == "error" and "not finite" in outputs[0].error


def test_draft_records_agree_with_the_counts():
    setup = Setup()
    request = Case(3, "draft_logprobs", 1.3, length=20)
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}
    batch = Batch([request], setup, spec)
    assert batch.differences() == []
    record = batch.serve({"3": tiny.run(setup.engine(), [request.request(plain=True)])["3"].token_ids})["3"]
    for step, start in zip(record.steps, _starts(record), strict=True):
        drafts = step.drafts or []
        assert [d.position for d in drafts] == list(range(start, start + step.num_draft))
        assert [d.accepted for d in drafts] == [i < step.num_accepted for i in range(step.num_draft)]
        for draft, row in zip(drafts[: step.num_accepted], bits(step.logprobs), strict=False):
            assert draft.token_id == row[0] and draft.target_logprob.hex() in row


def _starts(record):
    at = 0
    for step in record.steps:
        yield at
        at += len(step.token_ids)


# --- controls: an engine that ends wrongly is found out ---


def test_control_an_end_looked_for_at_the_windows_end_alone(monkeypatch):
    seed, answer = stream()
    request = make_request(seed, {"eos_token_ids": (answer[4],)})

    def broken(commit, ops, plan, windows, choice, bad, out):
        columns = windows.columns
        blind = replace(columns, ends=torch.zeros_like(columns.ends))
        copy = replace(blind, **{f.name: getattr(blind, f.name).clone() for f in fields(blind)})
        commit(ops, plan, replace(windows, columns=copy), choice, bad, out)
        last = out.table[0, TOKENS + int(out.table[0, NUM_OUT]) - 1]
        seen = columns if columns.ends[windows.slots[0], last] else blind
        commit(ops, plan, replace(windows, columns=seen), choice, bad, out)

    plant(monkeypatch, "commit", broken)
    with pytest.raises(AssertionError, match="tokens"):
        both(request, answer)


def test_control_an_error_on_a_fallen_draft_that_counts(monkeypatch):
    """The whole window fails with any of its rows."""
    seed, answer = stream()

    def strict(tokens, row):
        if tuple(tokens[20:]) != answer[: len(tokens) - 20]:
            raise ValueError("I do not know this text")
        return row

    whole = Sampler.__call__

    def broken(sampler, logits, windows, traits, hosted):
        sampled = whole(sampler, logits, windows, traits, hosted)
        for row, message in list(sampled.errors.items()):
            first = row - int(windows.depth[row])
            sampled.errors[first], sampled.bad[first] = message, sampled.bad[row]
        return sampled

    monkeypatch.setattr(Sampler, "__call__", broken)
    with pytest.raises(AssertionError, match="tokens"):
        both(make_request(seed, logits_processors=[strict]), answer, {**SPEC, "method": "proposers:Flaky"})


def test_control_counts_that_disagree():
    step = StepOutput("0", [5, 6], [], None, 1, 1, ["x"], None)
    assert count_errors("0", tiny.Record(steps=[step]))
    for wrong in ({"num_draft": 0}, {"num_accepted": 0}, {"token_ids": [5, 6, 7]}, {"drafts": []}):
        fine = replace(step, logprobs=None)
        assert not count_errors("0", tiny.Record(steps=[fine]))
        assert count_errors("0", tiny.Record(steps=[replace(fine, **wrong)]))
