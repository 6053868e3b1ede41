"""Embeddings: same bits in every batch, chunking and preemption; equal to hidden states of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_transformers import MODELS, make, tokens_of

import tiny
from draftproof import LLM, PoolingParams, SamplingParams
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.sequence import PooledRows, Sequence
from draftproof.frontend.pooler import Pooler, read_pooler
from exact import check_empty
from gguf_files import write_gguf

KINDS: Any = ("last", "mean")
LENGTHS = (50, 1, 33, 90, 16)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


def requests(kind: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    params = PoolingParams().sampling_params()
    return [tiny.request(i, params, length, pooling=kind) for i, length in enumerate(lengths)]


def embeddings(engine: Engine, kind: Any, others: int = 0, **options: Any) -> list[bytes]:
    """Return the bytes of each embedding, computed beside `others` requests that generate."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, prompt_logprobs=0)
    more = [tiny.request(100 + i, params, 30) for i in range(others)]
    records = tiny.run(engine, [*requests(kind), *more], **options)
    check_empty(engine)
    found = []
    for i in range(len(LENGTHS)):
        (step,) = [s for s in records[str(i)].steps if s.embedding is not None]
        found.append(step.embedding.tobytes())
    return found


@cache
def alone(kind: str, dtype: str = "float32") -> list[bytes]:
    """Return the embeddings of requests that are served one after the other, each in one chunk."""
    arrivals = [3 * i for i in range(len(LENGTHS))]
    engine = tiny.engine(dtype=dtype, max_num_batched_tokens=128, enable_prefix_caching=False)
    return embeddings(engine, kind, arrivals=arrivals)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"max_num_batched_tokens": 256}, 0),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 3}, 2),
        ({"max_num_batched_tokens": 24, "speculative": NGRAM}, 3),
        ({"max_num_batched_tokens": 48, "speculative": NGRAM, "overlap": True}, 3),
        ({"backend": "torch", "max_num_batched_tokens": 32}, 1),
        ({"backend": "padded_ops:PaddedOps", "overlap": True, "max_num_batched_tokens": 48}, 3),
        ({"backend": "test_wanted_rows:NarrowOps", "overlap": True, "max_num_batched_tokens": 64}, 2),
    ],
    ids=["whole", "chunks", "drafts", "overlap", "torch", "padded", "narrow"],
)
def test_bits_do_not_depend_on_batch_and_chunks(kind: str, options: dict[str, Any], others: int) -> None:
    engine = tiny.engine(**options)
    found = embeddings(engine, kind, others)
    if options.get("backend") == "torch":  # its own bits
        expected = embeddings(tiny.engine(backend="torch", max_num_batched_tokens=128), kind)
        assert found == expected
    else:
        assert found == alone(kind)
    assert found == embeddings(engine, kind, others), "the second time prefixes are cached"


def few_pages(kind: str) -> tuple[list[bytes], int]:
    """Return embeddings of an engine that preempts, and the number of preemptions."""
    engine = tiny.engine(max_num_batched_tokens=24, page_size=8, kv_cache_tokens=136, max_num_seqs=8)
    scheduler = engine.loop.scheduler

    def preempt(step: int) -> None:
        """Preempt every second step, in the middle of prompts."""
        if step % 2 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])

    return embeddings(engine, kind, others=2, each_step=preempt), engine.stats().num_preemptions


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_have_the_same_bits(kind: str) -> None:
    found, num_preemptions = few_pages(kind)
    assert found == alone(kind) and num_preemptions >= 4


