"""/v1/embeddings and /v1/score: equal to LLM, through a socket and from an engine in another process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftproof import PoolingParams
from draftproof.serve.ipc.remote_llm import RemoteLLM
from serving import NGRAM, Served, make_folder, serving, tiny
from worker_thread import run_remote

TEXTS = ["one two three", "four five six seven eight nine ten", "Größe 👍🏽", "one two three again"]


@pytest.fixture(scope="module")
def matryoshka(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder whose config allows 8 and 16 dimensions."""
    made = make_folder(tmp_path_factory.mktemp("matryoshka"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    return made


@pytest.fixture(scope="module")
def served(matryoshka: Path) -> Iterator[Served]:
    with serving(tiny(matryoshka, NGRAM, max_num_batched_tokens=16)) as one:
        yield one


@pytest.fixture(scope="module")
def expected(matryoshka: Path) -> Any:
    """Return embeddings and scores of an LLM without speculation."""
    with tiny(matryoshka) as llm:
        vectors = [out.outputs.embedding for out in llm.embed(TEXTS, use_tqdm=False)]
        cut = llm.embed(TEXTS[0], PoolingParams(dimensions=8, normalize=False))[0].outputs.embedding
        return vectors, cut, llm.score(TEXTS[0], TEXTS, use_tqdm=False)


def test_embeddings_of_the_openai_client_equal_llm(served: Served, expected: Any) -> None:
    """Compare both encodings, texts and token ids, while other requests generate."""
    stream = served.client.completions.create(
        model=served.model, prompt="one two", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    vectors, cut, _ = expected
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = served.client.embeddings.create(model=served.model, input=TEXTS, **options)
        rows = [one.embedding for one in found.data]
        if options.get("encoding_format") == "base64":
            rows = [np.frombuffer(base64.b64decode(row), "<f4").tolist() for row in rows]
        assert [np.float32(row).tobytes() for row in rows] == [np.float32(row).tobytes() for row in vectors]
        assert [one.index for one in found.data] == [0, 1, 2, 3] and found.object == "list"
    ids = [served.llm.get_tokenizer().encode(text) for text in TEXTS]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    assert rows == [
        one.embedding for one in served.client.embeddings.create(model=served.model, input=ids).data
    ]
    one = served.client.embeddings.create(model=served.model, input=ids[1]).data
    assert [each.embedding for each in one] == [vectors[1]]
    body = {"input": TEXTS[0], "dimensions": 8, "normalize": False}
    assert served.post("/v1/embeddings", body).json()["data"][0]["embedding"] == cut == list(cut)[:8]
    assert len(list(stream)) >= 60


def test_scores_equal_llm(served: Served, expected: Any) -> None:
    found = served.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    scores = expected[2]
    assert [one["score"] for one in found["data"]] == [one.logprob for one in scores]
    assert [one["token_logprobs"] for one in found["data"]] == [one.token_logprobs for one in scores]
    assert [one["is_greedy"] for one in found["data"]] == [one.is_greedy for one in scores]
    assert found["id"].startswith("score-") and found["object"] == "list"
    ids = served.llm.get_tokenizer().encode
    pairs = served.post("/v1/score", {"text_1": [TEXTS[1], TEXTS[0]], "text_2": [ids("one"), ids(TEXTS[1])]})
    assert pairs.json()["data"][1]["score"] == scores[1].logprob


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("embeddings", {"input": "a", "dimensions": 7}, "dimensions", "8, 16"),
        ("embeddings", {"input": "a", "dimensions": 99}, "dimensions", "more than the 32"),
        ("embeddings", {"input": []}, "input", "length"),
        ("embeddings", {"input": ""}, "input", "without tokens"),
        ("embeddings", {"input": ["a", [1]]}, "input", "mixed"),
        ("embeddings", {"input": [9999]}, "input", "outside the vocabulary"),
        ("embeddings", {"input": [5] * 300}, "input", "maximum is 255"),
        ("embeddings", {"input": ["a"] * 2049}, "input", "maximum is 2048"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "positive"),
        ("embeddings", {"input": "a", "priority": 1}, "priority", "range"),
        ("embeddings", {"input": "a", "max_tokens": 1}, "max_tokens", "unknown option"),
        ("embeddings", {"input": "a", "model": "other"}, "model", "unknown model"),
        ("score", {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}, "text_2", "3 contexts and 2"),
        ("score", {"text_1": "", "text_2": "a"}, "text_1", "without tokens"),
        ("score", {"text_1": [5] * 200, "text_2": [5] * 200}, "text_2", "maximum is 255"),
        ("score", {"text_1": "a"}, "text_2", "missing"),
    ],
)
def test_wrong_bodies_are_refused(served: Served, path: str, body: Any, param: str, text: str) -> None:
    response = served.post(f"/v1/{path}", body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and text in error["message"]


def test_long_inputs_are_truncated_on_request(served: Served) -> None:
    ids = [5 + i % 200 for i in range(400)]
    for keep, rest in ((-1, ids[-255:]), (9, ids[-9:])):
        bodies = {"input": [ids], "truncate_prompt_tokens": keep}, {"input": [rest]}
        first, second = (served.post("/v1/embeddings", body).json() for body in bodies)
        assert first["data"] == second["data"] and first["usage"]["prompt_tokens"] == len(rest)


def test_many_inputs_leave_room_in_the_queue(matryoshka: Path) -> None:
    """Send more inputs than the engine takes at once."""
    with serving(tiny(matryoshka, max_num_seqs=4, max_num_waiting=64)) as served:
        found = served.client.embeddings.create(model=served.model, input=["one", "two"] * 100)
    assert len(found.data) == 200 and found.data[0].embedding == found.data[198].embedding


def test_dimensions_need_a_model_that_was_trained_for_them(folder: Path) -> None:
    with serving(tiny(folder, pooling_type="mean")) as served:
        error = served.post("/v1/embeddings", {"input": "a", "dimensions": 8}).json()["error"]
        assert error["param"] == "dimensions" and "is_matryoshka" in error["message"]
        mean = served.post("/v1/embeddings", {"input": TEXTS[1]}).json()["data"][0]["embedding"]
    with tiny(folder, pooling_type="mean", max_num_batched_tokens=8) as llm:
        assert mean == llm.embed(TEXTS[1])[0].outputs.embedding


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings_of_a_remote_engine_equal_llm(folder: Path, tmp_path: Path, kind: str) -> None:
    llm = tiny(folder, NGRAM, pooling_type=kind, max_num_batched_tokens=16)
    expected = [out.outputs.embedding for out in llm.embed(TEXTS, use_tqdm=False)]
    score = llm.score(TEXTS[0], TEXTS[1])[0]

    async def body(remote: RemoteLLM) -> Any:
        found = await asyncio.gather(*(remote.embed(text) for text in TEXTS))
        return [out.outputs.embedding for out in found], await remote.score(TEXTS[0], TEXTS[1])

    assert run_remote(llm, tmp_path, body) == (expected, score)
