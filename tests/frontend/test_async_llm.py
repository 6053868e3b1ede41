"""AsyncLLM: many callers, loops and threads on one engine; outputs equal those of LLM."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from typing import Any

import pytest
from pytest import MonkeyPatch

from async_serving import (
    CASES,
    LONG,
    SPECS,
    check_prefix,
    check_stream,
    collect,
    facts,
    params,
    run,
    serve_all,
    slow_steps,
)
from draftproof import AsyncLLM, EngineClosedError, SamplingParams
from draftproof.frontend.engine_thread import EngineThread
from draftproof.frontend.request_tracker import RequestTracker
from draftproof.frontend.stream_queue import LoopWaker, StreamQueue
from draftproof.outputs import RequestOutput, TokenEvent
from exact import check_empty
from text_pieces import CONFIG, Pieces
from words import Words


@pytest.mark.parametrize("spec", SPECS)
def test_outputs_from_several_loops_and_threads_equal_llm(make: Any, alone: Any, spec: str) -> None:
    llm, failures = make(spec), []

    def serve_in_loop(engine: AsyncLLM, seed: int) -> None:
        try:
            asyncio.run(serve_all(engine, alone, random.Random(seed)))
        except BaseException as error:
            failures.append(error)

    async def main(engine: AsyncLLM) -> None:
        threads = [threading.Thread(target=serve_in_loop, args=(engine, seed)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        await serve_all(engine, alone, random.Random(3))
        for thread in threads:
            await asyncio.to_thread(thread.join)

    before = llm.stats.num_emitted_tokens
    run(llm, main)
    assert not failures
    tokens = sum(r.usage["completion_tokens"] for r in alone)
    assert llm.stats.num_emitted_tokens - before == 6 * tokens
    assert facts(llm.generate(*CASES[0])[0]) == facts(alone[0])  # the LLM can be used again


def test_control_swapped_events_are_detected(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    put, last = StreamQueue.put, []

    def wrong(self: StreamQueue, events: Any) -> None:
        put(last[-1] if last and len(last) % 7 == 0 else self, events)
        last.append(self)

    monkeypatch.setattr(StreamQueue, "put", wrong)
    with pytest.raises(AssertionError):
        run(make("plain"), lambda engine: serve_all(engine, alone, random.Random(3)))


def test_reused_request_id_is_another_request(make: Any, alone: Any) -> None:
    """Send requests that are equal in every field, one after the other."""

    async def main(engine: AsyncLLM) -> None:
        for _ in range(3):
            assert facts(await engine.generate(*CASES[1], request_id="me")) == facts(alone[1])
            check_stream(await collect(engine.stream(*CASES[1], request_id="me")), alone[1])

    run(make("plain", overlap=False), main)


def test_reported_drafts_of_a_stream_beside_a_complete_output(make: Any) -> None:
    """Serve a stream that reports drafts beside an output that reports none, and compare both with LLM."""
    reporting = params(4, include_draft_logprobs=True, max_tokens=40, ignore_eos=True)
    other = params(5, max_tokens=40, ignore_eos=True)
    llm = make("ngram")
    want = [llm.generate("ab" * 9, each)[0] for each in (reporting, other)]

    async def main(engine: AsyncLLM) -> None:
        events, output = await asyncio.gather(
            collect(engine.stream("ab" * 9, reporting)), engine.generate("ab" * 9, other)
        )
        check_stream(events, want[0])
        assert facts(output) == facts(want[1])

    run(llm, main)


def test_reported_drafts_of_a_request_that_a_stop_string_ends(make: Any) -> None:
    """Let a request with reported drafts end while a step with its next drafts is in flight."""
    llm = make("flaky")
    for seed in range(8):
        reporting = params(seed, include_draft_logprobs=True, max_tokens=60, stop=["b"], ignore_eos=True)
        other = params(seed + 50, max_tokens=90, ignore_eos=True)
        ended, complete = llm.generate(["ab" * 9, "ba" * 5], [reporting, other])
        assert ended.finished and len(complete.outputs[0].token_ids) == 90


def test_control_reused_group_of_a_step_is_detected(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    """Take the second of two equal requests for the first."""
    add = RequestTracker.add

    def keep_group(self: RequestTracker, job: Any) -> None:
        group = self._group
        add(self, job)
        self._group = group

    monkeypatch.setattr(RequestTracker, "add", keep_group)
    monkeypatch.setattr(logging.getLogger("draftproof"), "disabled", True)
    with pytest.raises((AssertionError, EngineClosedError)):
        test_reused_request_id_is_another_request(make, alone)


def test_grammars_are_compiled_in_another_thread(make: Any, monkeypatch: MonkeyPatch) -> None:
    """Neither the caller's loop nor the engine's thread compiles them; outputs equal those of LLM."""
    llm, threads = make("ngram"), []
    pieces, guided = Pieces(), params(logprobs=3, structured_outputs={"choice": ["abba", "bab"]})
    words = Words(["abba", "bab"], [pieces.token_bytes(i) for i in range(CONFIG["vocab_size"])], {2}, 2)

    def compile_grammar(options: SamplingParams, prompt: list[int]) -> Any:
        threads.append(threading.get_ident())
        return options.structure and words

    monkeypatch.setattr(llm._grammars, "compile", compile_grammar)
    want = llm.generate("ab", guided)[0]
    assert want.outputs[0].text in ("abba", "bab") and want.outputs[0].finish_reason == "stop"
    threads.clear()

    async def main(engine: AsyncLLM) -> None:
        free = asyncio.create_task(engine.generate(*CASES[1]))
        assert facts(await engine.generate("ab", guided)) == facts(want)
        check_stream(await collect(engine.stream("ab", guided)), want)
        await free
        names = {t.ident: t.name for t in threading.enumerate()}
        mine = [names.get(ident, "") for ident in threads]
        assert mine[1:] and "draftproof-engine" not in mine
        assert mine.count(threading.current_thread().name) == 1  # the one without a grammar

    run(llm, main)


async def leave_at_random(engine: AsyncLLM, alone: Any, draw: random.Random) -> set[str]:
    ways: set[str] = set()

    async def one(number: int) -> None:
        i, name = draw.randrange(len(CASES)), f"{threading.get_ident()} {number}"
        way = draw.choice(["stay", "break", "close", "cancel", "cancel generate", "abort"])
        after, turns = draw.randint(1, 9), draw.randint(0, 40)
        ways.add(way)
        if way == "stay":
            return check_stream(await collect(engine.stream(*CASES[i])), alone[i])
        if way.startswith("cancel"):
            whole = (
                engine.generate if way == "cancel generate" else lambda *case: collect(engine.stream(*case))
            )
            task: asyncio.Task[Any] = asyncio.create_task(whole(*CASES[i]))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(done, (list, RequestOutput, asyncio.CancelledError))
            return None
        stream, events = engine.stream(*CASES[i], request_id=name), []
        async for event in stream:
            events.append(event)
            if len(events) == after:
                if way == "break":
                    break
                if way == "close":
                    await stream.aclose()
                elif await engine.abort(name):
                    assert not await engine.abort(name)
        if way == "abort":
            assert stream.output is not None
            for o in stream.output.outputs:
                mine = [e for e in events if e.index == o.index]
                assert [e.token_id for e in mine if e.token_id is not None] == o.token_ids
                assert mine[-1].finish_reason == o.finish_reason and o.finish_reason is not None
        elif way == "close":
            assert len(events) <= after and await stream.read() == []
        check_prefix(events, alone[i])

    await asyncio.gather(*(one(number) for number in range(14)))
    return ways


@pytest.mark.parametrize("seed", range(6))
def test_readers_that_leave_at_random_affect_no_other(make: Any, alone: Any, seed: int) -> None:
    """Run readers in two loops of two threads."""
    llm = make(["plain", "ngram", "flaky"][seed % 3])
    draws = random.Random(seed), random.Random(100 + seed)

    async def main(engine: AsyncLLM) -> None:
        other = asyncio.to_thread(asyncio.run, leave_at_random(engine, alone, draws[1]))
        ways = await asyncio.gather(leave_at_random(engine, alone, draws[0]), other)
        assert len(set.union(*ways)) > 3
        assert await engine.drain() == 0 and engine.num_open == 0
        check_empty(llm.engine)

    run(llm, main)


def test_reader_that_leaves_aborts_its_request(make: Any) -> None:
    """Leave by `break` without an await; pages are free before another request is served."""
    llm = make("ngram")

    async def main(engine: AsyncLLM) -> None:
        async for _ in engine.stream("ab", params(**LONG), request_id="gone"):
            break
        assert not await engine.abort("gone") and engine.num_open == 0
        check_empty(llm.engine)
        task = asyncio.create_task(engine.generate("ab", params(**LONG), request_id="gone too"))
        while not engine.num_open:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await engine.abort("gone too")
        check_empty(llm.engine)

    with slow_steps(llm):
        run(llm, main)


def test_control_unnoticed_leave_is_detected(make: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(EngineThread, "_on_abort_unread", lambda *_: None)
    with pytest.raises(AssertionError):
        test_reader_that_leaves_aborts_its_request(make)


async def abort_another(engine: AsyncLLM, want: RequestOutput) -> None:
    stream = engine.stream("ab", params(**LONG), request_id="x")
    events = [await anext(stream)]
    assert await engine.abort("x") and not await engine.abort("x") and not await engine.abort("unknown")
    events += await collect(stream)
    assert stream.output is not None and not stream.output.finished
    output = stream.output.outputs[0]
    assert [e.token_id for e in events] == [*output.token_ids, None]
    assert events[-1].finish_reason == output.finish_reason == "abort"
    assert "".join(e.text for e in events) == output.text
    check_prefix(events, want)


def test_abort_ends_a_stream_without_further_tokens(make: Any, monkeypatch: MonkeyPatch) -> None:
    llm = make("ngram")
    want = llm.generate("ab", params(**LONG))[0]
    with slow_steps(llm):
        run(llm, lambda engine: abort_another(engine, want))
    end_job = EngineThread._end_job

    def late(self: EngineThread, job: Any, *rest: Any) -> None:  # control: events after the end
        queue, pending = self._open[job.id][1], list(self._delivery._pending)
        end_job(self, job, *rest)
        for events in [*(part for _, part in pending), *list(queue.parts)[-2:]]:
            queue.put(events)

    monkeypatch.setattr(EngineThread, "_end_job", late)
    with slow_steps(llm), pytest.raises(AssertionError):
        run(llm, lambda engine: abort_another(engine, want))


def slow_reader(
    make: Any, alone: Any, monkeypatch: MonkeyPatch, over: threading.Event, seconds: float = 120
) -> None:
    """Serve with one slot: if a reader could hold it, no other request would run."""
    llm, made = make("ngram", max_num_seqs=1), []
    want = llm.generate("ab", params(**LONG, n=2))[0]
    monkeypatch.setattr(
        "draftproof.text.streaming_output.TokenEvent", lambda *a, **k: made.append(1) or TokenEvent(*a, **k)
    )

    async def main(engine: AsyncLLM) -> None:
        slow = engine.stream("ab", params(**LONG, n=2))
        events = [await anext(slow)]
        try:
            async with asyncio.timeout(seconds):
                for i in range(len(CASES)):
                    assert facts(await engine.generate(*CASES[i])) == facts(alone[i])
        finally:
            over.set()
        assert engine.num_open == 0
        check_empty(llm.engine)
        assert len(made) < 40  # unread events are not built yet
        events += await collect(slow)
        check_stream(events, want)

    run(llm, main)


def test_slow_reader_delays_no_other_request(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    slow_reader(make, alone, monkeypatch, threading.Event())


def test_control_engine_waiting_for_a_reader_is_detected(
    make: Any, alone: Any, monkeypatch: MonkeyPatch
) -> None:
    put, over = StreamQueue.put, threading.Event()

    def wait(self: StreamQueue, events: Any) -> None:
        while len(self.parts) > 3 and not over.wait(0.01):
            pass
        put(self, events)

    monkeypatch.setattr(StreamQueue, "put", wait)
    with pytest.raises(TimeoutError):
        slow_reader(make, alone, monkeypatch, over, seconds=0.5)


def test_loop_with_streams_wakes_up_once_per_step(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    llm, steps, wakes = make("ngram", max_num_seqs=8), [], []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: steps.append(1) or step())

    async def main(engine: AsyncLLM) -> None:
        loop = asyncio.get_running_loop()
        whole = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: wakes.append(1) or whole(*a))
        streams = (engine.stream("ab", params(**LONG)) for _ in range(8))
        assert len(await asyncio.gather(*map(collect, streams))) == 8
        assert 0 < len(wakes) <= len(steps) + 2

    run(llm, main)


def test_blocked_loop_accumulates_one_wake_up(make: Any) -> None:
    llm = make("plain")
    want = llm.generate("ab", params(**LONG))[0]

    async def main(engine: AsyncLLM) -> None:
        stream = engine.stream("ab", params(**LONG))
        with slow_steps(llm):  # the loop wakes up before the last step
            events = [await anext(stream)]
        while engine.num_open:
            time.sleep(0.001)  # nothing of this loop runs meanwhile
        assert stream._queue is not None and len(stream._queue.waker._due) == 1
        assert len(asyncio.get_running_loop()._ready) <= 2  # type: ignore[attr-defined]
        check_stream(events + await stream.read(), want)
        assert await stream.read() == []

    run(llm, main)


def test_control_lost_wake_up_is_detected(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    wake = LoopWaker.wake

    async def main(engine: AsyncLLM) -> None:
        try:
            await collect(engine.stream("ab", params(**LONG)))
        finally:
            monkeypatch.setattr(LoopWaker, "wake", wake)

    monkeypatch.setattr(LoopWaker, "wake", lambda self: True)
    with pytest.raises(TimeoutError):
        run(make("plain"), main, seconds=0.5)
