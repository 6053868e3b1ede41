"""RemoteLLM on a worker against LLM in this process: tokens, logprobs, text, provenance, statistics."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pytest import MonkeyPatch

import async_serving
import proposers
from async_serving import CASES, LONG, SPECS, check_stream, collect, facts, params, serve_all, slow_steps
from draftproof import RequestOutput, SamplingParams
from draftproof.errors import EngineClosedError, EngineDownError, QueueFullError, RequestError
from draftproof.metrics import WorkerStatus
from draftproof.serve.ipc.decode import ReceivedGroup, decode_frame, to_step_results
from draftproof.serve.ipc.frame import Bounds
from draftproof.serve.ipc.messages import DISCONNECTED
from draftproof.serve.ipc.remote_llm import RemoteLLM, connect
from draftproof.serve.ipc.status import socket_address, write_status
from draftproof.serve.worker import frontend_connection, frontends, step_sender, worker
from draftproof.text.logprobs import LogprobMaps
from draftproof.text.reasoning.budget import ThinkingBudget
from draftproof.text.reasoning.section import ReasoningSection
from draftproof.types import Request
from text_pieces import CONFIG, Pieces
from words import Words
from worker_thread import TIMEOUT_SECONDS, RawFrontend, run_remote, run_worker, wait_for

SENDABLE = [(prompt, params) for prompt, params in CASES if not params.logits_processors]


@pytest.fixture
def portable(alone: Any, monkeypatch: MonkeyPatch) -> list[RequestOutput]:
    """Limit the cases to those that can be sent to another process; return their outputs."""
    outputs = [one for one, (_, params) in zip(alone, CASES, strict=True) if not params.logits_processors]
    monkeypatch.setattr(async_serving, "CASES", SENDABLE)
    return outputs


@pytest.mark.parametrize("spec", SPECS)
def test_remote_outputs_equal_llm_outputs(make: Any, portable: Any, tmp_path: Path, spec: str) -> None:
    """Send every request, streamed and whole, concurrently from two HTTP processes."""
    with run_worker(make(spec), tmp_path):

        async def main() -> None:
            clients = [connect(socket_address(tmp_path), tokenizer=Pieces()) for _ in range(2)]
            async with clients[0], clients[1], asyncio.timeout(TIMEOUT_SECONDS):
                calls = (serve_all(one, portable, random.Random(i)) for i, one in enumerate(clients))
                await asyncio.gather(*calls)
                tokens = sum(output.usage["completion_tokens"] for output in portable)
                for one in clients:
                    assert one.stats.num_emitted_tokens == 2 * tokens

        asyncio.run(main())


def run_client(folder: Path, body: Callable[[RemoteLLM], Awaitable[None]]) -> None:
    """Run `body` with a RemoteLLM on the worker that runs already."""

    async def main() -> None:
        remote = connect(socket_address(folder), tokenizer=Pieces())
        async with remote, asyncio.timeout(TIMEOUT_SECONDS):
            await body(remote)

    asyncio.run(main())


def all_fields(output: RequestOutput) -> str:
    """Return every field but times as text, in which every bit of a number shows."""
    fields = {name: getattr(output, name) for name in output.__dataclass_fields__}
    return repr([facts(output), {name: value for name, value in fields.items() if "seconds" not in name}])


@pytest.mark.parametrize("spec", ["plain", "ngram", "host", "several"])
def test_remote_provenance_and_statistics_equal_llm(make: Any, alone: Any, tmp_path: Path, spec: str) -> None:
    """Send one request after the other; compare provenance, drafts, statistics, cached tokens."""
    proposers.set_outputs(async_serving.Always(alone[1].outputs[0].token_ids))  # other tests set other ones
    options = {
        "plain": None,
        "ngram": {"method": "ngram", "adaptive": False},
        "host": {"method": "proposers:Junk", "adaptive": False},
        "several": {"method": "proposers:Parity", "num_speculative_tokens": 5, "adaptive": False},
    }
    SPECS["this"] = options[spec]
    cases = [(prompt, replace(params)) for prompt, params in SENDABLE * 2]
    try:
        local, served = make("this"), make("this")
    finally:
        del SPECS["this"]
    want = [local.generate(*case)[0] for case in cases]

    async def main(remote: RemoteLLM) -> list[RequestOutput]:
        return [await remote.generate(*case, request_id=str(i)) for i, case in enumerate(cases)]

    got = run_remote(served, tmp_path, main)
    assert [all_fields(one) for one in got] == [all_fields(one) for one in want]
    assert any(one.num_cached_tokens for one in got)
    assert all(0 <= (one.queue_seconds or 0) <= (one.first_token_seconds or 0) for one in got)
    assert all(one.queue_seconds and one.first_token_seconds for one in got)
    if spec != "plain":
        assert sum(one.metrics.num_draft_tokens for one in got) > 0
    if spec == "several":
        assert {"accepted:even", "accepted:odd"} <= {o for r in got for a in r.outputs for o in a.provenance}


def test_preempted_requests_keep_outputs_and_report_counts(make: Any, tmp_path: Path) -> None:
    options = {"kv_cache_tokens": 160, "overlap": False, "max_model_len": 128}
    cases = [("ab" * 8, params(i, max_tokens=60, ignore_eos=True, logprobs=1)) for i in range(4)]
    local = make("plain", **options)
    want = [local.generate(*case)[0] for case in cases]

    async def main(remote: RemoteLLM) -> None:
        got = await asyncio.gather(*(remote.generate(*case) for case in cases))
        assert [facts(one) for one in got] == [facts(one) for one in want]
        assert remote.engine_stats().num_preemptions == sum(one.num_preemptions for one in got) > 0
        assert remote.step_totals().num_steps > 60 and remote.step_totals().seconds > 0
        while remote.engine_stats().timings.first_token.count < 4:  # sent once a second
            await asyncio.sleep(0.01)

    run_remote(make("plain", **options), tmp_path, main)


def test_worker_compiles_grammars(make: Any, portable: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    llm = make("ngram")
    pieces, guided = Pieces(), params(logprobs=3, structured_outputs={"choice": ["abba", "bab"]})
    words = Words(["abba", "bab"], [pieces.token_bytes(i) for i in range(CONFIG["vocab_size"])], {2}, 2)

    end = pieces.encode("b")
    budget = ThinkingBudget(ReasoningSection(cast(Any, pieces), (), ("b",)), True, 2, end)

    def grammar(options: SamplingParams, prompt: list[int]) -> Any:
        assert prompt == pieces.encode("ab") or not options.needs_grammar
        if options.thinking_token_budget is not None:
            return budget
        if options.structure and "never" in (options.structure.choice or ()):
            raise RequestError("structured_outputs: invalid", "structured_outputs")
        return options.structure and words

    monkeypatch.setattr(llm._grammars, "compile", grammar)
    want = llm.generate("ab", guided)[0]
    limited = params(logprobs=3, thinking_token_budget=2, logit_bias={end[0]: -50.0})
    wanted_limited = llm.generate("ab", limited)[0]
    assert wanted_limited.outputs[0].token_ids.index(end[0]) == 2

    async def main(remote: RemoteLLM) -> None:
        free = asyncio.create_task(remote.generate(*SENDABLE[1]))
        assert facts(await remote.generate("ab", guided)) == facts(want)
        check_stream(await collect(remote.stream("ab", guided)), want)
        assert facts(await remote.generate("ab", limited)) == facts(wanted_limited)
        assert facts(await free) == facts(portable[1])
        bad = params(structured_outputs={"choice": ["never"]})
        with pytest.raises(RequestError, match="structured_outputs: invalid") as caught:
            await remote.generate("ab", bad)
        assert caught.value.param == "structured_outputs"
        with pytest.raises(RequestError, match="structured_outputs: invalid"):
            await collect(remote.stream("ab", bad))

    run_remote(llm, tmp_path, main)


def test_unsendable_or_invalid_request_raises_request_error(make: Any, tmp_path: Path) -> None:
    async def main(remote: RemoteLLM) -> None:
        with pytest.raises(RequestError, match="another process") as caught:
            await remote.generate("ab", params(logits_processors=[lambda ids, row: row]))
        assert caught.value.param == "logits_processors"
        for prompt, options, message in (
            ("ab", {"priority": 10**30}, "cannot be sent"),
            ("ab", {"cache_salt": "\ud800"}, "cannot be sent"),
            ("ab", {"speculative": {"verify_strategy": "os:system"}}, "unknown verify_strategy"),
            ("ab" * 200, {}, "max_model_len"),
        ):
            with pytest.raises(RequestError, match=message):
                await remote.generate(prompt, params(**options))
        assert (await remote.generate("ab", params())).finished and not remote.num_open

    run_remote(make("plain"), tmp_path, main)


def test_full_queue_rejects_all_requests_of_a_prompt(make: Any, tmp_path: Path) -> None:
    llm = make("plain", max_num_seqs=2, max_num_waiting=2)

    async def main(remote: RemoteLLM) -> None:
        first = remote.stream("ab", params(n=2, **LONG))
        await anext(first)
        waiting = asyncio.create_task(remote.generate("ba", params(max_tokens=2)))
        while remote.engine_stats().num_waiting < 1:
            await asyncio.sleep(0)
            await first.read()
        with pytest.raises(QueueFullError):
            await remote.generate("b", params(n=3))
        with pytest.raises(QueueFullError):
            await collect(remote.stream("b", params(n=3)))
        await first.aclose()
        assert (await waiting).finished
        assert len((await remote.generate("b", params(n=2))).outputs) == 2
        with pytest.raises(RequestError, match="n=5 is more than this engine takes at once") as no:
            await remote.generate("b", params(n=5))
        assert no.value.param == "n" and not isinstance(no.value, QueueFullError)
        assert len((await remote.generate("b", params(n=4))).outputs) == 4

    with slow_steps(llm):
        run_remote(llm, tmp_path, main)


def request(**options: Any) -> Request:
    """Return a long request without text."""
    sampling = params(**{"max_tokens": 100, "ignore_eos": True, "stop": None, **options})
    return Request(id="x", prompt_token_ids=[10, 11], params=sampling, seed=5, eos_token_ids=(2,))


def test_disconnect_aborts_the_requests_of_the_frontend(make: Any, portable: Any, tmp_path: Path) -> None:
    llm = make("plain")

    async def main(remote: RemoteLLM) -> None:
        with RawFrontend(tmp_path, queued=100) as gone:
            for handle in range(6):
                gone.add(handle, request(max_tokens=240))
            gone.recv()
        assert facts(await remote.generate(*SENDABLE[0])) == facts(portable[0])
        while remote.engine_stats().num_running:
            await asyncio.sleep(0.01)

    run_remote(llm, tmp_path, main)  # which checks that nothing is left


def test_stalled_frontend_receives_every_frame_when_it_reads_again(
    make: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Do not read until all queues are full; then read every frame."""
    monkeypatch.setattr(frontends, "MAX_QUEUED_FRAMES", 1)
    monkeypatch.setattr(frontend_connection, "STALL_BYTES", 1)
    llm, vocab = make("plain"), CONFIG["vocab_size"]
    prompt = {"prompt_token_ids": [10 + i % 7 for i in range(230)]}
    options = [params(i, max_tokens=20, prompt_logprobs=20, cache_salt=str(i)) for i in range(12)]
    want = [llm.generate(prompt, each)[0] for each in options]
    requests = {
        7 + i: Request(id=str(i), params=each, seed=i, eos_token_ids=(2,), **prompt)
        for i, each in enumerate(options)
    }
    with run_worker(llm, tmp_path) as served, RawFrontend(tmp_path) as slow:
        for handle, one in requests.items():
            slow.add(handle, one)
        (client,) = wait_for(lambda: list(served.frontends.connections.values()))
        wait_for(lambda: client.stalled_since and time.monotonic() > client.stalled_since + 0.3)
        num_frames, left = 0, set(requests)
        tokens: dict[str, list[int]] = {str(i): [] for i in range(12)}
        rows: dict[str, list[Any]] = {str(i): [] for i in range(12)}
        while left:
            frame = decode_frame(slow.recv(), Bounds(vocab, 0, 0))
            assert frame.header.sequence == num_frames
            num_frames += 1
            for one in to_step_results(frame, ReceivedGroup.build(frame.handles, requests, vocab), (), {}):
                tokens[one.request_id] += one.token_ids
                rows[one.request_id] += one.prompt_logprobs or []
            left -= {frame.handles[i] for i in frame.finished}
        assert list(tokens.values()) == [output.outputs[0].token_ids for output in want]
        for output, received in zip(want, rows.values(), strict=True):
            assert output.prompt_logprobs == LogprobMaps([None, *received], llm.tokenizer)


