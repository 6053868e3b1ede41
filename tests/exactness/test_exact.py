"""Exactness: tokens and logprobs with speculation equal, bit by bit, those of the request alone without it.

Covers every pair of levels of factors that some code reads together, and the full product of the most
important ones. Defects that the comparison detects are in test_exact_controls.py.
"""

from dataclasses import replace
from itertools import cycle, product

import pytest

import proposers
from covering import each_level, pairwise
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from exact import OPTIONS, Batch, Case, Setup, reference_run
from exact_matrix import (
    COSTS,
    DEVICE_TEST_METHODS,
    DISTINCT_METHODS,
    EXACT,
    FACTORS,
    GRAMMAR_MATRIX,
    KERNEL_FACTORS,
    MATRIX,
    MXFP4_MATRIX,
    ONE_MODEL,
    OVERLAP_OPTIONS,
    SCHEDULER_FACTORS,
    SHORT_LENGTH,
    TEST_METHODS,
    check,
    named,
    num_rows,
)

METHODS = [*PROPOSERS, *TEST_METHODS]
DEVICE_METHODS = [name for name in PROPOSERS if lookup(PROPOSERS, name, "proposer").graph_safe]
DEVICE_METHODS += DEVICE_TEST_METHODS
OVERLAP_FACTORS = {
    "option": OVERLAP_OPTIONS,
    "method": DEVICE_METHODS,
    "overlap": [True],
    "arch": ["ernie4_5"],
}
OVERLAP_FACTORS |= ONE_MODEL
# Options beside methods and the scheduler are in the matrix of all factors, half of them with overlap.
OVERLAP_MATRIX = pairwise(
    {**FACTORS, **OVERLAP_FACTORS, "predictions": [False]},
    unrelated=[("option", other) for other in ("method", "k", *SCHEDULER_FACTORS)],
    costs=COSTS,
)


QUICK = each_level(MATRIX, num_rows)
PAIRS = [pytest.param(case, marks=pytest.mark.fast if case in QUICK else ()) for case in MATRIX]


@pytest.mark.parametrize("case", PAIRS, ids=named)
def test_every_pair_of_factors_is_exact(case):
    check(case)


@pytest.mark.parametrize("case", MXFP4_MATRIX, ids=named)
def test_experts_in_mxfp4_are_exact(case):
    check(case)


# Only here are methods that share the code of another. Two draft lengths suffice, since rounds after the
# first are alike; greedy has no temperature.
@pytest.mark.parametrize("case", pairwise({"method": METHODS, "strategy": EXACT, "k": [1, 5]}), ids=named)
def test_every_method_strategy_and_length_is_exact(case):
    case = {**case, "temperature": 1.3 if case["strategy"] == "greedy" else 0.7}
    rest = {"option": "mix", "arch": "qwen3", "batch": 2, "chunk": 16, "traffic": "arriving"}
    rest |= {"dtype": "bfloat16", "adaptive": False, "overlap": False}
    check({**rest, **case, "prefix": "hit", "pages": "preempted", "priority": "equal"})


@pytest.mark.parametrize("case", OVERLAP_MATRIX, ids=named)
def test_overlapping_steps_are_exact(case):
    check(case)


@pytest.mark.parametrize("case", GRAMMAR_MATRIX, ids=named)
def test_grammars_are_exact(case):
    check(case)


@pytest.mark.parametrize("case", each_level([*MATRIX, *GRAMMAR_MATRIX, *OVERLAP_MATRIX], num_rows), ids=named)
def test_torch_backend_is_exact(case):
    check(case, "torch", lengths=SHORT_LENGTH)


@pytest.mark.parametrize("case", each_level(MATRIX, num_rows, KERNEL_FACTORS), ids=named)
def test_two_threads_are_exact(case):
    check(case, threads=2)


@pytest.mark.parametrize("method", ["proposers:Flaky", "proposers:SelfModel"])
def test_reference_backend_is_exact(method):
    case = {"option": "mix", "arch": "mistral", "batch": 2, "chunk": 16, "traffic": "together"}
    rest = {"strategy": "target_match", "k": 3, "temperature": 0.7, "dtype": "float32", "adaptive": True}
    rest |= {"method": method, "overlap": False, "prefix": "hit", "pages": "many", "priority": "shuffled"}
    check({**case, **rest}, "reference", lengths=SHORT_LENGTH)


