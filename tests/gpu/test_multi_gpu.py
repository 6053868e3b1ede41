"""Tensor parallelism over NCCL: `make test-multi-gpu` runs it on a machine with at least 2 GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import heads
import tiny
from draftproof import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")
SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]
PROMPTS = [{"prompt_token_ids": tiny.prompt(i, 5 + 9 * i)} for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.7 * (i % 2), seed=i, logprobs=3, prompt_logprobs=2)
    for i in range(6)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made, path = tiny.checkpoint("qwen3", "bfloat16"), tmp_path_factory.mktemp("model")
    heads.write_model(path, made.config, made.tensors)
    yield path


def outputs(folder: Path, size: int, invariant: bool, drafts: bool, one_by_one: bool = False) -> list[Any]:
    spec = {"method": "ngram", "num_speculative_tokens": 3} if drafts else None
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "skip_tokenizer_init": True, "device": "cuda"}
    with LLM(
        str(folder), tensor_parallel_size=size, tp_invariant=invariant, speculative_config=spec, **sizes
    ) as llm:
        pairs = zip(PROMPTS, PARAMS, strict=True)
        results = (
            [llm.generate(prompt, params)[0] for prompt, params in pairs]
            if one_by_one
            else llm.generate(PROMPTS, PARAMS)
        )
        return [(r.outputs[0].token_ids, r.outputs[0].logprobs, r.prompt_logprobs) for r in results]


@pytest.mark.parametrize("size", SIZES)
def test_drafts_and_batches_change_no_bit(folder: Path, size: int) -> None:
    alone = outputs(folder, size, invariant=False, drafts=False, one_by_one=True)
    assert outputs(folder, size, invariant=False, drafts=True) == alone


@pytest.mark.parametrize("size", SIZES)
def test_the_number_of_ranks_changes_no_bit(folder: Path, size: int) -> None:
    assert outputs(folder, size, invariant=True, drafts=True) == outputs(folder, 1, True, drafts=False)