def test_worker_end_delivers_frames_to_a_frontend_with_a_full_queue(make: Any, tmp_path: Path) -> None:
    """Do not read while the worker drains and ends; then read every frame and the disconnect message."""
    with run_worker(make("plain"), tmp_path) as served, RawFrontend(tmp_path) as slow:
        slow.add(7, request(max_tokens=100))
        wait_for(lambda: any(each.sequence > 2 for each in list(served.frontends.connections.values())))
        served.drain()
        wait_for(lambda: not served.engine.has_work)
        time.sleep(1.0)  # the worker would have closed its socket by now
        num_frames = num_tokens = 0
        while not (data := slow.recv()).startswith(DISCONNECTED):
            frame = decode_frame(data, Bounds(CONFIG["vocab_size"], 0, 0))
            assert frame.header.sequence == num_frames
            num_frames += 1
            num_tokens += frame.header.tokens
        assert num_tokens == 100


@pytest.mark.parametrize("bound", ["SHARED_STALL_SECONDS", "MAX_OUTBOX_BYTES"])
def test_stalled_frontend_does_not_delay_another_one(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: MonkeyPatch, bound: str
) -> None:
    """The other one is served; requests of the stalled one are aborted, and it is disconnected."""
    monkeypatch.setattr(frontend_connection, "STALL_BYTES", 1)
    monkeypatch.setattr(frontend_connection, "SHARED_STALL_SECONDS", 1e9)
    monkeypatch.setattr(worker.log, "disabled", True)
    try_send = frontend_connection.FrontendConnection.try_send

    def full(self: frontend_connection.FrontendConnection, socket: Any, data: bytes) -> bool:
        return try_send(self, socket, data) if self.number > 1 or not self.sequence or reads else False

    monkeypatch.setattr(frontend_connection.FrontendConnection, "try_send", full)
    llm, reads = make("plain"), []
    with run_worker(llm, tmp_path) as served, RawFrontend(tmp_path) as stalled:
        stalled.add(7, request(max_tokens=240))
        (client,) = wait_for(lambda: [c for c in list(served.frontends.connections.values()) if c.is_stalled])

        async def main(remote: RemoteLLM) -> None:
            assert facts(await remote.generate(*SENDABLE[0])) == facts(portable[0])
            assert client.entries and client.is_stalled
            monkeypatch.setattr(frontend_connection, bound, 0)
            assert facts(await remote.generate(*SENDABLE[0])) == facts(portable[0])
            assert not client.entries and remote.engine_stats().num_running == 0

        run_client(tmp_path, main)
        reads.append(True)  # from now on it receives: the disconnect message and nothing else
        assert stalled.recv().startswith(DISCONNECTED)
        stalled.abort(7)  # a message after the disconnect message gets another one
        assert stalled.recv().startswith(DISCONNECTED)


