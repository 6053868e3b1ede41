"""Parser of the Hugging Face `config.json` of decoders; `families` holds the defaults of each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling, check_num_layers
from draftproof.models.families.dense import DENSE_FAMILIES, DenseFamily
from draftproof.models.families.latent import latent_config_from_hf, yarn_mscale
from draftproof.models.families.moe import MOE_FAMILIES, moe_config_from_hf

# Keys of features that are not supported: (key, values that leave the feature off, name of the feature).
_Unsupported = tuple[tuple[str, tuple[Any, ...], str], ...]
_EXPERTS: _Unsupported = tuple(
    (key, (None, 0), "mixtures of experts of this architecture")
    for key in ("num_local_experts", "num_experts", "n_routed_experts")
)
_UNSUPPORTED: _Unsupported = (
    ("attention_sinks", (None, False, 0), "attention sinks"),
    ("use_attention_sinks", (None, False, 0), "attention sinks"),
    ("attn_logit_softcapping", (None, 0), "logit soft-capping"),
    ("final_logit_softcapping", (None, 0), "logit soft-capping"),
    ("is_encoder_decoder", (None, False), "encoder-decoder models"),
)


# Hugging Face's name of an activation -> that of the ops
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def dense_config_from_hf(
    architecture: str, raw: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    """Parse config.json (`raw`) and generation_config.json of a model of `DENSE_FAMILIES`."""
    family = DENSE_FAMILIES[architecture]
    raw = {**raw, **(raw.get("text_config") or {})}  # the text part of a model with images
    unsupported = _UNSUPPORTED if architecture in MOE_FAMILIES else (*_EXPERTS, *_UNSUPPORTED)
    for key, off, feature in unsupported:
        if raw.get(key) not in off:
            raise LoadError(f"{feature} are not supported ({key} = {raw[key]!r})")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or family.activation
    if activation not in ACTIVATIONS:
        raise LoadError(f"activation {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    num_heads = _int(raw, "num_attention_heads")
    num_layers = check_num_layers(_int(raw, "num_hidden_layers"))
    hidden_size = _int(raw, "hidden_size")
    max_position = int(raw.get("max_position_embeddings") or family.max_position)
    rope, local_rope_theta = _rope_parameters(raw, family)
    latent = latent_config_from_hf(raw, rope, pairs=True) if family.latent else None
    head_dim = raw["qk_rope_head_dim"] if latent else raw.get("head_dim", family.head_dim)
    head_dim = int(head_dim or hidden_size // num_heads)
    rotary = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor")
    if family.rotary_factor is None and rotary not in (None, 1):
        raise LoadError(
            f"partial rotary embeddings are not supported here (partial_rotary_factor = {rotary})"
        )
    rotary = float(rotary or family.rotary_factor or 1)
    bos = raw.get("bos_token_id", generation.get("bos_token_id", family.bos_token_id))
    eos = [*_ids(generation.get("eos_token_id")), *_ids(raw.get("eos_token_id", family.eos_token_id))]
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads", family.num_kv_heads) or num_heads),
        head_dim=head_dim,
        intermediate_size=_int(raw, "intermediate_size"),
        norm_eps=float(raw.get("rms_norm_eps", family.norm_eps)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or family.rope_theta),
        rope_scaling=_rope_scaling(rope, raw, max_position),
        rope_interleaved=family.rope_interleaved,
        partial_rotary_dim=0 if latent or rotary == 1 else int(head_dim * rotary),
        local_rope_theta=local_rope_theta,
        no_rope_layers=no_rope_layers(raw, family, num_layers),
        max_position=max_position,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=_flag(family.qkv_bias, raw),
        o_bias=_flag(family.o_bias, raw),
        mlp_bias=_flag(family.mlp_bias, raw),
        qk_norm=_flag(family.qk_norm, raw),
        qk_row_norm=family.qk_row_norm,
        has_sinks=family.has_sinks,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=family.fixed_activation or ACTIVATIONS[activation],
        **_scales(raw, family, hidden_size),
        windows=_windows(raw, family, num_layers),
        moe=moe_config_from_hf(architecture, raw, num_layers),
        latent=latent,
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
    return bool(raw.get(rule.removeprefix("+"), rule[0] == "+")) if isinstance(rule, str) else rule


def _scales(raw: Mapping[str, Any], family: DenseFamily, hidden_size: int) -> dict[str, Any]:
    """Return the factors of embeddings, attention scores, residual sums and logits."""
    scales: dict[str, Any] = {}
    if family.scales_embedding:
        scales["embedding_scale"] = hidden_size**0.5
    if family.attention_divisor:
        scales["attention_scale"] = float(raw.get(family.attention_divisor) or family.head_dim or 1) ** -0.5
    if family.has_multipliers:
        keys = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
        keys |= {"attention_scale": "attention_multiplier"}
        scales |= {name: float(raw.get(key, 1.0)) for name, key in keys.items()}
        scales["logit_scale"] = 1.0 / float(raw.get("logits_scaling", 1.0))
    return scales


def _rope_parameters(raw: Mapping[str, Any], family: DenseFamily) -> tuple[dict[str, Any], float | None]:
    """Return the rotary parameters of layers with full attention, and the base of layers with a window."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if family.local_rope_theta is None:
        return rope, None
    local = dict(rope.pop("sliding_attention", {}))
    if local.get("rope_type", "default") != "default":
        raise LoadError(f"rope type {local['rope_type']!r} of layers with a window is not supported")
    theta = local.get("rope_theta") or raw.get("rope_local_base_freq") or family.local_rope_theta
    return dict(rope.get("full_attention") or rope), float(theta)


