"""Reference definition of the ops of latent attention: one row and one head at a time, float64 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.types import LatentAttention
from draftproof.types import Rows


class ReferenceLatent(ForwardOps):
    """Latent attention as loops over rows."""

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight.double()

    def head_linear(self, x: Tensor, packed: Tensor) -> Tensor:
        num_heads, width, depth = packed.shape
        out = torch.zeros((len(x), num_heads, width), dtype=x.dtype)
        for r, row in enumerate(x.double().view(len(x), num_heads, depth)):
            for h in range(num_heads):
                out[r, h] = (packed[h] * row[h]).sum(-1)
        return out.flatten(1)

    def latent_store(
        self, qkv: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor, cache: Tensor
    ) -> Tensor:
        eps, page_size = attention.norm_eps, cache.shape[2]
        q, latent, key = qkv.split([attention.q_columns, attention.heads.value_dim, attention.rope_dim], 1)
        latent = self.rms_norm(latent, attention.latent_norm, eps)
        for r in range(len(qkv)):
            page, offset = divmod(int(rows.kv_index[r]), page_size)
            rotated = _rotate(key[r], rope[int(rows.positions[r])], attention.rope_pairs)
            cache[0, page, offset, 0] = torch.cat([latent[r], rotated])
        return q if attention.q_norm is None else self.rms_norm(q, attention.q_norm, eps)

    def latent_queries(self, q: Tensor, rows: Rows, attention: LatentAttention, rope: Tensor) -> Tensor:
        heads, nope_dim = attention.heads, attention.nope_dim
        queries = q.reshape(len(q), heads.num_q, nope_dim + attention.rope_dim)
        out = torch.zeros((len(q), heads.num_q, heads.dim), dtype=q.dtype)
        latent = self.head_linear(queries[..., :nope_dim].flatten(1), attention.key_up)
        out[..., : heads.value_dim] = latent.view(len(q), heads.num_q, heads.value_dim)
        for r in range(len(q)):
            for h in range(heads.num_q):
                angles = rope[int(rows.positions[r])]
                out[r, h, heads.value_dim :] = _rotate(queries[r, h, nope_dim:], angles, attention.rope_pairs)
        return out.flatten(1)


def _rotate(x: Tensor, angles: Tensor, pairs: bool) -> Tensor:
    """Rotate rope columns x [rope_dim], adjacent pairs or halves, and return halves."""
    cos, sin = angles.double().chunk(2)
    first, second = (x[0::2], x[1::2]) if pairs else x.chunk(2)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned).to(x.dtype)