def test_engine_failure_ends_open_requests_and_restart_serves_again(
    make: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.log, "disabled", True)
    llm, calls = make("plain"), []
    step = llm.engine.step

    def failing() -> Any:
        calls.append(1)
        stats = llm.engine.stats()
        if stats.num_running + stats.num_waiting < 4:  # wait for the others: a failed engine admits none
            time.sleep(0.02)
        elif len(calls) > 5:
            raise RuntimeError("planted device error")
        return step()

    async def main(remote: RemoteLLM) -> None:
        tasks = [asyncio.create_task(collect(remote.stream("ab", params(i, **LONG)))) for i in range(3)]
        whole = asyncio.create_task(remote.generate("ab", params(9, **LONG)))
        for task in tasks:
            events = await task
            assert events[-1].finish_reason == "error" and "planted device error" in events[-1].error
        output = await whole
        assert not output.finished and output.outputs[0].finish_reason == "error"
        write_status(tmp_path, WorkerStatus("restarting", 1, "planted device error"))
        with pytest.raises(EngineDownError, match="try again"):
            await remote.generate("ab", params())
        assert not remote.dead and remote.worker_status().state == "restarting" and not remote.num_open
        with run_worker(make("plain"), tmp_path):
            while remote.worker_status().state != "ready":
                await asyncio.sleep(0.01)
            assert (await remote.generate("ab", params())).finished
        write_status(tmp_path, WorkerStatus("failed", 5, "too many restarts"))
        while remote.worker_status().state != "failed":
            await asyncio.sleep(0.01)
        with pytest.raises(EngineClosedError, match="too many restarts"):
            while True:
                await remote.generate("ab", params())
        assert remote.dead and "too many restarts" in str(remote.dead_error)

    monkeypatch.setattr(llm.engine, "step", failing)
    with run_worker(llm, tmp_path):
        run_client(tmp_path, main)
        monkeypatch.setattr(llm.engine, "step", step)


