"""GGUF files of model families, written as llama.cpp's converter does, against the folders of the models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from draftproof.errors import LoadError
from draftproof.models.load import load_checkpoint
from gguf_files import stack_experts, write_gguf

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
STORED_PARTLY_ROTATED = ("glm4moe",)  # q and k in the order of the folder, not of the model


def write(path: Path, arch: str, **changes: Any) -> Any:
    """Write a random model as a folder and a GGUF file; return the folder's checkpoint."""
    kind, options, extra = FAMILIES[arch]
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
    if arch in STORED_PARTLY_ROTATED:
        tensors = load_file(path / "folder" / "model.safetensors")
    write_gguf(path / "m.gguf", arch, want.config, tensors, extra={**extra, **changes})
    return want


@pytest.mark.parametrize("arch", FAMILIES)
def test_gguf_of_a_family_equals_its_folder(tmp_path: Path, arch: str) -> None:
    want = write(tmp_path, arch)
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
    want = write(tmp_path, arch)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, want.config.num_layers)
    stored = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    names = [name.replace("experts.0.", "experts.") for name in stack_experts(want.tensors)]
    names = [name.replace("e_score_correction_bias", "e_score_correction.bias") for name in names]
    assert {table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names} == stored


def test_mtp_layers_of_a_file_are_left_out(tmp_path: Path) -> None:
    want = write(tmp_path, "glm4moe")
    layers = want.config.num_layers
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    extra = {**FAMILIES["glm4moe"][2], "nextn_predict_layers": 1, "block_count": layers + 1}
    more = {f"blk.{layers}.nextn.eh_proj.weight": torch.ones(32, 64).numpy()}
    write_gguf(tmp_path / "m.gguf", "glm4moe", want.config, tensors, extra=extra, more=more)
    found = load_checkpoint(tmp_path / "m.gguf", dtype="float32", progress=False)
    assert found.config.num_layers == layers and found.tensors.keys() == want.tensors.keys()


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
