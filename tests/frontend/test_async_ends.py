"""AsyncLLM: requests that are refused, draining, shutting down, and an engine that breaks."""

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
)
from draftproof import AsyncLLM, ConfigError, EngineClosedError, EngineDeadError, QueueFullError, RequestError
from draftproof.frontend.engine_thread import EngineThread
from draftproof.text.bulk.output_table import OutputTable
from exact import check_empty

# --- requests that are refused ----------------------------------------------------------------------------


def test_bad_requests_in_the_middle_of_others(make: Any, alone: Any) -> None:
    wrong: list[tuple[Any, Any, Any, str]] = [
        ({"prompt_token_ids": []}, None, None, "empty"),
        ({"prompt_token_ids": [99]}, None, None, "outside the vocabulary"),
        ("a" * 5000, None, None, "max_model_len"),  # tokenised in another thread
        ("ab", {"temperature": 0}, None, "must be SamplingParams"),
        ("ab", params(logprobs=21), None, "max_logprobs"),
        ("ab", params(prediction=[10]), None, "method 'given'"),
        ("ab", params(), "long", "already running"),
        ("ab", params(n=2), "long", "already running"),
        ("ab", params(), "many-1", "already running"),
        ("ab", params(), 7, "request_id must be"),
    ]

    async def main(engine: AsyncLLM) -> None:
        long = engine.stream("ab", params(**LONG), request_id="long")
        many = asyncio.create_task(engine.generate("ab", params(**LONG, n=2), request_id="many"))
        events = [await anext(long)]
        others = asyncio.create_task(serve_all(engine, alone, random.Random(5)))
        for prompt, wanted, name, message in wrong:
            with pytest.raises(RequestError, match=message):
                await engine.generate(prompt, wanted, request_id=name)
            with pytest.raises(RequestError, match=message):
                await collect(engine.stream(prompt, wanted, request_id=name))
        await others
        want = await engine.generate("ab", params(**LONG))
        check_stream(events + await collect(long), want)
        assert facts(await many)[0][0] == facts(want)[0][0]  # type: ignore[index]

    run(make("ngram", max_num_seqs=8), main)