@pytest.mark.parametrize("how", ["flipped", "short", "skipped", "invalid timings"])
def test_invalid_frame_ends_open_requests_and_reconnects(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: MonkeyPatch, how: str
) -> None:
    """Open requests end with an error, no token of the frame is used, and later requests are served."""
    monkeypatch.setattr(worker.log, "disabled", True)
    encode_step, calls = step_sender.encode_step, []

    def broken(*arguments: Any) -> bytes:
        frame = encode_step(*arguments)
        calls.append(1)
        if len(calls) != 4:
            return frame
        if how == "invalid timings":
            return b"DPRT\xc1"
        if how == "skipped":  # the sequence number of the next frame
            return encode_step(arguments[0] + 1, *arguments[1:])
        return frame[:-8] if how == "short" else frame[:-3] + b"\x55" + frame[-2:]

    monkeypatch.setattr(step_sender, "encode_step", broken)

    async def main(remote: RemoteLLM) -> None:
        events = await collect(remote.stream("ab", params(**LONG)))
        assert [e.finish_reason for e in events[:-1]] == [None] * 3 and events[-1].finish_reason == "error"
        assert "cannot be decoded" in events[-1].error and events[-1].token_id is None
        while remote.worker_status().state != "ready":
            await asyncio.sleep(0.01)
        assert facts(await remote.generate(*SENDABLE[0])) == facts(portable[0])

    run_remote(make("plain"), tmp_path, main)


