"""Mixtures of experts in Hugging Face `config.json`: one parser a family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, MoeConfig
from draftproof.ops.contract.types import Routing

_SWIGLU_OAI = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # constants of the activation


def moe_config_from_hf(architecture: str, raw: Mapping[str, Any], num_layers: int) -> MoeConfig | None:
    """Parse the mixtures of experts of a model; None for a dense family."""
    if architecture not in MOE_FAMILIES:
        return None
    return MOE_FAMILIES[architecture](raw, num_layers)


def keeps_stored_dtype(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor decides about experts, and is therefore not rounded to the model's dtype."""
    moe = config.moe
    if moe is None:
        return False
    exact = (f".{moe.router}.weight", f".{moe.router}.bias", f".{moe.shared}_gate.weight")
    return name.endswith(exact) or bool(moe.correction and name.endswith(f".{moe.correction}"))


def _count(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """Return the first of `keys` that is set; LoadError without one and without a default."""
    value = next((raw[key] for key in keys if raw.get(key) is not None), default)
    if not isinstance(value, int) or value < 0:
        raise LoadError(f"{' or '.join(keys)} is missing or not a whole number")
    return value


def _layers_where(num_layers: int, is_dense: Callable[[int], bool]) -> tuple[int, ...]:
    return tuple(layer for layer in range(num_layers) if is_dense(layer))


def _qwen_dense_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers without experts by `mlp_only_layers` and `decoder_sparse_step`."""
    only: Iterable[int] = raw.get("mlp_only_layers") or ()
    step = _count(raw, "decoder_sparse_step", default=1) or 1
    return _layers_where(num_layers, lambda layer: layer in only or bool((layer + 1) % step))


def _mixtral(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    top_k = _count(raw, "num_experts_per_tok", default=2)
    return MoeConfig(
        routing=Routing(_count(raw, "num_local_experts", default=8), top_k),
        intermediate_size=_count(raw, "intermediate_size"),
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
    )


def _qwen2_moe(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    if raw.get("qkv_bias", True) is not True:
        raise LoadError("qkv_bias = false is not supported for this architecture")
    normalize = bool(raw.get("norm_topk_prob", False))
    top_k = _count(raw, "num_experts_per_tok", default=4)
    return MoeConfig(
        routing=Routing(_count(raw, "num_experts", default=60), top_k, normalize=normalize),
        intermediate_size=_count(raw, "moe_intermediate_size", default=1408),
        dense_layers=_qwen_dense_layers(raw, num_layers),
        shared_intermediate_size=_count(raw, "shared_expert_intermediate_size", default=5632),
        has_shared_gate=True,
        shared="mlp.shared_expert",
    )


def _qwen3_moe(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    normalize = bool(raw.get("norm_topk_prob", False))
    top_k = _count(raw, "num_experts_per_tok", default=8)
    count = _count(raw, "num_experts", "num_local_experts", default=128)
    return MoeConfig(
        routing=Routing(count, top_k, normalize=normalize),
        intermediate_size=_count(raw, "moe_intermediate_size", default=768),
        dense_layers=_qwen_dense_layers(raw, num_layers),
    )


def _ernie4_5_moe(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    first = _count(raw, "moe_layer_start_index", default=1)
    last = raw.get("moe_layer_end_index")
    last = num_layers - 1 if last is None or last < 0 else int(last)
    step = _count(raw, "moe_layer_interval", default=1) or 1
    inner = _count(raw, "moe_intermediate_size", default=1536)
    top_k = _count(raw, "moe_k", "num_experts_per_tok", default=6)
    return MoeConfig(
        routing=Routing(_count(raw, "moe_num_experts", "num_experts", default=64), top_k),
        intermediate_size=inner,
        dense_layers=_layers_where(
            num_layers, lambda layer: not first <= layer <= last or bool((layer + 1) % step)
        ),
        shared_intermediate_size=inner * _count(raw, "moe_num_shared_experts", default=2),
        correction="mlp.moe_statics.e_score_correction_bias",
        is_correction_row=True,
    )


def _deepseek_v2(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    methods = {"greedy": False, "group_limited_greedy": True}
    method = raw.get("topk_method") or "greedy"
    if method not in methods or raw.get("scoring_func", "softmax") != "softmax":
        raise LoadError(f"topk_method {method!r} with {raw.get('scoring_func')!r} scores is not supported")
    if raw.get("norm_topk_prob"):  # transformers ignores it, DeepSeek's code drops the scaling factor
        raise LoadError("norm_topk_prob = true has no agreed meaning for this architecture")
    routing = Routing(
        num_experts=_count(raw, "n_routed_experts", default=64),
        top_k=_count(raw, "num_experts_per_tok"),
        normalize=False,
        num_groups=_count(raw, "n_group", default=1) if methods[method] else 1,
        top_groups=_count(raw, "topk_group", default=1) if methods[method] else 1,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
    )
    return _deepseek(raw, num_layers, routing, dense_layers=0)


def _glm4_moe(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    defaults = {"n_routed_experts": 128, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    defaults |= {"moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return _deepseek_v3({**defaults, **raw}, num_layers)


def _gpt_oss(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    for key, value in _SWIGLU_OAI.items():
        if raw.get(key, value) != value:
            raise LoadError(f"{key} = {raw[key]!r} is not supported: {value} is")
    if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        raise LoadError("rope_scaling is missing")
    top_k = _count(raw, "num_experts_per_tok", "experts_per_token", default=4)
    return MoeConfig(
        routing=Routing(_count(raw, "num_local_experts", "num_experts", default=128), top_k),
        intermediate_size=_count(raw, "intermediate_size"),
        router="mlp.router",
        has_router_bias=True,
    )


def _deepseek_v3(raw: Mapping[str, Any], num_layers: int) -> MoeConfig:
    method, scoring = raw.get("topk_method", "noaux_tc"), raw.get("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise LoadError(f"topk_method {method!r} with {scoring!r} scores is not supported")
    routing = Routing(
        num_experts=_count(raw, "n_routed_experts", default=256),
        top_k=_count(raw, "num_experts_per_tok", default=8),
        scoring="sigmoid",
        normalize=bool(raw.get("norm_topk_prob", True)),
        num_groups=_count(raw, "n_group", default=8),
        top_groups=_count(raw, "topk_group", default=4),
        group_score="top2_sum",
        scale=float(raw.get("routed_scaling_factor", 2.5)),
    )
    made = _deepseek(raw, num_layers, routing, dense_layers=3)
    return replace(made, correction="mlp.gate.e_score_correction_bias")


def _deepseek(raw: Mapping[str, Any], num_layers: int, routing: Routing, dense_layers: int) -> MoeConfig:
    """Return the mixtures of experts of a DeepSeek model; `dense_layers`: the family's default."""
    first = _count(raw, "first_k_dense_replace", default=dense_layers)
    step = _count(raw, "moe_layer_freq", default=1) or 1
    inner = _count(raw, "moe_intermediate_size")
    return MoeConfig(
        routing=routing,
        intermediate_size=inner,
        dense_layers=_layers_where(num_layers, lambda layer: layer < first or bool(layer % step)),
        shared_intermediate_size=inner * _count(raw, "n_shared_experts", default=0),
    )


# Hugging Face class name -> parser of config.json
MOE_FAMILIES: dict[str, Callable[[Mapping[str, Any], int], MoeConfig]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Ernie4_5_MoeForCausalLM": _ernie4_5_moe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
