"""Tensor parallelism over NCCL: `make test-multi-gpu` runs it on a machine with at least 2 GPUs."""

from __future__ import annotations

import json
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


SIZES_OF_ALL = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "n_shared_experts": 1}
# config.json of models with random weights: experts, latent attention, norms over all heads
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {**EXPERTS, "num_experts": 8, "head_dim": 16},
    "DeepseekV3ForCausalLM": {**EXPERTS, **LATENT, **GROUPS, "v_head_dim": 16, "first_k_dense_replace": 1},
    "Olmo2ForCausalLM": {},
}


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", *CONFIGS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, name = tmp_path_factory.mktemp("model"), request.param
    if name in CONFIGS:
        raw = {"architectures": [name], **SIZES_OF_ALL, **CONFIGS[name]}
        (path / "config.json").write_text(json.dumps(raw))
    else:
        made = tiny.checkpoint("qwen3", "bfloat16")
        heads.write_model(path, made.config, made.tensors)
    yield path


def outputs(folder: Path, size: int, invariant: bool, drafts: bool, one_by_one: bool = False) -> list[Any]:
    spec = {"method": "ngram", "num_speculative_tokens": 3} if drafts else None
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "skip_tokenizer_init": True, "device": "cuda"}
    if not (folder / "model.safetensors").exists():
        sizes |= {"load_format": "dummy", "dtype": "bfloat16"}
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