def test_invalid_messages_of_a_frontend_do_not_affect_another_one(
    make: Any, portable: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """300 random messages; each invalid request has a failure with a message."""
    monkeypatch.setattr(worker.log, "disabled", True)

    async def main(remote: RemoteLLM) -> None:
        rng = random.Random(1)
        with RawFrontend(tmp_path, queued=100) as odd:
            for i in range(300):
                parts = [rng.randbytes(rng.randint(0, 30)) for _ in range(rng.randint(1, 3))]
                if i % 3 == 0:  # a valid first part before an invalid body
                    parts = [b"\x93\xa3add" + bytes([i % 128]) + b"\x91\x05", *parts[1:]]
                odd.socket.send_multipart(parts)
            assert facts(await remote.generate(*SENDABLE[0])) == facts(portable[0])
            frame = decode_frame(odd.recv(), Bounds(CONFIG["vocab_size"], 0, 0))
            assert frame.finished and all(entry.message for entry in frame.finished.values())

    run_remote(make("plain"), tmp_path, main)


def test_draining_worker_rejects_new_requests_and_finishes_open_ones(make: Any, tmp_path: Path) -> None:
    """`drain` is what SIGTERM to the worker calls."""
    with run_worker(make("plain"), tmp_path) as served:

        async def main(remote: RemoteLLM) -> None:
            stream = remote.stream("ab", params(**{**LONG, "max_tokens": 80}))
            events = [await anext(stream)]
            served.drain()
            with pytest.raises(EngineDownError, match="draining|restarted"):
                while True:
                    await remote.generate("b", params())
            events += await collect(stream)
            assert events[-1].finish_reason == "length" and len(events) == 80

        run_client(tmp_path, main)
