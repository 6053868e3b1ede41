"""Weight updates under the names of models of transformers: fused, stacked and with an offset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import LoadError
from draftproof.models.load import load_checkpoint
from draftproof.models.weights.packed_tree import tensors_in

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# 2 * 16 inner rows are the hidden size: a transposed matrix has the same shape
FAMILIES: dict[str, dict[str, Any]] = {
    "Phi3": {},
    "Glm4": {},
    "Gemma3Text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "Qwen2Moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4},
    "Glm4Moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "DeepseekV3": {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                   "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def model(family: str, seed: int) -> Any:
    """Return a random model of transformers, with random norms and biases as well."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    made = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for value in (*made.parameters(), *made.buffers()):
            if value.is_floating_point():
                value.add_(0.1 * torch.randn(value.shape))
    return made


def engine_of(folder: Path) -> Engine:
    sizes = {"max_model_len": 32, "max_num_seqs": 1, "kv_cache_tokens": 64, "max_num_batched_tokens": 32}
    options: dict[str, Any] = {"device": "cpu", "backend": "torch", "warm_up": False, **sizes}
    return Engine(EngineConfig(model="tiny", **options), load_checkpoint(folder, dtype="float32"))


def packed(engine: Engine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors_in(engine.runner.model.entries)]


def named(made: Any) -> dict[str, torch.Tensor]:
    """Return the weights as a trainer has them; the correction biases of routers are buffers."""
    biases = {name: b for name, b in made.named_buffers() if name.endswith("e_score_correction_bias")}
    return {**dict(made.named_parameters()), **biases}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_a_transformers_model(family: str, tmp_path: Path) -> None:
    """Every packed weight has the bits of an engine that was started with the saved files of the model."""
    new = model(family, seed=2)
    model(family, seed=1).save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    engine, want = engine_of(tmp_path / "old"), packed(engine_of(tmp_path / "new"))
    assert not any(map(torch.equal, packed(engine), want))
    engine.update_weights(engine.read_weights(named(new).items()))
    assert all(map(torch.equal, packed(engine), want))
    again = engine_of(tmp_path / "old")
    again.update_weights(again.read_weights(tmp_path / "new"))
    assert all(map(torch.equal, packed(again), want))


def test_a_weight_by_itself_and_in_a_fused_one_is_refused(tmp_path: Path) -> None:
    made = model("Phi3", seed=1)
    made.save_pretrained(tmp_path)
    engine, given = engine_of(tmp_path), named(made)
    name = "model.layers.1.mlp.{}.weight"
    part = given[name.format("gate_up_proj")][:48]
    with pytest.raises(LoadError, match="given twice: by itself and in"):
        engine.read_weights({name.format("up_proj"): part, **given})
    with pytest.raises(LoadError, match="cannot be split"):
        engine.read_weights({name.format("gate_up_proj"): part})
