"""Ops of latent attention in torch: fixed blocks of rows, so that a row's bits depend on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import LatentAttention
from draftproof.types import Rows


class TorchLatent(ForwardOps):
    """Latent attention on torch tensors of any device."""

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def head_linear(self, x: Tensor, packed: Tensor) -> Tensor:
        num_heads, width, depth = packed.shape
        columns = x.reshape(len(x), num_heads, depth).unbind(1)
        out = [self.linear(head, (weight, None)) for head, weight in zip(columns, packed, strict=True)]
        return torch.stack(out, 1).view(len(x), num_heads * width)

    def latent_store(
        self, qkv: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor, cache: Tensor
    ) -> Tensor:
        eps, page_size = attention.norm_eps, cache.shape[2]
        q, latent, key = qkv.split([attention.q_columns, attention.heads.value_dim, attention.rope_dim], 1)
        stored = [
            self.rms_norm(latent, attention.latent_norm, eps),
            _rotate(key, rope[rows.positions], attention.rope_pairs),
        ]
        cache[0, rows.kv_index // page_size, rows.kv_index % page_size, 0] = torch.cat(stored, 1)
        return q if attention.q_norm is None else self.rms_norm(q, attention.q_norm, eps)

    def latent_queries(self, q: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor) -> Tensor:
        heads, count = attention.heads, len(q)
        widths = [attention.nope_dim, attention.rope_dim]
        nope, rotary = q.reshape(count, heads.num_q, sum(widths)).split(widths, 2)
        latent = self.head_linear(nope.flatten(1), attention.key_up)
        rotated = _rotate(rotary, rope[rows.positions][:, None], attention.rope_pairs)
        parts = [latent.view(count, heads.num_q, heads.value_dim), rotated]
        return torch.cat(parts, 2).view(count, heads.num_q * heads.dim)


def _rotate(x: Tensor, angles: Tensor, pairs: bool) -> Tensor:
    """Rotate rope columns x [..., rope_dim], adjacent pairs or halves, and return halves."""
    cos, sin = angles.chunk(2, dim=-1)
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if pairs else wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
