"""GGUF files of model families, written as llama.cpp's converter does, against the folders of the models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import mtp_models
import tiny
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.engine.engine import Engine
from draftproof.errors import LoadError
from draftproof.models.draft_head.formats import read_draft_head
from draftproof.models.load import load_checkpoint
from draftproof.sampling_params import SamplingParams
from gguf_files import split_latent_up, stack_experts, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.3}
GRANITE |= {"residual_multiplier": 0.22, "logits_scaling": 4.0}
# architecture of llama.cpp -> (family of transformers, options, metadata)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "granite": (
        "Granite",
        GRANITE,
        {"embedding_scale": 6.0, "attention.scale": 0.3, "residual_scale": 0.22, "logit_scale": 4.0},
    ),
    "olmo2": ("Olmo2", {}, {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}, {}),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 7, "query_pre_attn_scalar": 8, "sliding_window": 5},
        {"attention.sliding_window": 5},
    ),
    "ernie4_5": ("Ernie4_5", {}, {}),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 2},
        {**EXPERTS, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    ),
    "glm4moe": (
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}
        | {"num_nextn_predict_layers": 0},
        {**EXPERTS, "expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True}
        | {"leading_dense_block_count": 1, "rope.dimension_count": 4},
    ),
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 5, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 2}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
LATENT |= {"num_nextn_predict_layers": 0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn", "rope_theta": 10000.0}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN_KEYS |= {"rope.scaling.original_context_length": 32}
# llama.cpp stores one wide head, and the widths of heads in keys of their own
LATENT_KEYS = {"attention.q_lora_rank": 12, "attention.kv_lora_rank": 16, "rope.dimension_count": 4}
LATENT_KEYS |= {"attention.key_length": 20, "attention.value_length": 16, "attention.head_count_kv": 1}
LATENT_KEYS |= {"attention.key_length_mla": 10, "attention.value_length_mla": 5}
LATENT_KEYS |= {**EXPERTS, "leading_dense_block_count": 1, "expert_shared_count": 2}
FAMILIES |= {
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}, {"rope.dimension_count": 4}),
    "phi3": ("Phi3", {"sliding_window": 7}, {"attention.sliding_window": 7}),
    "phi3/longrope": (
        "Phi3",
        {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.1, 1.3], "long_factor": [2.5, 3.7]}},
        {"rope.dimension_count": 4, "rope.scaling.original_context_length": 32}
        | {"rope.scaling.attn_factor": 1.1832159566199232},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "intermediate_size": 48}
        | {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
        {**EXPERTS, **YARN_KEYS, "expert_feed_forward_length": 48, "attention.sliding_window": 5},
    ),
    "deepseek2": (
        "DeepseekV3",
        {**LATENT, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        {**LATENT_KEYS, **YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.0707, "expert_gating_func": 2}
        | {"expert_weights_norm": True, "expert_weights_scale": 2.5}
        | {"expert_group_count": 2, "expert_group_used_count": 1},
    ),
    "deepseek2/v2": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0},
        {**LATENT_KEYS, "attention.q_lora_rank": None, "expert_weights_scale": 1.0},
    ),
}
LONGROPE = {"rope_factors_short.weight": [1.1, 1.3], "rope_factors_long.weight": [2.5, 3.7]}
AS_STORED = ("glm4moe", "glm4", "phi3")  # q and k in the order of the folder, and its fused projections


def write(path: Path, family: str, **changes: Any) -> Any:
    """Write a random model as a folder and a GGUF file; return the folder's checkpoint."""
    kind, options, extra = FAMILIES[family]
    arch = family.partition("/")[0]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for value in model.parameters():
        if value.ndim == 1:
            value.data = torch.rand_like(value)
    for name, value in model.named_buffers():
        if "correction" in name:
            value.copy_(torch.rand_like(value))
    model.save_pretrained(path / "folder")
    want = load_checkpoint(path / "folder", dtype="float32", progress=False)
    tensors = want.tensors
    if arch in AS_STORED:
        tensors = load_file(path / "folder" / "model.safetensors")
    tensors = split_latent_up(tensors, want.config)
    more = {name: np.array(v, np.float32) for name, v in LONGROPE.items() if "longrope" in family}
    write_gguf(path / "m.gguf", arch, want.config, tensors, extra={**extra, **changes}, more=more)
    return want, tensors


