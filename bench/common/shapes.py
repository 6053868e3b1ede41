"""Configurations of public models for dummy weights: sizes as in their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "hidden_act": "silu", "attention_bias": False,
    "max_position_embeddings": 163840, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False, "eos_token_id": 100001, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 128001, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA_1B = _LLAMA_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN25_7B = _LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL_7B = _LLAMA_8B | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "eos_token_id": 2,
}  # fmt: skip
_QWEN3_8B = _LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "num_hidden_layers": 36, "intermediate_size": 12288, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA3_4B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208,
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "attention_bias": False, "tie_word_embeddings": True,
    "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_8B,
    "llama-3.2-1b": _LLAMA_1B,
    "qwen2.5-7b": _QWEN25_7B,
    "mistral-7b": _MISTRAL_7B,
    "qwen3-8b": _QWEN3_8B,
    "gemma-3-4b": _GEMMA3_4B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
}


def write_shape(name: str, folder: Path, num_layers: int = 0) -> str:
    """Write config.json of a shape to `folder`, which is returned; `num_layers` 0: as many as published."""
    raw = dict(SHAPES[name])
    if num_layers:
        raw["num_hidden_layers"] = num_layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return str(folder)
