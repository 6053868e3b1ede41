"""64 concurrent HTTP clients, some of which disconnect: the responses equal those of a server without drafts.

They are compared to the last printed digit with single requests.
"""

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
from serving import NGRAM, Served, serving, tiny

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a"],
}
WORDS = ["one two three", "four five", "The answer is", "naïve café", "again one two three one two", "[1, 2"]
# fields that speculation and other requests may change: draft sources, cached tokens, times
VARIABLE_FIELDS = {"id", "created", "metrics", "provenance", "prompt_tokens_details"}


def request_bodies(count: int) -> list[dict[str, Any]]:
    """Return a fixed mix of all options."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        body: dict[str, Any] = {"max_tokens": rng.randrange(4, 60), "seed": 1000 + i, "stream": i % 2 == 0}
        text = rng.choice(WORDS) + " " + rng.choice(WORDS)
        if i % 5 == 0:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = [text, rng.choice(WORDS)] if i % 7 == 1 else text
        kind = i % 6
        if kind == 0:
            body |= {"temperature": 0, "ignore_eos": True}
        elif kind == 1:
            body |= {"temperature": 0.3, "top_p": 0.9, "stop": ["ee", "\n\n"]}
        elif kind == 2:
            body |= {"temperature": 0.4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 40}
        elif kind == 3:
            structure = {"json": SCHEMA, "max_whitespace": 1}
            body |= {"structured_outputs": structure, "temperature": 0.5, "max_tokens": 40}
        elif kind == 4:
            body |= {
                "temperature": 0.2,
                "logit_bias": {"281": 3},
                "min_tokens": 3,
                "ignore_eos": True,
                "n": 2,
            }
        else:
            body |= {"temperature": 0.25, "bad_words": ["three"], "logprobs_mode": "processed"}
        if i % 3 == 0 and "messages" in body:
            body |= {"logprobs": True, "top_logprobs": i % 4}
        elif i % 3 == 0:
            body |= {"logprobs": i % 6, "echo": i % 9 == 0}
        if i % 4 == 1:
            body |= {"return_token_ids": True}
        if body["stream"] and i % 8 == 0:
            body |= {"stream_granularity": "step"}
        made.append(body)
    return made


def fixed_fields(data: Any) -> Any:
    """Return a response without VARIABLE_FIELDS."""
    if isinstance(data, dict):
        return {name: fixed_fields(value) for name, value in data.items() if name not in VARIABLE_FIELDS}
    return [fixed_fields(value) for value in data] if isinstance(data, list) else data


def joined_outputs(chunks: list[Any]) -> list[dict[str, Any]]:
    """Return the outputs of a stream, joined: the number of tokens in a chunk depends on the step."""
    outputs: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        output = outputs.setdefault(choice["index"], {"text": "", "logprobs": [], "token_ids": []})
        output["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        output["token_ids"] += choice.get("token_ids", [])
        logprobs = choice["logprobs"]
        if logprobs is not None and "content" in logprobs:
            output["logprobs"] += logprobs["content"]
        elif logprobs is not None:
            output["logprobs"] += [list(row) for row in zip(*logprobs.values(), strict=True)]
        if choice["finish_reason"] is not None:
            output["finish"] = choice["finish_reason"], choice["stop_reason"], choice["seed"]
    return [outputs[index] for index in sorted(outputs)]


async def send(client: httpx.AsyncClient, body: dict[str, Any], disconnect_after: int | None = None) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body["stream"]:
        timeout = None if disconnect_after is None else 0.001 * disconnect_after
        response = await client.post(path, json=body, timeout=timeout)
        assert response.status_code == 200, response.text
        return fixed_fields(response.json())
    chunks: list[Any] = []
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return joined_outputs(chunks)
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
            if disconnect_after is not None and len(chunks) > disconnect_after:
                return None
    raise AssertionError("the stream has no end")


@pytest.fixture(scope="module")
def alone(folder: Any) -> list[Any]:
    """Return the response to each request by itself, of a server without drafts and prefix cache."""
    with serving(tiny(folder, enable_prefix_caching=False)) as running:

        async def main() -> list[Any]:
            async with httpx.AsyncClient(base_url=running.url, timeout=600) as client:
                return [await send(client, body) for body in request_bodies(64)]

        return asyncio.run(main())


async def all_at_once(
    running: Served, disconnecting: set[int], indices: Sequence[int] = range(64)
) -> list[Any]:
    made = request_bodies(64)

    async def one(i: int) -> Any:
        if i not in disconnecting:
            return await send(client, made[i])
        try:
            await send(client, made[i], disconnect_after=i % 5)
        except httpx.TimeoutException:
            return None

    async with httpx.AsyncClient(base_url=running.url, timeout=600, limits=httpx.Limits()) as client:
        return await asyncio.gather(*map(one, indices))


def test_concurrent_responses_equal_those_of_single_requests(folder: Any, alone: list[Any]) -> None:
    disconnecting = set(range(3, 64, 7))
    # few pages, so that some requests are preempted
    with serving(tiny(folder, NGRAM, max_num_seqs=16, kv_cache_tokens=1024)) as running:
        got = asyncio.run(all_at_once(running, disconnecting))
        stats = running.llm.stats
        assert stats.num_accepted_tokens > 50 and stats.num_accepted_tokens < stats.num_draft_tokens
    for i, (mine, want) in enumerate(zip(got, alone, strict=True)):
        if i not in disconnecting:
            assert mine == want, request_bodies(64)[i]


@pytest.mark.control
def test_control_changed_logprob_bit_is_detected(
    folder: Any, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the last bit of one logprob of each stream."""
    plain = StepEvents.__getitem__

    def wrong(self: StepEvents, index: Any) -> Any:
        event = plain(self, index)
        row = event.logprob_row
        if self.first + index == 7 and row is not None:
            own, *others = row.logprobs
            event.logprob_row = LogprobRow(row.token_ids, [own * (1 + 2**-23), *others], row.ranks)
        return event

    monkeypatch.setattr(StepEvents, "__getitem__", wrong)
    made = request_bodies(64)
    indices = [i for i in range(64) if "structured_outputs" not in made[i]][:30]
    with serving(tiny(folder, NGRAM, max_num_seqs=16)) as running:
        got = asyncio.run(all_at_once(running, set(), indices))
    wrong_ones = [i for i, mine in zip(indices, got, strict=True) if mine != alone[i]]
    assert wrong_ones and all(made[i].get("logprobs") is not None and made[i]["stream"] for i in wrong_ones)
