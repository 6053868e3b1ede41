"""Forward ops in torch: fixed blocks of rows, so that a row's bits do not depend on the other rows."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.ops.contract.types import Attention, AttentionShape, ExpertOutputs, Moe, QuantizedTable
from draftproof.ops.reference import quantized as reference
from draftproof.ops.reference.activations import GATED
from draftproof.ops.reference.quantized import QuantizedLinear
from draftproof.ops.torch import moe as mixture
from draftproof.ops.torch import quantized
from draftproof.ops.torch.kv import load_kv, store_kv
from draftproof.ops.torch.latent import TorchLatent
from draftproof.ops.torch.row_by_row import map_rows
from draftproof.types import Rows

BLOCK_ROWS = 8  # rows in one matrix product
BLOCK_KEYS = 64  # keys in one attention block

PackedWeight = tuple[Tensor, Tensor | None]
_GATED = GATED | {"silu": lambda gate, up: torch.nn.functional.silu(gate) * up}


class TorchForward(TorchLatent):
    """Forward ops on torch tensors of any device."""

    has_independent_columns: ClassVar[bool] = False  # a BLAS selects its kernel by the shape
    weight_formats: ClassVar[frozenset[str]] = frozenset(quantized.PRODUCTS)
    table_formats: ClassVar[frozenset[str]] = frozenset({"blocks"})

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        return weight.contiguous(), None if bias is None else bias.float()

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
            scales = reference.plain_scales(scales)
        return QuantizedLinear(weight_format, data, scales, None if bias is None else bias.float(), zeros)

    def linear(
        self, x: Tensor, packed: PackedWeight | QuantizedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if isinstance(packed, QuantizedLinear):
            return quantized.linear(x, packed, out_dtype or x.dtype)
        weight, bias = packed
        out_dtype = out_dtype or x.dtype
        if out_dtype != x.dtype:  # logits: a bf16 product would round them to bf16 first
            x, weight = x.to(out_dtype), weight.to(out_dtype)
        out = x.new_empty((len(x), len(weight)), dtype=out_dtype)
        for start in range(0, len(x), BLOCK_ROWS):
            rows = x[start : start + BLOCK_ROWS]
            block = x.new_zeros((BLOCK_ROWS, x.shape[1]))
            block[: len(rows)] = rows
            y = torch.nn.functional.linear(block, weight)[: len(rows)]
            out[start : start + BLOCK_ROWS] = y if bias is None else (y.float() + bias)
        return out

    def embed(self, tokens: Tensor, table: Tensor | QuantizedTable) -> Tensor:
        if isinstance(table, QuantizedTable):
            return reference.embed(tokens, table.packed, table.dtype)
        return table[tokens]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        def scale(row: Tensor) -> Tensor:
            return torch.rsqrt((row * row).sum() / row.numel() + eps)

        wide = x.float().reshape(-1, len(weight))
        normed = (wide * map_rows(scale, wide)[:, None]).to(weight.dtype) * weight
        return normed.view(x.shape)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def act_mul(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        act = _GATED[activation]
        shape = (len(gate_up), gate_up.shape[1] // 2)
        return map_rows(lambda row: act(*row.chunk(2)), gate_up.float()).view(shape).to(gate_up.dtype)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return (x.float() * factor).to(x.dtype)

    def expert_outputs(self, x: Tensor, moe: Moe) -> ExpertOutputs:
        return mixture.expert_outputs(self, x, moe)

    def combine_experts(
        self, found: ExpertOutputs, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return mixture.combine_experts(found, shared, gate, dtype)

    def rope_store(
        self, qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        num_rows, heads = len(qkv), attention.heads
        split = [heads.num_q, heads.num_kv, heads.num_kv]
        q, k, v = qkv.view(num_rows, sum(split), heads.dim).split(split, dim=1)
        cos, sin = rope[rows.positions][:, None].chunk(2, dim=-1)
        if attention.q_norm is not None:
            q = self.rms_norm(q.reshape(-1, heads.dim), attention.q_norm, eps).view_as(q)
        if attention.k_norm is not None:
            k = self.rms_norm(k.reshape(-1, heads.dim), attention.k_norm, eps).view_as(k)
        store_kv(cache, rows.kv_index, _rotate(k, cos, sin), v)
        return _rotate(q, cos, sin).reshape(num_rows, heads.num_q * heads.dim)

    def attention(
        self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        out = q.new_empty((len(q), heads.num_q * heads.out_dim))
        _, counts = torch.unique_consecutive(rows.slots, return_counts=True)
        start = 0
        for count in counts.tolist():
            for at in range(start, start + count, BLOCK_ROWS):
                part = slice(at, min(at + BLOCK_ROWS, start + count))
                pages = rows.page_table[rows.slots[at]]
                out[part] = _attend(q[part], rows.positions[part], pages, heads, cache, sinks)
            start += count
        return out


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by the cos and sin of their positions."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(heads.dtype)


def _attend(
    q: Tensor,
    positions: Tensor,
    pages: Tensor,
    heads: AttentionShape,
    cache: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend up to BLOCK_ROWS rows of one slot to its keys, in ascending blocks of BLOCK_KEYS."""
    num_rows, group = len(q), heads.num_q // heads.num_kv
    device = q.device
    query = torch.zeros((BLOCK_ROWS, heads.num_kv, group, heads.dim), device=device)
    query[:num_rows] = q.view(num_rows, heads.num_kv, group, heads.dim)
    query = query.transpose(0, 1).reshape(heads.num_kv, BLOCK_ROWS * group, heads.dim) * heads.scale
    at = torch.full((BLOCK_ROWS, 1, 1), -1, dtype=torch.int64, device=device)
    at[:num_rows, 0, 0] = positions
    shape = (BLOCK_ROWS, heads.num_q, 1)
    best = torch.full(shape, -math.inf, device=device)
    total = torch.zeros(shape, device=device)
    acc = torch.zeros((BLOCK_ROWS, heads.num_q, heads.out_dim), device=device)
    last = int(positions.max())
    first = max(0, int(positions.min()) - heads.window + 1) if heads.window else 0
    for start in range(first // BLOCK_KEYS * BLOCK_KEYS, last + 1, BLOCK_KEYS):
        key_at = torch.arange(start, start + BLOCK_KEYS, device=device)
        hidden = (key_at > at) | ((key_at <= at - heads.window) if heads.window else False)
        # pages beyond the last row may not exist
        stored = load_kv(cache, pages, key_at.clamp(max=last))
        keys, values = stored[0], stored[-1, ..., : heads.out_dim]
        # a key that no row may see is undefined, maybe NaN, and 0 * NaN is not 0
        values = torch.where((key_at <= last)[:, None, None], values, 0.0)
        scores = torch.bmm(query, keys.permute(1, 2, 0).contiguous())
        scores = scores.view(heads.num_kv, BLOCK_ROWS, group, BLOCK_KEYS).transpose(0, 1)
        scores = scores.reshape(BLOCK_ROWS, heads.num_q, BLOCK_KEYS).masked_fill(hidden, -math.inf)
        new = torch.maximum(best, scores.amax(-1, keepdim=True))
        base = torch.where(new == -math.inf, 0.0, new)
        weights = map_rows(torch.exp, scores - base)  # [BLOCK_ROWS, num_q, BLOCK_KEYS]
        decay = map_rows(torch.exp, best - base)
        sums = map_rows(lambda w: w.sum(-1, keepdim=True), weights)
        mixed = weights.view(BLOCK_ROWS, heads.num_kv, group, BLOCK_KEYS).transpose(0, 1)
        mixed = mixed.reshape(heads.num_kv, BLOCK_ROWS * group, BLOCK_KEYS)
        mixed = torch.bmm(mixed, values.transpose(0, 1).contiguous())
        mixed = mixed.view(heads.num_kv, BLOCK_ROWS, group, heads.out_dim).transpose(0, 1)
        acc = acc * decay + mixed.reshape(BLOCK_ROWS, heads.num_q, heads.out_dim)
        total, best = total * decay + sums, new
    if sinks is not None:
        logit = sinks.view(1, heads.num_q, 1).expand(shape)
        new = torch.maximum(best, logit)
        decay = map_rows(torch.exp, best - new)
        acc, total = acc * decay, total * decay + map_rows(torch.exp, logit - new)
    return (acc / total)[:num_rows].reshape(num_rows, -1).to(q.dtype)
