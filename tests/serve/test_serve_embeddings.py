"""/v1/embeddings, /v1/score and /v1/rerank: equal to LLM, also from an engine in another process."""

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
from draftproof.errors import ConfigError
from draftproof.serve.http.app import create_app
from draftproof.serve.ipc.remote_llm import RemoteLLM
from draftproof.serve.settings import Settings
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
        ("score", {"text_1": "a", "text_2": "b", "score_type": "cosine"}, "score_type", "--pooling-type"),
        (
            "score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 3},
            "truncate_prompt_tokens",
            "for",
        ),
        ("rerank", {"query": "a", "documents": ["b"]}, None, "--classifier-from-token"),
        ("rerank", {"query": "a", "documents": []}, "documents", "length"),
        ("rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0]", "str"),
    ],
)
def test_wrong_bodies_are_refused(served: Served, path: str, body: Any, param: Any, text: str) -> None:
    response = served.post(f"/v1/{path}", body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and text in error["message"]


def test_scores_of_an_embedding_model_are_cosines_and_order_documents(folder: Path) -> None:
    """Compare with numpy over the embeddings, in vLLM's form of the bodies."""
    with serving(tiny(folder, NGRAM, pooling_type="mean")) as served:
        rows = [
            one.embedding for one in served.client.embeddings.create(model=served.model, input=TEXTS).data
        ]
        expected = (np.float64(rows) @ np.float64(rows[0])).tolist()
        found = [served.post(path, {"text_1": TEXTS[0], "text_2": TEXTS}) for path in ("/score", "/v1/score")]
        scores = [one["score"] for one in found[0].json()["data"]]
        assert np.allclose(scores, expected, atol=1e-6) and len(set(scores)) == 4 and scores[0] > 0.999
        assert found[1].json()["data"] == found[0].json()["data"]
        assert found[0].json()["score_type"] == "cosine" and "is_greedy" not in found[0].json()["data"][0]
        body = {"query": TEXTS[0], "documents": TEXTS, "top_n": 3}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = served.post(path, body).json()["results"]
            order = sorted(range(4), key=lambda i: -scores[i])[:3]
            assert [one["index"] for one in results] == order
            assert [one["relevance_score"] for one in results] == [scores[i] for i in order]
            assert [one["document"]["text"] for one in results] == [TEXTS[i] for i in order]
        likelihood = {"text_1": TEXTS[0], "text_2": TEXTS[1], "score_type": "log_likelihood"}
        assert served.post("/v1/score", likelihood).json()["data"][0]["score"] < 0


@pytest.mark.parametrize("speculative_config", [None, NGRAM])
def test_scores_of_a_reranker_are_probabilities_of_its_tokens(folder: Path, speculative_config: Any) -> None:
    """Compare with the logprobs of the first output token after the joined texts."""
    settings = Settings(classifier_from_token=("a", "b"))
    with serving(tiny(folder, speculative_config), settings) as served:
        encode = served.llm.get_tokenizer().encode
        ids = [encode(token, add_special_tokens=False)[0] for token in ("a", "b")]
        expected = []
        for text in TEXTS:
            joined = {"prompt": TEXTS[0] + text, "max_tokens": 1, "logprob_token_ids": ids, "temperature": 0}
            row = served.post("/v1/completions", joined).json()["choices"][0]["logprobs"]["top_logprobs"][0]
            expected.append(1 / (1 + np.exp(row["a"] - row["b"])))
        found = served.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
        scores = [one["score"] for one in found["data"]]
        assert np.allclose(scores, expected, rtol=1e-12) and len(set(scores)) == 4
        assert found["score_type"] == "probability"
        results = served.post("/rerank", {"query": TEXTS[0], "documents": TEXTS}).json()["results"]
        assert [one["relevance_score"] for one in results] == sorted(scores, reverse=True)
    with pytest.raises(ConfigError, match="one is needed"):
        create_app(served.llm, Settings(classifier_from_token=("a", "one two three")))
    with pytest.raises(ConfigError, match="two tokens"):
        Settings(classifier_from_token=("a",))


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
