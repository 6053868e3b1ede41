"""The promise, bitwise: tokens and logprobs with speculation equal those of a solo plain run.

Every pair of levels of all factors, and the full product of the most dangerous ones. What the comparison
would find if the engine were wrong is shown in test_exact_controls.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import proposers
import tiny
from covering import pairwise
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from exact import OPTIONS, Batch, Case, Setup, reference_run
from exact_matrix import (
    EXACT,
    FACTORS,
    FREE,
    GUIDED,
    MADE_UP,
    MATRIX,
    SCRIPTED,
    check,
    named,
)

METHODS = [*PROPOSERS, *MADE_UP]
DANGEROUS = {name: FACTORS[name] for name in ("strategy", "k", "temperature")}
FOLLOW = [name for name in PROPOSERS if lookup(PROPOSERS, name, "proposer").runs_every_step]
FOLLOW += ["hybrid"]  # with models of their own
DEVICE = [name for name in PROPOSERS if lookup(PROPOSERS, name, "proposer").graph_safe] + SCRIPTED
AHEAD = pairwise({**FACTORS, "option": FREE, "method": DEVICE, "overlap": [True]})


@pytest.mark.parametrize("case", MATRIX, ids=named)
def test_every_pair_of_factors(case):
    check(case)


# with a model every round is like the second: few lengths are enough
IN_FULL = [x for x in product(METHODS, *DANGEROUS.values()) if x[0] not in FOLLOW or x[2] in (1, 5)]


@pytest.mark.parametrize("levels", IN_FULL, ids=str)
def test_method_strategy_length_and_heat_in_full(levels):
    case = dict(zip(("method", *DANGEROUS), levels, strict=True))
    rest = {"option": "mix", "arch": "qwen3", "batch": 2, "chunk": 16, "traffic": "arriving"}
    rest |= {"dtype": "bfloat16", "adaptive": False, "overlap": False}
    check({**rest, **case, "prefix": "hit", "pages": "preempted", "priority": "equal"})


@pytest.mark.parametrize("case", AHEAD, ids=named)
def test_steps_that_overlap(case):
    check(case)


@pytest.mark.parametrize("case", GUIDED, ids=named)
def test_grammars(case):
    check(case)


@pytest.mark.parametrize("case", [*MATRIX[::9], *GUIDED[::9]], ids=named)
def test_a_sample_on_the_torch_backend(case):
    check(case, "torch")


@pytest.mark.parametrize("case", AHEAD[2::6], ids=named)
def test_a_sample_of_overlap_on_the_torch_backend(case):
    check(case, "torch")


@pytest.mark.parametrize("case", MATRIX[4::9], ids=named)
def test_a_sample_with_two_threads(case):
    check(case, threads=2)


@pytest.mark.parametrize("method", ["proposers:Flaky", "proposers:SelfModel"])
def test_a_little_on_the_reference_backend(method):
    case = {"option": "mix", "arch": "mistral", "batch": 2, "chunk": 64, "traffic": "together"}
    rest = {"strategy": "target_match", "k": 3, "temperature": 0.7, "dtype": "float32", "adaptive": True}
    rest |= {"method": method, "overlap": False, "prefix": "hit", "pages": "many", "priority": "shuffled"}
    check({**case, **rest}, "reference")


# --- put aside and cached -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "strategy"),
    [
        *product([None, *(m for m in METHODS if m not in FOLLOW), *SCRIPTED], EXACT),
        *product(FOLLOW, EXACT[:1]),
    ],
)
def test_everybody_is_put_aside_several_times(method, strategy, monkeypatch):
    """By hand, the first too; then because pages run out, where the one in front is spared."""
    monkeypatch.setitem(OPTIONS, "none", {"max_tokens": 30, "ignore_eos": True})
    monkeypatch.setitem(OPTIONS, "frequency", {**OPTIONS["frequency"], "max_tokens": 30, "ignore_eos": True})
    options = ["none", "frequency", "none", "frequency"]
    cases = [
        Case(i, option, (0.7, 0.0, 1.3, 0.7)[i], strategy, 12 + 5 * i, prompt=i == 1)
        for i, option in enumerate(options)
    ]
    spec = {"method": method, "verify_strategy": strategy, "num_speculative_tokens": 2, "adaptive": False}
    ahead = (False, True) if method in (None, *DEVICE) else (False,)  # a proposer on the host is waited for
    for preempts_all, overlap in product((True, False), ahead):
        setup = Setup("qwen3", "bfloat16")
        sizes = {"page_size": 8, "kv_cache_tokens": 96}
        how = {"overlap": overlap, "sizes": sizes, "preempted": preempts_all, "later": 0}
        batch = Batch(cases, setup, spec if method else None, chunk=32, **how)
        if overlap:
            batch.cases = [replace(case, prompt=False) for case in cases]
        assert batch.differences() == []
        counts = [batch.stats[str(case.index)].num_preemptions for case in cases]
        if preempts_all:
            assert min(counts) >= 2, counts
        else:
            assert counts[0] == 0 and sum(counts) >= 1, counts


def test_hits_are_hits(monkeypatch):
    """What the matrix calls one: of the prompt all full pages but that of the newest token, or none."""
    cases = [Case(i, "no_logprobs", 0.7, length=40) for i in range(4)]  # prompts with logprobs are computed
    for salts, other, hits in (((None,) * 4, (None,) * 4, 4), (("a",) * 4, ("b",) * 4, 0)):
        known = [replace(case, salt=salt) for case, salt in zip(cases, salts, strict=True)]
        engine = Setup().engine(page_size=8)
        Batch(known, engine=engine).serve({str(i): [] for i in range(4)})
        batch = Batch([replace(a, salt=s) for a, s in zip(cases, other, strict=True)], engine=engine)
        assert batch.differences() == []
        assert [batch.stats[str(i)].num_cached_tokens for i in range(4)] == [32] * hits + [0] * (4 - hits)


# --- one batch, many wishes ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "proposers:Flaky"])
def test_wishes_of_single_requests(method):
    """Speculation off, another length, another strategy, side by side."""
    cases = [
        Case(0, "none", 0.7, length=20, enabled=False),
        Case(1, "frequency", 0.7, length=20, k=1),
        Case(2, "processor", 0.0, length=20, k=3),
        Case(3, "none", 1.3, "greedy", length=20),
        Case(4, "bad_words", 0.7, "greedy", length=20, k=2),
        Case(5, "min_tokens", 1.3, length=20),
    ]
    batch = Batch(cases, Setup(), {"method": method, "num_speculative_tokens": 8})
    assert batch.differences() == []


def test_off_means_off():
    setup = Setup()
    case = Case(0, "none", 0.0, length=20, enabled=False)
    batch = Batch([case], setup, {"method": "proposers:Perfect"})
    record = batch.serve({"0": reference_run(case, setup).token_ids})["0"]
    assert all(step.num_draft == 0 for step in record.steps) and len(record.steps) == 14


@pytest.mark.parametrize("place", range(5))
def test_any_slot(place):
    """The same request, seated first, last or between, in a used engine too."""
    cases = [Case(i, "mix", 1.3, length=9 + i) for i in range(1, 5)]
    cases.insert(place, Case(0, "frequency", 0.7, length=20))
    batch = Batch(cases, Setup(), {"method": "proposers:Flaky"})
    assert batch.differences() == []
    batch.cases = cases[::-1]
    assert batch.differences() == []  # the same engine again: slots and pages are second-hand


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("adaptive", [True, False])
def test_reject_all_is_exact_too(strategy, adaptive):
    cases = [Case(0, "mix", 0.7, strategy, length=20), Case(1, "eos", 1.3, strategy, length=40)]
    spec = {
        "method": "proposers:Perfect",
        "verify_strategy": strategy,
        "accept_policy": "reject_all",
        "adaptive": adaptive,
    }
    batch = Batch(cases, Setup(), spec)
    assert batch.differences() == []


def test_small_pages_and_a_long_answer(monkeypatch):
    monkeypatch.setitem(OPTIONS, "none", {"max_tokens": 90, "ignore_eos": True})
    setup = Setup("mistral", "bfloat16")
    cases = [Case(7, "none", 0.0, length=30), Case(8, "none", 0.7, length=17)]
    engine = setup.engine({"method": "proposers:Flaky"}, page_size=8, max_num_batched_tokens=16)
    assert Batch(cases, setup, engine=engine).differences() == []
    assert len(reference_run(cases[0], setup).token_ids) == 90


# --- drafts do what they are for ----------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_perfect_drafts_save_steps(k, temperature):
    case = Case(0, "ignore_eos", temperature, length=20)
    setup = Setup()
    answer = reference_run(case, setup).token_ids
    spec = {"method": "proposers:Perfect", "num_speculative_tokens": k, "adaptive": False}
    record = Batch([case], setup, spec).serve({"0": answer})["0"]
    # the first token comes without drafts, then k + 1 a step; the last token needs no draft
    assert len(record.steps) == 1 + -(-(len(answer) - 1) // (k + 1))
    assert all(step.num_accepted == step.num_draft for step in record.steps)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_a_model_with_the_targets_weights_and_noise_is_always_right(temperature):
    """Hidden rows, own KV on the same pages, coupled noise: a slip in any of them loses a draft."""
    cases = [Case(i, "none", temperature, length=20 + 9 * i) for i in range(3)]
    before = proposers.SelfModel.hidden_rows_checked
    spec = {"method": "proposers:SelfModel", "num_speculative_tokens": 4}
    batch = Batch(cases, Setup("qwen2", "float32"), spec, chunk=16, arrivals=[0, 0, 2])
    assert batch.differences() == []
    records = batch.serve({str(a.index): [] for a in cases})
    steps = [step for record in records.values() for step in record.steps]
    ended_early = [step.finish_reason == "stop" for step in steps]
    assert all(s.num_accepted == s.num_draft or end for s, end in zip(steps, ended_early, strict=True))
    assert sum(step.num_accepted for step in steps) > 10
    assert proposers.SelfModel.hidden_rows_checked > before


def test_a_model_with_other_weights_is_sometimes_right_and_exact():
    cases = [Case(0, "draft_logprobs", 0.7, length=40), Case(1, "none", 1.3, length=9)]
    spec = {"method": "proposers:SelfModel", "weights": "mistral/float32", "same": False, "adaptive": False}
    batch = Batch(cases, Setup("llama", "float32"), spec)
    assert batch.differences() == []
    record = batch.serve({str(a.index): [] for a in cases})["0"]
    drafts = [draft for step in record.steps for draft in step.drafts or []]
    assert {draft.accepted for draft in drafts} == {True, False}
    assert all(draft.draft_logprob is not None and draft.source == "self" for draft in drafts)


def test_options_are_exercised():
    """Every option of the matrix changes something against `none`, or it would test nothing."""
    setup = Setup()
    same = []
    for option in OPTIONS:
        a, b = (
            tiny.run(setup.engine(), [Case(0, o, 0.7, length=20).request(plain=True)])["0"]
            for o in (option, "none")
        )
        if a.same() == b.same():
            same.append(option)
    assert same == ["none", "draft_logprobs"]
