"""Model configurations equal those of transformers; unsupported ones are refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftproof.errors import LoadError
from draftproof.models.config import RopeScaling
from draftproof.models.registry import MODELS, config_from_hf, expected_tensors
from draftproof.models.rope import rope_table

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"] * 2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def hf_config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**(SIZES | changes))


def saved(folder: Path, config: Any, kind: str) -> dict[str, Any]:
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def raw(name: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [name], **SIZES, **changes}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Llama", {"head_dim": 32, "rms_norm_eps": 1e-5, "num_key_value_heads": None}),
        ("Mistral", {}),
        ("Mistral", {"sliding_window": None, "head_dim": 32}),
        ("Mistral", {"sliding_window": 7}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
        ("Qwen3", {"head_dim": 32}),
        ("Ernie4_5", {}),
        ("Ernie4_5", {"head_dim": 32, "use_bias": True, "tie_word_embeddings": False}),
        ("Qwen3", {"attention_bias": True}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED_LAYERS}),
    ],
)
def test_config_equals_that_of_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    theirs = hf_config(kind, **changes)
    written = saved(tmp_path, theirs, kind)
    ours = config_from_hf(written)
    if "layer_types" not in changes:  # transformers 4 did not write them out
        assert config_from_hf({k: v for k, v in written.items() if k != "layer_types"}) == ours
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if theirs.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert expected_tensors(ours) == shapes
    windows = [getattr(layer.self_attn, "sliding_window", None) or 0 for layer in model.model.layers]
    if kind == "Mistral":
        windows = [theirs.sliding_window or 0] * 4
    assert ours.windows == tuple(windows)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        LLAMA3,
        YARN | {"rope_theta": 10000.0},
        YARN | {"rope_theta": 1000000.0, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
        YARN | {"rope_theta": 10000.0, "truncate": False},
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("old_style", [False, True])
def test_rope_table_has_the_bits_of_transformers(rope: dict[str, Any], old_style: bool) -> None:
    theirs = hf_config("Llama", rope_parameters=dict(rope), head_dim=64)
    if old_style:  # transformers 4: theta outside, the rest in rope_scaling
        scaling = {("type" if k == "rope_type" else k): v for k, v in rope.items() if k != "rope_theta"}
        ours = config_from_hf(raw(head_dim=64, rope_theta=rope["rope_theta"], rope_scaling=scaling))
    else:
        ours = config_from_hf(raw(head_dim=64, rope_parameters=rope))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    cos, sin = rotary(torch.zeros(1), torch.arange(512)[None])
    table = rope_table(ours, 512)
    assert table.dtype == torch.float32
    assert torch.equal(table, torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=1))
    plain = rope_table(config_from_hf(raw(head_dim=64)), 512)
    assert not torch.equal(table, plain)  # the scaling did something


def test_rope_rows_do_not_depend_on_the_table_length() -> None:
    config = config_from_hf(raw(head_dim=64, rope_parameters=LLAMA3))
    whole = rope_table(config, 1000)
    for length in (1, 2, 7, 100, 513):
        assert torch.equal(rope_table(config, length), whole[:length])


def test_wrong_number_of_rope_factors_is_refused() -> None:
    config = replace(config_from_hf(raw()), rope_scaling=RopeScaling("factors", factors=(1.0,) * 3))
    with pytest.raises(LoadError, match="rope factors"):
        rope_table(config, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": []}, "supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"num_local_experts": 8}, "experts"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*length"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": 0}, "config"),
        ({"num_key_value_heads": 3}, "num_kv_heads .3."),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"head_dim": 7}, "head_dim"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "different attention"),
    ],
)
def test_unsupported_configs_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    config_from_hf(raw())  # the same without the change is fine
    with pytest.raises(LoadError, match=f"config.json.*{message}"):
        config_from_hf(raw() | changes)


def test_sliding_layers_need_a_window() -> None:
    types = ["sliding_attention"] * 4
    with pytest.raises(LoadError, match="sliding_attention"):
        config_from_hf(raw("Qwen2ForCausalLM", layer_types=types))
    with pytest.raises(LoadError, match="chunked"):
        config_from_hf(raw("Qwen2ForCausalLM", layer_types=["chunked_attention"] * 4))
    on = raw("Qwen2ForCausalLM", layer_types=types, use_sliding_window=True, sliding_window=8)
    assert config_from_hf(on).windows == (8, 8, 8, 8)


def test_end_tokens_come_from_both_files() -> None:
    config = config_from_hf(raw(eos_token_id=5, bos_token_id=4), {"eos_token_id": [9, 5]})
    assert config.eos_token_ids == (9, 5)
    assert config.bos_token_id == 4
    assert config_from_hf(raw(eos_token_id=[3, 3])).eos_token_ids == (3,)
    assert config_from_hf(raw("Qwen2ForCausalLM")).eos_token_ids == ()


def test_every_architecture_has_its_transformers_class() -> None:
    for name in set(MODELS) - {"MiMoForCausalLM"}:  # its code is in the checkpoint
        assert hasattr(transformers, name)
