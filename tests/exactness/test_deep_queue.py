"""More steps under way than a CPU would ever have: the promise is kept, and nobody waits for the queue.

Faults with a full queue are in test_faults.py, plans in test_plan.py, the clock in test_pacing.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from async_serving import CASES as SERVED_CASES
from async_serving import check_left, facts
from covering import pairwise
from draftproof.engine.drafting.run_ahead import RunAhead
from draftproof.engine.drafting.token_feedback import TokenFeedback
from draftproof.engine.loop import Loop
from draftproof.engine.request_release import RequestRelease
from draftproof.engine.scheduler import Scheduler
from draftproof.ops import PendingCopy
from draftproof.ops.cpu.backend import CpuOps, CpuRuntime
from draftproof.propose.suffix_pool import Pool
from draftproof.sampling_params import SamplingParams
from exact import NEIGHBOURS, Batch, Case, Setup, check_empty
from exact_matrix import TRAFFIC, named


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """What is done when there is time is done in every step, however busy this machine is."""
    monkeypatch.setattr(RunAhead, "is_device_busy", lambda self, now: True)


@pytest.fixture(params=[3, 4])
def depth(request, monkeypatch):
    """All engines that are built meanwhile have so many under way."""
    whole = RunAhead.__init__

    def deep(self: RunAhead, *arguments: Any) -> None:
        whole(self, *arguments)
        self.min_depth = self.max_depth = request.param

    monkeypatch.setattr(RunAhead, "__init__", deep)
    return request.param


@pytest.fixture
def most(monkeypatch):
    """How many were under way at once, by how often."""
    seen: list[int] = []
    whole = Loop._read_step

    def settle(self: Loop, flight: Any) -> Any:
        seen.append(1 + len(self.pending))
        return whole(self, flight)

    monkeypatch.setattr(Loop, "_read_step", settle)
    return seen


# seven asks, three seats; nobody keeps the host in the loop
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
    }
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_promise(case, depth, most):
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
    assert max(most) == depth and most.count(depth) > 5
    if case["pages"] == "preempted":
        assert batch.engine.stats().num_preemptions
    while batch.engine.loop.pending:
        assert not batch.engine.step()
    assert not batch.engine.loop.release.unread and not batch.engine.loop.release.feedback._pending
    check_empty(batch.engine)


@pytest.mark.parametrize("spec", ["ngram", "flaky"])
def test_stop_strings_prompt_logprobs_and_processors(spec, make, alone, depth, most):
    """Whoever needs the host finds nothing under way, whoever comes later has the queue again."""
    llm = make(spec, max_num_seqs=3)
    prompts, params = zip(*SERVED_CASES, strict=True)
    for _ in range(2):
        assert [facts(one) for one in llm.generate(prompts, params)] == [facts(one) for one in alone]
    free = [i for i, wish in enumerate(params) if not needs_host(wish)]
    most.clear()
    answers = llm.generate([prompts[i] for i in free], [params[i] for i in free])
    assert [facts(one) for one in answers] == [facts(alone[i]) for i in free]
    assert max(most) == depth and any(isinstance(o.outputs[0].stop_reason, str) for o in answers)
    check_left(llm)


def needs_host(wish: SamplingParams) -> bool:
    hosted = wish.logits_processors or wish.logprob_token_ids or wish.include_draft_logprobs
    return bool(hosted) or wish.prompt_logprobs is not None


# --- copies come in their turn ---


class InTurnRuntime(CpuRuntime):
    """A CPU that has a queue, as a GPU has: a copy is there once all steps before it are."""

    asynchronous = True

    def graph(self, function: Any, own_pool: bool = False) -> Any:
        function()  # as a capture does, on an empty plan
        return function


class InTurn(CpuOps):
    """CPU backend with a queue."""

    def __init__(self, device: Any, **options: Any) -> None:
        super().__init__(device, **options)
        self.runtime = InTurnRuntime(device, self.executor)


class Turns:
    """Steps of an engine that were queued and read. Whoever wants a copy behind others is told off."""

    def __init__(self, engine: Any) -> None:
        self.loop, self.fetch = engine.loop, engine.ops.runtime.fetch
        self.queued = self.read = self.early = self.kept = 0
        run = engine.loop.device.run

        def counted(*arguments: Any) -> Any:
            ran = run(*arguments)
            self.queued += 1
            return ran

        engine.loop.device.run, engine.ops.runtime.fetch = counted, self.fetched

    def fetched(self, tensor: Any) -> PendingCopy:
        whole, behind = self.fetch(tensor), self.queued
        results = tensor.data_ptr() == self.loop.device.buffers.results.data_ptr()

        def read() -> Any:
            if results:
                assert behind == self.read + 1, "steps are read in turn"
                self.read = behind
            elif behind > self.read:  # it is waited for, and all steps before it
                self.early += 1
                scheduler = self.loop.scheduler
                assert not (scheduler.running or scheduler.waiting), "a copy behind others was waited for"
            elif self.loop.pending:
                self.kept += 1
            return whole()

        return PendingCopy(read, lambda: behind <= self.read)


def taught(depth: int) -> Turns:
    """Many short answers through few seats, all of them learned from and kept for the cache."""
    spec = {"method": "suffix", "num_speculative_tokens": 4}
    engine = Setup(backend="test_deep_queue:InTurn").engine(
        spec, overlap=True, max_num_seqs=2, page_size=8, max_num_batched_tokens=64
    )
    engine.loop.policy.run_ahead.min_depth = depth
    turns = Turns(engine)
    options = ["ignore_eos", "stop_ids", "eos", "max_tokens"]
    cases = [Case(i, options[i % 4], (0.0, 1.0)[i % 2], length=6 + i, prompt=False) for i in range(10)]
    batch = Batch(cases, Setup(), spec, engine=engine, arrivals=[0, 0, 0, 2, 9, 9, 11], aborts={4: 12})
    assert batch.differences() == []
    assert engine.loop.proposer.pool._lines and engine.loop.scheduler.pages.num_idle
    return turns


@pytest.mark.parametrize("steps", [2, 3])
def test_nobody_waits_for_what_lies_behind_steps(steps, most):
    turns = taught(steps)
    assert turns.kept > 10 and max(most) == steps and most.count(steps) > 20
    assert turns.early <= 2  # when the last one had gone


@pytest.mark.parametrize("planted", ["buried", "taught", "sent"])
def test_control_a_copy_that_is_read_at_once(planted, monkeypatch):
    release, teach = RequestRelease.release_finished, TokenFeedback.deliver
    if planted == "buried":
        monkeypatch.setattr(RequestRelease, "release_finished", lambda self, number=0: release(self))
    elif planted == "taught":
        monkeypatch.setattr(
            TokenFeedback, "deliver", lambda self, proposer, number: teach(self, proposer, 1e9)
        )
    else:
        send = Pool.send

        def at_once(self):
            send(self)
            self._pending_used = self._pending_used and PendingCopy(
                self._pending_used.read
            )  # as if it had come
            self.store()

        monkeypatch.setattr(Pool, "send", at_once)
    with pytest.raises(AssertionError, match="a copy behind others was waited for"):
        taught(3)


def test_an_engine_that_is_late_queues_three_by_itself(most):
    """Copies of a CPU have always come: the host is late for every one."""
    engine = Setup(backend="test_deep_queue:InTurn").engine({"method": "ngram"}, overlap=True)
    cases = [Case(i, "ignore_eos", 1.0, length=9 + i, prompt=False) for i in range(3)]
    assert Batch(cases, Setup(), {"method": "ngram"}, engine=engine).differences() == []
    assert engine.loop.policy.run_ahead.depth == 3 == max(most) and 2 in most


def test_loop_does_idle_work_while_steps_are_in_flight(depth, monkeypatch):
    read, meanwhile = [], Scheduler.meanwhile
    monkeypatch.setattr(Scheduler, "meanwhile", lambda self: read.append(1) or meanwhile(self))
    cases = [Case(i, "none", 0.0, length=20 + i, prompt=False) for i in range(6)]
    spec = {"method": "hybrid", "num_speculative_tokens": 3}
    assert Batch(cases, Setup(), spec, overlap=True).differences() == []
    assert read
