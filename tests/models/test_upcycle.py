"""Upcycled models: copies of one MLP give the text of the dense model; noise gives another text."""

from __future__ import annotations

from typing import Any

import pytest
from common.upcycle import upcycle

import tiny
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.models.load import Checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig


def texts(model: Checkpoint, drafts: dict[str, Any] | None = None) -> list[tuple[list[int], list[float]]]:
    speculative = SpeculativeConfig.parse(drafts) if drafts else None
    sizes = {"max_model_len": 96, "max_num_seqs": 4}
    config = EngineConfig(model="tiny", device="cpu", warm_up=False, speculative=speculative, **sizes)
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=0, ignore_eos=True)
    records = tiny.run(Engine(config, model), [tiny.request(i, params) for i in range(4)])
    return [(r.token_ids, [row.logprobs[0] for row in r.logprobs]) for r in records.values()]


def test_copied_experts_give_the_text_of_the_dense_model() -> None:
    dense = tiny.checkpoint("smollm2")
    for (want, values), (got, own) in zip(texts(dense.copy()), texts(upcycle(dense.copy())), strict=True):
        assert got == want
        assert own == pytest.approx(values, abs=1e-4)


def test_experts_that_differ_give_another_text_and_the_same_with_drafts() -> None:
    dense = tiny.checkpoint("smollm2")
    plain = texts(upcycle(dense.copy(), noise=0.5))
    assert plain != texts(dense.copy())
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    assert texts(upcycle(dense.copy(), noise=0.5), drafts) == plain
