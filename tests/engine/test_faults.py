"""Steps that fail cost time only; a lost device stops the engine and finishes no request."""

import asyncio
from dataclasses import replace

import pytest
import torch

import tiny
from draftproof import AsyncLLM
from draftproof.engine import fault_recovery
from draftproof.engine.loop import Loop
from draftproof.engine.page_pool import Pages
from draftproof.engine.scheduler import Scheduler
from draftproof.errors import EngineDeadError
from draftproof.sampling_params import SamplingParams
from exact import check_empty

SPEC = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
OPTIONS = [
    {"logprobs": 3},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 0, "prompt_logprobs": 2},
    {"logprob_token_ids": [5, 9], "include_draft_logprobs": True},
    {"frequency_penalty": 0.7, "logprobs": 2, "logprobs_mode": "processed"},
]


def make_requests(count=5, tokens=14):
    """Return requests with prompts of one page to several chunks."""
    return [
        tiny.request(i, SamplingParams(max_tokens=tokens, **OPTIONS[i % len(OPTIONS)]), length=12 + 13 * i)
        for i in range(count)
    ]


def build(backend="faulty:FaultyOps", steps=0, **options):
    """Build an engine with at most `steps` in flight; 1: each is read before the next is planned."""
    options |= {"overlap": steps > 1} if steps else {}
    target = tiny.engine(backend=backend, **{"speculative": SPEC, "page_size": 8, **options})
    target.loop.policy.run_ahead.min_depth = max(2, steps)
    return target, target.ops


steps = pytest.mark.parametrize("steps", [1, 2, 3])


@pytest.fixture(scope="module")
def reference():
    """Return each output alone, without drafts, from an engine that never fails."""
    target = tiny.engine(overlap=False, enable_prefix_caching=False)
    return {request.id: tiny.run(target, [request])[request.id].same() for request in make_requests()}


def served(target, requests, **options):
    records = tiny.run(target, requests, **options)
    target.step()
    check_empty(target)
    return {name: record.same() for name, record in records.items()}


@steps
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["layout", "sample", "commit", "logprobs", "store_drafts", "fetch", "read"])
def test_failed_steps_change_no_output(name, late, steps, reference):
    """Fail at the first call, in the middle and twice in a row, before an op and after it."""
    target, ops = build(steps=steps, debug=name != "store_drafts")
    counts = (1, 8, 20, 33) if name in ("fetch", "read") else (1, 8, 9, 19)  # some steps must be recovered
    ops.late, ops.when = late, lambda _, op, count: op == name and count in counts
    assert served(target, make_requests(), arrivals=[0, 0, 2, 2, 5]) == reference
    assert ops.raised >= 1 + (name != "store_drafts")
    proposer_failed = target.loop.device.drafting.failure is not None
    assert proposer_failed == (name == "store_drafts")  # the proposer is switched off


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_many_faults_with_preemption_and_shared_prefixes_are_exact(steps, reference):
    target, ops = build(steps=steps, kv_cache_tokens=72, max_num_seqs=4)
    again = [replace(r, id=turn + r.id) for turn in "abc" for r in make_requests(2)]
    ops.when = lambda _, op, count: op == "sample" and count % 23 == 5
    got = served(target, again, arrivals=[0, 0, 1, 3, 9, 30])
    assert {turn + name: reference[name] for turn in "abc" for name in "01"} == got
    stats = target.stats()
    assert ops.raised > 1 and stats.num_preemptions and stats.num_cached_tokens


@steps
def test_request_that_always_fails_ends_with_the_reason_and_others_are_exact(steps, reference):
    target, ops = build(steps=steps, max_num_seqs=2)
    columns = target.loop.slots.columns

    def when(_, op, count):
        taking_part = target.loop.device.plan.slots
        return op == "sample" and 1001 in columns.seed[taking_part[taking_part >= 0]].tolist()

    ops.when = when
    got = served(target, make_requests())
    reason = "OutOfMemoryError in a step: planted: out of memory"
    assert got["1"][3] == ("error", None, reason) and got["1"][0] == []
    assert got["0"][3] == ("error", None, reason)  # it shared all its steps
    tokens, logprobs = got["0"][:2]
    assert tokens == reference["0"][0][: len(tokens)] and logprobs == reference["0"][1][: len(tokens)]
    assert {name: got[name] for name in "234"} == {name: reference[name] for name in "234"}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("name", "num_lost"), [("sample", {1}), ("read", {2, 3})])
def test_faults_with_a_full_queue_are_exact(name, late, num_lost, reference, monkeypatch):
    """Fail to queue a step while two are in flight, or to read one with two behind it."""
    target, ops = build(steps=3, max_num_batched_tokens=16)
    seen, whole = set(), Loop._recover

    def recover(self, fault):
        seen.add((len(fault.lost), len(self.pending)))
        return whole(self, fault)

    monkeypatch.setattr(Loop, "_recover", recover)
    requests = [r for r in make_requests() if r.id in "014"]  # none needs the host
    for nth in range(2, 14):
        ops.late, ops._counts[name] = late, 0
        ops.when = lambda _, op, count, nth=nth: op == name and count == nth
        assert served(target, requests) == {r.id: reference[r.id] for r in requests}
        ops.when = None
        while target.loop.pending:
            target.step()
    assert {many for many, _ in seen} == num_lost and (2 if name == "sample" else 0) in {n for _, n in seen}