def test_control_cached_rows_that_are_not_added_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take prefixes from the cache although the mean needs their rows."""
    monkeypatch.setattr(Sequence, "max_cached_tokens", property(lambda self: len(self.ids) - 1))
    engine = tiny.engine(max_num_batched_tokens=256)
    with pytest.raises(AssertionError):
        assert [embeddings(engine, "mean") for _ in range(2)] == [alone("mean")] * 2


def test_control_sums_by_chunk_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the sum of each chunk instead of its rows, in fp32."""

    def by_chunk(self: PooledRows, rows: Any) -> PooledRows:
        total = rows.astype(np.float32).sum(0) + (self.total if self.count else 0)
        return PooledRows(self.count + len(rows), total.astype(np.float64))

    monkeypatch.setattr(PooledRows, "plus", by_chunk)
    engines = [tiny.engine(max_num_batched_tokens=size) for size in (256, 16)]
    first, second = (embeddings(engine, "mean") for engine in engines)
    assert first != second


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "mistral"])
def test_embeddings_are_the_hidden_states_of_transformers(name: str, tmp_path: Path) -> None:
    """Compare the last row and the mean with the last hidden states, normalised and as they are."""
    assert name in MODELS
    model, ids = make(name, tmp_path), tokens_of(70)
    with torch.inference_mode():
        hidden = model.model(ids[None]).last_hidden_state[0].double().numpy()
    for kind, row in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        with LLM(
            str(tmp_path),
            dtype="float32",
            pooling_type=kind,
            max_num_batched_tokens=32,
            skip_tokenizer_init=True,
            device="cpu",
        ) as llm:
            plain, unit = PoolingParams(normalize=False), PoolingParams()
            found = [np.array(out.outputs.embedding) for out in llm.embed([ids.tolist()] * 2, [plain, unit])]
        assert np.abs(found[0] - row).max() < 2e-5 * np.abs(row).max()
        assert np.abs(found[1] - row / np.linalg.norm(row)).max() < 2e-5
        assert np.linalg.norm(found[1]) == pytest.approx(1, abs=1e-6)


def test_pooler_is_read_from_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    import json

    def pooler(modules: list[str] | None, pooling: Any = None, config: Any = None, **options: Any) -> Pooler:
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        (tmp_path / "modules.json").unlink(missing_ok=True)
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
        if modules is not None:
            entries = [
                {"idx": i, "name": str(i), "type": f"sentence_transformers.models.{name}",
                 "path": "1_Pooling" if name == "Pooling" else ""}
                for i, name in enumerate(modules)
            ]  # fmt: skip
            (tmp_path / "modules.json").write_text(json.dumps(entries))
        return read_pooler(EngineConfig(model="m", **options), 32, tmp_path)

    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}
    cls = {"pooling_mode_cls_token": True, "word_embedding_dimension": 32}
    assert pooler(None) == Pooler(32, "last", True)
    assert pooler(["Transformer", "Pooling"], mean) == Pooler(32, "mean", False, is_embedding_model=True)
    assert pooler(["Transformer", "Pooling", "Normalize"], {"pooling_mode": "lasttoken"}) == Pooler(
        32, is_embedding_model=True
    )
    assert pooler(["Transformer", "Pooling"], mean, pooling_type="last") == Pooler(
        32, "last", False, is_embedding_model=True
    )
    assert pooler(["Transformer", "Pooling"], mean, normalize_embeddings=True) == Pooler(
        32, "mean", True, is_embedding_model=True
    )
    assert "cls_token" in str(pooler(["Transformer", "Pooling"], cls).refusal)
    assert pooler(["Transformer", "Pooling"], cls, pooling_type="last").refusal is None
    dense = pooler(["Transformer", "Pooling", "Dense"], mean, pooling_type="last")
    assert "Dense" in str(dense.refusal)
    assert pooler(None, config={"matryoshka_dimensions": [16, 8]}) == Pooler(
        32, "last", True, True, matryoshka_dimensions=(8, 16)
    )
    assert pooler(None, config={"is_matryoshka": True}).is_matryoshka
    assert "causal" in str(pooler(None, config={"is_causal": False}).refusal)


def test_pooling_type_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for number, expected in ((1, "mean"), (3, "last"), (None, "last")):
        write_gguf(path, "llama", tiny.model_config("llama"), extra={"pooling_type": number})
        found = read_pooler(EngineConfig(model="m"), 32, path)
        is_embedding_model = number is not None
        assert found == Pooler(32, expected, is_embedding_model=is_embedding_model), number  # type: ignore[arg-type]
    write_gguf(path, "llama", tiny.model_config("llama"), extra={"pooling_type": 2})
    assert "cls" in str(read_pooler(EngineConfig(model="m"), 32, path).refusal)


def test_decoders_without_a_head_load_as_embedding_models(tmp_path: Path) -> None:
    """Save the decoder alone, as Qwen3-Embedding is: tensor names without `model.`, tied embeddings."""
    model = make("qwen3_tied", tmp_path)
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    ids = [[5, 6, 7, 8]]
    with LLM(str(tmp_path), **options) as llm:
        expected = llm.embed(ids)[0].outputs.embedding
    config = (tmp_path / "config.json").read_text()
    model.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with LLM(str(tmp_path), **options) as llm:
        assert llm.embed(ids)[0].outputs.embedding == expected
