"""Upcycling: a dense model as a mixture of experts, whose text is known."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftproof.models.config import MoeConfig
from draftproof.models.load import Checkpoint
from draftproof.models.weight_formats import FloatWeight
from draftproof.ops import Routing

PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def upcycle(dense: Checkpoint, num_experts: int = 8, top_k: int = 2, noise: float = 0.0) -> Checkpoint:
    """Return a Llama model with each MLP copied into all experts of a Mixtral, and random routers.

    Normalised weights add up to 1, so without noise the output is that of the dense model. `noise` is added
    to the experts, relative to the standard deviation of a matrix.
    """
    generator = torch.Generator().manual_seed(0)
    moe = MoeConfig(
        Routing(num_experts, top_k),
        intermediate_size=dense.config.intermediate_size,
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
    )
    config = replace(dense.config, architecture="MixtralForCausalLM", moe=moe)
    weights = {}
    for name, tensor in dense.tensors.items():
        prefix, _, part = name.removesuffix(".weight").partition(".mlp.")
        if not part:
            weights[name] = FloatWeight(tensor)
            continue
        for expert in range(num_experts):
            own = tensor
            if noise:
                own = tensor + torch.randn(tensor.shape, generator=generator) * noise * tensor.float().std()
            to = f"{prefix}.{moe.experts}.{expert}.{PARTS[part]}.weight"
            weights[to] = FloatWeight(own.to(tensor.dtype))
        if part == "gate_proj":
            router = torch.randn((num_experts, config.hidden_size), generator=generator)
            weights[f"{prefix}.{moe.router}.weight"] = FloatWeight(router)
    return replace(dense, config=config, weights=weights)