# --- the prefix cache ---


def serve_after_failed_prefill(**options):
    """Serve a prompt of several pages whose first step fails."""
    target, ops = build(**options)
    ops.when = lambda _, op, count: op == "layout" and count == 1
    request, stats = make_requests()[4], {}
    return served(target, [request], stats=stats)["4"], stats["4"]


@steps
def test_pages_of_a_failed_step_are_not_found(steps, reference):
    same, stats = serve_after_failed_prefill(steps=steps)
    assert same == reference["4"]
    assert stats.num_cached_tokens == 0 and stats.num_preemptions == 0


@steps
@pytest.mark.parametrize("when", ["queued", "aborted"])
def test_pages_of_an_aborted_request_are_not_found_after_a_fault(when, steps, reference):
    """Abort a request whose prompt is in flight or planned, then lose that step."""
    target, ops = build(steps=steps)
    request = make_requests()[4]
    target.add(replace(request, id="first", params=replace(request.params, max_tokens=40)))
    target.step()
    if when == "queued":
        target.step()
    ops.when = lambda _, op, count: op == "read" and count == 8
    if when == "queued":
        target.step()
    target.abort("first")
    stats = {}
    assert served(target, [replace(request, id="4")], stats=stats)["4"] == reference["4"]


@pytest.mark.parametrize("broken", ["unpublish", "computed"])
def test_control_unfilled_pages_are_detected(broken, monkeypatch, reference):
    if broken == "unpublish":
        monkeypatch.setattr(Pages, "unpublish", lambda *_: None)
    else:
        whole = Scheduler._return_to_waiting
        monkeypatch.setattr(
            Scheduler, "_return_to_waiting", lambda self, s, computed: whole(self, s, computed + 24)
        )
    same, _ = serve_after_failed_prefill()
    assert same != reference["4"]


def test_control_lost_step_is_detected(monkeypatch, reference):
    monkeypatch.setattr(fault_recovery, "requeue_lost", lambda *_: [])
    target, ops = build(debug=False)
    ops.when = lambda _, op, count: op == "read" and count == 8
    with pytest.raises(AssertionError):
        assert served(target, make_requests()) == reference


# --- captures ---


def test_step_that_cannot_be_captured_runs_op_by_op(reference, caplog):
    target, ops = build("faulty:CapturedOps")
    ops.when = lambda _, op, count: op == "graph" and count % 3 != 1
    assert served(target, make_requests()) == reference
    assert ops.raised and "it runs op by op" in caplog.text


@pytest.mark.parametrize("name", ["fetch", "sample"])
def test_engine_with_permanent_faults_stops(name):
    target, ops = build()
    ops.when = lambda _, op, count: op == name
    with pytest.raises((EngineDeadError, torch.OutOfMemoryError)):
        for i in range(60):
            target.add(tiny.request(i, SamplingParams(max_tokens=9)))
            target.step()
    with pytest.raises(EngineDeadError, match="create a new one"):
        target.step()


# --- a lost device ---


@steps
def test_engine_with_a_lost_device_stops_with_the_reason(steps):
    target, ops = build(steps=steps)
    outputs = []
    for request in make_requests():
        target.add(request)
    with pytest.raises(EngineDeadError, match="does not respond after RuntimeError in a step: CUDA"):
        for step in range(100):
            ops.is_device_lost = step == 4
            outputs += target.step()
    assert outputs and not any(out.finish_reason for out in outputs)
    for call in (target.step, lambda: target.add(tiny.request(9, SamplingParams()))):
        with pytest.raises(
            EngineDeadError, match="this engine has failed, create a new one: EngineDeadError: the dev"
        ):
            call()
    assert target.abort("0") and not target.abort("0")  # a dead engine accepts aborts


def test_llm_raises_and_async_llm_ends_every_request_with_the_reason(make):
    llm = make("ngram", backend="faulty:FaultyOps")

    def lose_device(count, num_requests):
        """Lose the device once all requests are added, since a dead engine accepts none."""
        llm.engine.ops.is_device_lost |= count >= 5 and llm.tracker.num_requests == num_requests
        return False

    llm.engine.ops.when = lambda ops, op, count: op == "sample" and lose_device(count, 4)

    async def main():
        engine = AsyncLLM.from_llm(llm)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        answers = await asyncio.gather(*(engine.generate("ab" * (i + 1), params) for i in range(4)))
        assert engine.dead and isinstance(engine.dead_error, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await engine.generate("a")
        await engine.shutdown()
        return answers

    answers = asyncio.run(main())
    assert all(not answer.finished for answer in answers)
    ends = [(o.finish_reason, o.error) for answer in answers for o in answer.outputs]
    assert all(reason == "error" and "does not respond" in why for reason, why in ends)
    llm = make("ngram", backend="faulty:FaultyOps")
    llm.engine.ops.when = lambda ops, op, count: op == "sample" and lose_device(count, 2)
    with pytest.raises(EngineDeadError, match="does not respond"):
        llm.generate(["ab", "ba"], SamplingParams(max_tokens=40, ignore_eos=True))
    with pytest.raises(EngineDeadError, match="create a new one"):
        llm.generate("b")
