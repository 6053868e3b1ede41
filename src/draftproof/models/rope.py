"""Rotary embedding: the table of cosines and sines, with the frequencies that transformers uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, max_len: int) -> Tensor:
    """[max_len, head_dim] fp32: cos of the head_dim/2 frequencies, then sin. Rows are positions."""
    frequencies, scale = inverse_frequencies(config)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """The frequencies [head_dim / 2] fp32, and what cos and sin are multiplied by."""
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
    """Long waves are stretched by `factor`, short ones stay, those between are blended."""
    low, high, old_len = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position,
    )
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
