"""Logits and logprobs of tiny random models of every architecture against transformers in fp32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.models.families.dense import DENSE_FAMILIES
from draftproof.models.load import load_checkpoint
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.ops import resolve
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from latent_layers import LATENT_SIZES
from opcheck import check_order
from tiny import request, run

CPU = torch.device("cpu")
VOCAB, LENGTH = 199, 90
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # with 0.02 logits are almost flat
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def longrope(original: int) -> dict[str, Any]:
    """Return options of a Phi-4 with longrope, trained on texts of `original` tokens."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]}
    factors |= {"original_max_position_embeddings": original, "partial_rotary_factor": 0.75}
    sizes = {"hidden_size": 64, "original_max_position_embeddings": original, "pad_token_id": 0}
    return {**sizes, **scaled("longrope", **factors)}


LLAMA3 = scaled(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64)
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 13}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", LLAMA3),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "linear_rope": ("Llama", scaled("linear", factor=4.0)),
    "yarn": ("Llama", YARN),
    "mistral": ("Mistral", {"sliding_window": 17}),
    "mistral_head_dim": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "num_key_value_heads": 2}),
    "ernie4_5_bias": ("Ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", EXPERTS),
    "glm4_moe": ("Glm4Moe", GLM_EXPERTS),
    "glm4_moe_norms": ("Glm4Moe", {**GLM_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 1},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 56}
        | {"mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe_plain": ("Qwen3Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 13}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 24, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 24, "pad_token_id": 0}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        GPT_OSS | scaled("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    ),
    "mimo": ("Qwen2", {"architectures": ["MiMoForCausalLM"]}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi4_longrope": ("Phi3", longrope(128)),  # texts are shorter
    "phi4_long_texts": ("Phi3", longrope(64)),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "qwen3_tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
}
MODELS |= {
    "deepseek_v2_lite": ("DeepseekV2", {**LATENT_SIZES, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT_SIZES,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            **scaled(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.707,
                mscale_all_dim=0.5,
            ),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT_SIZES,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {**LATENT_SIZES, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
}
every = pytest.mark.parametrize("name", MODELS)


def make(name: str, folder: Path) -> Any:
    """Save a random model of transformers in `folder`; biases and norms are random too."""
    family, options = MODELS[name]
    options = dict(options)
    renamed = options.pop("architectures", None)
    name_of = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    config = getattr(transformers, name_of)(**{**_BASE, **options})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if not value.any() and value.ndim == 2:  # routers, whose experts would all be equal
                value.copy_(torch.randn_like(value) * 0.3)
            if value.ndim == 1:
                value.copy_(torch.randn_like(value) * 0.3 + (1.0 if "norm" in key else 0.0))
    model.save_pretrained(folder)
    if renamed:  # a family that transformers does not have, with the layers of one that it has
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": renamed}))
    return model


def tokens_of(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def ours(folder: Path, tokens: Tensor, chunk: int, backend: str = "auto") -> Tensor:
    """Return logits of every position, the prompt in chunks, on pages out of order."""
    checkpoint = load_checkpoint(folder, dtype="float32")
    ops = resolve(backend, CPU)
    model = create_model(checkpoint.config, checkpoint.weights, ops, 128)
    runner = Runner(model, ops, torch.float32, num_pages=20, page_size=8, max_rows=len(tokens))
    table = (1 + torch.randperm(16, generator=torch.Generator().manual_seed(2)))[None].to(torch.int32)
    out = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        positions = torch.arange(start, start + len(part))
        hidden = runner.forward(runner.rows(part, positions, torch.zeros_like(part), table))
        out.append(runner.logits(hidden).clone())
    return torch.cat(out)


@torch.inference_mode()
def theirs(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference of a row relative to its largest logit."""
    return float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())


@every
def test_logits_equal_transformers_within_tolerance(name: str, tmp_path: Path) -> None:
    """Logits are within 1e-4 at every position and do not depend on the chunk size."""
    tokens = tokens_of()
    want = theirs(make(name, tmp_path), tokens)
    assert float(want.std()) > 0.5, "logits are flat"
    whole = ours(tmp_path, tokens, LENGTH)
    assert error(whole, want) < 1e-4
    for chunk in (1, 16, 37):
        assert torch.equal(ours(tmp_path, tokens, chunk), whole)


@pytest.mark.parametrize("name", ("llama3", "mistral", "qwen3"))
def test_logits_of_the_torch_backend_equal_transformers(name: str, tmp_path: Path) -> None:
    tokens = tokens_of(40)
    model = make(name, tmp_path)
    assert error(ours(tmp_path, tokens, 16, "torch"), theirs(model, tokens)) < 1e-4


FAMILIES = ("gemma3", "glm", "glm4", "granite", "mimo", "olmo2", "phi3", "phi4_longrope", "smollm3")
FAMILIES += ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "ernie4_5_moe", "glm4_moe")


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_transformers(name: str, tmp_path: Path) -> None:
    """Generate tokens, beyond the original context of YaRN, with drafts of n-grams and without."""
    tokens, count = tokens_of(12), 64 if name == "gpt_oss" else 32
    theirs_ids = make(name, tmp_path).generate(
        tokens[None], max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    want = theirs_ids[0, len(tokens) :].tolist()
    params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count)
    for speculative in (None, SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3})):
        config = EngineConfig(
            model=name, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16, speculative=speculative
        )
        engine = Engine(config, load_checkpoint(tmp_path, dtype="float32"))
        assert run(engine, [request(0, params, prompt_token_ids=tokens.tolist())])["0"].token_ids == want


@every
def test_prompt_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    """Logprobs are within 1e-4; entries nearer than 1e-4 may swap places."""
    tokens = tokens_of(70)  # beyond the short texts of a longrope
    want = torch.log_softmax(theirs(make(name, tmp_path), tokens).double(), -1)
    config = EngineConfig(model=name, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16)
    engine = Engine(config, load_checkpoint(tmp_path, dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, logprobs=20)
    record = run(engine, [request(0, params, prompt_token_ids=tokens.tolist())])["0"]
    lines = [*record.prompt_logprobs, *record.logprobs]
    assert len(lines) == len(tokens)
    assert record.token_ids == [int(want[-1].argmax())]
    for position, line in enumerate(lines):
        row = want[position]
        own = torch.tensor(line.logprobs, dtype=torch.float64)
        assert float((own - row[line.token_ids]).abs().max()) < 1e-4
        check_order(line.token_ids[1:], row)


# --- negative controls ---


def test_control_wrong_window_is_detected(tmp_path: Path) -> None:
    model = make("mistral", tmp_path)
    model.config.sliding_window = 16
    model.save_pretrained(tmp_path)
    model.config.sliding_window = 17
    assert error(ours(tmp_path, tokens_of(), LENGTH), theirs(model, tokens_of())) > 1e-3


def test_control_missing_rope_scaling_is_detected(tmp_path: Path) -> None:
    model = make("llama3", tmp_path)
    plain = tmp_path / "plain"
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model.save_pretrained(plain)
    assert error(ours(plain, tokens_of(), LENGTH), theirs(model, tokens_of())) > 1e-3


def test_control_weight_off_by_a_hundredth_is_detected(tmp_path: Path) -> None:
    model = make("qwen2", tmp_path)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.bias[3] += 0.01
    assert error(ours(tmp_path, tokens_of(), LENGTH), theirs(model, tokens_of())) > 1e-4


def test_control_wrong_order_is_detected() -> None:
    with pytest.raises(AssertionError):
        check_order([1, 0], torch.tensor([2.0, 1.0, 0.0]))
    check_order([1, 0], torch.tensor([2.0, 2.0 - 1e-5, 0.0]))


@pytest.mark.control
@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("gemma3", "norm_offset", 0.0),
        ("gemma3", "scales_embedding", False),
        ("gemma3", "local_rope_theta", 1e6),
        ("gemma3", "attention_divisor", ""),
        ("gemma3", "activation", "silu"),
        ("glm4", "rope_interleaved", False),
        ("glm4", "rotary_factor", 1.0),
        ("granite", "has_multipliers", False),
        ("gpt_oss", "fixed_activation", "silu"),
        ("smollm3", "no_rope_interval", 0),
    ],
)
def test_control_a_wrong_flag_of_a_family_is_detected(
    name: str, field: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(40)
    model = make(name, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for key in ("hidden_activation", "hidden_act", "rope_local_base_freq", "partial_rotary_factor"):
        raw.pop(key, None)
    rope = raw.get("rope_parameters", {})
    rope.pop("partial_rotary_factor", None)
    rope.get("sliding_attention", {}).pop("rope_theta", None)
    path.write_text(json.dumps(raw))
    assert error(ours(tmp_path, tokens, 16), theirs(model, tokens)) < 1e-4
    architecture = raw["architectures"][0]
    monkeypatch.setitem(DENSE_FAMILIES, architecture, replace(DENSE_FAMILIES[architecture], **{field: wrong}))
    assert error(ours(tmp_path, tokens, 16), theirs(model, tokens)) > 1e-3


def test_text_part_of_a_model_with_images_is_loaded(tmp_path: Path) -> None:
    make("gemma3", tmp_path)
    want = load_checkpoint(tmp_path, dtype="float32")
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "vision_tower.weight": torch.ones(2, 2)}, file)
    text = json.loads(path.read_text())
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    path.write_text(json.dumps(nested))
    found = load_checkpoint(tmp_path, dtype="float32")
    assert replace(found.config, architecture=want.config.architecture) == want.config
    assert found.weights.keys() == want.weights.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in want.tensors.items())