@pytest.mark.parametrize("arch", FAMILIES)
def test_gguf_of_a_family_equals_its_folder(tmp_path: Path, arch: str) -> None:
    want, _ = write(tmp_path, arch)
    for keep_blocks in (False, True):
        found = load_checkpoint(tmp_path / "m.gguf", dtype="float32", progress=False, keep_blocks=keep_blocks)
        ends = {"bos_token_id": None, "eos_token_ids": ()}
        assert replace(found.config, **ends) == replace(want.config, **ends)
        assert found.tensors.keys() == want.tensors.keys()
        for name, tensor in want.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize("arch", FAMILIES)
def test_names_in_the_files_are_those_of_llama_cpp(tmp_path: Path, arch: str) -> None:
    """Compare with the table of the package gguf, which converters use."""
    want, tensors = write(tmp_path, arch)
    named = arch.partition("/")[0]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == named)
    table = gguf.get_tensor_name_map(kind, want.config.num_layers)
    stored = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors} - LONGROPE.keys()
    names = [name.replace("experts.0.", "experts.") for name in stack_experts(tensors)]
    names = [f"{name}.weight" if name.endswith(".sinks") else name for name in names]
    names = [name.replace("e_score_correction_bias", "e_score_correction.bias") for name in names]
    assert {table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names} == stored


def write_with_mtp(path: Path) -> Path:
    """Write a GLM-4.5 model with two MTP layers as a folder and a GGUF file; return the path of the file."""
    mtp_models.save_family(path / "folder", "Glm4Moe", layers=2)
    want = load_checkpoint(path / "folder", dtype="float32", progress=False)
    extra = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 20}
    extra |= {"expert_gating_func": 2, "leading_dense_block_count": 1, "rope.dimension_count": 8}
    extra |= {"nextn_predict_layers": 2, "block_count": 4}
    tensors = load_file(path / "folder" / "model.safetensors")
    write_gguf(path / "m.gguf", "glm4moe", want.config, tensors, extra=extra)
    return path / "m.gguf"


def test_mtp_layers_of_a_file_are_those_of_the_folder(tmp_path: Path) -> None:
    path = write_with_mtp(tmp_path)
    want, found = read_draft_head(tmp_path / "folder", 2), read_draft_head(path, 2)
    assert found[0] == replace(want[0], native=found[0].native) and found[0].chain_length == 2
    assert found[1].keys() == want[1].keys()
    for name, weight in want[1].items():
        assert torch.equal(found[1][name].dequantize(torch.float32), weight.dequantize(torch.float32)), name
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 4)
    names = {"eh_proj", "enorm", "hnorm", "shared_head.norm"}
    stored = {table.get_name(f"model.layers.{layer}.{name}") for layer in (2, 3) for name in names}
    assert {f"{name}.weight" for name in stored} <= {t.name for t in gguf.GGUFReader(path).tensors}


def test_mtp_layers_of_a_file_draft_and_change_no_output(tmp_path: Path) -> None:
    path = write_with_mtp(tmp_path)
    params = SamplingParams(temperature=0.7, max_tokens=10, ignore_eos=True, logprobs=1)
    requests, made = [tiny.request(i, params) for i in range(2)], []
    for spec in (None, {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}):
        config = EngineConfig(
            model=str(path),
            speculative=SpeculativeConfig.parse(spec) if spec else None,
            device="cpu",
            backend="torch",
            max_model_len=64,
            warm_up=False,
        )
        made.append(tiny.run(Engine(config, load_checkpoint(path, progress=False)), requests))
    assert [made[0][r.id].same() for r in requests] == [made[1][r.id].same() for r in requests]
    assert sum(step.num_draft for record in made[1].values() for step in record.steps) > 10


def test_file_without_its_mtp_layers_is_an_error_with_the_reason(tmp_path: Path) -> None:
    want, _ = write(tmp_path, "glm4moe")
    extra = {**FAMILIES["glm4moe"][2], "nextn_predict_layers": 1, "block_count": want.config.num_layers + 1}
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    write_gguf(tmp_path / "m.gguf", "glm4moe", want.config, tensors, extra=extra)
    found = load_checkpoint(tmp_path / "m.gguf", dtype="float32", progress=False)
    assert found.tensors.keys() == want.tensors.keys()
    with pytest.raises(LoadError, match=r"name 1 MTP layer.*no tensor of one \(such as blk\.3\.nextn"):
        read_draft_head(found.config.mtp_source, 3)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func = 1 is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
    ],
)
def test_unsupported_metadata_are_refused(
    tmp_path: Path, arch: str, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, arch, **changes)
    with pytest.raises(LoadError, match=message):
        load_checkpoint(tmp_path / "m.gguf", progress=False)
