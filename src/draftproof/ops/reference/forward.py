"""Reference definition of the forward ops: one row at a time, float64 inside."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from draftproof.ops.contract.types import Attention, AttentionShape, ExpertOutputs, Moe, QuantizedTable
from draftproof.ops.reference import moe as mixture
from draftproof.ops.reference import quantized
from draftproof.ops.reference.activations import GATED
from draftproof.ops.reference.kv import load_kv, store_kv
from draftproof.ops.reference.latent import ReferenceLatent
from draftproof.ops.reference.quantized import QuantizedLinear
from draftproof.types import Rows

PackedWeight = tuple[Tensor, Tensor | None]


class ReferenceForward(ReferenceLatent):
    """Forward ops as loops over rows."""

    weight_formats: ClassVar[frozenset[str]] = frozenset(quantized.ROW_PRODUCTS)
    table_formats: ClassVar[frozenset[str]] = frozenset({"blocks"})

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        return weight.double(), None if bias is None else bias.double()

    def pack_quantized(
        self,
        weight_format: str,
        data: Tensor,
        scales: Tensor | None,
        bias: Tensor | None = None,
        zeros: Tensor | None = None,
    ) -> QuantizedLinear:
        assert scales is not None
        if weight_format == "blocks":
            scales = quantized.plain_scales(scales)
        return QuantizedLinear(weight_format, data, scales, None if bias is None else bias.float(), zeros)

    def linear(
        self, x: Tensor, packed: PackedWeight | QuantizedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if isinstance(packed, QuantizedLinear):
            return quantized.linear(x, packed, out_dtype or x.dtype)
        weight, bias = packed
        rows = []
        for row in x.double():
            y = torch.stack([(row * line).sum() for line in weight])
            rows.append(y if bias is None else y + bias)
        return _stack(rows, (len(x), len(weight)), out_dtype or x.dtype)

    def embed(self, tokens: Tensor, table: Tensor | QuantizedTable) -> Tensor:
        if isinstance(table, QuantizedTable):
            return quantized.embed(tokens, table.packed, table.dtype)
        return _stack([table[int(t)] for t in tokens], (len(tokens), table.shape[1]), table.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = [_norm(row, weight, eps) for row in x.reshape(-1, len(weight))]
        return _stack(rows, (len(rows), len(weight)), weight.dtype).view(x.shape)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return (x.double() + residual.double()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.add(x.to(residual.dtype), residual)
        return self.rms_norm(total, weight, eps), total

    def act_mul(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        return GATED[activation](gate, up).to(gate_up.dtype)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return (x.double() * float(torch.tensor(factor, dtype=torch.float32))).to(x.dtype)

    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        return mixture.expert_outputs(self, x, moe)

    def combine_experts(
        self, found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return mixture.combine_experts(found, shared, gate, dtype)

    def rope_store(
        self, qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        heads, out = attention.heads, []
        for r in range(len(qkv)):
            q, k, v = qkv[r].view(-1, heads.dim).split([heads.num_q, heads.num_kv, heads.num_kv])
            at = rope[int(rows.positions[r])]
            q = torch.stack([_rotate(_norm(h, attention.q_norm, eps), at) for h in q])
            k = torch.stack([_rotate(_norm(h, attention.k_norm, eps), at) for h in k])
            store_kv(cache, int(rows.kv_index[r]), k, v)
            out.append(q.reshape(-1))
        return _stack(out, (len(qkv), heads.num_q * heads.dim), qkv.dtype)

    def attention(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        out = []
        group = heads.num_q // heads.num_kv
        for r in range(len(q)):
            position, pages = int(rows.positions[r]), rows.page_table[int(rows.slots[r])]
            first = max(0, position - heads.window + 1) if heads.window else 0
            stored = load_kv(cache, pages, range(first, position + 1))
            for h, query in enumerate(q[r].view(heads.num_q, heads.dim).double()):
                keys, values = stored[:, 0, h // group], stored[:, -1, h // group, : heads.out_dim]
                scores = (keys * query).sum(-1) * heads.scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1].double()])
                    values = torch.cat([values, values.new_zeros((1, values.shape[1]))])
                weights = torch.exp(scores - scores.max())
                out.append((weights[:, None] * values).sum(0) / weights.sum())
        shape = (len(q) * heads.num_q, heads.out_dim)
        return _stack(out, shape, q.dtype).view(len(q), heads.num_q * heads.out_dim)


def _norm(row: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm of one row; the row itself without a weight."""
    if weight is None:
        return row
    x = row.double()
    scaled = (x / torch.sqrt((x * x).mean() + eps)).to(weight.dtype)
    return (scaled.double() * weight.double()).to(weight.dtype)


def _rotate(head: Tensor, rope: Tensor) -> Tensor:
    """Rotate one head by the cos and sin of its position."""
    cos, sin = rope.double().chunk(2)
    first, second = head.double().chunk(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin]).to(head.dtype)


def _stack(rows: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Stack rows, or return zeros of `shape` without rows."""
    return torch.stack(rows).to(dtype) if rows else torch.zeros(shape, dtype=dtype)
