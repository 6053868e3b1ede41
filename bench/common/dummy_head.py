"""EAGLE-3 head with random weights, in the widths of its target model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity


def write_dummy_head(
    model: ModelConfig, target: TargetIdentity, vocab: int, folder: Path, share_lm_head: bool = True
) -> str:
    """Write a head of one layer over every (V / vocab)-th id of `model` to `folder`, which is returned."""
    layers, random = model.num_layers, torch.Generator().manual_seed(1)
    config = DraftHeadConfig(
        kind="eagle3",
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        aux_layers=tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})),
        draft_vocab_size=min(vocab, model.vocab_size),
        share_lm_head=share_lm_head,
        target=target,
    )
    tensors: dict[str, Tensor] = {}
    for name, shape in config.tensors().items():
        tensors[name] = (torch.randn(shape, generator=random) / math.sqrt(shape[-1])).to(torch.bfloat16)
        if "norm" in name:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        if name == "d2t":
            tensors[name] = torch.arange(shape[0]) * (model.vocab_size // shape[0])
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return str(folder)
