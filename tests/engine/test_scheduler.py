"""Plans of the scheduler: chunks, row budget, order, slots and pages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from draftproof.engine.invariants import check_step
from draftproof.errors import QueueFullError
from draftproof.sampling_params import SamplingParams
from exact import check_empty


def make_requests(lengths, **options):
    values = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **options}
    return [tiny.request(i, SamplingParams(**values), length) for i, length in enumerate(lengths)]


def plans(engine, requests, arrivals=()):
    """Serve the requests; return request id -> (rows, drafts, samples) of every step."""
    seen, whole = [], engine.loop.scheduler.plan

    def plan(*given, **named):
        planned = whole(*given, **named)
        if planned is not None:
            names = [sequence.request.id for sequence in planned.sequences]
            rows = np.maximum(planned.chunk, 1) + planned.drafts
            columns = (rows.tolist(), planned.drafts.tolist(), planned.is_sampled.tolist())
            seen.append(dict(zip(names, zip(*columns, strict=True), strict=True)))
            assert planned.num_rows == rows.sum() <= engine.loop.scheduler.max_rows
        return planned

    engine.loop.scheduler.plan = plan
    tiny.run(engine, requests, arrivals)
    check_empty(engine)
    return seen


def test_long_prompt_is_split_into_chunks():
    seen = plans(tiny.engine(max_num_batched_tokens=16), make_requests([40]))
    assert [step["0"] for step in seen] == [(16, 0, False), (16, 0, False), (8, 0, True), *[(1, 0, True)] * 3]
    seen = plans(tiny.engine(max_num_batched_tokens=16), make_requests([32]))
    assert [step["0"] for step in seen][:3] == [(16, 0, False), (16, 0, True), (1, 0, True)]


def test_decoding_precedes_prompts_which_share_the_remaining_rows():
    seen = plans(tiny.engine(max_num_batched_tokens=16), make_requests([10, 40, 9]), arrivals=[0, 1, 1])
    assert seen[0] == {"0": (10, 0, True)}
    assert seen[1] == {"0": (1, 0, True), "1": (15, 0, False)}
    assert seen[3] == {"0": (1, 0, True), "1": (10, 0, True), "2": (5, 0, False)}
    assert seen[4] == {"1": (1, 0, True), "2": (4, 0, True)}


def test_drafts_are_cut_to_the_row_budget():
    spec = {"method": "proposers:Perfect", "num_speculative_tokens": 8, "adaptive": False}
    engine = tiny.engine(speculative=spec, max_num_batched_tokens=16)
    seen = plans(engine, make_requests([2] * 6, max_tokens=12))
    assert all(sum(rows for rows, _, _ in step.values()) <= 16 for step in seen)
    crowded = [step for step in seen if len(step) == 6 and all(s for _, _, s in step.values())]
    assert [drafts for _, drafts, _ in crowded[1].values()] == [8, 2, 0, 0, 0, 0]
    assert all(rows == 1 + drafts for step in crowded[1:] for rows, drafts, _ in step.values())


def test_few_slots_are_given_in_order_of_arrival():
    engine = tiny.engine(max_num_seqs=2)
    seen = plans(engine, make_requests([5, 6, 7, 8]))
    first = {name: next(i for i, step in enumerate(seen) if name in step) for name in "0123"}
    assert first["0"] == first["1"] == 0 and first["2"] == first["3"] == 4
    assert all(len(step) <= 2 for step in seen)


def test_request_that_waits_for_pages_is_not_overtaken():
    engine = tiny.engine(kv_cache_tokens=64, page_size=16)  # four pages
    requests = make_requests([28, 40, 5])  # 2 pages, 3 pages, 1 page
    seen = plans(engine, requests)
    first = {name: next(i for i, step in enumerate(seen) if name in step) for name in "012"}
    assert first["0"] == 0 and first["1"] == 4  # the third fits, but is behind
    assert first["2"] == 8  # a page stays free for the running request


def test_pages_are_allocated_as_a_request_grows():
    engine = tiny.engine(page_size=16, kv_cache_tokens=64)
    pages = engine.loop.scheduler.pages
    engine.add(make_requests([15], max_tokens=40)[0])
    used = []
    while engine.has_work:
        engine.step()
        used.append(pages.capacity - pages.num_free)
    assert used[0] == 1 and used[-2] == 4 and sorted(used[:-1]) == used[:-1]
    check_empty(engine)


def test_request_that_fills_the_pool_is_served():
    engine = tiny.engine(page_size=16, kv_cache_tokens=64, speculative={"method": "ngram"})
    for lengths in ([60], [20, 30, 40], [61], [63]):
        requests = make_requests(lengths, max_tokens=64 - max(lengths))
        records = tiny.run(engine, requests)
        assert all(record.finish[0] == "length" for record in records.values())
        check_empty(engine)


# --- priorities and preemption ---


def ranked(priorities, lengths, **options):
    requests = make_requests(lengths, **options)
    return [
        replace(request, params=replace(request.params, priority=priority))
        for request, priority in zip(requests, priorities, strict=True)
    ]


def test_smaller_priority_is_admitted_first_then_the_earlier():
    engine = tiny.engine(max_num_seqs=1)
    seen = plans(engine, ranked([1, 0, -3, 0], [5, 6, 7, 8]))
    order = list(dict.fromkeys(name for step in seen for name in step))
    assert order == ["2", "1", "3", "0"]


def test_prompt_of_better_rank_precedes_one_in_progress():
    engine = tiny.engine(max_num_batched_tokens=16)
    seen = plans(engine, ranked([0, -1, 0], [60, 20, 9]), arrivals=[0, 1, 1])
    assert seen[0] == {"0": (16, 0, False)}
    assert seen[1] == {"1": (16, 0, False)}
    assert seen[2] == {"0": (12, 0, False), "1": (4, 0, True)}
    assert [next(i for i, step in enumerate(seen) if name in step) for name in "012"] == [0, 1, 5]


def test_worst_rank_is_preempted_and_resumed():
    """Three requests fit at first and not to the end."""
    for priorities, loser in (([0, 0, 0], "2"), ([2, 0, 1], "0")):
        engine = tiny.engine(kv_cache_tokens=96, page_size=8)
        requests = ranked(priorities, [12, 12, 12], max_tokens=40)
        stats = {r.id: engine.add(r) for r in requests}
        records = {r.id: [] for r in requests}
        while engine.has_work:
            for out in engine.step():
                records[out.request_id] += out.token_ids
        best = min(requests, key=lambda r: (r.params.priority, int(r.id))).id
        assert stats[best].num_preemptions == 0 and stats[loser].num_preemptions > 0
        assert engine.stats().num_preemptions == sum(s.num_preemptions for s in stats.values())
        alone = tiny.run(tiny.engine(), requests)
        assert records == {name: record.token_ids for name, record in alone.items()}
        check_empty(engine)


def test_drafts_are_cut_before_a_request_is_preempted():
    """The pages of two requests end inside a full window."""
    spec = {"method": "proposers:Junk", "num_speculative_tokens": 8, "adaptive": False}
    engine = tiny.engine(speculative=spec, page_size=8, kv_cache_tokens=64)
    tiny.run(engine, make_requests([15, 15], max_tokens=17))
    assert engine.stats().num_preemptions == 0
    check_empty(engine)


def test_abort_of_a_preempted_request():
    spec = {"method": "proposers:Flaky"}  # a host proposer has `start` and `stop`
    engine = tiny.engine(kv_cache_tokens=96, page_size=8, speculative=spec)
    stats = [engine.add(request) for request in make_requests([12, 12, 12], max_tokens=40)]
    while not stats[2].num_preemptions:
        engine.step()
    assert [s.request.id for s in engine.loop.scheduler.waiting] == ["2"]
    assert engine.abort("2") and not engine.abort("2")
    while engine.has_work:
        assert all(out.request_id != "2" for out in engine.step())
    assert engine.loop.proposer._requests == {}
    check_empty(engine)


# --- a bounded queue ---


def test_full_queue_refuses_and_loses_nothing():
    engine = tiny.engine(max_num_seqs=2, max_num_waiting=3)
    requests = make_requests([5] * 9)
    for request in requests[:5]:  # two have a slot
        engine.add(request)
    with pytest.raises(QueueFullError, match="5 requests are waiting already: try again later"):
        engine.add(requests[5])
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 3)
    with pytest.raises(QueueFullError):
        engine.add(requests[6])
    assert engine.abort("4")
    engine.add(requests[7])
    done = []
    while engine.has_work:
        done += [out.request_id for out in engine.step() if out.finish_reason]
    assert done == ["0", "1", "2", "3", "7"]
    tiny.run(engine, [requests[5], requests[6]])
    check_empty(engine)


@pytest.mark.parametrize("when", range(6))
def test_abort_at_any_step_frees_everything(when):
    engine = tiny.engine(speculative={"method": "ngram"}, max_num_batched_tokens=16, max_num_seqs=1)
    requests = make_requests([40, 12])
    for request in requests:
        engine.add(request)
    for _ in range(when):
        engine.step()
    assert engine.abort("0") and engine.abort("1")
    assert not engine.abort("0") and not engine.abort("unknown")
    check_empty(engine)
    assert not engine.step() and engine.loop.scheduler.plan() is None


def _column(name, add=1):
    return lambda e, s: getattr(e.loop.slots.columns, name)[s.slot].add_(add)


def _host(name, add=1):
    def spoil(engine, sequence):
        getattr(engine.loop.scheduler.mirror, name)[sequence.slot] += add

    return spoil


def _share(engine, sequence):
    """Put its page in place of that of another request."""
    other = engine.loop.scheduler.running[1]
    other.pages[0] = sequence.pages[0]
    engine.loop.slots.columns.page_table[other.slot, 0] = sequence.pages[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_column("length"), "lengths differ"),
        (_host("length"), "lengths differ"),
        (_column("computed"), "KV of 13 tokens"),
        (_column("computed", -1), "KV of 11 tokens"),
        (_host("prompt_left", 2), "KV of 12 tokens"),
        (_column("num_draft"), "more drafts than the host mirror has"),
        (_column("prompt_len"), "prompt lengths differ"),
        (_column("finish_status"), "finished on the device only"),
        (_host("in_flight"), "a step is missing"),
        (lambda e, s: setattr(s, "max_length", 13), "ran past its maximum length"),
        (lambda e, s: e.loop.slots.requests.__setitem__(s.slot, None), "its slot holds another request"),
        (lambda e, s: s.pages.clear(), "pages short"),
        (lambda e, s: s.pages.append(7), "pages miscounted"),
        (_host("num_pages"), "pages miscounted"),
        (_host("max_committed"), "a step is in flight"),
        (_column("page_table"), "its page table differs"),
        (_share, "shares a page that is written to"),
        (lambda e, s: e.loop.slots.columns.tokens[s.slot].fill_(97), "impossible token"),
        (lambda e, s: e.loop.scheduler.pages.release(s.pages[:1]), "has no user"),
    ],
)
def test_invariant_check_detects_wrong_state(spoil, message):
    engine = tiny.engine()
    for request in make_requests([12, 9], max_tokens=20):
        engine.add(request)
    engine.step()
    scheduler = engine.loop.scheduler
    check_step(scheduler, engine.loop.slots)
    with torch.inference_mode():
        spoil(engine, scheduler.running[0])
    with pytest.raises(AssertionError, match=message):
        check_step(scheduler, engine.loop.slots)


def test_slot_freed_twice_is_an_error():
    engine = tiny.engine()
    engine.add(make_requests([5])[0])
    engine.step()
    slot = engine.loop.scheduler.running[0].slot
    engine.abort("0")
    with pytest.raises(AssertionError, match="freed twice"):
        engine.loop.slots.free(slot)


def test_drafts_leave_rows_for_a_prompt():
    """Six requests with eight drafts each could fill all 16 rows of every step."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    spec = {"method": "proposers:Junk", "num_speculative_tokens": 8, "adaptive": False}
    busy = tiny.engine(speculative=spec, max_num_batched_tokens=16)
    for i in range(6):
        busy.add(tiny.request(i, params))
    scheduler = busy.loop.scheduler

    def prompt_left(sequence):
        return scheduler.mirror.prompt_left[sequence.slot]

    while any(prompt_left(s) for s in scheduler.running) or scheduler.waiting:
        busy.step()
    busy.add(tiny.request(6, params, length=20))
    for _ in range(20 // ((16 - 6) // 2) + 1):  # half of what six rows leave, 5 rows a step
        busy.step()
    assert scheduler.running[-1].request.id == "6" and not prompt_left(scheduler.running[-1])
