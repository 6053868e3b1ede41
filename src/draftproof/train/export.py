"""Export of a trained head in this project's format and in that of the `speculators` package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.models.config import ModelConfig, RopeScaling
from draftproof.models.draft_head.config import DraftHeadConfig
from draftproof.models.weight_formats import Int8RowWeight
from draftproof.train.config import write_json

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
SPECULATORS_VERSION = "0.3.0"  # of the format that is written: the first with every key used here


def write_head(
    folder: Path, config: DraftHeadConfig, weights: Mapping[str, Tensor], d2t: Tensor, bits: int = 16
) -> None:
    """Write this project's format, without the target's embedding and LM head. Bytes are deterministic."""
    tensors = stored(weights, bits)
    if config.has_reduced_vocab:
        tensors["d2t"] = d2t.to(torch.int64)
    _save(folder, tensors)
    write_json(folder / CONFIG, config.to_json())


def write_speculators(
    folder: Path,
    config: DraftHeadConfig,
    weights: Mapping[str, Tensor],
    d2t: Tensor,
    target: ModelConfig,
    lm_head: Tensor,  # [draft vocab, hidden]: the rows d2t of the target's
    *,
    verifier: str | None,  # hub id or folder of the target for other engines
    drafts: int,
) -> None:
    """Write the `speculators` format: its own LM head, offsets in d2t, the mask t2d, no embedding."""
    ids = d2t.detach().cpu().to(torch.int64)
    tensors = stored({**weights, "lm_head.weight": lm_head}, bits=16)
    tensors = {name.replace("feature_norm.", "fc_norm."): tensor for name, tensor in tensors.items()}
    if config.has_reduced_vocab:
        used = torch.zeros(target.vocab_size, dtype=torch.bool)
        used[ids] = True
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = used
    _save(folder, tensors)
    write_json(folder / CONFIG, _speculators_config(config, target, verifier, drafts))


def _speculators_config(
    config: DraftHeadConfig, target: ModelConfig, verifier: str | None, drafts: int
) -> dict[str, Any]:
    proposal: dict[str, Any] = {"proposal_type": "greedy", "speculative_tokens": drafts}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        # layer inputs there, layer outputs here
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layers],
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [target.architecture]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": config.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position,
            "rope_parameters": _rope(config),
        },
    }


def _rope(config: DraftHeadConfig) -> dict[str, Any]:
    scaling: RopeScaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling.kind == "linear":
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return rope  # yarn and "factors" are refused before training: `head_config`


def stored(weights: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return the tensors as a file stores them: bf16, with `bits=8` matrices in int8."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if bits == 8 and weight.dim() == 2:
            tensors |= Int8RowWeight.quantize(weight).stored(name)
        else:
            tensors[name] = weight.detach().bfloat16() if weight.is_floating_point() else weight
    return tensors


def _save(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (WEIGHTS + ".part")
    on_host = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    save_file(on_host, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # the library writes for the owner alone
    os.replace(partial, folder / WEIGHTS)
