"""Logprobs: exactly the requested entries, in a fixed order, from unchanged logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.step.step_results import StepResults, add_named
from draftproof.errors import RequestError
from draftproof.ops import NamedIds, Rows
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.outputs import LogprobRow
from draftproof.sampling_params import SamplingParams
from opcheck import bits, importable
from tiny import VOCAB, Record, engine, prompt, request, run

OPS = importable()
SPEC = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
every = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
both = pytest.mark.parametrize("spec", (None, SPEC), ids=("plain", "drafts"))


def one(spec: dict[str, Any] | None = None, index: int = 0, length: int = 12, **options: Any) -> Record:
    """Serve one greedy request of 24 tokens, by default."""
    overlap = options.pop("overlap", False)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **options})
    target = engine(speculative=spec, max_logprobs=-1, overlap=overlap)
    return run(target, [request(index, params, length)])[str(index)]


def logprob_rows(
    ops: Any, logits: Tensor, rows: list[int], tokens: list[int], top: int = 0, ids: tuple[int, ...] = ()
) -> list[LogprobRow]:
    """Return the logprobs of tokens [n] at rows [n] of the logits, then of the `top` best, then of `ids`."""
    slots = torch.zeros(len(logits), dtype=torch.int64)
    named = NamedIds(torch.tensor([ids]), slots, len(ids)) if ids else None
    found = ops.sampling.logprobs(logits, torch.tensor(rows), torch.tensor(tokens), top, None, named)
    columns = found.values.tolist(), found.ids.tolist(), found.ranks.tolist()
    lines = LogprobRow.from_columns(*columns, tokens, top)
    if ids:
        add_named(lines, ids, *(tensor.tolist() for tensor in found.named))
    return lines


def rows_from_scratch(logits: Tensor, token: int, top: int) -> tuple[list[int], list[float], list[int]]:
    """Return ids, logprobs and ranks by definition, in plain Python."""
    values = torch.log_softmax(logits.double(), -1).tolist()
    order = sorted(range(len(values)), key=lambda i: (-float(logits[i]), i))
    ids = [token, *order[:top]]
    return ids, [values[i] for i in ids], [1 + order.index(i) for i in ids]


# --- the rows ---


@every
@pytest.mark.parametrize("top", (0, 1, 5, 20, 61))
def test_rows_equal_the_definition(ops: Any, top: int) -> None:
    """Ids, order and ranks are equal, ties included; values are within 1e-5 of fp64."""
    logits = 2 * torch.randn((9, 61), generator=torch.Generator().manual_seed(1))
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, 10:] = -torch.inf
    tokens = [0, 3, 60, 4, 30, 31, 2, 1, 9]
    lines = logprob_rows(ops, logits, list(range(9)), tokens, top, ())
    for line, row, token in zip(lines, logits, tokens, strict=True):
        ids, values, ranks = rows_from_scratch(row, token, top)
        assert line.token_ids == ids and line.ranks == ranks
        got, want = torch.tensor(line.logprobs).double(), torch.tensor(values).double()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@every
def test_rows_computed_together_equal_rows_computed_alone(ops: Any) -> None:
    logits = torch.randn((12, 61), generator=torch.Generator().manual_seed(2))
    rows = [0, 1, 2, -1, 3, 4, 5, -1, -1, 11, 10, 9, 0]
    tokens = [5, 6, 7, 0, 1, 1, 60, 0, 0, 1, 2, 3, 0]
    found = ops.sampling.logprobs(logits, torch.tensor(rows), torch.tensor(tokens), 20)
    columns = found.values.tolist(), found.ids.tolist(), found.ranks.tolist()
    for top in (0, 1, 5, 20):
        lines = LogprobRow.from_columns(*columns, tokens, top)
        for row, token, line in zip(rows, tokens, lines, strict=True):
            if row >= 0:
                assert [line] == logprob_rows(ops, logits, [row], [token], top, ())
    named = logprob_rows(ops, logits, [11, 10, 9], [1, 2, 3], 0, (4, 60, 2))
    assert [line.token_ids[1:] for line in named] == [[4, 60, 2]] * 3
    for line, row in zip(named, (11, 10, 9), strict=True):
        assert (line.token_ids, line.ranks) == pick(logits[row], line.token_ids)


def pick(row: Tensor, ids: list[int]) -> tuple[list[int], list[int]]:
    return ids, [rows_from_scratch(row, token, 0)[2][0] for token in ids]


@every
def test_memory_around_the_rows_is_never_read(ops: Any) -> None:
    logits = torch.randn((4, 61), generator=torch.Generator().manual_seed(3))
    buffer = torch.full((40, 61), torch.nan)
    buffer[[7, 8, 20, 39]] = logits
    before = bits(buffer)
    clean = logprob_rows(ops, logits, [0, 1, 2, 3], [1, 2, 3, 4], 5, (9,))
    assert logprob_rows(ops, buffer, [7, 8, 20, 39], [1, 2, 3, 4], 5, (9,)) == clean
    assert bits(buffer) == before


# --- options ---


@both
def test_each_option_returns_its_own_entries(spec: dict[str, Any] | None) -> None:
    none = one(spec)
    assert none.logprobs == [] and all(step.logprobs is None for step in none.steps)
    full = one(spec, logprobs=-1)
    assert all(len(line.token_ids) == 1 + VOCAB for line in full.logprobs)
    for options, width in (
        ({"logprobs": 0}, 1),
        ({"logprobs": 1}, 2),
        ({"logprobs": 5}, 6),
        ({"logprobs": 20}, 21),
        ({"logprob_token_ids": [4, 90, 2]}, 4),
        ({"logprob_token_ids": [4], "logprobs": 0}, 2),
    ):
        record = one(spec, **options)
        assert record.token_ids == none.token_ids
        assert len(record.logprobs) == len(record.token_ids)
        for line, whole, token in zip(record.logprobs, full.logprobs, record.token_ids, strict=True):
            assert len(line.token_ids) == len(line.logprobs) == len(line.ranks) == width
            assert line.token_ids[0] == token
            values = dict(zip(whole.token_ids, zip(whole.logprobs, whole.ranks, strict=True), strict=True))
            assert [values[t] for t in line.token_ids] == list(zip(line.logprobs, line.ranks, strict=True))
        if "logprob_token_ids" in options:
            assert all(
                tuple(line.token_ids[1:]) == tuple(options["logprob_token_ids"]) for line in record.logprobs
            )


@both
def test_top_5_is_a_prefix_of_top_20_with_ranks_in_order(spec: dict[str, Any] | None) -> None:
    short, long = one(spec, logprobs=5), one(spec, logprobs=20)
    for a, b in zip(short.logprobs, long.logprobs, strict=True):
        assert (a.token_ids, a.logprobs, a.ranks) == (b.token_ids[:6], b.logprobs[:6], b.ranks[:6])
        assert b.ranks[1:] == list(range(1, 21))
        assert b.logprobs[1:] == sorted(b.logprobs[1:], reverse=True)
        assert b.token_ids[0] == b.token_ids[1] and b.ranks[0] == 1  # greedy


def test_ties_are_ordered_by_id() -> None:

    def flat(tokens: Any, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits)

    record = one(None, logprobs=5, logits_processors=[flat], logprobs_mode="processed", max_tokens=3)
    for line in record.logprobs:
        assert line.token_ids == [0, 0, 1, 2, 3, 4] and line.ranks == [1, 1, 2, 3, 4, 5]
        assert len(set(line.logprobs)) == 1


@both
def test_all_logprobs_sum_to_one(spec: dict[str, Any] | None) -> None:
    for line in one(spec, logprobs=-1, max_tokens=6).logprobs:
        assert sum(2.718281828459045**x for x in line.logprobs[1:]) == pytest.approx(1, abs=1e-5)
        assert sorted(line.token_ids[1:]) == list(range(VOCAB))


def test_more_than_max_logprobs_is_refused() -> None:
    target = engine(max_logprobs=5)
    for options in (
        {"logprobs": 6},
        {"logprobs": -1},
        {"prompt_logprobs": 6},
        {"logprob_token_ids": list(range(6))},
        {"logprob_token_ids": [VOCAB]},
    ):
        with pytest.raises(RequestError):
            target.add(request(0, SamplingParams(**options)))
    with pytest.raises(RequestError):
        SamplingParams(logprobs=3, logprob_token_ids=[1])
    assert not target.has_work


# --- prompt logprobs ---


def test_prompt_logprobs_equal_those_of_generation() -> None:
    """Send prompt and output as a prompt."""
    first = one(None, logprobs=5)
    ids = [*prompt(0), *first.token_ids]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    again = run(engine(), [request(0, params, prompt_token_ids=ids)])["0"]
    assert again.prompt_logprobs[len(prompt(0)) - 1 :] == first.logprobs


@pytest.mark.parametrize("k", (0, 1, -1))
def test_prompt_logprobs_have_the_requested_width(k: int) -> None:
    record = one(None, prompt_logprobs=k, max_tokens=1)
    assert {len(line.token_ids) for line in record.prompt_logprobs} == {1 + (VOCAB if k == -1 else k)}
    assert len(one(None, prompt_logprobs=k, length=1, max_tokens=1).prompt_logprobs) == 0


# --- raw and processed ---

PENALISED = {"temperature": 0.7, "top_k": 10, "repetition_penalty": 1.5, "presence_penalty": 0.5, "seed": 1}


@both
def test_raw_is_before_and_processed_after_sampling_options(spec: dict[str, Any] | None) -> None:
    options = {"max_tokens": 12, "logprobs": -1, **PENALISED}
    raw, processed = one(spec, **options), one(spec, **options, logprobs_mode="processed")
    assert raw.token_ids == processed.token_ids
    ids = [*prompt(0), *raw.token_ids]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    plain = run(engine(max_logprobs=-1), [request(0, params, prompt_token_ids=ids)])["0"].prompt_logprobs
    assert plain[len(prompt(0)) - 1 :] == raw.logprobs
    for line in processed.logprobs:
        finite = [t for t, x in zip(line.token_ids[1:], line.logprobs[1:], strict=True) if x > -1e30]
        assert len(finite) == 10 and line.token_ids[0] in finite
        assert sum(2.718281828459045**x for x in line.logprobs[1:11]) == pytest.approx(1, abs=1e-5)


def test_processed_logprobs_divide_by_temperature_once() -> None:
    raw = one(None, logprobs=-1, temperature=0.5, seed=1, max_tokens=8)
    processed = one(None, logprobs=-1, temperature=0.5, seed=1, max_tokens=8, logprobs_mode="processed")
    for a, b in zip(raw.logprobs, processed.logprobs, strict=True):
        assert a.token_ids == b.token_ids
        want = torch.log_softmax(torch.tensor(a.logprobs[1:]).double() / 0.5, -1)
        torch.testing.assert_close(torch.tensor(b.logprobs[1:]).double(), want, rtol=1e-4, atol=1e-4)


# --- drafts ---


@pytest.mark.parametrize(("mode", "overlap"), (("raw", False), ("raw", True), ("processed", True)))
def test_draft_records_hold_every_draft(mode: str, overlap: bool) -> None:
    options = {"logprobs": -1, "max_tokens": 60, "presence_penalty": 0.1, "logprobs_mode": mode}
    record = one(SPEC, include_draft_logprobs=True, overlap=overlap, **options)
    assert one(SPEC, max_tokens=60).steps[-1].drafts is None
    done, num_rejected = 0, 0
    for step in record.steps:
        assert step.drafts is not None and len(step.drafts) == step.num_draft
        assert [d.accepted for d in step.drafts] == [i < step.num_accepted for i in range(step.num_draft)]
        assert step.sources == ["ngram"] * step.num_accepted
        for i, draft in enumerate(step.drafts):
            assert draft.position == done + i and draft.source == "ngram" and draft.draft_logprob is None
            if i <= step.num_accepted and done + i < len(record.token_ids):
                # Rows up to the first rejected draft have the context of the output.
                line = record.logprobs[done + i]
                at = line.token_ids.index(draft.token_id, 1)
                assert draft.target_logprob == line.logprobs[at]
            if draft.accepted:
                assert draft.token_id == record.token_ids[done + i]
            num_rejected += not draft.accepted
        done += len(step.token_ids)
    assert done == 60 and num_rejected > 0 and any(step.num_accepted for step in record.steps)


def test_control_logprobs_at_rows_of_other_drafts_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SamplingOps.draft_logprobs
    other = lambda self, logits, *given, **more: whole(self, logits.roll(1, 0), *given, **more)  # noqa: E731
    monkeypatch.setattr(SamplingOps, "draft_logprobs", other)
    with pytest.raises(AssertionError):
        test_draft_records_hold_every_draft("raw", True)


def test_draft_logprobs_of_a_sampling_proposer() -> None:
    spec = {"method": "test_distribution:SampledProposer", "num_speculative_tokens": 2, "adaptive": False}
    params = {"temperature": 1.0, "seed": 3, "include_draft_logprobs": True}
    records = [d for s in one(spec, **params).steps for d in s.drafts or ()]
    logprobs = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2, 0.0]), -1).tolist()
    own = dict(zip((5, 17, 40, 63, 90, 8), logprobs, strict=True))
    assert len(records) > 20
    assert all(d.draft_logprob == pytest.approx(own[d.token_id], abs=1e-5) for d in records)
    assert all(d.target_logprob is not None and d.target_logprob < 0 for d in records)
    assert {d.source for d in records} == {"sampled"}


# --- cost and controls ---


class CallCounter:
    """Count calls and rows of `SamplingOps.logprobs`."""

    def __init__(self, target: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.real = 0
        self.tops: set[int] = set()
        whole = target.ops.sampling.logprobs

        def counted(logits: Tensor, rows: Tensor, tokens: Tensor, top: int, *out: Any) -> Any:
            self.calls += 1
            self.real += int((rows >= 0).sum())
            self.tops.add(top)
            return whole(logits, rows, tokens, top, *out)

        monkeypatch.setattr(target.ops.sampling, "logprobs", counted)


@both
@pytest.mark.parametrize("mode", ("raw", "processed"))
def test_logprobs_are_computed_for_committed_tokens_of_requests_that_want_them(
    spec: dict[str, Any] | None, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    unwanted, wanted = SamplingParams(**options), SamplingParams(**options, logprobs=5, logprobs_mode=mode)
    target = engine(speculative=spec)
    counter = CallCounter(target, monkeypatch)
    run(target, [request(i, unwanted) for i in range(3)])
    assert counter.calls == 0
    run(target, [request(0, unwanted), request(1, wanted), request(2, unwanted)])
    assert counter.real == 24 and min(counter.tops) >= 5


@both
def test_raw_and_processed_are_computed_for_their_own_rows(
    spec: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(speculative=spec)
    counter = CallCounter(target, monkeypatch)
    modes: tuple[Any, ...] = ("raw", "processed", "raw")
    requests = [
        request(i, SamplingParams(max_tokens=9 + i, ignore_eos=True, logprobs=2 * i, logprobs_mode=mode))
        for i, mode in enumerate(modes)
    ]
    run(target, requests)
    assert counter.real == 9 + 10 + 11


@both
def test_logits_of_the_model_are_never_changed(
    spec: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, kept, changed = engine(speculative=spec), [], []
    logits_of, forward_logits, step = target.runner.logits, target.runner.forward_logits, target.loop.step

    def watched(hidden: Tensor) -> Tensor:
        logits = logits_of(hidden)
        kept.append((logits, bits(logits)))
        return logits

    def watched_forward(rows: Rows) -> tuple[Tensor, ...]:
        logits, *found = forward_logits(rows)
        kept.append((logits, bits(logits)))
        return logits, *found

    def watched_step() -> StepResults:
        results = step()
        changed.extend(bits(logits) != before for logits, before in kept[-1:])  # valid until the next step
        return results

    monkeypatch.setattr(target.runner, "logits", watched)
    monkeypatch.setattr(target.runner, "forward_logits", watched_forward)
    monkeypatch.setattr(target.loop, "step", watched_step)
    params = SamplingParams(
        max_tokens=20,
        min_p=0.01,
        top_p=0.9,
        frequency_penalty=0.5,
        logit_bias={5: 3.0},
        min_tokens=4,
        logits_processors=[lambda tokens, row: row.mul_(0.9)],
        logprobs=3,
        logprobs_mode="processed",
        **PENALISED,
    )
    captured = replace(params, logits_processors=None)
    for each in (params, captured):  # with processors, logits are not a part of the captured pass
        kept.clear()
        run(target, [request(i, each) for i in range(2)])
        assert len(kept) > 5
    assert len(changed) > 5 and not any(changed)
