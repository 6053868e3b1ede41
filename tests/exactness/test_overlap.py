"""Steps that overlap: the next one is planned and run before the last is read, and nobody can tell.

The matrix of test_exact.py and the endings of test_endings.py run with overlap too. Here are the moments in
which a step under way and the host know different things: arrivals that need the host, aborts, slots that
change hands, endings.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import proposers
import tiny
from draftproof.engine.loop import Loop
from draftproof.engine.scheduler import Scheduler
from draftproof.sampling_params import SamplingParams
from exact import Batch, Case, Setup, check_empty, compare, count_errors, reference_run
from overlap_watch import Watch

FLAKY = {"method": "proposers:DeviceFlaky", "num_speculative_tokens": 5, "adaptive": False}
JUNK = {"method": "proposers:DeviceJunk", "num_speculative_tokens": 5, "adaptive": False}
METHODS = [None, {"method": "ngram"}, FLAKY]
methods = pytest.mark.parametrize("spec", METHODS, ids=["plain", "ngram", "flaky"])


def free(index: int, option: str = "none", temperature: float = 0.7, **fields) -> Case:
    """A request that never needs the host."""
    return Case(index, option, temperature, **{"length": 9 + index, "prompt": False, **fields})


# --- it happens ---


@methods
def test_the_next_step_runs_before_the_last_is_read(spec):
    cases = [free(i) for i in range(3)]
    batch = Batch(cases, Setup(), spec, engine=Setup().engine(spec, overlap=True))
    watch = Watch(batch.engine)
    assert batch.differences() == []
    ahead, waited = watch.check()
    assert ahead >= len(watch.launched) - 2 > 2 and waited == 0


def test_nothing_is_said_before_it_is_read():
    """The first step is shown when the second is under way; all the same, as many steps are launched."""
    engine, plain = tiny.engine(overlap=True), tiny.engine()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    shown = {}
    for name, target in (("ahead", engine), ("plain", plain)):
        target.add(tiny.request(0, params))
        shown[name] = [[out.token_ids for out in target.step()] for _ in range(6)]
    assert shown["ahead"] == [[], *shown["plain"][:5]] and shown["plain"][5] == []
    assert not engine.has_work and not engine.loop.pending


def test_a_proposer_on_the_host_is_waited_for():
    batch = Batch([free(0)], Setup(), {"method": "proposers:Flaky"}, overlap=True)
    assert batch.differences() == [] and not batch.engine.loop.overlap


# --- arrivals ---

HOSTED = ["processor", "bad_words", "named_logprobs", "all_logprobs", "draft_logprobs", "mix"]


def interrupted(spec, option, when, **options):
    """Others decode, `option` arrives after `when` steps, one more comes at the end."""
    late = Case(3, length=40) if option == "prompt" else free(3, option, length=20)
    cases = [free(0, "frequency"), free(1, "processed", 1.3), free(2, "stop_ids", 0.0), late, free(4)]
    engine = Setup().engine(spec, overlap=True, max_num_batched_tokens=16, **options)
    watch = Watch(engine)
    return Batch(cases, Setup(), spec, engine=engine, arrivals=[0, 0, 1, when, 30]).differences(), watch


@pytest.mark.parametrize("spec", [*METHODS, JUNK], ids=["plain", "ngram", "flaky", "junk"])
@pytest.mark.parametrize("option", [*HOSTED, "prompt"])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_one_that_needs_the_host_arrives_in_the_middle(spec, option, when):
    """The engine drains, waits while it must, and runs ahead again when it may."""
    found, watch = interrupted(spec, option, when)
    assert found == []
    ahead, waited = watch.check()
    assert ahead > 0 and waited > 0 and not watch.launched[-1][1]


@pytest.mark.parametrize(
    ("option", "what"),
    [("prompt", "prompt logprobs"), ("draft_logprobs", "draft records")],
)
def test_control_an_engine_that_never_waits(monkeypatch, option, what):
    monkeypatch.setattr(Loop, "_needs_sync", lambda self: False)
    assert any(f"request 3: {what}" in line for line in interrupted(FLAKY, option, 5, debug=False)[0])


def test_control_drafts_that_are_not_counted_before_the_host_looks(monkeypatch):
    """It then takes the rows that there may be for those that there are."""
    monkeypatch.setattr(Loop, "_count_drafts", lambda self: None)
    found = [line for when in range(2, 9) for line in interrupted(JUNK, "prompt", when, debug=False)[0]]
    assert any("prompt logprobs" in line for line in found)


def test_several_that_need_the_host_come_and_go():
    """One after another and side by side, each queued behind others as well: two slots for seven."""
    cases = [free(i, option) for i, option in enumerate(["none", *HOSTED])]
    cases[0] = replace(cases[0], prompt=True)
    engine = Setup().engine(FLAKY, overlap=True, max_num_batched_tokens=16, max_num_seqs=2)
    watch = Watch(engine)
    batch = Batch(cases, Setup(), FLAKY, engine=engine, arrivals=[3, 0, 6, 2, 9, 4, 12])
    assert batch.differences() == []
    watch.check()


@methods
@pytest.mark.parametrize("seats", [1, 2, 8])
def test_any_time_of_arrival(spec, seats):
    cases = [
        free(i, option, length=5 + 7 * i) for i, option in enumerate(["none", "eos", "top_k", "stop_ids"])
    ]
    for late in range(5):
        engine = Setup().engine(spec, overlap=True, max_num_batched_tokens=16, max_num_seqs=seats)
        watch = Watch(engine)
        batch = Batch(cases, Setup(), spec, engine=engine, arrivals=[0, late, 2 * late, 3 * late])
        assert batch.differences() == []
        watch.check()


# --- aborts ---


@methods
@pytest.mark.parametrize("when", range(8))
def test_an_abort_at_any_step(spec, when):
    """Queued, in its prompt, decoding: always with a step under way. Its slot is wanted at once."""
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
def test_all_are_aborted_and_others_follow(spec, when):
    """The step under way is nobody's; the next requests find a clean engine."""
    engine = Setup().engine(spec, overlap=True, max_num_seqs=2)
    cases = [free(0), free(1, "frequency"), free(2, "eos")]
    alone = {str(a.index): reference_run(a, Setup()) for a in cases}
    proposers.set_answers({name: record.token_ids for name, record in alone.items()})
    for i in range(3):
        engine.add(tiny.request(10 + i, SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(when):
        engine.step()
    assert all(engine.abort(str(10 + i)) for i in range(3))
    check_empty(engine)
    records = tiny.run(engine, [a.request() for a in cases])
    assert [line for name in alone for line in compare(name, alone[name], records[name])] == []
    assert not engine.loop.pending or not engine.step()


# --- a slot changes hands ---


def inherited(spec) -> list[str]:
    """One slot. Its tenant is aborted with a step under way, and a newcomer sits down before it is read.

    What the newcomer got that is not its own, and what the old one was given after it left.
    """
    newcomer = free(1, "none", 1.3, length=4)
    alone = reference_run(newcomer, Setup())
    proposers.set_answers({"1": alone.token_ids})
    found = []
    for when in range(2, 7):
        engine = Setup().engine(spec, overlap=True, max_num_seqs=1, debug=False)
        engine.add(tiny.request(0, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=5)))
        for _ in range(when):
            engine.step()
        assert engine.loop.pending, "no step is under way"
        assert engine.abort("0")
        engine.add(newcomer.request())
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
def test_results_of_a_predecessor_never_reach_a_newcomer(spec):
    assert inherited(spec) == []


@methods
def test_control_without_the_tenant_check_they_do(spec, monkeypatch):
    whole = Scheduler.settle

    def broken(self, planned, *columns):
        return whole(self, replace(planned, generations=self.mirror.generation[planned.slots]), *columns)

    monkeypatch.setattr(Scheduler, "settle", broken)
    assert any("after its end" in line for line in inherited(spec))


def test_control_a_newcomer_whose_count_is_moved_by_its_predecessor(monkeypatch):
    """The other half of the check: nothing is shown wrongly, but the newcomer's length is."""
    whole = Scheduler.settle

    def broken(self, planned, num_out, *columns):
        here = whole(self, planned, num_out, *columns)
        self.mirror.length[planned.slots[~here]] += num_out[~here]
        return here

    monkeypatch.setattr(Scheduler, "settle", broken)
    assert any("request 1" in line for line in inherited(None))


# --- endings ---


@methods
@pytest.mark.parametrize("seats", [1, 3])
def test_slots_of_requests_that_ended_are_used_at_once(spec, seats):
    """Twelve requests that end in every way, one after another in the same slots."""
    options = ["eos", "stop_ids", "max_tokens", "min_tokens", "none", "no_logprobs"]
    cases = [free(i, options[i % 6], (0.0, 0.7, 1.3)[i % 3]) for i in range(12)]
    engine = Setup().engine(spec, overlap=True, max_num_seqs=seats, max_num_batched_tokens=32)
    watch = Watch(engine)
    batch = Batch(cases, Setup(), spec, engine=engine)
    assert batch.differences() == []
    watch.check()


def after_the_end(spec, **options) -> list[str]:
    """Counts of every request, and what was said after its end."""
    engine = Setup().engine(spec, overlap=True, max_num_seqs=3, debug=False, **options)
    cases = [free(i, "stop_ids" if i % 2 else "max_tokens", 1.3) for i in range(6)]
    alone = {str(a.index): reference_run(a, Setup()) for a in cases}
    proposers.set_answers({name: record.token_ids for name, record in alone.items()})
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
            found.append(f"request {name}: a step said nothing")
    check_empty(engine)
    return found


@methods
def test_no_token_is_shown_after_the_end(spec):
    assert after_the_end(spec) == []


def test_control_a_request_that_is_not_let_go_is_seen(monkeypatch):
    """Its tenant stays although it ended: what is under way of it is told as well."""
    whole = Scheduler._leave

    def broken(self, sequence):
        slot = sequence.slot
        whole(self, sequence)
        self.mirror.generation[slot] -= 1

    monkeypatch.setattr(Scheduler, "_leave", broken)
    assert after_the_end(None) and after_the_end(JUNK)


def test_a_step_of_ended_requests_has_no_rows():
    """They are still in the plan; the device skips them."""
    engine = tiny.engine(overlap=True)
    token = tiny.run(tiny.engine(), [tiny.request(0, SamplingParams(max_tokens=4, temperature=0))])[
        "0"
    ].token_ids[2]
    engine.add(tiny.request(0, SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[token])))
    seen, whole = [], engine.ops.step.layout

    def layout(plan, columns, page_size, out):
        whole(plan, columns, page_size, out)
        seen.append((int((plan.slots >= 0).sum()), int((out.rows.slots >= 0).sum())))

    engine.ops.step.layout = layout
    while engine.has_work:
        engine.step()
    assert seen == [(1, 12), (1, 1), (1, 1), (1, 0)]


# --- when nothing is under way ---


def test_an_idle_engine_does_nothing(monkeypatch):
    engine = tiny.engine(overlap=True, speculative=FLAKY)
    proposers.set_answers({})
    assert not engine.step()
    tiny.run(engine, [tiny.request(0, SamplingParams(max_tokens=3))])
    launched = []
    monkeypatch.setattr(Loop, "_read_step", lambda self, flight: launched.append(flight) or [])
    monkeypatch.setattr(engine.loop.device, "run", None)
    engine.step()
    engine.step()
    assert len(launched) <= 1 and not engine.loop.pending


def test_results_are_copies():
    """What was shown stays as it was when later steps write to the same buffers."""
    engine = tiny.engine(overlap=True, speculative={"method": "ngram"})
    for i in range(3):
        engine.add(tiny.request(i, SamplingParams(max_tokens=12, logprobs=3)))
    kept = []
    while engine.has_work:
        results = engine.step()
        kept.append((results, results.table.copy(), list(results)))
    for results, table, outputs in kept:
        assert np.array_equal(results.table, table) and list(results) == outputs
