"""Small GGUF files for tests, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.expected_tensors import dummy_tensors

NAMES = {
    ".embed_tokens.": ".nextn.embed_tokens.",
    ".shared_head.": ".nextn.shared_head_",
    ".eh_proj.": ".nextn.eh_proj.",
    ".enorm.": ".nextn.enorm.",
    ".hnorm.": ".nextn.hnorm.",
    "model.nextn.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.router.": "ffn_gate_inp.",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate.": "ffn_gate_inp.",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.experts.0.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.0.w3": "ffn_up_exps",
    "block_sparse_moe.experts.0.w2": "ffn_down_exps",
    "mlp.experts.0.gate_proj": "ffn_gate_exps",
    "mlp.experts.0.up_proj": "ffn_up_exps",
    "mlp.experts.0.down_proj": "ffn_down_exps",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}
CAN_QUANTISE = ("MXFP4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


AFTER_BLOCKS = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM4_NORMS = {
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
# architectures without a norm that llama.cpp names `ffn_norm`
NAMES_ALL_NORMS = ("glm4moe", "gpt-oss")
# architectures whose files hold rotary pairs as adjacent rows of q and k
PERMUTED = ("llama", "mistral", "granite", "smollm3", "ernie4_5", "ernie4_5-moe")


def gguf_name(name: str, arch: str = "", config: ModelConfig | None = None) -> str:
    has_more_norms = config is not None and bool(config.norms.mlp_output)
    norms = AFTER_BLOCKS if has_more_norms or arch in NAMES_ALL_NORMS else {}
    for old, new in (GLM4_NORMS if arch == "glm4" else norms).items():
        name = name.replace(old, new)
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Apply the `permute` of convert_hf_to_gguf.py: halves of a head become adjacent pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def encode(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Encode `values` in GGUF type `kind`; K types, which gguf cannot write, get random valid blocks."""
    if kind == "F32":
        return values.astype(np.float32)
    if kind == "F16":
        return values.astype(np.float16)
    if kind in CAN_QUANTISE:
        return gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[kind])
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // block, size), dtype=np.uint8)
    # The fp16 scales must be finite: a random one can be NaN or huge.
    scales = rng.uniform(-0.01, 0.01, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[..., -2:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(values.shape[0], -1)


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the tensors of all experts under the name of the first, as convert_hf_to_gguf.py does."""
    stacked: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stacked.setdefault(re.sub(r"experts\.\d+\.", "experts.0.", name), []).append(tensor)
    return {name: torch.stack(parts) if ".experts." in name else parts[0] for name, parts in stacked.items()}


def split_latent_up(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Split `kv_b_proj` into keys, transposed, and values, head by head, as convert_hf_to_gguf.py does."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        latent = config.latent
        assert latent is not None
        heads = tensor.view(config.num_heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        key, value = heads.split([latent.nope_dim, latent.value_dim], dim=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = key.transpose(1, 2).contiguous()
        found[name.replace("kv_b_proj", "v_b_proj")] = value.contiguous()
    return found


def write_gguf(
    path: Path,
    arch: str,
    config: ModelConfig,
    tensors: dict[str, Tensor] | None = None,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,  # part of a tensor's name -> its type, where it differs from `kind`
    extra: dict[str, Any] | None = None,
    more: dict[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model and return the stored arrays by llama.cpp's names. A None in `extra` removes a key."""
    rng = np.random.default_rng(0)
    tensors = tensors or dummy_tensors(config, torch.float32, 0)
    meta: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
    } | (extra or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in meta.items():
        key = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    if tokens is not None:
        writer.add_token_list(tokens)
    stored = {}
    for name, tensor in stack_experts(tensors).items():
        values = tensor.float().numpy()
        if arch in PERMUTED and ".q_proj." in name:
            values = interleave(values, config.num_heads)
        if arch in PERMUTED and ".k_proj." in name:
            values = interleave(values, config.num_kv_heads)
        stored_name = gguf_name(name, arch, config)
        if "exp_probs_b" in stored_name:
            values = values.flatten()
        matrix = values.ndim > 1
        own = next((k for part, k in (kinds or {}).items() if part in stored_name.split(".")), kind)
        own = "F32" if "ffn_gate_inp" in stored_name else own  # routers
        data = encode(values, own, rng) if matrix else values.astype(np.float32)
        raw_type = gguf.GGMLQuantizationType[own] if matrix else None
        stored[stored_name] = data
        writer.add_tensor(stored_name, data, raw_dtype=raw_type)
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
