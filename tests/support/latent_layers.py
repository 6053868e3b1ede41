"""A layer of latent attention with random weights, and the sizes of tiny models that have one."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops import AttentionShape, LatentAttention, Ops

NOPE, VALUE, RANK = 12, 10, 20
MAX_POSITIONS = 320
# config.json of a tiny model
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(ops: Ops, heads: AttentionShape, dtype: torch.dtype, rank: int, pairs: bool) -> LatentAttention:
    """Return an attention block without the weights of `linear`."""
    kv_up = randn(heads.num_q, NOPE + VALUE, heads.value_dim, seed=4, dtype=dtype) / 4
    return LatentAttention(
        heads=heads,
        nope_dim=NOPE,
        qkv=None,
        q_norm=randn(rank, seed=5, dtype=dtype) if rank else None,
        q_up=None,
        latent_norm=randn(heads.value_dim, seed=6, dtype=dtype),
        key_up=ops.forward.pack_heads(kv_up[:, :NOPE].transpose(1, 2)),
        value_up=ops.forward.pack_heads(kv_up[:, NOPE:]),
        out=None,
        rope_pairs=pairs,
        norm_eps=1e-6,
    )


def rope(width: int) -> Tensor:
    """Return a rotary table [MAX_POSITIONS, width]."""
    angles = torch.arange(MAX_POSITIONS)[:, None] / 10.0 ** torch.arange(width // 2)[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)
