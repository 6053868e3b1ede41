"""AsyncLLM: rejected requests, draining, shutdown, and an engine that fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import weakref
from threading import Event
from typing import Any

import pytest
from pytest import MonkeyPatch

from async_serving import (
    CASES,
    LONG,
    check_left,
    check_prefix,
    check_stream,
    collect,
    facts,
    params,
    run,
    serve_all,
    slow_steps,
)
from draftproof import AsyncLLM, ConfigError, EngineClosedError, EngineDeadError, QueueFullError, RequestError
from draftproof.frontend.engine_thread import EngineThread
from draftproof.text.bulk.output_table import OutputTable
from exact import check_empty


def test_invalid_requests_are_rejected_and_others_continue(make: Any, alone: Any) -> None:
    wrong: list[tuple[Any, Any, Any, str]] = [
        ({"prompt_token_ids": []}, None, None, "empty"),
        ({"prompt_token_ids": [99]}, None, None, "outside the vocabulary"),
        ("a" * 5000, None, None, "max_model_len"),  # tokenized in another thread
        ("ab", {"temperature": 0}, None, "must be SamplingParams"),
        ("ab", params(logprobs=21), None, "max_logprobs"),
        ("ab", params(), "long", "already running"),
        ("ab", params(n=2), "long", "already running"),
        ("ab", params(), "many-1", "already running"),
        ("ab", params(), 7, "request_id must be"),
    ]
    llm = make("ngram", max_num_seqs=8)

    async def main(engine: AsyncLLM) -> None:
        long = engine.stream("ab", params(**LONG), request_id="long")
        many = asyncio.create_task(engine.generate("ab", params(**LONG, n=2), request_id="many"))
        events = [await anext(long)]
        others = asyncio.create_task(serve_all(engine, alone, random.Random(5)))
        with slow_steps(llm):
            for prompt, options, name, message in wrong:
                with pytest.raises(RequestError, match=message):
                    await engine.generate(prompt, options, request_id=name)
                with pytest.raises(RequestError, match=message):
                    await collect(engine.stream(prompt, options, request_id=name))
        await others
        want = await engine.generate("ab", params(**LONG))
        check_stream(events + await collect(long), want)
        assert facts(await many)[0][0] == facts(want)[0][0]  # type: ignore[index]

    run(llm, main)


def test_full_queue_during_n_requests_adds_none(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    llm, full = make("plain"), []
    add = llm.engine.add

    def limited(request: Any, max_length: int | None = None) -> Any:
        if full and request.id.endswith("-2"):
            raise QueueFullError("the queue is full: try later")
        return add(request, max_length)

    monkeypatch.setattr(llm.engine, "add", limited)

    async def main(engine: AsyncLLM) -> None:
        full.append(1)
        with pytest.raises(QueueFullError, match="try later"):
            await engine.generate(*CASES[3])
        check_empty(llm.engine)
        full.clear()
        assert facts(await engine.generate(*CASES[3])) == facts(alone[3])

    run(llm, main)


def test_n_above_all_slots_is_rejected_and_runs_offline(make: Any) -> None:
    """`AsyncLLM` raises RequestError, not QueueFullError; `LLM` adds the requests as slots become free."""
    llm = make("plain", max_num_seqs=2, max_num_waiting=1)
    assert len(llm.generate("ab", params(n=5), use_tqdm=False)[0].outputs) == 5

    async def main(engine: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="n=4 is more than this engine takes at once, .* 3 ") as no:
            await engine.generate("ab", params(n=4))
        assert no.value.param == "n" and not isinstance(no.value, QueueFullError)
        check_empty(llm.engine)
        assert len((await engine.generate("ab", params(n=3))).outputs) == 3

    run(llm, main)


def test_drain_finishes_open_requests_and_rejects_new_ones(make: Any, alone: Any) -> None:
    async def main(engine: AsyncLLM) -> None:
        streams = [asyncio.create_task(collect(engine.stream(*case))) for case in CASES]
        wholes = [asyncio.create_task(engine.generate(*case)) for case in CASES]
        # on a busy machine the engine may finish all before the last one is submitted
        while engine.num_open < 2 * len(CASES) and not all(task.done() for task in (*streams, *wholes)):
            await asyncio.sleep(0)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="drains"):
            await engine.generate(*CASES[0])
        with pytest.raises(EngineClosedError, match="drains"):
            await collect(engine.stream(*CASES[0]))
        assert await drained == 0 and engine.num_open == 0
        assert await engine.drain(0) == 0
        for i, (stream, whole) in enumerate(zip(streams, wholes, strict=True)):
            check_stream(await stream, alone[i])
            assert facts(await whole) == facts(alone[i])

    run(make("ngram"), main)


def test_drain_timeout_aborts_and_counts_open_requests(make: Any) -> None:
    llm = make("ngram")
    want = llm.generate("ab", params(**LONG))[0]

    async def main(engine: AsyncLLM) -> None:
        streams = [engine.stream("ab", params(**LONG)) for _ in range(6)]  # two of them wait for a slot
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        events = [[await task] for task in waiting[:4]]
        aborted = await engine.drain(timeout=0)
        check_empty(llm.engine)
        assert engine.num_open == 0 and aborted > 0
        ends = []
        for stream, task, seen in zip(streams, waiting, [*events, [], []], strict=True):
            seen += [] if seen else [await task]
            seen += await collect(stream)
            check_prefix(seen, want)
            ends.append(seen[-1].finish_reason)
        assert ends.count("abort") == aborted and set(ends) <= {"abort", "length"}

    with slow_steps(llm):
        run(llm, main)


def test_repeated_shutdown_aborts_open_requests_once(make: Any, alone: Any) -> None:
    llm = make("ngram", max_num_seqs=2)

    async def main() -> None:
        engine = AsyncLLM.from_llm(llm)
        with pytest.raises(ConfigError, match="in use"):
            AsyncLLM.from_llm(llm)
        with pytest.raises(EngineClosedError, match="AsyncLLM runs this engine"):
            llm.generate("ab")
        stream = engine.stream("ab", params(**LONG))
        first = await anext(stream)
        wholes = [asyncio.create_task(engine.generate("ab", params(**LONG))) for _ in range(3)]
        while engine.num_open < 4:
            await asyncio.sleep(0)
        await asyncio.gather(engine.shutdown(), engine.shutdown())
        await engine.shutdown()
        check_left(llm)
        events = [first, *await collect(stream)]
        assert events[-1].finish_reason == "abort" and events[-1].token_id is None
        for output in await asyncio.gather(*wholes):
            assert not output.finished and output.outputs[0].finish_reason == "abort"
        with pytest.raises(EngineClosedError, match="shut down"):
            await engine.generate("ab")
        with pytest.raises(EngineClosedError, match="shut down"):
            await anext(engine.stream("ab"))
        assert not await engine.abort("x") and await engine.drain() == 0 and not engine.dead

    with slow_steps(llm):
        asyncio.run(main())
    for case, want in zip(CASES, alone, strict=True):
        assert facts(llm.generate(*case)[0]) == facts(want)


def test_interrupted_llm_can_be_attached(make: Any, monkeypatch: MonkeyPatch) -> None:
    """Finished outputs that were not closed are dropped."""
    llm = make("plain")
    want, add, calls = llm.generate(*CASES[0])[0], OutputTable.add, []

    def interrupted(self: OutputTable, *step: Any) -> list[int]:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return add(self, *step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OutputTable, "add", interrupted)
        llm.generate(["ab", "ba"], [params(max_tokens=n, ignore_eos=True) for n in (2, 9)], use_tqdm=False)

    async def main() -> None:
        async with AsyncLLM.from_llm(llm) as engine:
            assert facts(await engine.generate(*CASES[0])) == facts(want)
            assert not engine.dead

    asyncio.run(main())
    check_left(llm)


def test_closed_event_loop_aborts_its_stream(make: Any, alone: Any) -> None:
    """Requests of other loops are served, and another loop can shut the engine down."""
    llm = make("ngram")
    engine = AsyncLLM.from_llm(llm)
    loop = asyncio.new_event_loop()
    stream = engine.stream("ab", params(**LONG))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def main() -> None:
        assert facts(await engine.generate(*CASES[0])) == facts(alone[0])
        while engine.num_open:
            await asyncio.sleep(0)
        check_empty(llm.engine)
        await engine.shutdown()

    asyncio.run(main())
    check_left(llm)
    del stream


def test_collected_async_llm_stops_its_thread(make: Any) -> None:
    llm = make("plain")

    async def main() -> Any:
        engine = AsyncLLM.from_llm(llm)
        async for _ in engine.stream("ab", params(**LONG)):
            break
        return weakref.ref(engine)

    gone = asyncio.run(main())
    gc.collect()
    assert gone() is None
    check_left(llm)


def test_program_exits_without_shutdown(make: Any) -> None:
    """Run two programs at once, idle and with an open stream: no hang and no warning."""
    programs = {}
    for how in ("idle", "open"):
        program = f"""
