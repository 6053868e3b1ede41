"""Tensor names and shapes of a checkpoint: the table for dense decoders, the check, and random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig, MoeConfig
from draftproof.models.families.latent import latent_shapes
from draftproof.models.registry import expected_tensors

_MTP = re.compile(r"(model\.)?mtp[._]")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def dense_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face name -> shape of every tensor of a dense decoder, in forward order."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        norms = config.norms
        for name in (norms.attention, norms.attention_output, norms.mlp, norms.mlp_output):
            if name:
                shapes[f"{prefix}{name}.weight"] = (hidden,)
        if config.qk_norm or config.qk_row_norm:
            for x, count in (("q", config.num_heads), ("k", config.num_kv_heads)):
                width = config.head_dim * (count if config.qk_row_norm else 1)
                shapes[f"{prefix}self_attn.{x}_norm.weight"] = (width,)
        if config.has_sinks:
            shapes[prefix + "self_attn.sinks"] = (config.num_heads,)
        shapes |= linear_shapes(prefix, config, hidden, layer)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def linear_shapes(
    prefix: str, config: ModelConfig, qkv_inputs: int, layer: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the linear weights of one layer; `qkv_inputs`: columns of q, k and v."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    attention: tuple[tuple[str, int, int, bool], ...] = (
        ("self_attn.q_proj", q_size, qkv_inputs, config.qkv_bias),
        ("self_attn.k_proj", kv_size, qkv_inputs, config.qkv_bias),
        ("self_attn.v_proj", kv_size, qkv_inputs, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
    )
    if config.latent is not None:
        shapes, attention = latent_shapes(prefix, config, config.latent), ()
    for name, rows, columns, bias in attention:
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    if config.moe is not None and config.has_experts(layer):
        return shapes | _moe_shapes(prefix, config.moe, config)
    return shapes | _mlp_shapes(prefix + "mlp.", config.intermediate_size, config)


def _mlp_shapes(
    prefix: str,
    inner: int,
    config: ModelConfig,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the weights of a gated MLP with `inner` channels."""
    gate, up, down = (prefix + name for name in projections)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        (gate, inner, config.hidden_size),
        (up, inner, config.hidden_size),
        (down, config.hidden_size, inner),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _moe_shapes(prefix: str, moe: MoeConfig, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a mixture of experts."""
    count = moe.routing.num_experts
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{moe.router}.weight": (count, config.hidden_size)}
    if moe.has_router_bias:
        shapes[f"{prefix}{moe.router}.bias"] = (count,)
    if moe.correction:
        shapes[prefix + moe.correction] = (1, count) if moe.is_correction_row else (count,)
    for expert in range(count):
        name = f"{prefix}{moe.experts}.{expert}."
        shapes |= _mlp_shapes(name, moe.intermediate_size, config, moe.projections)
    if moe.shared_intermediate_size:
        shapes |= _mlp_shapes(f"{prefix}{moe.shared}.", moe.shared_intermediate_size, config)
    if moe.has_shared_gate:
        shapes[f"{prefix}{moe.shared}_gate.weight"] = (1, config.hidden_size)
    return shapes


def split_draft_tensors(
    tensors: Mapping[str, Tensor], raw: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Separate the tensors of a model from those of MTP layers in the same files.

    MTP layers are named `mtp.*` or `model.mtp*`, or are the `num_nextn_predict_layers` layers after the
    `num_hidden_layers` of the model. `raw` is the model's config.json.
    """
    first, count = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    beyond = range(first, first + count) if isinstance(first, int) and isinstance(count, int) else range(0)
    model: dict[str, Tensor] = {}
    draft: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = _LAYER.match(name)
        is_draft = _MTP.match(name) is not None or (layer is not None and int(layer[1]) in beyond)
        (draft if is_draft else model)[name] = tensor
    return model, draft


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise LoadError with the names that are missing, unknown or of another shape."""
    if missing := [name for name in expected if name not in found]:
        raise LoadError(f"{where}: missing {_some(f'{name} {list(expected[name])}' for name in missing)}")
    if unknown := [name for name in found if name not in expected]:
        shapes = (f"{name} {list(found[name])}" for name in unknown)
        raise LoadError(f"{where}: the model has no place for {_some(shapes)}")
    wrong = [
        f"{name} is {list(found[name])} but should be {list(shape)}"
        for name, shape in expected.items()
        if tuple(found[name]) != shape
    ]
    if wrong:
        raise LoadError(f"{where}: {_some(wrong)}")


def _some(names: Iterable[str], limit: int = 4) -> str:
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


MAX_DRAWN_NUMBERS = 1 << 30  # of a model; in a larger one all tensors are taken from a pool
POOL_SIZE = (1 << 24) + 43  # numbers drawn for all large tensors together; a prime, so that rows differ


def dummy_tensors(config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Return random weights for tests and benchmarks, the same for the same seed.

    Large layers add little to the embedding. With a tied LM head greedy text therefore soon repeats itself,
    which gives n-gram drafts something to match.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = 1 / math.sqrt(2 * config.num_layers)  # the residual stream keeps its size
    tensors: dict[str, Tensor] = {}
    pools: dict[float, Tensor] = {}
    shapes = expected_tensors(config)
    is_huge = sum(map(math.prod, shapes.values())) > MAX_DRAWN_NUMBERS
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=dtype)
            continue
        is_added = name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))
        std = 0.02 * depth * min(1.0, 640 / shape[1]) if is_added else 0.02
        size = math.prod(shape)
        if size <= POOL_SIZE and not is_huge:
            tensors[name] = torch.randn(shape, generator=generator).mul_(std).to(dtype)
            continue
        if std not in pools:  # eight billion draws would take minutes
            pools[std] = torch.randn(POOL_SIZE, generator=generator).mul_(std).to(dtype)
        if size <= POOL_SIZE:  # a view: the experts of a model may exceed the memory of the host
            start = int(torch.randint(POOL_SIZE - size + 1, (1,), generator=generator))
            tensors[name] = pools[std][start : start + size].view(shape)
            continue
        start = int(torch.randint(POOL_SIZE, (1,), generator=generator))
        tensors[name] = _window(pools[std], start, size).view(shape)
    return tensors


def _window(pool: Tensor, start: int, size: int) -> Tensor:
    """Return `size` numbers of the pool from `start` on, wrapping around."""
    out = torch.empty(size, dtype=pool.dtype)
    done = 0
    while done < size:
        piece = pool[start : start + size - done]
        out[done : done + len(piece)] = piece
        done, start = done + len(piece), 0
    return out
