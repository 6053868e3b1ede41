"""Mixtures of experts in GGUF files: the stacked tensors of llama.cpp against the same model in floats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.models.config import ModelConfig, MoeConfig
from draftproof.models.load import load_checkpoint
from draftproof.ops import Routing
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from gguf_files import write_gguf

MIXTRAL = MoeConfig(
    Routing(4, 2),
    intermediate_size=64,
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    projections=("w1", "w3", "w2"),
)
FILES = {
    "llama": ("qwen3_moe", {"architecture": "MixtralForCausalLM", "qk_norm": False, "moe": MIXTRAL}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {}),
}


def model_of(arch: str) -> ModelConfig:
    name, changes = FILES[arch]
    config = replace(tiny.model_config(name), hidden_size=64, intermediate_size=64, **changes)
    assert config.moe is not None
    moe = replace(config.moe, intermediate_size=64, dense_layers=())
    if moe.shared_intermediate_size:
        moe = replace(moe, shared_intermediate_size=96)
    return replace(config, moe=moe)


def write(path: Path, arch: str, kind: str) -> dict[str, torch.Tensor]:
    config = model_of(arch)
    assert config.moe is not None
    extra = {
        "expert_count": config.moe.routing.num_experts,
        "expert_used_count": config.moe.routing.top_k,
        "expert_feed_forward_length": config.moe.intermediate_size,
        "expert_shared_feed_forward_length": config.moe.shared_intermediate_size or None,
    }
    tensors = load_checkpoint(config, dtype="float32", load_format="dummy", seed=3).tensors
    write_gguf(path, arch, config, tensors, kind=kind, extra=extra)
    return tensors


@pytest.mark.parametrize("arch", FILES)
def test_stacked_experts_are_read_one_by_one(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    want = write(path, arch, "F32")
    found = load_checkpoint(path, dtype="float32", keep_blocks=True)
    assert found.config.moe == model_of(arch).moe
    assert found.config.architecture == model_of(arch).architecture
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("arch", FILES)
def test_experts_in_blocks_give_the_same_text_with_drafts(arch: str, tmp_path: Path) -> None:
    """Blocks of the file are multiplied as they are; the bits are those without drafts."""
    path = tmp_path / "model.gguf"
    write(path, arch, "Q8_0")
    params = SamplingParams(temperature=0.7, max_tokens=24, logprobs=2, ignore_eos=True)
    records = []
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        speculative = SpeculativeConfig.parse(drafts) if drafts else None
        loaded = load_checkpoint(path, dtype="float32", keep_blocks=True)
        sizes = {"max_model_len": 64, "max_num_seqs": 4}
        config = EngineConfig(model=arch, device="cpu", warm_up=False, speculative=speculative, **sizes)
        records.append(tiny.run(Engine(config, loaded), [tiny.request(i, params) for i in range(3)]))
    assert {key: r.same() for key, r in records[0].items()} == {
        key: r.same() for key, r in records[1].items()
    }
