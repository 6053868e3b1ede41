"""Who runs, with how many rows: chunks, budgets, first come first served, slots and pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from draftproof.engine.invariants import check_step
from draftproof.sampling_params import SamplingParams
from exact import check_empty


def asks(lengths, **options):
    values = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **options}
    return [tiny.request(i, SamplingParams(**values), length) for i, length in enumerate(lengths)]


def plans(engine, requests, arrivals=()):
    """Serve; per step, request id -> (rows, drafts, samples)."""
    seen, whole = [], engine.loop.scheduler.plan

    def plan():
        planned = whole()
        if planned is not None:
            names = [sequence.request.id for sequence in planned.sequences]
            rows = np.maximum(planned.chunk, 1) + planned.drafts
            columns = (rows.tolist(), planned.drafts.tolist(), planned.samples.tolist())
            seen.append(dict(zip(names, zip(*columns, strict=True), strict=True)))
            assert planned.num_rows == rows.sum() <= engine.loop.scheduler.max_rows
        return planned

    engine.loop.scheduler.plan = plan
    tiny.run(engine, requests, arrivals)
    check_empty(engine)
    return seen


def test_a_long_prompt_comes_in_chunks():
    seen = plans(tiny.engine(max_num_batched_tokens=16), asks([40]))
    assert [step["0"] for step in seen] == [(16, 0, False), (16, 0, False), (8, 0, True), *[(1, 0, True)] * 3]


def test_a_prompt_that_fills_its_last_chunk():
    seen = plans(tiny.engine(max_num_batched_tokens=16), asks([32]))
    assert [step["0"] for step in seen][:3] == [(16, 0, False), (16, 0, True), (1, 0, True)]


def test_decoding_goes_before_prompts_and_prompts_share_what_is_left():
    seen = plans(tiny.engine(max_num_batched_tokens=16), asks([10, 40, 9]), arrivals=[0, 1, 1])
    assert seen[0] == {"0": (10, 0, True)}
    assert seen[1] == {"0": (1, 0, True), "1": (15, 0, False)}
    assert seen[3] == {"0": (1, 0, True), "1": (10, 0, True), "2": (5, 0, False)}
    assert seen[4] == {"1": (1, 0, True), "2": (4, 0, True)}


def test_rows_never_pass_the_budget_and_drafts_give_way():
    spec = {"method": "proposers:Perfect", "num_speculative_tokens": 8, "adaptive": False}
    engine = tiny.engine(speculative=spec, max_num_batched_tokens=16)
    seen = plans(engine, asks([2] * 6, max_tokens=12))
    assert all(sum(rows for rows, _, _ in step.values()) <= 16 for step in seen)
    crowded = [step for step in seen if len(step) == 6 and all(s for _, _, s in step.values())]
    assert [drafts for _, drafts, _ in crowded[1].values()] == [8, 2, 0, 0, 0, 0]
    assert all(rows == 1 + drafts for step in crowded[1:] for rows, drafts, _ in step.values())


def test_first_come_first_served_when_slots_are_few():
    engine = tiny.engine(max_num_seqs=2)
    seen = plans(engine, asks([5, 6, 7, 8]))
    first = {name: next(i for i, step in enumerate(seen) if name in step) for name in "0123"}
    assert first["0"] == first["1"] == 0 and first["2"] == first["3"] == 4
    assert all(len(step) <= 2 for step in seen)


def test_a_large_request_waits_for_pages_and_is_not_overtaken():
    engine = tiny.engine(kv_cache_tokens=64, page_size=16)  # four pages
    requests = asks([28, 40, 5])  # 2 pages, 3 pages, 1 page
    seen = plans(engine, requests)
    first = {name: next(i for i, step in enumerate(seen) if name in step) for name in "012"}
    assert first["0"] == 0 and first["1"] == first["2"] == 4  # the third would have fitted, but is behind


def test_a_request_holds_the_pages_it_can_ever_need():
    engine = tiny.engine(page_size=16)
    free = engine.loop.scheduler.pages.num_free
    engine.add(asks([30], max_tokens=3)[0])
    engine.step()
    assert free - engine.loop.scheduler.pages.num_free == 3  # 33 tokens
    engine.abort("0")
    check_empty(engine)


@pytest.mark.parametrize("when", range(6))
def test_an_abort_at_any_step_frees_everything(when):
    """Queued, in the middle of the prompt, decoding."""
    engine = tiny.engine(speculative={"method": "ngram"}, max_num_batched_tokens=16, max_num_seqs=1)
    requests = asks([40, 12])
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


def _host(name):
    def spoil(engine, sequence):
        getattr(engine.loop.scheduler.host, name)[sequence.slot] += 1

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_column("length"), "lengths differ"),
        (_host("length"), "lengths differ"),
        (_column("computed"), "KV of 13 tokens"),
        (_column("computed", -1), "KV of 11 tokens"),
        (_host("prompt_left"), "KV of 12 tokens"),
        (_column("num_draft"), "more drafts than are known of"),
        (_column("prompt_len"), "prompt lengths differ"),
        (_column("ended"), "ended on the device alone"),
        (_host("under_way"), "a step is missing"),
        (lambda e, s: setattr(s, "max_length", 13), "ran past its end"),
        (lambda e, s: e.loop.slots.requests.__setitem__(s.slot, None), "its slot is another's"),
        (lambda e, s: s.pages.pop(), "pages short"),
        (lambda e, s: e.loop.slots.columns.tokens[s.slot].fill_(97), "impossible token"),
        (lambda e, s: e.loop.scheduler.pages.give_back(s.pages[:1]), "shares a page|free"),
    ],
)
def test_the_invariants_see_what_is_wrong(spoil, message):
    engine = tiny.engine()
    for request in asks([12, 9], max_tokens=20):
        engine.add(request)
    engine.step()
    scheduler = engine.loop.scheduler
    check_step(scheduler, engine.loop.slots)
    with torch.inference_mode():
        spoil(engine, scheduler.running[0])
    if "page" in message and "short" not in message:
        scheduler.running[1].pages.append(scheduler.pages.take(1)[0])
    with pytest.raises(AssertionError, match=message):
        check_step(scheduler, engine.loop.slots)


def test_a_slot_freed_twice_is_caught():
    engine = tiny.engine()
    engine.add(asks([5])[0])
    engine.step()
    slot = engine.loop.scheduler.running[0].slot
    engine.abort("0")
    with pytest.raises(AssertionError, match="freed twice"):
        engine.loop.slots.stand(slot)


def test_drafts_do_not_keep_a_prompt_out():
    """Six requests with eight drafts each could fill all 16 rows of every step."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    spec = {"method": "proposers:Junk", "num_speculative_tokens": 8, "adaptive": False}
    busy = tiny.engine(speculative=spec, max_num_batched_tokens=16)
    for i in range(6):
        busy.add(tiny.request(i, params))
    scheduler = busy.loop.scheduler

    def prompt_left(sequence):
        return scheduler.host.prompt_left[sequence.slot]

    while any(prompt_left(s) for s in scheduler.running) or scheduler.waiting:
        busy.step()
    busy.add(tiny.request(6, params, length=20))
    for _ in range(20 // ((16 - 6) // 2) + 1):  # half of what six rows leave, 5 rows a step
        busy.step()
    assert scheduler.running[-1].request.id == "6" and not prompt_left(scheduler.running[-1])
