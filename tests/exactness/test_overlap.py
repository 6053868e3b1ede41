"""Overlapping steps: the next one is planned and launched before the last is read, with the same output.

The matrix of test_exact.py and test_endings.py run with overlap too. These tests cover the moments in which
the host and a step in flight differ: arrivals that need the host, aborts, reused slots, finishes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import proposers
import tiny
from covering import pairwise
from draftproof.engine.loop import Loop
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.step import queued_logprobs, step_results
from draftproof.sampling_params import SamplingParams
from draftproof.types import FIRST_ROW
from exact import Batch, Case, Setup, check_empty, compare, count_errors, reference_run
from overlap_watch import Watch

FLAKY = {"method": "proposers:DeviceFlaky", "num_speculative_tokens": 5, "adaptive": False}
JUNK = {"method": "proposers:DeviceJunk", "num_speculative_tokens": 5, "adaptive": False}
METHODS = [None, {"method": "ngram"}, FLAKY]
methods = pytest.mark.parametrize("spec", METHODS, ids=["plain", "ngram", "flaky"])


def free(index: int, option: str = "none", temperature: float = 0.7, **fields) -> Case:
    """Return a request that never needs the host."""
    return Case(index, option, temperature, **{"length": 9 + index, "prompt": False, **fields})


# --- overlap ---


@methods
def test_next_step_is_launched_before_the_last_is_read(spec):
    cases = [free(i) for i in range(3)]
    batch = Batch(cases, Setup(), spec, engine=Setup().engine(spec, overlap=True))
    watch = Watch(batch.engine)
    assert batch.differences() == []
    ahead, waited = watch.check()
    assert ahead >= len(watch.launched) - 2 > 2 and waited == 0


def test_outputs_are_returned_one_step_later():
    engine, plain = tiny.engine(overlap=True), tiny.engine()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    returned = {}
    for name, target in (("ahead", engine), ("plain", plain)):
        target.add(tiny.request(0, params))
        returned[name] = [[out.token_ids for out in target.step()] for _ in range(6)]
    assert returned["ahead"] == [[], *returned["plain"][:5]] and returned["plain"][5] == []
    assert not engine.has_work and not engine.loop.pending


def test_host_proposer_disables_overlap():
    batch = Batch([free(0)], Setup(), {"method": "proposers:Flaky"}, overlap=True)
    assert batch.differences() == [] and not batch.engine.loop.overlap


# --- arrivals ---

HOSTED = ["processor", "bad_words", "mix"]
LOGPROBS = ["named_logprobs", "all_logprobs", "draft_logprobs", "prompt"]


def serve_with_arrival(spec, option, when, **options):
    """Serve requests, one of which arrives with `option` after `when` steps and one more at the end."""
    late = Case(3, length=20) if option == "prompt" else free(3, option, length=20)
    if option == "grammar":
        late = free(3, grammar="json", length=20)
    cases = [free(0, "frequency"), free(1, "processed", 1.3), free(2, "stop_ids", 0.0), late, free(4)]
    engine = Setup().engine(spec, overlap=True, max_num_batched_tokens=16, **options)
    watch = Watch(engine)
    return Batch(cases, Setup(), spec, engine=engine, arrivals=[0, 0, 1, when, 30]).differences(), watch


ARRIVALS = pairwise({"spec": [*METHODS, JUNK], "option": HOSTED, "when": [1, 2, 5]})
LOGPROB_ARRIVALS = pairwise({"spec": [*METHODS, JUNK], "option": LOGPROBS, "when": [1, 2, 5]})


@pytest.mark.parametrize(("spec", "option", "when"), [tuple(case.values()) for case in ARRIVALS])
def test_arrival_that_needs_the_host_is_exact(spec, option, when):
    """The engine drains, runs without overlap while it must, and overlaps again."""
    found, watch = serve_with_arrival(spec, option, when)
    assert found == []
    ahead, waited = watch.check()
    assert ahead > 0 and waited > 0 and not watch.launched[-1][1]


@pytest.mark.parametrize(("spec", "option", "when"), [tuple(case.values()) for case in LOGPROB_ARRIVALS])
def test_arrival_with_any_logprobs_keeps_overlap(spec, option, when):
    """Overlap as many steps as with a plain request, and wait for none."""
    (found, watch), (_, plain) = (serve_with_arrival(spec, each, when) for each in (option, "none"))
    assert found == []
    assert watch.check()[1] == 0 and watch.launched == plain.launched


def test_waiting_request_ends_no_overlap_without_a_free_slot():
    cases = [free(0, length=20), free(1, length=20), free(2, "processor")]
    engine = Setup().engine(FLAKY, overlap=True, max_num_seqs=2)
    watch = Watch(engine)
    assert Batch(cases, Setup(), FLAKY, engine=engine, arrivals=[0, 0, 1]).differences() == []
    assert [waits for _, waits in watch.launched[:3]] == [False] * 3
    assert watch.check()[1] > 0


def test_control_engine_that_never_drains_is_detected(monkeypatch):
    monkeypatch.setattr(Loop, "_needs_sync", lambda self: False)
    assert any("request 3: " in line for line in serve_with_arrival(FLAKY, "grammar", 5, debug=False)[0])


def test_control_prompt_rows_by_the_bounds_of_the_host_are_detected(monkeypatch):
    """With fewer drafts than planned the rows of a prompt lie before those that the host would expect."""
    whole = queued_logprobs._row_slots
    monkeypatch.setattr(queued_logprobs, "_row_slots", lambda *given: whole(*given).roll(1))
    assert any("prompt logprobs" in line for line in serve_with_arrival(JUNK, "prompt", 2, debug=False)[0])


def test_control_named_logprobs_at_other_rows_are_detected(monkeypatch):
    monkeypatch.setattr(step_results, "PICK", FIRST_ROW)
    found = serve_with_arrival(FLAKY, "named_logprobs", 2, debug=False)[0]
    assert any("request 3: logprobs" in line for line in found)


def test_several_requests_that_need_the_host_are_exact():
    options = ["none", *HOSTED, "named_logprobs", "all_logprobs", "draft_logprobs"]
    cases = [free(i, option) for i, option in enumerate(options)]
    cases[0] = replace(cases[0], prompt=True)
    engine = Setup().engine(FLAKY, overlap=True, max_num_batched_tokens=16, max_num_seqs=2)
    watch = Watch(engine)
    batch = Batch(cases, Setup(), FLAKY, engine=engine, arrivals=[3, 0, 6, 2, 9, 4, 12])
    assert batch.differences() == []
    watch.check()


@methods
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_any_arrival_step_is_exact(spec, slots):
    cases = [
        free(i, option, length=5 + 7 * i) for i, option in enumerate(["none", "eos", "top_k", "stop_ids"])
    ]
    for late in range(5):
        engine = Setup().engine(spec, overlap=True, max_num_batched_tokens=16, max_num_seqs=slots)
        watch = Watch(engine)
        batch = Batch(cases, Setup(), spec, engine=engine, arrivals=[0, late, 2 * late, 3 * late])
        assert batch.differences() == []
        watch.check()


# --- aborts ---


@methods
@pytest.mark.parametrize("when", range(8))
def test_abort_at_any_step_is_exact(spec, when):
    cases = [
        free(0, "frequency", length=20),
        free(1, "none", length=40),
        free(2, "eos", 1.3),
        free(3, "top_k"),
    ]
    engine = Setup().engine(spec, overlap=True, max_num_batched_tokens=16, max_num_seqs=2)
    batch = Batch(cases, Setup(), spec, engine=engine, arrivals=[0, 1, 1, 2], aborts={1: when})
    Watch(engine)
    assert batch.differences() == []


@methods
@pytest.mark.parametrize("when", range(6))
def test_requests_after_abort_of_all_are_exact(spec, when):
    engine = Setup().engine(spec, overlap=True, max_num_seqs=2)
    cases = [free(0), free(1, "frequency"), free(2, "eos")]
    alone = {str(a.index): reference_run(a, Setup()) for a in cases}
    proposers.set_outputs({name: record.token_ids for name, record in alone.items()})
    for i in range(3):
        engine.add(tiny.request(10 + i, SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(when):
        engine.step()
    assert all(engine.abort(str(10 + i)) for i in range(3))
    check_empty(engine)
    records = tiny.run(engine, [a.request() for a in cases])
    assert [line for name in alone for line in compare(name, alone[name], records[name])] == []
    assert not engine.loop.pending or not engine.step()


# --- a reused slot ---


def reuse_slot(spec) -> list[str]:
    """Abort the only request with a step in flight and add another to its slot before that step is read.

    Return differences of the second request and outputs of the first after its end.
    """
    second = free(1, "none", 1.3, length=4)
    alone = reference_run(second, Setup())
    proposers.set_outputs({"1": alone.token_ids})
    found = []
    for when in range(2, 7):
        engine = Setup().engine(spec, overlap=True, max_num_seqs=1, debug=False)
        engine.add(tiny.request(0, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=5)))
        for _ in range(when):
            engine.step()
        assert engine.loop.pending, "no step is in flight"
        assert engine.abort("0")
        engine.add(second.request())
        record = tiny.Record()
        for _ in range(40):
            for out in engine.step():
                if out.request_id != "1":
                    found.append(f"request 0 was given {out.token_ids} after its end")
                    continue
                record.steps.append(out)
                record.token_ids += out.token_ids
                record.logprobs += out.logprobs or []
                if out.finish_reason:
                    record.finish = (out.finish_reason, out.stop_reason, out.error)
        found += compare("1", alone, record)
    return found


@methods
def test_results_of_an_aborted_request_never_reach_the_next_in_its_slot(spec):
    assert reuse_slot(spec) == []


@methods
def test_control_missing_generation_check_is_detected(spec, monkeypatch):
    whole = Scheduler.settle

    def broken(self, planned, *columns):
        return whole(self, replace(planned, generations=self.mirror.generation[planned.slots]), *columns)

    monkeypatch.setattr(Scheduler, "settle", broken)
    assert any("after its end" in line for line in reuse_slot(spec))


def test_control_length_changed_by_the_previous_request_is_detected(monkeypatch):
    whole = Scheduler.settle

    def broken(self, planned, num_out, *columns):
        here = whole(self, planned, num_out, *columns)
        self.mirror.length[planned.slots[~here]] += num_out[~here]
        return here

    monkeypatch.setattr(Scheduler, "settle", broken)
    assert any("request 1" in line for line in reuse_slot(None))


# --- finishes ---


@methods
@pytest.mark.parametrize("slots", [1, 3])
def test_slots_of_finished_requests_are_reused_at_once(spec, slots):
    options = ["eos", "stop_ids", "max_tokens", "min_tokens", "none", "no_logprobs"]
    cases = [free(i, options[i % 6], (0.0, 0.7, 1.3)[i % 3]) for i in range(12)]
    engine = Setup().engine(spec, overlap=True, max_num_seqs=slots, max_num_batched_tokens=32)
    watch = Watch(engine)
    batch = Batch(cases, Setup(), spec, engine=engine)
    assert batch.differences() == []
    watch.check()


def errors_after_finish(spec, **options) -> list[str]:
    """Return wrong counts of every request and outputs after its finish."""
    engine = Setup().engine(spec, overlap=True, max_num_seqs=3, debug=False, **options)
    cases = [free(i, "stop_ids" if i % 2 else "max_tokens", 1.3) for i in range(6)]
    alone = {str(a.index): reference_run(a, Setup()) for a in cases}
    proposers.set_outputs({name: record.token_ids for name, record in alone.items()})
    records = tiny.run(engine, [a.request() for a in cases])
    found = []
    for name, record in records.items():
        found += count_errors(name, record)
        ends = [i for i, step in enumerate(record.steps) if step.finish_reason]
        if ends != [len(record.steps) - 1]:
            found.append(f"request {name}: {len(record.steps)} steps, ends at {ends}")
        if len(record.token_ids) != len(alone[name].token_ids):
            found.append(f"request {name}: {len(record.token_ids)} tokens")
        if any(not step.token_ids for step in record.steps):
            found.append(f"request {name}: a step without tokens")
    check_empty(engine)
    return found


@methods
def test_no_token_is_returned_after_the_finish(spec):
    assert errors_after_finish(spec) == []


def test_control_unreleased_request_is_detected(monkeypatch):
    whole = Scheduler._remove_from_running

    def broken(self, sequences):
        slots = [sequence.slot for sequence in sequences]
        whole(self, sequences)
        self.mirror.generation[slots] -= 1

    monkeypatch.setattr(Scheduler, "_remove_from_running", broken)
    assert errors_after_finish(None) and errors_after_finish(JUNK)


def test_step_of_finished_requests_has_no_rows():
    engine = tiny.engine(overlap=True)
    plain = tiny.run(tiny.engine(), [tiny.request(0, SamplingParams(max_tokens=4, temperature=0))])["0"]
    engine.add(
        tiny.request(0, SamplingParams(max_tokens=20, temperature=0, stop_token_ids=plain.token_ids[2:3]))
    )
    seen, whole = [], engine.ops.step.layout

    def layout(plan, columns, page_size, out):
        whole(plan, columns, page_size, out)
        seen.append((int((plan.slots >= 0).sum()), int((out.rows.slots >= 0).sum())))

    engine.ops.step.layout = layout
    while engine.has_work:
        engine.step()
    assert seen == [(1, 12), (1, 1), (1, 1), (1, 0)]


# --- idle ---


def test_idle_engine_launches_nothing(monkeypatch):
    engine = tiny.engine(overlap=True, speculative=FLAKY)
    proposers.set_outputs({})
    assert not engine.step()
    tiny.run(engine, [tiny.request(0, SamplingParams(max_tokens=3))])
    launched = []
    monkeypatch.setattr(Loop, "_read_step", lambda self, flight: launched.append(flight) or [])
    monkeypatch.setattr(engine.loop.device, "run", None)
    engine.step()
    engine.step()
    assert len(launched) <= 1 and not engine.loop.pending


def test_results_are_copies():
    engine = tiny.engine(overlap=True, speculative={"method": "ngram"})
    for i in range(3):
        engine.add(tiny.request(i, SamplingParams(max_tokens=12, logprobs=3)))
    kept = []
    while engine.has_work:
        results = engine.step()
        kept.append((results, results.table.copy(), list(results)))
    for results, table, outputs in kept:
        assert np.array_equal(results.table, table) and list(results) == outputs
