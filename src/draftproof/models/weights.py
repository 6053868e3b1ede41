"""Named tensors: the one table of what a checkpoint must hold, its check, and random stand-ins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig

# Buffers that old exporters wrote into checkpoints; they are computed from the config instead.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of this model, in forward order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = config.qkv_bias, config.o_bias, config.mlp_bias
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes |= linear_shapes(prefix, hidden, hidden, q_size, kv_size, inner, biases)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def linear_shapes(
    prefix: str,
    hidden: int,
    reads: int,
    q_size: int,
    kv_size: int,
    inner: int,
    biases: tuple[bool, bool, bool],
) -> dict[str, tuple[int, ...]]:
    """Of one layer whose attention reads `reads` columns; biases of q, k and v, of o, and of the MLP."""
    of_qkv, of_o, of_mlp = biases
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q_size, reads, of_qkv),
        ("self_attn.k_proj", kv_size, reads, of_qkv),
        ("self_attn.v_proj", kv_size, reads, of_qkv),
        ("self_attn.o_proj", hidden, q_size, of_o),
        ("mlp.gate_proj", inner, hidden, of_mlp),
        ("mlp.up_proj", inner, hidden, of_mlp),
        ("mlp.down_proj", hidden, inner, of_mlp),
    ):
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def is_ignored(name: str) -> bool:
    """Whether a stored tensor is one that every loader leaves out."""
    return _IGNORED.fullmatch(name) is not None


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """LoadError naming what is missing, unknown or of another shape."""
    if missing := [name for name in expected if name not in found]:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        raise LoadError(f"{where}: missing {_some(shapes)}")
    if unknown := [name for name in found if name not in expected]:
        shapes = [f"{name} {list(found[name])}" for name in unknown]
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


POOL = (1 << 24) + 43  # numbers drawn for all large tensors together; a prime: no two rows are alike


def dummy_tensors(config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Random weights of a sensible size, the same for the same seed: for tests and benchmarks.

    Large layers add little to the embedding, so where the head is tied to it greedy text soon repeats itself:
    what a benchmark of drafts from the text wants.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = 1 / math.sqrt(2 * config.num_layers)  # the residual stream keeps its size
    tensors: dict[str, Tensor] = {}
    pools: dict[float, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=dtype)
            continue
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 * depth * min(1.0, 640 / shape[1]) if adds else 0.02
        if math.prod(shape) <= POOL:
            tensors[name] = torch.randn(shape, generator=generator).mul_(std).to(dtype)
            continue
        if std not in pools:  # eight billion draws would take minutes
            pools[std] = torch.randn(POOL, generator=generator).mul_(std).to(dtype)
        start = int(torch.randint(POOL, (1,), generator=generator))
        tensors[name] = _window(pools[std], start, math.prod(shape)).view(shape)
    return tensors


def _window(pool: Tensor, start: int, size: int) -> Tensor:
    """`size` numbers of the pool from `start` on, round and round."""
    out = torch.empty(size, dtype=pool.dtype)
    done = 0
    while done < size:
        piece = pool[start : start + size - done]
        out[done : done + len(piece)] = piece
        done, start = done + len(piece), 0
    return out
