"""Exactness with more steps in flight than a CPU ever has, and no read that waits for the queue.

Faults with a full queue are in test_faults.py, plans in test_plan.py, depths in test_run_ahead.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from async_serving import CASES as SERVED_CASES
from async_serving import check_left, facts
from covering import pairwise
from draftproof.engine.drafting.run_ahead_depth import RunAhead
from draftproof.engine.loop import Loop
from draftproof.engine.request_release import RequestRelease
from draftproof.engine.scheduler import Scheduler
from draftproof.ops import PendingCopy
from draftproof.propose.suffix_pool import Pool
from exact import NEIGHBOURS, Batch, Case, Setup, check_empty
from exact_matrix import TRAFFIC, named


@pytest.fixture(autouse=True)
def device_always_busy(monkeypatch):
    """Do idle work in every step, however busy this machine is."""
    monkeypatch.setattr(RunAhead, "is_device_busy", lambda self, now: True)


@pytest.fixture(params=[3, 4])
def depth(request, monkeypatch):
    """Set the number of steps in flight of engines built by the test."""
    whole = RunAhead.__init__

    def set_depth(self: RunAhead, *arguments: Any) -> None:
        whole(self, *arguments)
        self.min_depth = self.max_depth = request.param

    monkeypatch.setattr(RunAhead, "__init__", set_depth)
    return request.param


@pytest.fixture
def depths(monkeypatch):
    """Record the number of steps in flight at every read."""
    seen: list[int] = []
    whole = Loop._read_step

    def record_depth(self: Loop, flight: Any) -> Any:
        seen.append(1 + len(self.pending))
        return whole(self, flight)

    monkeypatch.setattr(Loop, "_read_step", record_depth)
    return seen


# Seven requests in three slots; none needs the host.
CASES = pairwise(
    {
        "method": ["ngram", "suffix", "eagle3", "hybrid", "proposers:DeviceFlaky", None],
        "option": ["none", "frequency", "eos", "stop_ids", "processed", "max_tokens"],
        "temperature": [0.0, 1.0],
        "prefix": ["miss", "hit", "off"],
        "pages": ["many", "few", "preempted"],
        "traffic": list(TRAFFIC),
        "adaptive": [True, False],
        "chunk": [16, 64],
        "depth": [3, 4],
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "depth"),
    [(c, c["depth"]) for c in CASES],
    indirect=["depth"],
    ids=lambda level: named(level) if isinstance(level, dict) else "",
)
def test_deep_queue_is_exact(case, depth, depths):
    cases = [Case(0, case["option"], case["temperature"], length=40), *NEIGHBOURS]
    free = {"prompt": False, "grammar": "none"}
    cases = [replace(a, option="eos" if a.option == "mix" else a.option, **free) for a in cases]
    if case["method"] is None:
        cases = [replace(a, enabled=True, k=None) for a in cases]
    sizes = {"page_size": 8, "enable_prefix_caching": case["prefix"] != "off", "max_num_seqs": 3}
    if case["pages"] != "many":
        sizes["kv_cache_tokens"] = 128  # the longest just fits
    spec = {"method": case["method"], "num_speculative_tokens": 4, "adaptive": case["adaptive"]}
    batch = Batch(
        *(cases, Setup(), spec if case["method"] else None),
        chunk=case["chunk"],
        overlap=True,
        sizes=sizes,
        warm=case["prefix"] == "hit",
        preempts_all=case["pages"] == "preempted",
        **TRAFFIC[case["traffic"]],
    )
    assert batch.differences() == []
    assert max(depths) == depth and depths.count(depth) > 5
    if case["pages"] == "preempted":
        assert batch.engine.stats().num_preemptions
    while batch.engine.loop.pending:
        assert not batch.engine.step()
    assert not batch.engine.loop.release.unread
    check_empty(batch.engine)


@pytest.mark.parametrize("spec", ["ngram", "flaky"])
def test_requests_that_need_the_host_drain_the_queue(spec, make, alone, depth, depths):
    llm = make(spec, max_num_seqs=3)
    prompts, params = zip(*SERVED_CASES, strict=True)
    for _ in range(2):
        assert [facts(one) for one in llm.generate(prompts, params)] == [facts(one) for one in alone]
    free = [i for i, each in enumerate(params) if not each.logits_processors]
    depths.clear()
    answers = llm.generate([prompts[i] for i in free], [params[i] for i in free])
    assert [facts(one) for one in answers] == [facts(alone[i]) for i in free]
    assert max(depths) == depth and any(isinstance(o.outputs[0].stop_reason, str) for o in answers)
    check_left(llm)


# --- order of reads ---


class ReadOrder:
    """Count queued and read steps, and reject reads of a copy behind unread steps."""

    def __init__(self, engine: Any) -> None:
        self.loop, self.fetch = engine.loop, engine.ops.runtime.fetch
        self.queued = self.read = self.blocking_reads = self.ready_reads = 0
        run = engine.loop.device.run

        def counted(*arguments: Any) -> Any:
            ran = run(*arguments)
            self.queued += 1
            return ran

        engine.loop.device.run, engine.ops.runtime.fetch = counted, self._fetch

    def _fetch(self, tensor: Any) -> PendingCopy:
        whole, behind = self.fetch(tensor), self.queued
        results = tensor.data_ptr() == self.loop.device.buffers.results.data_ptr()

        def read() -> Any:
            if results:
                assert behind == self.read + 1, "steps are read in order"
                self.read = behind
            elif behind > self.read:
                self.blocking_reads += 1
                scheduler = self.loop.scheduler
                assert not (scheduler.running or scheduler.waiting), "a read waited for later steps"
            elif self.loop.pending:
                self.ready_reads += 1
            return whole()

        return PendingCopy(read, lambda: behind <= self.read)


def serve_with_suffix_pool(depth: int) -> ReadOrder:
    """Serve many short requests in few slots with a suffix pool and a prefix cache."""
    spec = {"method": "suffix", "num_speculative_tokens": 4}
    engine = Setup(backend="padded_ops:PaddedOps").engine(
        spec, overlap=True, max_num_seqs=2, page_size=8, max_num_batched_tokens=64
    )
    engine.loop.policy.run_ahead.min_depth = depth
    order = ReadOrder(engine)
    options = ["ignore_eos", "stop_ids", "eos", "max_tokens"]
    cases = [Case(i, options[i % 4], (0.0, 1.0)[i % 2], length=6 + i, prompt=False) for i in range(10)]
    batch = Batch(cases, Setup(), spec, engine=engine, arrivals=[0, 0, 0, 2, 9, 9, 11], aborts={4: 12})
    assert batch.differences() == []
    assert engine.loop.proposer.pool._lines and engine.loop.scheduler.pages.num_idle
    return order


@pytest.mark.parametrize("steps", [2, 3])
def test_no_read_waits_for_later_steps(steps, depths):
    order = serve_with_suffix_pool(steps)
    assert order.ready_reads > 10 and max(depths) == steps and depths.count(steps) > 20
    assert order.blocking_reads <= 2  # after the last request


@pytest.mark.parametrize("defect", ["release", "pool"])
def test_control_blocking_read_is_detected(defect, monkeypatch):
    release = RequestRelease.release_finished
    if defect == "release":
        monkeypatch.setattr(RequestRelease, "release_finished", lambda self, number=0: release(self))
    else:
        send = Pool.send

        def at_once(self):
            send(self)
            self._pending_used = self._pending_used and PendingCopy(self._pending_used.read)
            self.store()

        monkeypatch.setattr(Pool, "send", at_once)
    with pytest.raises(AssertionError, match="a read waited for later steps"):
        serve_with_suffix_pool(3)


def test_late_host_queues_three_steps(depths):
    """Copies of a CPU are always ready, so the host is late for each."""
    engine = Setup(backend="padded_ops:PaddedOps").engine({"method": "ngram"}, overlap=True)
    cases = [Case(i, "ignore_eos", 1.0, length=9 + i, prompt=False) for i in range(3)]
    assert Batch(cases, Setup(), {"method": "ngram"}, engine=engine).differences() == []
    assert engine.loop.policy.run_ahead.depth == 3 == max(depths) and 2 in depths


def test_loop_does_idle_work_while_steps_are_in_flight(depth, monkeypatch):
    read, do_idle_work = [], Scheduler.do_idle_work
    monkeypatch.setattr(Scheduler, "do_idle_work", lambda self: read.append(1) or do_idle_work(self))
    cases = [Case(i, "none", 0.0, length=20 + i, prompt=False) for i in range(6)]
    spec = {"method": "hybrid", "num_speculative_tokens": 3}
    assert Batch(cases, Setup(), spec, overlap=True).differences() == []
    assert read