# --- preemption and prefix cache ---


@pytest.mark.parametrize(
    ("method", "strategy"),
    [
        *product([None, "ngram", "proposers:Flaky", "proposers:DeviceFlaky"], EXACT),
        *product(
            [m for m in [*DISTINCT_METHODS, *DEVICE_TEST_METHODS] if not m.endswith(("ngram", "Flaky"))],
            EXACT[:1],
        ),
    ],
)
def test_requests_preempted_several_times_are_exact(method, strategy, monkeypatch):
    """Preempt all requests by force, then by a lack of pages, which never preempts the first request."""
    monkeypatch.setitem(OPTIONS, "none", {"max_tokens": 20, "ignore_eos": True})
    monkeypatch.setitem(OPTIONS, "frequency", {**OPTIONS["frequency"], "max_tokens": 20, "ignore_eos": True})
    options = ["none", "frequency", "none", "frequency"]
    cases = [
        Case(i, option, (0.7, 0.0, 1.3, 0.7)[i], strategy, 12 + 5 * i, prompt=i == 1)
        for i, option in enumerate(options)
    ]
    spec = {"method": method, "verify_strategy": strategy, "num_speculative_tokens": 2, "adaptive": False}
    overlaps = (False, True) if method in (None, *DEVICE_METHODS) else (False,)  # not with a host proposer
    sizes = {"page_size": 8, "kv_cache_tokens": 96}
    for preempts_all, overlap in product((True, False), overlaps):
        how = {"overlap": overlap, "sizes": sizes, "preempts_all": preempts_all, "interval_growth": 0}
        batch = Batch(cases, Setup("qwen3", "bfloat16"), spec if method else None, chunk=32, **how)
        if overlap:
            batch.cases = [replace(case, prompt=False) for case in cases]
        assert batch.differences() == []
        counts = [batch.stats[str(case.index)].num_preemptions for case in cases]
        if preempts_all:
            assert min(counts) >= 2, counts
        else:
            assert counts[0] == 0 and sum(counts) >= 1, counts


def test_prefix_hits_cover_all_full_pages_but_the_last():
    cases = [Case(i, "no_logprobs", 0.7, length=40) for i in range(4)]  # prompt logprobs prevent hits
    for first, second, cached in ((None, None, 32), ("a", "b", 0)):
        engine = Setup().engine(page_size=8)
        known = [replace(case, salt=first) for case in cases]
        Batch(known, engine=engine).serve({str(i): [] for i in range(4)})
        batch = Batch([replace(case, salt=second) for case in cases], engine=engine)
        assert batch.differences() == []
        assert [batch.stats[str(i)].num_cached_tokens for i in range(4)] == [cached] * 4


# --- predictions beside any proposer ---


PREDICTED = [*zip([*METHODS, *DEVICE_TEST_METHODS], cycle(EXACT), strict=False)]


@pytest.mark.parametrize(("method", "strategy"), PREDICTED)
def test_prediction_beside_any_proposer_is_used_and_changes_no_bit(method, strategy, monkeypatch):
    """Every other request has one, and some arrive while others run ahead."""
    monkeypatch.setitem(OPTIONS, "none", {"max_tokens": 30, "ignore_eos": True})
    options = ["none", "frequency", "draft_logprobs", "none"]
    heats = (0.7, 0.0, 1.3, 0.7)
    pairs = zip(options, heats, strict=True)
    cases = [Case(i, *pair, strategy, 12 + 5 * i, prompt=False) for i, pair in enumerate(pairs)]
    spec = {"method": method, "verify_strategy": strategy, "num_speculative_tokens": 3, "adaptive": False}
    for overlap in (False, True) if method in DEVICE_METHODS else (False,):
        batch = Batch(cases, Setup(), spec, overlap=overlap, arrivals=[0, 0, 4, 6], has_predictions=True)
        assert batch.differences() == []
        steps = {case.index: batch.records[str(case.index)].steps for case in cases}
        assert not [step for i in (1, 3) for step in steps[i] if step.is_predicted]
        predicted = [step for step in steps[0] if step.is_predicted]
        assert sum(step.num_accepted for step in predicted) > 10
        assert {source for step in predicted for source in step.sources} == {"given"}
        records = [draft for step in steps[2] if step.is_predicted for draft in step.drafts]
        assert records and all(d.source == "given" for d in records)
        assert all(d.draft_logprob is None and d.draft_rank is None for d in records)


