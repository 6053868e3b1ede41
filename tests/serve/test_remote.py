"""An AsyncLLM over the wire is the LLM in this process: tokens, logprobs, text, provenance, counts."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import async_serving
import proposers
from async_serving import ASKS, LONG, SPECS, check_stream, collect, facts, params, serve_all
from draftproof import (
    EngineClosedError,
    EngineDownError,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from draftproof.serve.ipc import encode, frontend_connection, worker
from draftproof.serve.ipc.decode import Guests, read, results_of
from draftproof.serve.ipc.frame import Bounds, FrameError, pack
from draftproof.serve.ipc.messages import FAREWELL
from draftproof.serve.ipc.remote_llm import RemoteLLM, connect
from draftproof.serve.ipc.status import WorkerStatus, address_of, write_status
from draftproof.text.logprobs import LogprobMaps
from draftproof.types import Request
from far import RawServer, serve, wait_for, working
from text_pieces import CONFIG, Pieces
from words import Words

HERE = [(prompt, wish) for prompt, wish in ASKS if not wish.logits_processors]


@pytest.fixture
def portable(alone: Any, monkeypatch: pytest.MonkeyPatch) -> list[RequestOutput]:
    """The asks that can cross a process, and their answers."""
    answers = [answer for answer, (_, wish) in zip(alone, ASKS, strict=True) if not wish.logits_processors]
    monkeypatch.setattr(async_serving, "ASKS", HERE)
    return answers


# --- the promise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_answers_are_those_of_llm(make: Any, portable: Any, tmp_path: Path, spec: str) -> None:
    """Every ask, streamed and whole, all at once, from two servers."""
    llm = make(spec)
    with working(llm, tmp_path):

        async def main() -> None:
            servers = [connect(address_of(tmp_path), tokenizer=Pieces()) for _ in range(2)]
            async with servers[0], servers[1], asyncio.timeout(120):
                await asyncio.gather(
                    *(serve_all(one, portable, random.Random(seed)) for seed, one in enumerate(servers))
                )
                tokens = sum(answer.usage["completion_tokens"] for answer in portable)
                for one in servers:
                    assert one.stats.num_emitted_tokens == 2 * tokens

        asyncio.run(main())


def everything(output: RequestOutput) -> str:
    """How it came about included; as text, in which every bit of a number shows."""
    told = {name: getattr(output, name) for name in output.__dataclass_fields__}
    return repr([facts(output), {name: value for name, value in told.items() if "seconds" not in name}])


@pytest.mark.parametrize("spec", ["plain", "ngram", "host", "several"])
def test_how_it_came_about_is_the_same(make: Any, alone: Any, tmp_path: Path, spec: str) -> None:
    """One after the other: provenance, drafts, statistics, cached tokens."""
    proposers.set_answers(async_serving.Always(alone[1].outputs[0].token_ids))  # other tests have set others
    options = {
        "plain": None,
        "ngram": {"method": "ngram", "adaptive": False},
        "host": {"method": "proposers:Junk", "adaptive": False},
        "several": {"method": "proposers:Parity", "num_speculative_tokens": 5, "adaptive": False},
    }
    SPECS["this"] = options[spec]
    asks = [(prompt, SamplingParams(**kept(wish))) for prompt, wish in HERE * 2]
    try:
        here, there = make("this"), make("this")
    finally:
        del SPECS["this"]
    want = [here.generate(*ask)[0] for ask in asks]

    async def main(far: RemoteLLM) -> list[RequestOutput]:
        return [await far.generate(*ask, request_id=str(i)) for i, ask in enumerate(asks)]

    got = serve(there, tmp_path, main)
    assert [everything(one) for one in got] == [everything(one) for one in want]
    assert any(one.num_cached_tokens for one in got)
    assert all(0 <= (one.queue_seconds or 0) <= (one.first_token_seconds or 0) for one in got)
    assert all(one.queue_seconds and one.first_token_seconds for one in got)
    if spec != "plain":
        assert sum(one.metrics.num_draft_tokens for one in got) > 0
    if spec == "several":
        assert {"accepted:even", "accepted:odd"} <= {o for r in got for a in r.outputs for o in a.provenance}


def kept(wish: SamplingParams) -> dict[str, Any]:
    return {name: getattr(wish, name) for name in wish.__dataclass_fields__}


def test_control_rows_of_a_neighbour(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: two columns of a frame change places. The tests above see it."""

    def swapped(header: Any, columns: Any) -> bytes:
        if header.raw_rows > 1:
            columns["raw_value"] = np.roll(columns["raw_value"], 1, axis=0)
        return pack(header, columns)

    monkeypatch.setattr(encode, "pack", swapped)
    with pytest.raises(AssertionError):
        serve(make("plain"), tmp_path, lambda far: serve_all(far, portable, random.Random(1)))


