"""DeepSeek-V2 and V3 (latent attention, grouped routing) against transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import ConfigError, LoadError
from draftproof.models.load import load_checkpoint
from draftproof.models.registry import config_from_hf, kv_layout
from draftproof.models.weight_formats import FloatWeight, Fp8BlockWeight, quantize_linears
from draftproof.ops import resolve
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from latent_layers import LATENT_SIZES

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    **LATENT_SIZES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 20, "rope_parameters": YARN}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2_lite": ("DeepseekV2", {"q_lora_rank": None, "n_shared_experts": 2}),
    "v2": ("DeepseekV2", {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}),
    "v3": ("DeepseekV3", GROUPS),
}


def make(name: str, folder: Path) -> Any:
    """Save a random model of transformers; norms and correction biases are random too."""
    family, options = MODELS[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    ).eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or "correction_bias" in key:
                value.copy_(torch.randn_like(value) * 0.3 + (1.0 if "norm" in key else 0.0))
    model.save_pretrained(folder)
    return model


def engine(folder: Path, **options: Any) -> Engine:
    config = EngineConfig(model="deepseek", max_model_len=160, max_num_seqs=2, warm_up=False, **options)
    return Engine(config, load_checkpoint(folder, dtype="float32"))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    model, prompt = make(name, tmp_path), tiny.prompt(1, 30, 199)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    record = tiny.run(engine(tmp_path), [tiny.request(0, params, prompt_token_ids=prompt)])["0"]
    tokens = torch.tensor([*prompt, *record.token_ids])
    with torch.inference_mode():
        want = torch.log_softmax(model(tokens[None]).logits[0].double(), -1)
    assert record.token_ids == want[len(prompt) - 1 : -1].argmax(-1).tolist()
    values = want[:-1].gather(1, tokens[1:, None])[:, 0]
    got = [row.logprobs[0] for row in [*record.prompt_logprobs[-len(prompt) + 1 :], *record.logprobs]]
    torch.testing.assert_close(torch.tensor(got).double(), values, rtol=1e-4, atol=1e-4)


def test_capacity_is_computed_from_latent_rows() -> None:
    config = tiny.model_config("deepseek_v3")
    assert config.latent is not None
    layout = kv_layout(config, torch.bfloat16)
    assert layout.bytes_per_token == config.num_layers * (config.latent.kv_rank + config.head_dim) * 2
    assert layout.shape(5, 8) == (1, 5, 8, 1, config.latent.kv_rank + config.head_dim)


@pytest.mark.parametrize("dtype", ("int8", "fp8"))
def test_quantised_latent_rows_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'auto' for latent attention"):
        tiny.engine("deepseek_v2", kv_cache_dtype=dtype)


def published(**changes: Any) -> dict[str, Any]:
    """Return config.json of DeepSeek-V3 as it is published, with changes."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        **changes,
    }


def test_published_configuration_is_read() -> None:
    config = config_from_hf(published())
    assert config.latent is not None and config.moe is not None
    assert config.latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.rope_scaling.attention_factor == 1.0
    assert kv_layout(config, torch.bfloat16).bytes_per_token == 61 * 576 * 2
    assert config.moe.dense_layers == (0, 1, 2)
    assert config.moe.shared_intermediate_size == 2048
    assert (config.moe.routing.scoring, config.moe.routing.group_score) == ("sigmoid", "top2_sum")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "biases of latent attention"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"scoring_func": "softmax"}, "'softmax' scores"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        config_from_hf(published(**changes))


def add_mtp_layer(folder: Path) -> None:
    """Add an MTP layer in the place after the last layer, under DeepSeek's names."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    extra = {k.replace("layers.2.", "layers.3."): v.clone() for k, v in tensors.items() if "layers.2." in k}
    shapes = {"enorm": (48,), "hnorm": (48,), "shared_head.norm": (48,), "eh_proj": (48, 96)}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        extra[f"model.layers.3.{name}.weight"] = drawn * 0.2 + (0.0 if name == "eh_proj" else 1.0)
    extra["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    extra["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | extra, file)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))


def test_layers_after_the_last_are_not_part_of_the_decoder(tmp_path: Path) -> None:
    make("v3", tmp_path)
    add_mtp_layer(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.num_layers == 3 and checkpoint.config.mtp_source == str(tmp_path)
    assert not [name for name in checkpoint.weights if "layers.3." in name]


def test_drafts_of_its_own_mtp_layer_change_no_bit(tmp_path: Path) -> None:
    """Draft with a layer of latent attention and experts; its drafts store latent rows too."""
    make("v3", tmp_path)
    add_mtp_layer(tmp_path)
    params = SamplingParams(temperature=0.8, max_tokens=24, logprobs=1)
    requests = [tiny.request(i, params, prompt_token_ids=tiny.prompt(i, 20, 199)) for i in range(2)]
    plain = tiny.run(engine(tmp_path), requests)
    target = engine(tmp_path, speculative=SpeculativeConfig(method="mtp", num_speculative_tokens=3))
    drafted = tiny.run(target, requests)
    assert [drafted[key].same() for key in plain] == [record.same() for record in plain.values()]
    assert sum(step.num_draft for record in drafted.values() for step in record.steps)


def test_fp8_blocks_are_exact_with_speculation(tmp_path: Path) -> None:
    """Load 128 x 128 blocks, as DeepSeek publishes them; the per-head projections are dequantised."""
    make("v3", tmp_path)
    file, stored = tmp_path / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        stored[name] = tensor
        if tensor.ndim == 2 and "_proj" in name:
            weight = Fp8BlockWeight.quantize(tensor)
            assert weight.scales is not None
            stored |= {name: weight.data, f"{name}_scale_inv": weight.scales}
    save_file(stored, file)
    raw = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    raw["quantization_config"] = quantization | {"activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    formats = {name: weight.format for name, weight in load_checkpoint(tmp_path).weights.items()}
    assert formats["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == "fp8_block"
    params = SamplingParams(temperature=0.8, max_tokens=24, logprobs=1)
    requests = [tiny.request(i, params, prompt_token_ids=tiny.prompt(i, 20, 199)) for i in range(2)]
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    plain = tiny.run(engine(tmp_path), requests)
    drafted = tiny.run(engine(tmp_path, speculative=drafts), requests)
    assert [drafted[key].same() for key in plain] == [record.same() for record in plain.values()]


@pytest.mark.parametrize("quantization", ("int8", "fp8"))
def test_quantization_on_load_keeps_per_head_projections_as_floats(quantization: str) -> None:
    weights, ops = tiny.checkpoint("deepseek_v3").weights, resolve("torch", torch.device("cpu"))
    quantize_linears(weights, quantization, ops)
    floats = {name for name, weight in weights.items() if isinstance(weight, FloatWeight)}
    quantized = {name.split(".")[-2] for name in weights.keys() - floats}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} <= quantized
    assert "kv_b_proj" not in quantized
