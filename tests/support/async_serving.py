"""A tiny LLM, requests with their reference outputs, and checks for tests of AsyncLLM."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import proposers
from draftproof import LLM, AsyncLLM, SamplingParams
from draftproof.async_llm import Stream
from draftproof.outputs import RequestOutput, TokenEvent
from exact import check_empty
from text_pieces import FIRST, PIECES, Always, Pieces, output_fields

ALLOWED = [2, *range(FIRST, FIRST + len(PIECES))]
SPECS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram"},
    "flaky": {"method": "proposers:DeviceFlaky", "adaptive": False},
    "host": {"method": "proposers:Junk", "adaptive": False},
}
LONG = {"max_tokens": 150, "ignore_eos": True, "stop": None, "logprobs": None}


def tiny_llm(folder: str, spec: str = "ngram", **more: Any) -> LLM:
    options = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 4, "debug": True}
    llm = LLM(folder, speculative_config=SPECS[spec], **{**options, "overlap": True, **more})
    llm.tokenizer = Pieces()  # type: ignore[assignment]
    return llm


def params(seed: int = 11, **options: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": seed, "max_tokens": 18, "logprobs": 2, "allowed_token_ids": ALLOWED}
    return SamplingParams(**{**values, **options})


def favour_one_token(tokens: Sequence[int], row: Any) -> Any:
    row[FIRST + len(tokens) % 3] += 2.0
    return row


CASES = [
    ("ab", params(1)),
    ("ba", params(2, temperature=0, logprobs=None, max_tokens=30, ignore_eos=True)),
    ("aab", params(3, stop=["bb", "é"], ignore_eos=True)),
    ("abab", params(4, n=3, logprobs=0, frequency_penalty=0.5)),
    ("b", params(5, logprobs=None, prompt_logprobs=2, min_tokens=4)),
    ("bba", params(6, logprobs=5, logprobs_mode="processed", top_k=7, stop=["ab"], ignore_eos=True)),
    ("abba", params(7, logprobs=None, logprob_token_ids=[FIRST, FIRST + 3])),
    ("bb", params(8, logits_processors=[favour_one_token], stop_token_ids=[14])),
    ("a" * 40, params(9, include_draft_logprobs=True, n=2, speculative=False)),
    ("ab" * 9, params(10, repetition_penalty=1.3, max_tokens=40, ignore_eos=True)),
]


def reference_outputs(make: Callable[..., LLM]) -> list[RequestOutput]:
    """Return each output alone, without drafts and overlap."""
    llm = make("plain", overlap=False)
    made = [llm.generate(prompt, params_of)[0] for prompt, params_of in CASES]
    assert any(isinstance(o.stop_reason, str) for r in made for o in r.outputs)
    proposers.set_outputs(Always(made[1].outputs[0].token_ids))
    return made


def facts(output: RequestOutput) -> object:
    return [output_fields(o) for o in output.outputs], output.prompt_logprobs, output.finished, output.usage


def stream_facts(events: Sequence[TokenEvent], index: int) -> tuple[object, ...]:
    mine = [e for e in events if e.index == index]
    assert [e.finish_reason for e in mine[:-1]] == [None] * (len(mine) - 1)
    tokens = [e.token_id for e in mine if e.token_id is not None]
    return tokens, "".join(e.text for e in mine), [e.logprobs for e in mine], mine[-1].finish_reason


def check_stream(events: Sequence[TokenEvent], want: RequestOutput) -> None:
    assert {e.index for e in events} == set(range(len(want.outputs)))
    for answer in want.outputs:
        logprobs = [None] * len(answer.token_ids) if answer.logprobs is None else list(answer.logprobs)
        expected = answer.token_ids, answer.text, logprobs, answer.finish_reason
        assert stream_facts(events, answer.index) == expected


def check_prefix(events: Sequence[TokenEvent], want: RequestOutput) -> None:
    for answer in want.outputs:
        tokens = [e.token_id for e in events if e.index == answer.index and e.token_id is not None]
        assert tokens == answer.token_ids[: len(tokens)]


def check_left(llm: LLM) -> None:
    """Check that no request and no engine thread is left."""
    check_empty(llm.engine)
    assert not llm.tracker.has_pending_outputs
    assert not [t for t in threading.enumerate() if t.name == "draftproof-engine"]


def run(llm: LLM, body: Callable[[AsyncLLM], Awaitable[Any]], seconds: float = 300) -> Any:
    """Run `body` in an event loop of its own with a time limit; check that nothing is left."""

    async def main() -> Any:
        async with AsyncLLM.from_llm(llm) as engine, asyncio.timeout(seconds):
            return await body(engine)

    try:
        return asyncio.run(main())
    finally:
        check_left(llm)


@contextmanager
def slow_steps(llm: LLM, seconds: float = 0.02) -> Iterator[None]:
    """Make every step take longer, so that a long request is open while a test continues."""
    step = llm.engine.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    llm.engine.step = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm.engine.step  # type: ignore[method-assign]


async def collect(stream: Stream) -> list[TokenEvent]:
    return [event async for event in stream]


async def serve_all(engine: AsyncLLM, alone: Sequence[RequestOutput], order: random.Random) -> None:
    """Serve every case as a stream and as a whole output, at once, in random order."""

    async def one(i: int, streamed: bool) -> None:
        await asyncio.sleep(0)
        if not streamed:
            assert facts(await engine.generate(*CASES[i])) == facts(alone[i])
            return
        stream = engine.stream(*CASES[i])
        if order.random() < 0.5:
            events = await collect(stream)
        else:
            events = []
            while part := await stream.read():
                events += part
        check_stream(events, alone[i])
        assert stream.output is not None and facts(stream.output) == facts(alone[i])

    tasks = [(i, streamed) for i in range(len(CASES)) for streamed in (False, True)]
    order.shuffle(tasks)
    await asyncio.gather(*(one(*task) for task in tasks))