def test_put_aside_and_counted(make: Any, tmp_path: Path) -> None:
    """Too few pages for all: the same answers, and the counts come across."""
    options = {"kv_cache_tokens": 160, "overlap": False, "max_model_len": 128}
    asks = [("ab" * 8, params(i, max_tokens=60, ignore_eos=True, logprobs=1)) for i in range(4)]
    alone = make("plain", **options)
    want = [alone.generate(*ask)[0] for ask in asks]

    async def main(far: RemoteLLM) -> None:
        got = await asyncio.gather(*(far.generate(*ask) for ask in asks))
        assert [facts(one) for one in got] == [facts(one) for one in want]
        assert far.engine_stats().num_preemptions == sum(one.num_preemptions for one in got) > 0
        assert far.steps().num_steps > 60 and far.steps().seconds > 0
        while far.engine_stats().timings.first_token.count < 4:  # they come once a second
            await asyncio.sleep(0.01)

    serve(make("plain", **options), tmp_path, main)


# --- grammars, refusals -----------------------------------------------------------------------------------


def test_grammars_are_compiled_by_the_worker(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make("ngram")
    pieces, wish = Pieces(), params(logprobs=3, structured_outputs={"choice": ["abba", "bab"]})
    words = Words(["abba", "bab"], [pieces.token_bytes(i) for i in range(CONFIG["vocab_size"])], {2}, 2)

    def grammar(asked: SamplingParams) -> Any:
        if asked.structure and "never" in (asked.structure.choice or ()):
            raise RequestError("structured_outputs: it is none", "structured_outputs")
        return asked.structure and words

    monkeypatch.setattr(llm._grammars, "of", grammar)
    want = llm.generate("ab", wish)[0]

    async def main(far: RemoteLLM) -> None:
        free = asyncio.create_task(far.generate(*HERE[1]))
        assert facts(await far.generate("ab", wish)) == facts(want)
        check_stream(await collect(far.stream("ab", wish)), want)
        assert facts(await free) == facts(portable[1])
        bad = params(structured_outputs={"choice": ["never"]})
        with pytest.raises(RequestError, match="it is none") as caught:
            await far.generate("ab", bad)
        assert caught.value.param == "structured_outputs"
        with pytest.raises(RequestError, match="it is none"):
            await collect(far.stream("ab", bad))

    serve(llm, tmp_path, main)


def test_what_cannot_cross_is_refused(make: Any, tmp_path: Path) -> None:
    async def main(far: RemoteLLM) -> None:
        with pytest.raises(RequestError, match="another process") as caught:
            await far.generate("ab", params(logits_processors=[lambda ids, row: row]))
        assert caught.value.param == "logits_processors"
        with pytest.raises(RequestError, match="cannot be sent"):
            await far.generate("ab", params(priority=10**30))
        with pytest.raises(RequestError, match="cannot be sent"):
            await far.generate("ab", params(cache_salt="\ud800"))
        with pytest.raises(RequestError, match="unknown verify_strategy"):
            await far.generate("ab", params(speculative={"verify_strategy": "os:system"}))
        with pytest.raises(RequestError, match="max_model_len"):
            await far.generate("ab" * 200, params())
        # they have touched nobody
        assert (await far.generate("ab", params())).finished and not far.num_open

    serve(make("plain"), tmp_path, main)


def test_a_full_queue_refuses_a_job_as_a_whole(make: Any, tmp_path: Path) -> None:
    llm = make("plain", max_num_seqs=2, max_num_waiting=2)

    async def main(far: RemoteLLM) -> None:
        first = far.stream("ab", params(n=2, **LONG))
        await anext(first)
        waits = asyncio.create_task(far.generate("ba", params(max_tokens=2)))
        while far.engine_stats().num_waiting < 1:
            await asyncio.sleep(0)
            await first.read()
        with pytest.raises(QueueFullError):
            await far.generate("b", params(n=3))
        with pytest.raises(QueueFullError):
            await collect(far.stream("b", params(n=3)))
        await first.aclose()
        assert (await waits).finished
        assert len((await far.generate("b", params(n=2))).outputs) == 2
        with pytest.raises(
            RequestError, match="n=5 is more than this engine takes at once, which is 4"
        ) as no:
            await far.generate("b", params(n=5))
        assert no.value.param == "n" and not isinstance(no.value, QueueFullError)
        assert len((await far.generate("b", params(n=4))).outputs) == 4

    serve(llm, tmp_path, main)


# --- servers that come and go -----------------------------------------------------------------------------


def request(**options: Any) -> Request:
    wish = params(**{"max_tokens": 100, "ignore_eos": True, "stop": None, **options})
    return Request(id="x", prompt_token_ids=[10, 11], params=wish, seed=5, eos_token_ids=(2,))


def test_a_server_that_vanishes_is_cleared_away(make: Any, portable: Any, tmp_path: Path) -> None:
    llm = make("plain")

    async def main(far: RemoteLLM) -> None:
        with RawServer(tmp_path, queued=100) as gone:
            for handle in range(6):
                gone.add(handle, request(max_tokens=240))
            gone.recv()
        assert facts(await far.generate(*HERE[0])) == facts(portable[0])
        while far.engine_stats().num_running:
            await asyncio.sleep(0.01)

    serve(llm, tmp_path, main)  # which checks that nothing is left


def test_a_full_queue_of_frames_loses_nothing(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server does not read while it is served, until all queues are full; then it finds every frame."""
    monkeypatch.setattr(worker, "QUEUED", 1)
    monkeypatch.setattr(frontend_connection, "OUTBOX", 1)
    llm, vocab = make("plain"), CONFIG["vocab_size"]
    prompt = {"prompt_token_ids": [10 + i % 7 for i in range(230)]}
    asks = [params(i, max_tokens=20, prompt_logprobs=20, cache_salt=str(i)) for i in range(12)]
    want = [llm.generate(prompt, ask)[0] for ask in asks]
    wishes = {
        7 + i: Request(id=str(i), params=ask, seed=i, eos_token_ids=(2,), **prompt)
        for i, ask in enumerate(asks)
    }
    with working(llm, tmp_path) as served, RawServer(tmp_path) as slow:
        for handle, wish in wishes.items():
            slow.add(handle, wish)
        (client,) = wait_for(lambda: list(served._clients.values()))
        wait_for(lambda: client.stuck_since and time.monotonic() > client.stuck_since + 0.3)
        frames, left = 0, set(wishes)
        tokens: dict[str, list[int]] = {str(i): [] for i in range(12)}
        rows: dict[str, list[Any]] = {str(i): [] for i in range(12)}
        while left:
            told = read(slow.recv(), Bounds(vocab, 0, 0), ())
            assert told.header.sequence == frames
            frames += 1
            for one in results_of(told, Guests.of(told.handles, wishes, vocab), (), {}):
                tokens[one.request_id] += one.token_ids
                rows[one.request_id] += one.prompt_logprobs or []
            left -= {told.handles[i] for i in told.ends}
        assert list(tokens.values()) == [answer.outputs[0].token_ids for answer in want]
        for answer, mine in zip(want, rows.values(), strict=True):
            assert answer.prompt_logprobs == LogprobMaps([None, *mine], llm.tokenizer)


@pytest.mark.parametrize("bound", ["OTHERS_SECONDS", "MOST"])
def test_nobody_waits_for_a_server_that_is_stuck(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Others are served meanwhile. In the end it loses its requests, and they give back what they had."""
    monkeypatch.setattr(frontend_connection, "OUTBOX", 1)
    monkeypatch.setattr(frontend_connection, "OTHERS_SECONDS", 1e9)
    monkeypatch.setattr(worker.log, "disabled", True)
    put = frontend_connection.Client.put

    def full(self: frontend_connection.Client, socket: Any, data: bytes) -> bool:
        return put(self, socket, data) if self.number > 1 or not self.sequence or awake else False

    monkeypatch.setattr(frontend_connection.Client, "put", full)
    llm, awake = make("plain"), []
    with working(llm, tmp_path) as served, RawServer(tmp_path) as stuck:
        stuck.add(7, request(max_tokens=240))
        (client,) = wait_for(lambda: [c for c in list(served._clients.values()) if c.stuck])

        async def main() -> None:
            async with asyncio.timeout(60), connect(address_of(tmp_path), tokenizer=Pieces()) as far:
                assert facts(await far.generate(*HERE[0])) == facts(portable[0])
                assert client.entries and client.stuck
                monkeypatch.setattr(frontend_connection, bound, 0)
                assert facts(await far.generate(*HERE[0])) == facts(portable[0])
                assert not client.entries and far.engine_stats().num_running == 0

        asyncio.run(main())
        awake.append(True)  # it hears that it was given up, and nothing else
        assert stuck.recv().startswith(FAREWELL)
        stuck.abort(7)  # and again, should it not have listened
        assert stuck.recv().startswith(FAREWELL)


# --- a worker that goes, or talks nonsense ----------------------------------------------------------------


def test_the_engine_breaks(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is open hears why, at once; later calls hear that it is being started again; then it is."""
    monkeypatch.setattr(worker.log, "disabled", True)
    llm, calls = make("plain"), []
    step = llm.engine.step

    def breaks() -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("a device fell over")
        return step()

    async def main() -> None:
        far = connect(address_of(tmp_path), tokenizer=Pieces())
        async with far, asyncio.timeout(120):
            tasks = [asyncio.create_task(collect(far.stream("ab", params(i, **LONG)))) for i in range(3)]
            whole = asyncio.create_task(far.generate("ab", params(9, **LONG)))
            for task in tasks:
                events = await task
                assert events[-1].finish_reason == "error" and "a device fell over" in events[-1].error
            output = await whole
            assert not output.finished and output.outputs[0].finish_reason == "error"
            write_status(tmp_path, WorkerStatus("restarting", 1, "a device fell over"))
            with pytest.raises(EngineDownError, match="try again"):
                await far.generate("ab", params())
            assert not far.dead and far.worker().state == "restarting" and not far.num_open
            with working(make("plain"), tmp_path):
                while far.worker().state != "ready":
                    await asyncio.sleep(0.01)
                assert (await far.generate("ab", params())).finished
            write_status(tmp_path, WorkerStatus("failed", 5, "it died too often"))
            while far.worker().state != "failed":
                await asyncio.sleep(0.01)
            with pytest.raises(EngineClosedError, match="died too often"):
                while True:
                    await far.generate("ab", params())
            assert far.dead and "died too often" in str(far.dead_error)

    monkeypatch.setattr(llm.engine, "step", breaks)
    with working(llm, tmp_path):
        asyncio.run(main())
        monkeypatch.setattr(llm.engine, "step", step)


@pytest.mark.parametrize("how", ["flipped", "short", "lost", "no words"])
def test_a_frame_that_cannot_be_read(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever is open hears of it; nothing of it is believed; the line is made anew and serves again."""
    monkeypatch.setattr(worker.log, "disabled", True)
    whole, calls = worker.frame_of, []

    def broken(*arguments: Any) -> bytes:
        frame = whole(*arguments)
        calls.append(1)
        if len(calls) != 4:
            return frame
        if how == "no words":
            return b"DPRT\xc1"
        if how == "lost":  # one that is numbered as if another had gone before
            return whole(arguments[0] + 1, *arguments[1:])
        return frame[:-8] if how == "short" else frame[:-3] + b"\x55" + frame[-2:]

    monkeypatch.setattr(worker, "frame_of", broken)

    async def main(far: RemoteLLM) -> None:
        events = await collect(far.stream("ab", params(**LONG)))
        assert [e.finish_reason for e in events[:-1]] == [None] * 3 and events[-1].finish_reason == "error"
        assert "cannot be read" in events[-1].error and events[-1].token_id is None
        while far.worker().state != "ready":
            await asyncio.sleep(0.01)
        assert facts(await far.generate(*HERE[0])) == facts(portable[0])

    serve(make("plain"), tmp_path, main)


def test_nonsense_from_a_server_hurts_nobody(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.log, "disabled", True)

    async def main(far: RemoteLLM) -> None:
        chance = random.Random(1)
        with RawServer(tmp_path, queued=100) as odd:
            for i in range(300):
                parts = [chance.randbytes(chance.randint(0, 30)) for _ in range(chance.randint(1, 3))]
                if i % 3 == 0:  # a head that is right before a body that is not
                    parts = [b"\x93\xa3add" + bytes([i % 128]) + b"\x91\x05", *parts[1:]]
                odd.socket.send_multipart(parts)
            assert facts(await far.generate(*HERE[0])) == facts(portable[0])
            told = read(odd.recv(), Bounds(CONFIG["vocab_size"], 0, 0), ())
            assert told.ends and all(end.text for end in told.ends.values())

    serve(make("plain"), tmp_path, main)


def test_draining_refuses_and_finishes(make: Any, portable: Any, tmp_path: Path) -> None:
    """SIGTERM for the worker alone."""
    llm = make("plain")
    with working(llm, tmp_path) as served:

        async def main() -> None:
            far = connect(address_of(tmp_path), tokenizer=Pieces())
            async with far, asyncio.timeout(120):
                stream = far.stream("ab", params(**{**LONG, "max_tokens": 80}))
                events = [await anext(stream)]
                served.drain()
                with pytest.raises(EngineDownError, match="drains|started again"):
                    while True:
                        await far.generate("b", params())
                events += await collect(stream)
                assert events[-1].finish_reason == "length" and len(events) == 80

        asyncio.run(main())


def test_frame_errors_are_value_errors() -> None:
    assert issubclass(FrameError, ValueError)