# --- different options in one batch ---


@pytest.mark.parametrize("method", ["ngram", "proposers:Flaky"])
def test_speculative_options_of_single_requests_are_exact(method):
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


def test_disabled_speculation_makes_no_drafts():
    setup = Setup()
    case = Case(0, "none", 0.0, length=20, enabled=False)
    batch = Batch([case], setup, {"method": "proposers:Perfect"})
    record = batch.serve({"0": reference_run(case, setup).token_ids})["0"]
    assert all(step.num_draft == 0 for step in record.steps) and len(record.steps) == case.max_tokens


@pytest.mark.parametrize("place", range(5))
def test_any_slot_is_exact(place):
    cases = [Case(i, "mix", 1.3, length=9 + i) for i in range(1, 5)]
    cases.insert(place, Case(0, "frequency", 0.7, length=20))
    batch = Batch(cases, Setup(), {"method": "proposers:Flaky"})
    assert batch.differences() == []
    batch.cases = cases[::-1]
    assert batch.differences() == []  # the same engine again, with used slots and pages


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("adaptive", [True, False])
def test_reject_all_is_exact(strategy, adaptive):
    cases = [Case(0, "mix", 0.7, strategy, length=20), Case(1, "eos", 1.3, strategy, length=40)]
    spec = {"method": "proposers:Perfect", "verify_strategy": strategy, "adaptive": adaptive}
    assert Batch(cases, Setup(), {**spec, "accept_policy": "reject_all"}).differences() == []


def test_long_output_on_small_pages_is_exact(monkeypatch):
    monkeypatch.setitem(OPTIONS, "none", {"max_tokens": 90, "ignore_eos": True})
    setup = Setup("mistral", "bfloat16")
    cases = [Case(7, "none", 0.0, length=30), Case(8, "none", 0.7, length=17)]
    engine = setup.engine({"method": "proposers:Flaky"}, page_size=8, max_num_batched_tokens=16)
    assert Batch(cases, setup, engine=engine).differences() == []
    assert len(reference_run(cases[0], setup).token_ids) == 90


# --- accepted drafts ---


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_perfect_drafts_save_steps(k, temperature):
    case = Case(0, "ignore_eos", temperature, length=20)
    setup = Setup()
    answer = reference_run(case, setup).token_ids
    spec = {"method": "proposers:Perfect", "num_speculative_tokens": k, "adaptive": False}
    record = Batch([case], setup, spec).serve({"0": answer})["0"]
    # The first step has no drafts, later ones commit k + 1 tokens, and the last token needs no draft.
    assert len(record.steps) == 1 + -(-(len(answer) - 1) // (k + 1))
    assert all(step.num_accepted == step.num_draft for step in record.steps)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_drafts_of_the_target_weights_are_all_accepted(temperature):
    """Check hidden rows, own KV on shared pages and shared noise: an error in any loses a draft."""
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


def test_drafts_of_other_weights_are_partly_accepted_and_exact():
    cases = [Case(0, "draft_logprobs", 0.7, length=40), Case(1, "none", 1.3, length=9)]
    spec = {
        "method": "proposers:SelfModel",
        "weights": "mistral/float32/none",
        "same": False,
        "adaptive": False,
    }
    batch = Batch(cases, Setup("llama", "float32"), spec)
    assert batch.differences() == []
    record = batch.serve({str(a.index): [] for a in cases})["0"]
    drafts = [draft for step in record.steps for draft in step.drafts or []]
    assert {draft.accepted for draft in drafts} == {True, False}
    assert all(draft.draft_logprob is not None and draft.source == "self" for draft in drafts)


def test_every_option_changes_the_output():
    records = {option: reference_run(Case(0, option, 0.7, length=20), Setup()).same() for option in OPTIONS}
    same = [option for option in OPTIONS if records[option] == records["none"]]
    assert same == ["none", "draft_logprobs"]
