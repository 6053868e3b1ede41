"""Table of dense families, and of what mixtures of experts share with them: defaults and fixed flags."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftproof.models.config import LayerNorms


@dataclass(frozen=True, slots=True)
class DenseFamily:
    """Values that a family takes where config.json is silent, as in transformers, and its fixed flags."""

    num_kv_heads: int | None  # None = num_attention_heads
    max_position: int
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleaved: bool = False  # rotary pairs are adjacent columns, not halves
    tie_embeddings: bool = False
    qkv_bias: bool | str = False  # a string names the config key that decides; "+" before it: default true
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_row_norm: bool = False  # over all heads together
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0
    activation: str = "silu"  # Hugging Face's name
    fixed_activation: str = ""  # one of `ops.contract.types.ACTIVATIONS`, whatever config.json has; "": none
    has_sinks: bool = False
    rotary_factor: float | None = None  # part of a head that is rotated; None: all, and no other is possible
    local_rope_theta: float | None = None  # of layers with a window
    no_rope_interval: int = 0  # every so many layers one is without rotary embedding; 0: none
    has_multipliers: bool = False  # of embeddings, attention scores, residual sums and logits
    scales_embedding: bool = False  # by the square root of the hidden size
    attention_divisor: str = ""  # key of the number whose square root divides attention scores
    sliding_window: int | None = None
    windows: str = "none"  # "none" | "all" | "all_if_used" | "layer_types" | "pattern"
    full_interval: int = 0  # "pattern": every so many layers one has full attention
    latent: bool = False  # latent attention, whose rotary pairs are adjacent columns by default
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_GLM = DenseFamily(
    num_kv_heads=2,
    max_position=131072,
    head_dim=128,
    norm_eps=1.5625e-07,
    rope_interleaved=True,
    rotary_factor=0.5,
    qkv_bias="+attention_bias",
)

DENSE_FAMILIES = {
    "DeepseekV2ForCausalLM": DenseFamily(
        num_kv_heads=None, max_position=2048, latent=True, mlp_bias="mlp_bias", bos_token_id=1, eos_token_id=2
    ),
    "DeepseekV3ForCausalLM": DenseFamily(
        num_kv_heads=None, max_position=4096, latent=True, bos_token_id=0, eos_token_id=1
    ),
    "Ernie4_5ForCausalLM": DenseFamily(
        num_kv_heads=2,
        max_position=131072,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_interleaved=True,
        tie_embeddings=True,
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Ernie4_5_MoeForCausalLM": DenseFamily(
        num_kv_heads=4,
        max_position=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_interleaved=True,
        tie_embeddings=True,
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Glm4MoeForCausalLM": DenseFamily(
        num_kv_heads=8,
        max_position=131072,
        norm_eps=1e-5,
        rotary_factor=0.5,
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
    ),
    "LlamaForCausalLM": DenseFamily(
        num_kv_heads=None,
        max_position=2048,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "MistralForCausalLM": DenseFamily(
        num_kv_heads=8,
        max_position=4096 * 32,
        sliding_window=4096,
        windows="all",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "MixtralForCausalLM": DenseFamily(
        num_kv_heads=8,
        max_position=4096 * 32,
        norm_eps=1e-5,
        rope_theta=1e6,
        windows="all",
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Qwen2ForCausalLM": DenseFamily(
        num_kv_heads=32, max_position=32768, qkv_bias=True, sliding_window=4096, windows="layer_types"
    ),
    "Qwen2MoeForCausalLM": DenseFamily(
        num_kv_heads=16, max_position=32768, qkv_bias=True, sliding_window=4096, windows="layer_types"
    ),
    "Qwen3ForCausalLM": DenseFamily(
        num_kv_heads=32,
        max_position=32768,
        head_dim=128,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding_window=4096,
        windows="layer_types",
    ),
    "Qwen3MoeForCausalLM": DenseFamily(
        num_kv_heads=4,
        max_position=32768,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding_window=4096,
        windows="all_if_used",
    ),
    "Gemma3ForCausalLM": DenseFamily(
        num_kv_heads=4,
        max_position=131072,
        head_dim=256,
        rope_theta=1e6,
        local_rope_theta=10000.0,
        tie_embeddings=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        norms=LayerNorms(
            attention_output="post_attention_layernorm",
            mlp="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        scales_embedding=True,
        attention_divisor="query_pre_attn_scalar",
        sliding_window=4096,
        windows="pattern",
        full_interval=6,
        bos_token_id=2,
        eos_token_id=1,
    ),
    "GlmForCausalLM": _GLM,
    "GptOssForCausalLM": DenseFamily(
        num_kv_heads=8,
        max_position=131072,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150000.0,
        qkv_bias="+attention_bias",
        o_bias="+attention_bias",
        mlp_bias=True,
        fixed_activation="swiglu_oai",
        has_sinks=True,
        sliding_window=128,
        windows="pattern",
        full_interval=2,
    ),
    "Glm4ForCausalLM": replace(
        _GLM, norms=LayerNorms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")
    ),
    "GraniteForCausalLM": DenseFamily(
        num_kv_heads=None,
        max_position=2048,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "MiMoForCausalLM": DenseFamily(num_kv_heads=8, max_position=32768, rope_theta=640000.0, qkv_bias=True),
    "Olmo2ForCausalLM": DenseFamily(
        num_kv_heads=None,
        max_position=2048,
        norm_eps=1e-5,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_row_norm=True,
        norms=LayerNorms(
            attention="",
            attention_output="post_attention_layernorm",
            mlp="",
            mlp_output="post_feedforward_layernorm",
        ),
        eos_token_id=50279,
    ),
    "Phi3ForCausalLM": DenseFamily(
        num_kv_heads=None,
        max_position=4096,
        norm_eps=1e-5,
        rotary_factor=1.0,
        windows="all",
        bos_token_id=1,
        eos_token_id=32000,
    ),
    "SmolLM3ForCausalLM": DenseFamily(
        num_kv_heads=4,
        max_position=32768,
        rope_theta=2e6,
        no_rope_interval=4,
        tie_embeddings=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="layer_types",
        bos_token_id=128000,
        eos_token_id=128001,
    ),
}
DENSE_FAMILIES["Gemma3ForConditionalGeneration"] = DENSE_FAMILIES["Gemma3ForCausalLM"]
