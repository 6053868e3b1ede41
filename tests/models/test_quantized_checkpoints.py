"""Quantised checkpoints of public tools: stored values, the same output with drafts, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import quantized_files as files
from draftproof import LLM, SamplingParams
from draftproof.errors import ConfigError, LoadError
from draftproof.models.load import load_checkpoint, load_config
from draftproof.models.quantized import layouts
from draftproof.models.quantized.config import parse_quantization
from quantized_files import SCHEMES, compressed, write_quantized

Q_PROJ = "model.layers.0.self_attn.q_proj"
PROMPTS: Any = [{"prompt_token_ids": [5, 9, 5, 9, 5, 9, 30 + i, 5, 9, 5]} for i in range(3)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_values_are_read_in_the_format_of_the_file(tmp_path: Path, scheme: str) -> None:
    exact = write_quantized(tmp_path, scheme)
    found = load_checkpoint(tmp_path, progress=False)
    assert found.dtype == torch.bfloat16
    assert found.weights["lm_head.weight"].format == "bf16"
    for name, matrix in exact.items():
        weight = found.weights[name]
        assert weight.format == SCHEMES[scheme][2]
        assert torch.equal(weight.dequantize(torch.bfloat16), matrix.bfloat16()), name
    config, _ = load_config(tmp_path)
    assert config.dtype == found.config.dtype and SCHEMES[scheme][0]["quant_method"] in config.dtype


@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_control_other_order_or_zero_points_are_seen(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: plain columns of AWQ and zero points of GPTQ without the offset give other values."""
    exact = write_quantized(tmp_path, scheme)
    monkeypatch.setattr(layouts, "AWQ_COLUMNS", list(range(8)))
    monkeypatch.setattr(layouts, "ONE_IN_EACH", 0)
    found = load_checkpoint(tmp_path, progress=False)
    assert not any(torch.equal(found.tensors[name], exact[name].bfloat16()) for name in exact)


def generate(folder: Path, backend: str, **options: Any) -> list[tuple[Any, Any]]:
    sizes = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "device": "cpu"}
    options["warm_up"] = False
    with LLM(str(folder), skip_tokenizer_init=True, backend=backend, **sizes, **options) as llm:
        params = SamplingParams(temperature=0.8, seed=7, max_tokens=16, logprobs=2, detokenize=False)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("scheme", "backend"),
    [("int8", "cpu"), ("awq", "cpu"), ("gptq_v2", "torch"), ("fp8", "cpu"), ("fp8_block", "cpu")],
)
def test_drafts_change_no_bit_of_the_output(tmp_path: Path, scheme: str, backend: str) -> None:
    write_quantized(tmp_path, scheme)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    plain = generate(tmp_path, backend)
    assert generate(tmp_path, backend, speculative_config=drafts) == plain
    assert len({tokens[0] for tokens, _ in plain}) > 1 or len({str(logprobs) for _, logprobs in plain}) > 1


@pytest.mark.parametrize("scheme", ["awq", "int4_zeros", "fp8_block", "int8"])
def test_logprobs_are_those_of_transformers_with_the_same_weights(tmp_path: Path, scheme: str) -> None:
    """Compare with transformers on dequantised weights; merged q, k, v and gate, up are covered by it."""
    exact = write_quantized(tmp_path, scheme)
    stored = load_file(tmp_path / "model.safetensors")
    settings = {key: value for key, value in files.CONFIG.items() if key != "dtype"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    names = [name for name in model.state_dict() if name in exact or name in stored]
    state = {name: exact.get(name, stored.get(name)).float() for name in names}
    assert set(model.state_dict()) == set(state)
    model.load_state_dict(state)
    ids = PROMPTS[0]["prompt_token_ids"]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "device": "cpu", "backend": "torch", "warm_up": False}
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_logprobs=-1, **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        rows = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].prompt_logprobs
    assert rows is not None
    found = torch.tensor([[row[i].logprob for i in range(files.VOCAB)] for row in rows[1:] if row])
    loss = (want[:-1].exp() * (want[:-1] - found)).sum(-1)
    assert loss.max() < 0.02  # a swapped projection gives 0.3 and more


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def update(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{Q_PROJ}.{name}"] = make(tensors[f"{Q_PROJ}.{name}"]).contiguous()

    return change


def not_finite(scales: torch.Tensor) -> torch.Tensor:
    return scales.index_fill(0, torch.tensor([0]), float("inf"))


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("int8", update("weight_scale", not_finite), "scales that are not finite"),
        ("fp8", update("weight_scale", not_finite), "scales that are not finite"),
        ("fp8_block", update("weight_scale_inv", not_finite), "scales that are not finite"),
        ("awq", update("scales", not_finite), "scales that are not finite"),
        ("int8", lambda t: t.pop(f"{Q_PROJ}.weight_scale"), "weight_scale missing"),
        ("fp8_block", lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"), "weight_scale_inv missing"),
        ("awq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), "qzeros missing"),
        ("gptq", lambda t: t.pop(f"{Q_PROJ}.qweight"), "qweight missing"),
        ("int4_zeros", lambda t: t.pop(f"{Q_PROJ}.weight_zero_point"), "weight_zero_point is missing"),
        ("int8", update("weight", lambda t: t[:, :32]), r"weight is \[64, 32\] but should be \[64, 64\]"),
        ("int8", update("weight", lambda t: t.float()), "weight is torch.float32"),
        ("int8", update("weight_scale", lambda t: t[:7]), "scales of shape"),
        ("fp8", update("weight", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype)), "not numbers"),
        ("awq", update("qweight", lambda t: t[:, :4]), r"qweight is \[64, 4\] but should be \[64, 8\]"),
        ("awq", update("scales", lambda t: t[:1]), r"scales is \[1, 64\] but should be \[2, 64\]"),
        ("gptq", update("g_idx", lambda t: t.flip(0)), "order of activations.*desc_act=False"),
        ("int4", update("weight_shape", lambda t: t * 2), r"weight_shape is \[128, 128\]"),
        ("int4", lambda t: t.update({f"{Q_PROJ}.weight_zero_point": torch.ones(2)}), "is symmetric"),
        ("gptq", lambda t: t.update({f"{Q_PROJ}.bias": torch.ones(64)}), "no place for .*bias"),
    ],
)
def test_damaged_layer_is_refused_by_name(
    tmp_path: Path, scheme: str, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    write_quantized(tmp_path, scheme)
    edit(tmp_path, change)
    with pytest.raises(LoadError, match=rf"(?s){tmp_path.name}.*q_proj.*{message}|{message}"):
        load_checkpoint(tmp_path, progress=False)


def test_truncated_file_and_group_that_does_not_divide_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "awq")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["group_size"] = 48
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LoadError, match=r"q_proj: rows of 64 are not whole groups of 48"):
        load_checkpoint(tmp_path, progress=False)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LoadError, match="not a usable safetensors file"):
        load_checkpoint(tmp_path, progress=False)