def test_a_full_engine_refuses_in_the_middle_of_n(
    make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_more_answers_than_there_will_ever_be_room_for(make: Any) -> None:
    """It is not told to try later. The offline entry seats them as others leave."""
    llm = make("plain", max_num_seqs=2, max_num_waiting=1)
    assert len(llm.generate("ab", params(n=5), use_tqdm=False)[0].outputs) == 5

    async def main(engine: AsyncLLM) -> None:
        with pytest.raises(
            RequestError, match="n=4 is more than this engine takes at once, which is 3"
        ) as no:
            await engine.generate("ab", params(n=4))
        assert no.value.param == "n" and not isinstance(no.value, QueueFullError)
        check_empty(llm.engine)
        assert len((await engine.generate("ab", params(n=3))).outputs) == 3

    run(llm, main)


# --- draining and shutting down ---------------------------------------------------------------------------


def test_drain_finishes_what_is_here_and_takes_nothing_in(make: Any, alone: Any) -> None:
    async def main(engine: AsyncLLM) -> None:
        streams = [asyncio.create_task(collect(engine.stream(*ask))) for ask in CASES]
        wholes = [asyncio.create_task(engine.generate(*ask)) for ask in CASES]
        # on a busy machine the engine may be done with all before the last of them is asked
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


def test_drain_aborts_what_takes_too_long_and_counts_it(make: Any) -> None:
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

    run(llm, main)


def test_shutdown_ends_open_requests_and_twice_is_once(make: Any, alone: Any) -> None:
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

    asyncio.run(main())
    for ask, want in zip(CASES, alone, strict=True):
        assert facts(llm.generate(*ask)[0]) == facts(want)


def test_an_llm_that_was_interrupted_can_be_served(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that had finished and were not closed are dropped."""
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


def test_a_loop_that_is_closed_with_a_stream_open(make: Any, alone: Any) -> None:
    """Its request is let go; others are served; shutting down works from another loop."""
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


def test_programs_that_just_end(make: Any) -> None:
    """No hanging, no warning, whatever is open. Both at once: a process takes a while to begin."""
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
    reported = {how: running.communicate(timeout=120) for how, running in programs.items()}
    for how, (out, errors) in reported.items():
        assert (programs[how].returncode, errors.strip(), out) == (0, "", ""), how


# --- an engine that breaks --------------------------------------------------------------------------------


def break_it(llm: Any, monkeypatch: pytest.MonkeyPatch, where: str, after: int, given_params: int) -> None:
    """Raise in a step: before it, or when some of its results are stored and some are not.

    All jobs are submitted and added first, because a dead engine accepts none.
    """
    owner: Any = llm.engine if where == "step" else OutputTable
    whole, submit, calls, submitted, all_here = getattr(owner, where), EngineThread.submit, [], [], Event()

    def noted(thread: EngineThread, *args: Any) -> Any:
        queue = submit(thread, *args)
        submitted.append(thread)
        if len(submitted) == given_params:
            all_here.set()
        return queue

    monkeypatch.setattr(EngineThread, "submit", noted)

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            assert all_here.wait(60)
            submitted[0]._read_inbox()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return whole(*args)

    monkeypatch.setattr(owner, where, broken)


def dies(make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, where: str, after: int) -> set[str]:
    llm, reasons = make("ngram"), set()
    with monkeypatch.context() as patch:
        break_it(llm, patch, where, after, 2 * len(CASES))

        async def main() -> None:
            engine = AsyncLLM.from_llm(llm)
            streams = [engine.stream(*ask) for ask in CASES]
            reading = [asyncio.create_task(collect(stream)) for stream in streams]
            wholes = [asyncio.create_task(engine.generate(*ask)) for ask in CASES]
            for i, (stream, events) in enumerate(zip(streams, await asyncio.gather(*reading), strict=True)):
                check_prefix(events, alone[i])
                assert stream.output is not None
                for answer in stream.output.outputs:
                    mine = [e for e in events if e.index == answer.index]
                    assert [e.token_id for e in mine if e.token_id is not None] == answer.token_ids
                    assert mine[-1].finish_reason == answer.finish_reason
                    assert mine[-1].error == answer.error
            outputs = [stream.output for stream in streams] + await asyncio.gather(*wholes)
            for output, want in zip(outputs, [*alone, *alone], strict=True):
                assert output is not None
                check(output, want)
                reasons.update(str(o.finish_reason) for o in output.outputs)
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


def check(output: Any, want: Any) -> None:
    """Check that finished outputs are complete and the others are prefixes with an error."""
    for answer, whole in zip(output.outputs, want.outputs, strict=True):
        n = len(answer.token_ids)
        assert answer.token_ids == whole.token_ids[:n] and whole.text.startswith(answer.text[:-1])
        assert n == len(answer.provenance) == answer.metrics.num_emitted_tokens
        if answer.finish_reason == "error":
            assert "illegal memory access" in answer.error and not output.finished
        else:
            assert (n, answer.finish_reason) == (len(whole.token_ids), whole.finish_reason)
            assert answer.error is None and answer.text == whole.text
            assert answer.logprobs == whole.logprobs
    if output.finished:
        assert facts(output) == facts(want)


@pytest.mark.parametrize(
    ("where", "after"), [("step", 0), ("step", 1), ("step", 9), ("step", 25), ("add", 7)]
)
def test_an_engine_that_breaks_ends_everything_with_its_reason(
    make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, where: str, after: int
) -> None:
    monkeypatch.setattr(logging.getLogger("draftproof"), "disabled", True)
    reasons = dies(make, alone, monkeypatch, where, after)
    assert "error" in reasons and (after != 25 or len(reasons) > 1)


def test_control_a_broken_engine_that_calls_it_an_end(
    make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("draftproof"), "disabled", True)
    end_job = EngineThread._end_job

    def lie(self: EngineThread, job: Any, reason: str = "abort", error: Any = None) -> None:
        end_job(self, job, "length" if error else reason)

    monkeypatch.setattr(EngineThread, "_end_job", lie)
    with pytest.raises(AssertionError):
        dies(make, alone, monkeypatch, "step", 9)
