"""Small draft heads and draft models for tests, written as folders that the loaders read."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity
from draftproof.models.expected_tensors import dummy_tensors
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup

_FOLDER = tempfile.TemporaryDirectory(prefix="draftproof-heads-")
# Methods that need a model folder.
WITH_MODELS = ("mtp", "eagle", "eagle3", "draft_model")


def folder(name: str) -> Path:
    made = Path(_FOLDER.name) / name.replace("/", "-")
    made.mkdir(parents=True, exist_ok=True)
    return made


def target_of(arch: str, dtype: str) -> TargetIdentity:
    made = tiny.checkpoint(arch, dtype)
    return TargetIdentity.from_weights(made.config, made.tensors)


def head_config(kind: str, arch: str = "llama", dtype: str = "float32", **fields: Any) -> DraftHeadConfig:
    """Return the configuration of a draft head; the kinds differ in sizes and flags too."""
    model = tiny.model_config(arch)
    values: dict[str, Any] = {
        "kind": kind,
        "hidden_size": model.hidden_size,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "draft_vocab_size": model.vocab_size,
        "target": target_of(arch, dtype),
    }
    values |= {
        "eagle3": {"aux_layers": (0, 1), "draft_vocab_size": 61, "num_kv_heads": 1},
        "eagle": {"feature": "last", "num_layers": 2, "share_lm_head": False, "fc_bias": True},
        "mtp": {"feature": "last_normed", "qk_norm": True, "norm_output": True},
    }[kind]
    return DraftHeadConfig(**{**values, **fields})


def head_tensors(config: DraftHeadConfig, seed: int = 5, bold: float = 8.0) -> dict[str, Tensor]:
    """Return random tensors, and the ids of a reduced vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in config.tensors().items():
        if name == "d2t":
            mixed = torch.randperm(config.target.vocab_size, generator=generator)
            tensors[name] = mixed[: shape[0]].sort().values
        elif "norm" in name:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = 0.02 * bold * torch.randn(shape, generator=generator)
    return tensors


def save_head(name: str, config: DraftHeadConfig, tensors: dict[str, Tensor]) -> str:
    made = folder(name)
    (made / "config.json").write_text(json.dumps(config.to_json()))
    save_file(tensors, made / "model.safetensors")
    return str(made)


@cache
def head(kind: str, arch: str = "llama", dtype: str = "float32") -> str:
    config = head_config(kind, arch, dtype)
    return save_head(f"{kind}/{arch}/{dtype}", config, head_tensors(config))


def _qk_to_pairs(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Undo `rope.qk_to_halves`: halves of a head become adjacent rotary pairs, as the files hold them."""
    counts = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
    for part, count in counts.items():
        if part in name:
            halves = tensor.reshape(count, 2, len(tensor) // count // 2, *tensor.shape[1:])
            return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def save_model(name: str, config: ModelConfig, tensors: dict[str, Tensor]) -> str:
    write_model(folder(name), config, tensors)
    return str(folder(name))


def write_model(made: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint as other tools do."""
    if config.rope_interleaved:
        tensors = {key: _qk_to_pairs(key, tensor, config) for key, tensor in tensors.items()}
    raw = {
        "use_bias": config.mlp_bias,  # ERNIE 4.5
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "eos_token_id": list(config.eos_token_ids),
    }
    if config.rope_scaling.kind == "llama3":
        scaling = config.rope_scaling
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    if any(config.windows):
        raw["sliding_window"] = config.windows[0]
    (made / "config.json").write_text(json.dumps(raw))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, made / "model.safetensors")


@cache
def target_copy(arch: str, dtype: str) -> str:
    """Return a copy of the target; as a draft model its drafts are always accepted."""
    made = tiny.checkpoint(arch, dtype)
    return save_model(f"target_copy/{arch}/{dtype}", made.config, made.tensors)


@cache
def small(dtype: str) -> str:
    """Return another model of one layer with the same vocabulary."""
    config = replace(
        tiny.model_config("smollm2"), num_layers=1, hidden_size=16, num_heads=2, windows=(), dtype=dtype
    )
    tensors = dummy_tensors(config, getattr(torch, dtype), 8)
    return save_model(f"small/{dtype}", config, {k: t * 8 if t.dim() == 2 else t for k, t in tensors.items()})


def code_of(method: str) -> Any:
    """Return the function that drafts; methods of the table may share it."""
    kind = lookup(PROPOSERS, method, "method")
    return kind.draft if kind.graph_safe else kind.propose


def options(method: str, arch: str, dtype: str) -> dict[str, Any]:
    """Return the options that a method of the table needs."""
    assert all(name in PROPOSERS for name in WITH_MODELS)
    if method == "draft_model":
        return {"model": small(dtype)}
    if method == "hybrid":
        members = [{"method": name, **options(name, arch, dtype)} for name in ("suffix", "mtp", "ngram")]
        return {"proposers": [{**one, "num_speculative_tokens": 3} for one in members[1:]] + members[:1]}
    return {"model": head(method, arch, dtype)} if method in WITH_MODELS else {}
