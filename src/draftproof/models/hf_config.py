"""Hugging Face `config.json` of dense decoders: defaults of each family, and the parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling, check_num_layers


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
    qkv_bias: bool | str = False  # a string names the config key that decides
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windows: str = "none"  # "none" | "all" | "layer_types"
    bos_token_id: int | None = None
    eos_token_id: int | None = None


DENSE_FAMILIES = {
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
    "Qwen2ForCausalLM": DenseFamily(
        num_kv_heads=32, max_position=32768, qkv_bias=True, sliding_window=4096, windows="layer_types"
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
}

# Keys of features that are not supported: (key, values that leave the feature off, name of the feature).
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_local_experts", (None, 0), "mixture-of-experts models"),
    ("num_experts", (None, 0), "mixture-of-experts models"),
    ("n_routed_experts", (None, 0), "mixture-of-experts models"),
    ("partial_rotary_factor", (None, 1, 1.0), "partial rotary embeddings"),
    ("attention_sinks", (None, False, 0), "attention sinks"),
    ("use_attention_sinks", (None, False, 0), "attention sinks"),
    ("attn_logit_softcapping", (None, 0), "logit soft-capping"),
    ("final_logit_softcapping", (None, 0), "logit soft-capping"),
    ("is_encoder_decoder", (None, False), "encoder-decoder models"),
)


def dense_config_from_hf(
    architecture: str, raw: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    """Parse config.json (`raw`) and generation_config.json of a model of `DENSE_FAMILIES`."""
    family = DENSE_FAMILIES[architecture]
    for key, off, feature in _UNSUPPORTED:
        if raw.get(key) not in off:
            raise LoadError(f"{feature} are not supported ({key} = {raw[key]!r})")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise LoadError(f"activation {raw['hidden_act']!r} is not supported; supported: silu")
    num_heads = _int(raw, "num_attention_heads")
    num_layers = check_num_layers(_int(raw, "num_hidden_layers"))
    hidden_size = _int(raw, "hidden_size")
    max_position = int(raw.get("max_position_embeddings") or family.max_position)
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    bos = raw.get("bos_token_id", generation.get("bos_token_id", family.bos_token_id))
    eos = [*_ids(generation.get("eos_token_id")), *_ids(raw.get("eos_token_id", family.eos_token_id))]
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads", family.num_kv_heads) or num_heads),
        head_dim=int(raw.get("head_dim", family.head_dim) or hidden_size // num_heads),
        intermediate_size=_int(raw, "intermediate_size"),
        norm_eps=float(raw.get("rms_norm_eps", family.norm_eps)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or family.rope_theta),
        rope_scaling=_rope_scaling(rope, raw, max_position),
        rope_interleaved=family.rope_interleaved,
        max_position=max_position,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=_flag(family.qkv_bias, raw),
        o_bias=_flag(family.o_bias, raw),
        mlp_bias=_flag(family.mlp_bias, raw),
        qk_norm=family.qk_norm,
        windows=_windows(raw, family, num_layers),
        bos_token_id=_ids(bos)[0] if _ids(bos) else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _int(raw: Mapping[str, Any], key: str) -> int:
    if not isinstance(raw.get(key), int):
        raise LoadError(f"{key} is missing or not a whole number")
    return int(raw[key])


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(x) for x in value] if isinstance(value, list | tuple) else [int(value)]


def _flag(rule: bool | str, raw: Mapping[str, Any]) -> bool:
    return bool(raw.get(rule, False)) if isinstance(rule, str) else rule


def _rope_scaling(rope: dict[str, Any], raw: Mapping[str, Any], max_position: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        raise LoadError("rotary parameters that differ between layers are not supported")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise LoadError("partial rotary embeddings are not supported")
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        # With these two the frequencies of a row would depend on tokens that come after it.
        varies = kind in ("dynamic", "longrope")
        why = ": its frequencies change with the length of the text" if varies else ""
        raise LoadError(f"rope type {kind!r} is not supported{why}; supported: default, linear, llama3, yarn")
    if rope.get("factor") is None:
        raise LoadError(f"rope type {kind!r} without a factor")
    key = "original_max_position_embeddings"
    original = raw.get(key) or rope.get(key) or max_position
    scaling = RopeScaling(kind, float(rope["factor"]), original_max_position=int(original))
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return replace(scaling, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            raise LoadError("yarn with mscale and mscale_all_dim is not supported")
        attention = rope.get("attention_factor")
        return replace(
            scaling,
            attention_factor=None if attention is None else float(attention),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
        )
    return scaling


def _windows(raw: Mapping[str, Any], family: DenseFamily, num_layers: int) -> tuple[int, ...]:
    """Return the attention window of each layer, with the keys read as in transformers 5."""
    types = raw.get("layer_types")
    if types is not None and len(types) != num_layers:
        raise LoadError(f"layer_types has {len(types)} entries, the model has {num_layers} layers")
    window = raw.get("sliding_window", family.sliding_window)
    if family.windows != "layer_types":
        if len(set(types or ())) > 1:
            raise LoadError(f"layers of different attention types are not supported here: {types}")
        return (int(window or 0) if family.windows == "all" else 0,) * num_layers
    if not raw.get("use_sliding_window", False):
        window = None
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(int(window or 0) if layer >= first else 0 for layer in range(num_layers))
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise LoadError(f"attention types not supported: {', '.join(sorted(unknown))}")
    if "sliding_attention" in types and not window:
        raise LoadError("layer_types has sliding_attention but sliding_window is not set")
    return tuple(int(window) if kind == "sliding_attention" and window else 0 for kind in types)