import asyncio
from draftproof import AsyncLLM, SamplingParams
engine = AsyncLLM({make.args[0]!r}, load_format="dummy", max_num_seqs=2)
prompt, params = {{"prompt_token_ids": [5, 6]}}, SamplingParams(max_tokens=200, ignore_eos=True)
stream = engine.stream(prompt, params)
async def main():
    await anext(stream)
if {how!r} == "open":
    asyncio.run(main())
"""
        command = [sys.executable, "-W", "error", "-c", program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        programs[how] = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    reported = {how: running.communicate(timeout=300) for how, running in programs.items()}
    for how, (out, errors) in reported.items():
        assert (programs[how].returncode, errors.strip(), out) == (0, "", ""), how


def plant_failure(llm: Any, monkeypatch: MonkeyPatch, where: str, after: int, count: int) -> None:
    """Raise before a step, or when some of its results are stored and some are not.

    All `count` jobs are submitted and added first, because a failed engine accepts none.
    """
    owner: Any = llm.engine if where == "step" else OutputTable
    whole, submit, calls, submitted, complete = getattr(owner, where), EngineThread.submit, [], [], Event()

    def counted(thread: EngineThread, *args: Any) -> Any:
        queue = submit(thread, *args)
        submitted.append(thread)
        if len(submitted) == count:
            complete.set()
        return queue

    monkeypatch.setattr(EngineThread, "submit", counted)

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            assert complete.wait(300)
            submitted[0]._read_inbox()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return whole(*args)

    monkeypatch.setattr(owner, where, broken)


def run_until_failure(make: Any, alone: Any, monkeypatch: MonkeyPatch, where: str, after: int) -> set[str]:
    llm, reasons = make("ngram"), set()
    with monkeypatch.context() as patch:
        plant_failure(llm, patch, where, after, 2 * len(CASES))

        async def main() -> None:
            engine = AsyncLLM.from_llm(llm)
            streams = [engine.stream(*case) for case in CASES]
            reading = [asyncio.create_task(collect(stream)) for stream in streams]
            wholes = [asyncio.create_task(engine.generate(*case)) for case in CASES]
            for i, (stream, events) in enumerate(zip(streams, await asyncio.gather(*reading), strict=True)):
                check_prefix(events, alone[i])
                assert stream.output is not None
                for output in stream.output.outputs:
                    mine = [e for e in events if e.index == output.index]
                    assert [e.token_id for e in mine if e.token_id is not None] == output.token_ids
                    assert mine[-1].finish_reason == output.finish_reason
                    assert mine[-1].error == output.error
            results = [stream.output for stream in streams] + await asyncio.gather(*wholes)
            for result, want in zip(results, [*alone, *alone], strict=True):
                assert result is not None
                check(result, want)
                reasons.update(str(o.finish_reason) for o in result.outputs)
            assert engine.dead and isinstance(engine.dead_error, RuntimeError) and engine.num_open == 0
            for call in (engine.generate("ab"), collect(engine.stream("ab"))):
                with pytest.raises(EngineDeadError, match="illegal memory access") as caught:
                    await call
                assert caught.value.__cause__ is engine.dead_error
            assert not await engine.abort("x") and await engine.drain() == 0
            await engine.shutdown()
            await engine.shutdown()

        asyncio.run(main())
    with pytest.raises(EngineClosedError):
        llm.generate("ab")
    check_left(llm)
    return reasons


def check(result: Any, want: Any) -> None:
    """Check that finished outputs are complete and the others are prefixes with an error."""
    for output, whole in zip(result.outputs, want.outputs, strict=True):
        n = len(output.token_ids)
        assert output.token_ids == whole.token_ids[:n] and whole.text.startswith(output.text[:-1])
        assert n == len(output.provenance) == output.metrics.num_emitted_tokens
        if output.finish_reason == "error":
            assert "illegal memory access" in output.error and not result.finished
        else:
            assert (n, output.finish_reason) == (len(whole.token_ids), whole.finish_reason)
            assert output.error is None and output.text == whole.text
            assert output.logprobs == whole.logprobs
    if result.finished:
        assert facts(result) == facts(want)


@pytest.mark.parametrize(
    ("where", "after"), [("step", 0), ("step", 1), ("step", 9), ("step", 25), ("add", 7)]
)
def test_failed_engine_ends_every_request_with_the_cause(
    make: Any, alone: Any, monkeypatch: MonkeyPatch, where: str, after: int
) -> None:
    monkeypatch.setattr(logging.getLogger("draftproof"), "disabled", True)
    reasons = run_until_failure(make, alone, monkeypatch, where, after)
    assert "error" in reasons and (after != 25 or len(reasons) > 1)


def test_control_wrong_finish_reason_is_detected(make: Any, alone: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("draftproof"), "disabled", True)
    end_job = EngineThread._end_job

    def wrong(self: EngineThread, job: Any, reason: str = "abort", error: Any = None) -> None:
        end_job(self, job, "length" if error else reason)

    monkeypatch.setattr(EngineThread, "_end_job", wrong)
    with pytest.raises(AssertionError):
        run_until_failure(make, alone, monkeypatch, "step", 9)
