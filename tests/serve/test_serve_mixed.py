"""64 clients at once over HTTP, some of whom leave: every other answer is, to the last printed digit, the one
that a server without drafts gives to the same request alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from draftproof.outputs import LogprobRow
from draftproof.text.streaming_output import StepEvents
from serving import NGRAM, Served, make_folder, serving, tiny

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a"],
}
WORDS = ["one two three", "four five", "The answer is", "naïve café", "again one two three one two", "[1, 2"]
# what speculation and neighbours may change: who drafted, what was cached, when it was
FREE = {"id", "created", "metrics", "provenance", "prompt_tokens_details"}


def wishes(count: int) -> list[dict[str, Any]]:
    """A mix of everything, the same every time."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        wish: dict[str, Any] = {"max_tokens": rng.randrange(4, 60), "seed": 1000 + i, "stream": i % 2 == 0}
        text = rng.choice(WORDS) + " " + rng.choice(WORDS)
        if i % 5 == 0:
            wish["messages"] = [{"role": "user", "content": text}]
        else:
            wish["prompt"] = [text, rng.choice(WORDS)] if i % 7 == 1 else text
        kind = i % 6
        if kind == 0:
            wish |= {"temperature": 0, "ignore_eos": True}
        elif kind == 1:
            wish |= {"temperature": 0.3, "top_p": 0.9, "stop": ["ee", "\n\n"]}
        elif kind == 2:
            wish |= {"temperature": 0.4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 40}
        elif kind == 3:
            wish |= {
                "structured_outputs": {"json": SCHEMA, "max_whitespace": 1},
                "temperature": 0.5,
                "max_tokens": 40,
            }
        elif kind == 4:
            wish |= {
                "temperature": 0.2,
                "logit_bias": {"281": 3},
                "min_tokens": 3,
                "ignore_eos": True,
                "n": 2,
            }
        else:
            wish |= {"temperature": 0.25, "bad_words": ["three"], "logprobs_mode": "processed"}
        if i % 3 == 0 and "messages" in wish:
            wish |= {"logprobs": True, "top_logprobs": i % 4}
        elif i % 3 == 0:
            wish |= {"logprobs": i % 6, "echo": i % 9 == 0}
        if i % 4 == 1:
            wish |= {"return_token_ids": True}
        if wish["stream"] and i % 8 == 0:
            wish |= {"stream_granularity": "step"}
        made.append(wish)
    return made


def told(data: Any) -> Any:
    """What must not change."""
    if isinstance(data, dict):
        return {name: told(value) for name, value in data.items() if name not in FREE}
    return [told(value) for value in data] if isinstance(data, list) else data


def gathered(chunks: list[Any]) -> list[dict[str, Any]]:
    """A stream's answers, put together: how many tokens a chunk has is the step's affair."""
    answers: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        answer = answers.setdefault(choice["index"], {"text": "", "logprobs": [], "token_ids": []})
        answer["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        answer["token_ids"] += choice.get("token_ids", [])
        logprobs = choice["logprobs"]
        if logprobs is not None and "content" in logprobs:
            answer["logprobs"] += logprobs["content"]
        elif logprobs is not None:
            answer["logprobs"] += [list(row) for row in zip(*logprobs.values(), strict=True)]
        if choice["finish_reason"] is not None:
            answer["finish"] = choice["finish_reason"], choice["stop_reason"], choice["seed"]
    return [answers[index] for index in sorted(answers)]


async def ask(client: httpx.AsyncClient, wish: dict[str, Any], leave_after: int | None = None) -> Any:
    path = "/v1/chat/completions" if "messages" in wish else "/v1/completions"
    if not wish["stream"]:
        response = await client.post(
            path, json=wish, timeout=None if leave_after is None else 0.001 * leave_after
        )
        assert response.status_code == 200, response.text
        return told(response.json())
    chunks: list[Any] = []
    async with client.stream("POST", path, json=wish) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return gathered(chunks)
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
            if leave_after is not None and len(chunks) > leave_after:
                return None
    raise AssertionError("the stream has no end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_folder(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def alone(folder: Any) -> list[Any]:
    """Each by itself, from a server that has no drafts and no cache."""
    with serving(tiny(folder, enable_prefix_caching=False)) as running:

        async def main() -> list[Any]:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                return [await ask(client, wish) for wish in wishes(64)]

        return asyncio.run(main())


async def all_at_once(running: Served, leavers: set[int], asked: Sequence[int] = range(64)) -> list[Any]:
    made = wishes(64)

    async def one(i: int) -> Any:
        if i not in leavers:
            return await ask(client, made[i])
        try:
            await ask(client, made[i], leave_after=i % 5)
        except httpx.TimeoutException:
            return None

    async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=httpx.Limits()) as client:
        return await asyncio.gather(*map(one, asked))


def test_everybody_gets_what_they_would_get_alone(folder: Any, alone: list[Any]) -> None:
    leavers = set(range(3, 64, 7))
    # few pages, so that somebody is put aside now and then
    with serving(tiny(folder, NGRAM, max_num_seqs=16, kv_cache_tokens=1024)) as running:
        got = asyncio.run(all_at_once(running, leavers))
        stats = running.llm.stats
        assert stats.num_accepted_tokens > 50 and stats.num_accepted_tokens < stats.num_draft_tokens
    for i, (mine, want) in enumerate(zip(got, alone, strict=True)):
        if i not in leavers:
            assert mine == want, wishes(64)[i]


@pytest.mark.control
def test_control_changed_logprob_bit_is_detected(
    folder: Any, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the last bit of one logprob of each stream."""
    plain = StepEvents.__getitem__

    def wrong(self: StepEvents, index: Any) -> Any:
        event = plain(self, index)
        row = event.logprob_row
        if self._first + index == 7 and row is not None:
            own, *others = row.logprobs
            event.logprob_row = LogprobRow(row.token_ids, [own * (1 + 2**-23), *others], row.ranks)
        return event

    monkeypatch.setattr(StepEvents, "__getitem__", wrong)
    made = wishes(64)
    asked = [i for i in range(64) if "structured_outputs" not in made[i]][:30]
    with serving(tiny(folder, NGRAM, max_num_seqs=16)) as running:
        got = asyncio.run(all_at_once(running, set(), asked))
    wrong_ones = [i for i, mine in zip(asked, got, strict=True) if mine != alone[i]]
    assert wrong_ones and all(made[i].get("logprobs") is not None and made[i]["stream"] for i in wrong_ones)
