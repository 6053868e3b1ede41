"""Rotary embedding: table of cosines and sines, frequencies as in transformers, order of q and k rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, max_len: int) -> Tensor:
    """Return [max_len, head_dim] fp32: cos of the head_dim/2 frequencies, then sin. Rows are positions."""
    frequencies, scale = inverse_frequencies(config)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1)


def pairs_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a q or k projection from adjacent rotary pairs to halves, head by head.

    Rows (0, 1), (2, 3), … of a head become its two halves, so that half-split rope kernels rotate the same
    pairs. Products of q and k do not change, because both are reordered alike.
    """
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def qk_to_halves(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Reorder the tensor `name` if it belongs to a q or k projection stored as adjacent rotary pairs."""
    if ".q_proj." in name:
        return pairs_to_halves(tensor, config.num_heads)
    if ".k_proj." in name:
        return pairs_to_halves(tensor, config.num_kv_heads)
    return tensor


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return the frequencies [head_dim / 2] fp32 and the factor of cos and sin."""
    dim, scaling = config.head_dim, config.rope_scaling
    powers = config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / powers
    if scaling.kind == "none":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "factors":
        if len(scaling.factors) != dim // 2:
            raise LoadError(f"{len(scaling.factors)} rope factors given for {dim // 2} rotary frequencies")
        return plain / torch.tensor(scaling.factors, dtype=torch.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(powers, config)
    raise LoadError(f"rope scaling {scaling.kind!r} is not supported")


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, blend those between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    old_len = scaling.original_max_position
    wavelen = 2 * math.pi / plain
    scaled = torch.where(wavelen > old_len / low, plain / scaling.factor, plain)
    smooth = (old_len / wavelen - low) / (high - low)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = ~(wavelen < old_len / high) & ~(wavelen > old_len / low)
    return torch.where(between, blended, scaled)


def _yarn(powers: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    scaling, dim, base = config.rope_scaling, config.head_dim, config.rope_theta

    def dimension_of(rotations: float) -> float:
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return (dim * math.log(ratio)) / (2 * math.log(base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep
    scale = scaling.attention_factor
    if scale is None:
        scale = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
    return frequencies, scale
