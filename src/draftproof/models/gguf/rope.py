"""Rotary embedding and latent attention in the metadata of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from draftproof.errors import LoadError
from draftproof.models.config import LatentConfig, RopeScaling
from draftproof.models.families.latent import yarn_mscale
from draftproof.models.gguf.file import GGUFFile, dequantize

ROPE_FREQS = "rope_freqs.weight"
LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
ROPE_TENSORS = (ROPE_FREQS, *LONGROPE)
_UNTRUNCATED_YARN = ("gpt-oss",)  # files do not have it
_YARN_KEYS = ("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")


def short_float(value: float) -> float:
    """Return the shortest decimal with the same fp32 bits: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rope_from_gguf(file: GGUFFile, arch: str) -> RopeScaling:
    """Return the scaling of the rotary frequencies."""
    meta = file.metadata
    kind = meta.get(f"{arch}.rope.scaling.type", "linear")  # llama.cpp's default
    old_key = meta.get(f"{arch}.rope.scale_linear", 1.0)
    factor = float(meta.get(f"{arch}.rope.scaling.factor", old_key))
    if all(name in file.tensors for name in LONGROPE):
        return _longrope(file, arch)
    if ROPE_FREQS in file.tensors:
        # Llama 3.1 and later: llama.cpp stores the result of the llama3 rule, not its parameters.
        if kind != "none" and factor not in (0.0, 1.0):
            raise LoadError(f"rope_freqs together with {kind} rope scaling is not supported")
        factors = _values(file, ROPE_FREQS)
        return RopeScaling() if set(factors) == {1.0} else RopeScaling("factors", factors=factors)
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return _yarn(meta, arch, factor)
    raise LoadError(f"rope scaling {kind!r} is not supported; supported: linear, yarn, longrope, rope_freqs")


def _values(file: GGUFFile, name: str) -> tuple[float, ...]:
    raw = np.memmap(file.path, dtype=np.uint8, mode="r")
    return tuple(dequantize(raw, file.tensors[name]).flatten().tolist())


def _yarn(meta: dict[str, Any], arch: str, factor: float) -> RopeScaling:
    prefix = f"{arch}.rope.scaling."
    unknown = [k for k in meta if k.startswith(prefix + "yarn") and k.removeprefix(prefix) not in _YARN_KEYS]
    unknown += [k for k in meta if k == prefix + "attn_factor"]
    if prefix + "yarn_log_multiplier" in meta and arch != "deepseek2":
        unknown.append(prefix + "yarn_log_multiplier")
    if unknown:
        raise LoadError(f"yarn with {', '.join(unknown)} is not supported")
    original = meta.get(prefix + "original_context_length", meta[f"{arch}.context_length"])
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=int(original),
        # DeepSeek's checkpoints have `mscale` = `mscale_all_dim`, whose factors cancel on cos and sin
        attention_factor=1.0 if prefix + "yarn_log_multiplier" in meta else None,
        beta_fast=float(meta.get(prefix + "yarn_beta_fast", 32.0)),
        beta_slow=float(meta.get(prefix + "yarn_beta_slow", 1.0)),
        truncate=arch not in _UNTRUNCATED_YARN,
    )


def _longrope(file: GGUFFile, arch: str) -> RopeScaling:
    """Return the scaling of Phi-3: two sets of factors, and a factor of cos and sin."""
    meta, prefix = file.metadata, f"{arch}.rope.scaling."
    length = int(meta[f"{arch}.context_length"])
    original = int(meta.get(prefix + "original_context_length", length))
    factor, stored = length / original, meta.get(prefix + "attn_factor")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    is_usual = stored is None or np.float32(stored) == np.float32(usual)
    short, long = (tuple(map(short_float, _values(file, name))) for name in LONGROPE)
    return RopeScaling(
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=None if stored is None or is_usual else short_float(stored),
        factors=short,
        long_factors=long,
    )


def latent_from_gguf(meta: dict[str, Any], arch: str, need: Callable[[str], Any]) -> LatentConfig:
    """Return the widths of latent attention.

    Files that hold K and V projections apart have the widths of heads in keys of their own.
    """
    is_split = f"{arch}.attention.key_length_mla" in meta
    width = int(need("attention.key_length_mla" if is_split else "attention.key_length"))
    scale = width**-0.5
    if mscale := meta.get(f"{arch}.rope.scaling.yarn_log_multiplier"):
        factor = float(meta.get(f"{arch}.rope.scaling.factor", 1.0))
        scale *= yarn_mscale(factor, short_float(10 * short_float(mscale))) ** 2
    return LatentConfig(
        q_rank=int(meta.get(f"{arch}.attention.q_lora_rank") or 0),
        kv_rank=int(need("attention.kv_lora_rank")),
        nope_dim=width - int(need("rope.dimension_count")),
        value_dim=int(need("attention.value_length_mla" if is_split else "attention.value_length")),
        scale=scale,
    )