def test_zero_bias_of_gptq_tools_is_left_out(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    edit(tmp_path, lambda t: t.update({f"{Q_PROJ}.bias": torch.zeros(64)}))
    assert f"{Q_PROJ}.bias" not in load_checkpoint(tmp_path, progress=False).weights


def test_layers_of_the_ignore_list_stay_floats(tmp_path: Path) -> None:
    exact = write_quantized(tmp_path, "int8")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["ignore"].append(r"re:.*layers\.0\.self_attn\.[qk]_proj$")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LoadError, match="no place for .*weight_scale"):  # stored as integers nevertheless
        load_checkpoint(tmp_path, progress=False)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk"]

    def change(tensors: dict[str, Any]) -> None:
        for name in names:
            tensors[name] = exact[name].bfloat16()
            del tensors[f"{name}_scale"]

    edit(tmp_path, change)
    found = load_checkpoint(tmp_path, progress=False)
    formats = {name: weight.format for name, weight in found.weights.items() if "_proj" in name}
    assert [name for name, kind in formats.items() if kind == "bf16"] == names
    assert set(formats.values()) == {"bf16", "w8a8"}


def test_a_name_has_precedence_over_a_pattern_and_that_over_the_class() -> None:
    raw = compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, files.TOKEN_INT)
    pack = compressed("pack-quantized", files.INT4)["config_groups"]["group_0"] | {"format": "pack-quantized"}
    raw["config_groups"]["group_1"] = pack | {"targets": [r"re:.*mlp.*"]}
    raw["config_groups"]["group_2"] = raw["config_groups"]["group_0"] | {"targets": ["model.mlp.up_proj"]}
    found = parse_quantization({"quantization_config": raw}, "here")
    assert found is not None
    kinds = {
        name: found.scheme(name) for name in ("model.mlp.up_proj", "model.mlp.down_proj", "model.q_proj")
    }
    assert [scheme and scheme.layout for scheme in kinds.values()] == ["int8", "int4_packed", "int8"]
    assert found.scheme("lm_head") is None


STATIC = {"type": "float", "strategy": "tensor", "dynamic": False}
ASYMMETRIC = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes"},
        "'bitsandbytes' is not supported; supported: compressed-tensors.*gptq",
    ),
    ({"quant_method": "awq", "bits": 8}, "8 bits"),
    ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'.*gemm"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits"),
    ({"quant_method": "gptq", "group_size": 128}, "KeyError"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "static activation scales"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
    (compressed("float-quantized", files.FP8, STATIC), "static activation scales"),
    (compressed("float-quantized", files.FP8), "without quantised activations"),
    (compressed("float-quantized", files.FP8, files.TOKEN_FP | {"strategy": "tensor"}), "per tensor is not"),
    (compressed("int-quantized", ASYMMETRIC, files.TOKEN_INT), "zero points"),
    (compressed("pack-quantized", files.INT4 | {"num_bits": 8}), "int8 weights per group is not supported"),
    (compressed("pack-quantized", files.INT4, files.TOKEN_INT), "quantised activations"),
    (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "'nvfp4-pack-quantized'"),
    (compressed("marlin-24", files.INT4), "'marlin-24'"),
    (compressed("int-quantized", files.INT4) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (compressed("int-quantized", files.INT4) | {"sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
    (compressed("int-quantized", files.INT4) | {"config_groups": {}}, "config_groups is empty"),
    (compressed("pack-quantized", files.INT4) | {"ignore": ["re:("]}, "not a usable quantization_config"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_unsupported_scheme_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=f"config.json: .*{message}"):
        parse_quantization({"quantization_config": config}, "config.json")


def test_quantised_checkpoint_refuses_the_option_and_dummy_weights(tmp_path: Path) -> None:
    write_quantized(tmp_path, "fp8")
    for options, message in (
        ({"quantization": "int8"}, "quantised already .fp8.: leave quantization out"),
        ({"load_format": "dummy"}, "dummy weights"),
    ):
        with pytest.raises((ConfigError, LoadError), match=message):
            LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu", max_model_len=64, **options)
