"""Latent attention (MLA) of the DeepSeek families: configuration, tensor names, and the packed layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from draftproof.errors import ConfigError, LoadError
from draftproof.models.config import LatentConfig, ModelConfig
from draftproof.models.weight_formats import WeightPacker, WeightTensor
from draftproof.ops import AttentionShape, KVLayout, LatentAttention
from draftproof.ops.contract.kv_layout import kv_format


def latent_config_from_hf(raw: Mapping[str, Any], rope: Mapping[str, Any], pairs: bool) -> LatentConfig:
    """Parse the widths of latent attention; `rope`: the rotary parameters; `pairs`: the family's default."""
    if raw.get("attention_bias"):
        raise LoadError("biases of latent attention are not supported (attention_bias = true)")
    widths = {}
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if not isinstance(raw.get(key), int) or raw[key] <= 0:
            raise LoadError(f"{key} is missing or not a positive whole number")
        widths[key] = int(raw[key])
    scale = (widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]) ** -0.5
    if mscale := rope.get("mscale_all_dim"):
        scale *= yarn_mscale(float(rope.get("factor") or 1.0), float(mscale)) ** 2
    return LatentConfig(
        q_rank=int(raw.get("q_lora_rank") or 0),
        kv_rank=widths["kv_lora_rank"],
        nope_dim=widths["qk_nope_head_dim"],
        value_dim=widths["v_head_dim"],
        scale=scale,
        rope_pairs=bool(raw.get("rope_interleave", pairs)),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return the factor by which yarn scales attention for a context `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def latent_shapes(prefix: str, config: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the attention tensors of one layer."""
    hidden, heads, rope_dim = config.hidden_size, config.num_heads, config.head_dim
    q_size = heads * (latent.nope_dim + rope_dim)
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (q_size, hidden)}
    if latent.q_rank:
        shapes = {
            "q_a_proj": (latent.q_rank, hidden),
            "q_a_layernorm": (latent.q_rank,),
            "q_b_proj": (q_size, latent.q_rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa": (latent.kv_rank + rope_dim, hidden),
        "kv_a_layernorm": (latent.kv_rank,),
        "kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "o_proj": (hidden, heads * latent.value_dim),
    }
    return {f"{prefix}self_attn.{name}.weight": shape for name, shape in shapes.items()}


def latent_attention(
    packer: WeightPacker, prefix: str, config: ModelConfig, latent: LatentConfig
) -> LatentAttention:
    """Pack the attention of one layer.

    `kv_b_proj` holds the key and value projections of every head. They are multiplied head by head, so a
    quantised `kv_b_proj` is dequantised.
    """
    at = prefix + "self_attn."
    first = "q_a_proj" if latent.q_rank else "q_proj"
    pack, name = packer.ops.forward.pack_heads, at + "kv_b_proj.weight"

    def pack_up(weights: Mapping[str, WeightTensor]) -> tuple[Any, Any]:
        kv_up = packer.on_device(weights[name])
        kv_up = kv_up.view(config.num_heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        return pack(kv_up[:, : latent.nope_dim].transpose(1, 2)), pack(kv_up[:, latent.nope_dim :])

    key_up, value_up = packer.derive([name], pack_up)
    return LatentAttention(
        heads=AttentionShape(
            num_q=config.num_heads,
            num_kv=1,
            dim=latent.kv_rank + config.head_dim,
            scale=latent.scale,
            window=0,
            value_dim=latent.kv_rank,
        ),
        nope_dim=latent.nope_dim,
        qkv=packer.packed([at + first, at + "kv_a_proj_with_mqa"], bias=False),
        q_norm=packer.tensor(at + "q_a_layernorm.weight") if latent.q_rank else None,
        q_up=packer.packed([at + "q_b_proj"], bias=False) if latent.q_rank else None,
        latent_norm=packer.tensor(at + "kv_a_layernorm.weight"),
        key_up=key_up,
        value_up=value_up,
        out=packer.packed([at + "o_proj"], bias=False),
        rope_pairs=latent.rope_pairs,
        norm_eps=latent.norm_eps,
    )


def latent_kv_layout(config: ModelConfig, latent: LatentConfig, dtype: torch.dtype) -> KVLayout:
    """Return the storage of one latent row a token; quantised rows are refused."""
    if kv_format(dtype) is not None:
        raise ConfigError(
            "kv_cache_dtype must be 'auto' for latent attention: its rope columns would share a scale with "
            "the latent, whose values are much smaller"
        )
    return KVLayout(config.num_layers, 1, latent.kv_rank + config.head_dim, dtype, planes=1)