def no_rope_layers(raw: Mapping[str, Any], family: DenseFamily, num_layers: int) -> tuple[int, ...]:
    """Return the layers without rotary embedding; `no_rope_layers` of config.json has a 0 for each."""
    if not family.no_rope_interval:
        return ()
    interval = int(raw.get("no_rope_layer_interval") or family.no_rope_interval)
    flags = raw.get("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if len(flags) != num_layers:
        raise LoadError(f"no_rope_layers has {len(flags)} entries, the model has {num_layers} layers")
    return tuple(layer for layer, flag in enumerate(flags) if not flag)


def _rope_scaling(rope: dict[str, Any], raw: Mapping[str, Any], max_position: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        raise LoadError("rotary parameters that differ between layers are not supported")
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn", "longrope", "su"):
        # Its frequencies of a row would depend on tokens that come after it.
        why = ": its frequencies change with the length of the text" if kind == "dynamic" else ""
        kinds = "default, linear, llama3, yarn, longrope"
        raise LoadError(f"rope type {kind!r} is not supported{why}; supported: {kinds}")
    key = "original_max_position_embeddings"
    original = raw.get(key) or rope.get(key) or max_position
    if kind in ("longrope", "su"):
        if not rope.get("short_factor") or not rope.get("long_factor"):
            raise LoadError(f"rope type {kind!r} without short_factor and long_factor")
        return RopeScaling(
            "longrope",
            float(rope.get("factor") or max_position / original),
            original_max_position=int(original),
            attention_factor=rope.get("attention_factor"),
            factors=tuple(map(float, rope["short_factor"])),
            long_factors=tuple(map(float, rope["long_factor"])),
        )
    if rope.get("factor") is None:
        raise LoadError(f"rope type {kind!r} without a factor")
    scaling = RopeScaling(kind, float(rope["factor"]), original_max_position=int(original))
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return replace(scaling, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        attention = rope.get("attention_factor")
        if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
            both = [yarn_mscale(scaling.factor, float(rope[name])) for name in ("mscale", "mscale_all_dim")]
            attention = both[0] / both[1]
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
    if family.windows == "pattern":
        interval = int(raw.get("sliding_window_pattern") or family.full_interval)
        every = ["sliding_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
        return _windows_of_types(types or every, window)
    if family.windows != "layer_types":
        if len(set(types or ())) > 1:
            raise LoadError(f"layers of different attention types are not supported here: {types}")
        is_used = family.windows == "all" or (
            family.windows == "all_if_used" and bool(raw.get("use_sliding_window", False))
        )
        return (int(window or 0) if is_used else 0,) * num_layers
    if not raw.get("use_sliding_window", False):
        window = None
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(int(window or 0) if layer >= first else 0 for layer in range(num_layers))
    return _windows_of_types(types, window)


def _windows_of_types(types: list[str], window: Any) -> tuple[int, ...]:
    """Return the window of each layer from its attention type."""
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise LoadError(f"attention types not supported: {', '.join(sorted(unknown))}")
    if "sliding_attention" in types and not window:
        raise LoadError("layer_types has sliding_attention but sliding_window is not set")
    return tuple(int(window) if kind == "sliding_attention" and window else 0 for kind in types)
