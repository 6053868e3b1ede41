"""Requests that finish inside a draft window: equal tokens and logprobs with and without speculation."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache
from itertools import product

import pytest
import torch

import proposers
import tiny
from draftproof.metrics import SpecStats
from draftproof.sampling_params import SamplingParams
from draftproof.types import NUM_OUT, TOKENS, Request, StepOutput
from draftproof.verify.sampler import Sampler
from exact import Batch, Case, Setup, check_empty, compare, count_errors, plant

K = 8
SPEC = {"method": "proposers:Perfect", "num_speculative_tokens": K, "adaptive": False}
# The next step is in flight before the host reads that this one finished.
AHEAD = {**SPEC, "method": "proposers:DevicePerfect", "overlap": True}
with_and_without_overlap = pytest.mark.parametrize("spec", [SPEC, AHEAD], ids=["no overlap", "overlap"])
PLAIN_RECORDS: dict[str, tiny.Record] = {}  # request and options of the engine -> record without drafts
# The last prompt row gives the first token; the first window then decides positions 1 to K + 1.
PLACES = {"prefill": 0, "first draft": 1, "middle draft": 4, "last draft": K, "bonus": K + 1, "recovered": 5}


def make_request(seed: int, fields: dict | None = None, **options) -> Request:
    values = {"max_tokens": 20, "temperature": 1.3, "logprobs": 5, **options}
    return tiny.request(0, SamplingParams(**values), 20, seed=seed, **(fields or {}))


@cache
def distinct_output() -> tuple[int, tuple[int, ...]]:
    """Return a seed whose output has no token twice, and that output, so that any token can be the end."""
    for seed in range(200):
        tokens = tiny.run(tiny.engine(), [make_request(seed, ignore_eos=True)])["0"].token_ids
        if len(set(tokens)) == len(tokens) and 2 not in tokens:
            return seed, tuple(tokens)
    raise AssertionError("no seed gives twenty different tokens")


def plain_record(request: Request, options: dict) -> tiny.Record:
    """Serve a request without drafts and without overlap."""
    engine = tiny.engine(overlap=False, **options)
    record = tiny.run(engine, [request])["0"]
    check_empty(engine)
    assert count_errors("0", record) == []
    return record


def serve(request: Request, answer, spec=SPEC, fresh=False, **options) -> tiny.Record:
    """Return the record with drafts from `answer`, which must equal that of plain decoding.

    Plain records are cached, except those of requests with processors, whose repr has only their address.
    `fresh`: not, for a broken engine.
    """
    proposers.set_outputs({"0": list(answer)})
    spec = dict(spec)
    overlap = spec.pop("overlap", False)
    if fresh or request.params.logits_processors:
        plain = plain_record(request, options)
    else:
        key = repr((request, options))
        plain = PLAIN_RECORDS.get(key) or PLAIN_RECORDS.setdefault(key, plain_record(request, options))
    records = [plain]
    for speculative, ahead in (*([(None, True)] if overlap else []), (spec, overlap)):
        engine = tiny.engine(speculative=speculative, overlap=ahead, **options)
        records.append(tiny.run(engine, [request])["0"])
        check_empty(engine)
        assert compare("0", records[0], records[-1]) == []
    assert all(len(r.logprobs) == len(r.token_ids) for r in records)
    return records[-1]


def statistics(record: tiny.Record) -> SpecStats:
    stats = SpecStats()
    for step in record.steps:
        if step.token_ids:
            stats.record(step.num_draft, step.num_accepted, len(step.token_ids))
    assert stats.num_emitted_tokens == len(record.token_ids)
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    return stats


@with_and_without_overlap
@pytest.mark.parametrize("kind", ["eos", "stop token", "both"])
@pytest.mark.parametrize("place", PLACES)
def test_end_token_anywhere_in_a_window_finishes_there(place, kind, spec):
    seed, answer = distinct_output()
    at = PLACES[place]
    end = answer[at]
    drafts = list(answer)
    if place == "recovered":
        drafts[at] = 3
    fields = {"eos_token_ids": (end,)} if kind != "stop token" else {}
    options = {"stop_token_ids": [end]} if kind != "eos" else {}
    record = serve(make_request(seed, fields, **options), drafts, spec)
    assert record.token_ids == list(answer[: at + 1])
    assert record.finish == ("stop", None if kind == "eos" else end, None)
    last = record.steps[-1]
    want = {"prefill": (0, 0), "bonus": (K, K), "recovered": (K, at - 1)}.get(place, (K, at))
    assert (last.num_draft, last.num_accepted) == want
    stats = statistics(record)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == want


@with_and_without_overlap
@pytest.mark.parametrize("place", PLACES)
def test_ignored_end_token_does_not_finish(place, spec):
    seed, answer = distinct_output()
    fields = {"eos_token_ids": (answer[PLACES[place]],)}
    record = serve(make_request(seed, fields, ignore_eos=True), answer, spec)
    assert record.token_ids == list(answer) and record.finish[0] == "length"


@with_and_without_overlap
@pytest.mark.parametrize("max_tokens", [1, 2, 5, K + 1, K + 2, K + 3, 19])
def test_max_tokens_finishes_anywhere_in_a_window(max_tokens, spec):
    seed, answer = distinct_output()
    record = serve(make_request(seed, max_tokens=max_tokens), answer, spec)
    assert record.token_ids == list(answer[:max_tokens])
    assert record.finish == ("length", None, None)
    left = max_tokens
    for step in record.steps:  # no draft past the limit
        assert step.num_draft <= left - 1
        left -= len(step.token_ids)
    statistics(record)


@with_and_without_overlap
@pytest.mark.parametrize("room", [1, 2, 5, K + 1, K + 2])
def test_max_model_len_finishes_anywhere_in_a_window(room, spec):
    seed, answer = distinct_output()
    record = serve(make_request(seed, max_tokens=None), answer, spec, max_model_len=20 + room)
    assert record.token_ids == list(answer[:room])
    assert record.finish == ("length", None, None)
    statistics(record)


@with_and_without_overlap
def test_end_token_at_max_tokens_is_a_stop(spec):
    seed, answer = distinct_output()
    record = serve(make_request(seed, {"eos_token_ids": (answer[6],)}, max_tokens=7), answer, spec)
    assert record.finish == ("stop", None, None) and len(record.token_ids) == 7


@with_and_without_overlap
@pytest.mark.parametrize("minimum", [0, 1, 4, 5, 9])
def test_min_tokens_is_reached_inside_a_window(minimum, spec):
    """The end token is the most likely one everywhere."""
    request = make_request(5, min_tokens=minimum, logit_bias={2: 50.0})
    answer = tiny.run(tiny.engine(), [request])["0"].token_ids
    assert len(answer) == minimum + 1
    record = serve(request, answer, spec)
    assert record.finish == ("stop", None, None)


@with_and_without_overlap
@pytest.mark.parametrize("drafts", [[2] * 20, [3] * 20], ids=["ends", "others"])
def test_rejected_end_token_does_not_finish(drafts, spec):
    seed, answer = distinct_output()
    record = serve(make_request(seed), drafts, spec)
    assert record.token_ids == list(answer)


def test_reject_all_and_accept_all_finish():
    seed, answer = distinct_output()
    request = make_request(seed, {"eos_token_ids": (answer[4],)})
    record = serve(request, answer, {**SPEC, "accept_policy": "reject_all"})
    assert statistics(record).num_accepted_tokens == 0 and len(record.token_ids) == 5
    proposers.set_outputs({"0": [9, 9, 9, answer[4], 9, 9, 9, 9, 9]})
    engine = tiny.engine(speculative={**SPEC, "accept_policy": "accept_all"})
    record = tiny.run(engine, [request])["0"]
    assert record.token_ids[1:] == [9, 9, answer[4]] and record.finish[0] == "stop"
    assert count_errors("0", record) == [] and statistics(record).num_accepted_tokens == 3
    check_empty(engine)


# --- errors inside a window ---


def failing_at(count: int):
    """Return a processor that raises at the row of output token `count`."""

    def processor(tokens, row):
        if len(tokens) == 20 + count:
            raise ValueError("no more")
        return row

    return processor


@with_and_without_overlap
@pytest.mark.parametrize("place", PLACES)
def test_error_inside_a_window_keeps_earlier_tokens(place, spec):
    seed, answer = distinct_output()
    at = PLACES[place]
    drafts = list(answer)
    if place == "recovered":
        drafts[at] = 3
    record = serve(make_request(seed, logits_processors=[failing_at(at)]), drafts, spec)
    assert record.token_ids == list(answer[:at])
    assert record.finish[0] == "error" and "no more" in record.finish[2]
    statistics(record)


@with_and_without_overlap
def test_end_token_before_an_error_is_a_stop(spec):
    seed, answer = distinct_output()
    request = make_request(seed, {"eos_token_ids": (answer[4],)}, logits_processors=[failing_at(5)])
    record = serve(request, answer, spec)
    assert record.finish == ("stop", None, None) and len(record.token_ids) == 5


def reject_other_texts(tokens, row):
    """Raise in a context that plain decoding never has."""
    if tuple(tokens[20:]) != distinct_output()[1][: len(tokens) - 20]:
        raise ValueError("unknown text")
    return row


@pytest.mark.parametrize("method", ["proposers:Flaky", "proposers:Junk"])
def test_error_on_rejected_drafts_is_ignored(method):
    seed, answer = distinct_output()
    record = serve(
        make_request(seed, logits_processors=[reject_other_texts]), answer, {**SPEC, "method": method}
    )
    assert record.token_ids == list(answer) and record.finish[0] == "length"
    assert sum(step.num_draft - step.num_accepted for step in record.steps) > 5


@with_and_without_overlap
def test_request_without_allowed_tokens_fails(spec):
    """Two tokens are allowed, and bad words forbid every continuation."""
    words = [(10, 10), (11, 11), (10, 11, 10), (10, 11, 11)]
    request = make_request(3, {"bad_word_ids": words}, allowed_token_ids=[10, 11])
    answer = tiny.run(tiny.engine(), [request])["0"].token_ids
    assert answer in ([10, 11], [11, 10, 11])
    record = serve(request, [*answer, 10, 11, 10], spec)
    assert record.finish[0] == "error" and "forbid every one" in record.finish[2]
    record = serve(make_request(3, {"bad_word_ids": [(10,)]}, allowed_token_ids=[10]), answer, spec)
    assert record.finish[0] == "error" and record.token_ids == []


# --- unwritten memory ---


def poisoned(engine):
    """Fill slots and KV caches with impossible values."""
    with torch.inference_mode():
        engine.loop.slots.poison()
        for cache_ in engine.runner.caches:
            cache_.fill_(math.nan)
    return engine


# One architecture of each kind of attention: the torch backend reads caches there alone, and it is slow.
TORCH_ARCHITECTURES = ("llama", "mistral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    ("backend", "arch"), [*product(["auto"], tiny.ARCHITECTURES), *product(["torch"], TORCH_ARCHITECTURES)]
)
def test_unwritten_memory_is_never_read(backend, arch):
    setup = Setup(arch, "float32", backend)
    cases = [
        Case(0, "mix", 0.7, length=20),
        Case(1, "frequency", 0.0, length=40, max_tokens=9),
        Case(2, "none", 1.3, length=1, max_tokens=9),
    ]
    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5}
    engine = poisoned(setup.engine(spec, max_num_batched_tokens=16))
    batch = Batch(cases, setup, engine=engine, arrivals=[0, 0, 3])
    assert batch.differences() == []
    poisoned(engine)  # used slots and pages as well
    assert batch.differences() == []


def test_control_poison_in_a_running_request_is_detected():
    engine = tiny.engine()
    engine.add(make_request(1))
    engine.step()
    poisoned(engine)
    outputs = engine.step()
    assert outputs[0].finish_reason == "error" and "not finite" in outputs[0].error


# --- controls ---


def test_control_end_token_checked_at_the_last_row_only_is_detected(monkeypatch):
    seed, answer = distinct_output()
    request = make_request(seed, {"eos_token_ids": (answer[4],)})

    def broken(commit, ops, plan, windows, choice, bad, out):
        columns = windows.columns
        blind = replace(columns, ends=torch.zeros_like(columns.ends))
        copy = replace(blind, **{f.name: getattr(blind, f.name).clone() for f in fields(blind)})
        commit(ops, plan, replace(windows, columns=copy), choice, bad, out)
        last = out.table[0, TOKENS + int(out.table[0, NUM_OUT]) - 1]
        used = columns if columns.ends[windows.slots[0], last] else blind
        commit(ops, plan, replace(windows, columns=used), choice, bad, out)

    plant(monkeypatch, "commit", broken)
    with pytest.raises(AssertionError, match="tokens"):
        serve(request, answer, fresh=True)


def test_control_error_of_a_rejected_draft_is_detected(monkeypatch):
    """Fail the whole window with any of its rows."""
    seed, answer = distinct_output()

    whole = Sampler.__call__

    def broken(sampler, logits, windows, traits, hosted):
        sampled = whole(sampler, logits, windows, traits, hosted)
        for row, message in list(sampled.errors.items()):
            first = row - int(windows.depth[row])
            sampled.errors[first], sampled.bad[first] = message, sampled.bad[row]
        return sampled

    monkeypatch.setattr(Sampler, "__call__", broken)
    with pytest.raises(AssertionError, match="tokens"):
        serve(
            make_request(seed, logits_processors=[reject_other_texts]),
            answer,
            {**SPEC, "method": "proposers:Flaky"},
            fresh=True,
        )


def test_control_inconsistent_counts_are_detected():
    step = StepOutput("0", [5, 6], [], None, 1, 1, ["x"], None)
    assert count_errors("0", tiny.Record(steps=[step]))
    for wrong in ({"num_draft": 0}, {"num_accepted": 0}, {"token_ids": [5, 6, 7]}, {"drafts": []}):
        fine = replace(step, logprobs=None)
        assert not count_errors("0", tiny.Record(steps=[fine]))
        assert count_errors("0", tiny.Record(steps=[replace(fine, **wrong)]))
