"""Rotary embedding: table of cosines and sines, frequencies as in transformers, order of q and k rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, max_len: int) -> Tensor:
    """Return [max_len, head_dim] fp32: cos of head_dim/2 frequencies, then sin. Rows are positions.

    Columns that are not rotated have cos 1 and sin 0.
    """
    frequencies, scale = inverse_frequencies(config, max_len)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    rest = (0, config.head_dim // 2 - len(frequencies))
    cos = torch.nn.functional.pad(angles.cos() * scale, rest, value=1.0)
    return torch.cat([cos, torch.nn.functional.pad(angles.sin() * scale, rest)], dim=1)


def layer_rope_tables(config: ModelConfig, max_len: int, device: torch.device) -> list[Tensor]:
    """Return the rotary table of each layer on `device`; equal tables are one tensor."""
    tables: dict[str, Tensor] = {}

    def table(kind: str) -> Tensor:
        if kind not in tables:
            made = config
            if kind == "local" and config.local_rope_theta is not None:
                made = replace(config, rope_theta=config.local_rope_theta, rope_scaling=RopeScaling())
            found = rope_table(made, max_len)
            if kind == "none":
                found = (torch.arange(config.head_dim) < config.head_dim // 2).float().repeat(max_len, 1)
            tables[kind] = found.to(device)
        return tables[kind]

    kinds = []
    for layer, window in enumerate(config.windows):
        is_local = bool(window) and config.local_rope_theta is not None
        kinds.append("none" if layer in config.no_rope_layers else "local" if is_local else "global")
    return [table(kind) for kind in kinds]


def rotary_order(config: ModelConfig, is_interleaved: bool) -> Tensor:
    """Return [head_dim] int64: the stored column of each column of a head, whose halves are rotary pairs.

    The first columns of both halves are the pairs that are rotated, the others are not rotated. Products of
    q and k do not change, because both are reordered alike.
    """
    columns, rotated = torch.arange(config.head_dim), config.rotary_dim
    pairs = columns[:rotated].view(-1, 2).T if is_interleaved else columns[:rotated].view(2, -1)
    return torch.cat([pairs, columns[rotated:].view(2, -1)], dim=1).flatten()


def qk_to_halves(name: str, tensor: Tensor, config: ModelConfig, is_interleaved: bool = True) -> Tensor:
    """Reorder the tensor `name` along its rows if it belongs to q or k, see `rotary_order`."""
    if not any(part in name for part in (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")):
        return tensor
    order = rotary_order(config, is_interleaved)
    heads = tensor.reshape(-1, config.head_dim, *tensor.shape[1:])
    return heads[:, order].reshape(tensor.shape)


def qk_to_pairs(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Undo `qk_to_halves` of a checkpoint of this configuration."""
    rows = torch.arange(len(tensor), device=tensor.device)
    return tensor[qk_to_halves(name, rows, config, config.rope_interleaved).argsort()]


def loaded_form(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors of a safetensors checkpoint with q and k rows in the order of the model."""
    if not config.reorders_qk:
        return dict(tensors)
    pairs = config.rope_interleaved
    return {name: qk_to_halves(name, tensor, config, pairs) for name, tensor in tensors.items()}


def inverse_frequencies(config: ModelConfig, max_len: int = 0) -> tuple[Tensor, float]:
    """Return the frequencies [rotary_dim / 2] fp32 and the factor of cos and sin.

    `max_len`, the largest number of tokens of a text, selects the frequencies of longrope.
    """
    dim, scaling = config.rotary_dim, config.rope_scaling
    powers = config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / powers
    if scaling.kind == "none":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind in ("factors", "longrope"):
        is_long = scaling.kind == "longrope" and max_len > scaling.original_max_position
        factors = scaling.long_factors if is_long else scaling.factors
        if len(factors) != dim // 2:
            raise LoadError(f"{len(factors)} rope factors given for {dim // 2} rotary frequencies")
        divisors = torch.tensor(factors, dtype=torch.float32)
        if scaling.kind == "factors":
            return plain / divisors, 1.0
        return 1.0 / (divisors * powers), _longrope_scale(scaling)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(powers, config)
    raise LoadError(f"rope scaling {scaling.kind!r} is not supported")


def _longrope_scale(scaling: RopeScaling) -> float:
    """Return the factor of cos and sin of longrope."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))


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
    scaling, dim, base = config.rope_scaling, config.rotary_dim, config.rope_theta

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
