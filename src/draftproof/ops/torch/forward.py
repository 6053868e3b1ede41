"""The torch backend: any device that PyTorch knows, exact by fixed shapes.

Libraries choose their order of summation by shape, so every call that sums (or uses a vectorised
exp, whose tail may take another path) has one fixed shape: a block of `BLOCK` rows, padded, or one row.
A row then never feels how many neighbours it has. The price is more and smaller calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.torch.step import Bookkeeping

BLOCK = 8  # rows in one matrix product
KEYS = 64  # keys in one attention block

PackedResults = tuple[Tensor, Tensor | None]


class TorchOps(Bookkeeping):
    """Vectorised within a row or a fixed block of rows, never across."""

    name: ClassVar[str] = "torch"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedResults:
        return weight.contiguous(), None if bias is None else bias.float()

    def linear(self, x: Tensor, packed: PackedResults, out_dtype: torch.dtype | None = None) -> Tensor:
        weight, bias = packed
        out_dtype = out_dtype or x.dtype
        if out_dtype != x.dtype:  # logits: a bf16 product would round them to bf16 first
            x, weight = x.to(out_dtype), weight.to(out_dtype)
        out = x.new_empty((len(x), len(weight)), dtype=out_dtype)
        for start in range(0, len(x), BLOCK):
            rows = x[start : start + BLOCK]
            block = x.new_zeros((BLOCK, x.shape[1]))
            block[: len(rows)] = rows
            y = torch.nn.functional.linear(block, weight)[: len(rows)]
            out[start : start + BLOCK] = y if bias is None else (y.float() + bias)
        return out

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return table[tokens]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        def scale(row: Tensor) -> Tensor:
            return torch.rsqrt((row * row).sum() / row.numel() + eps)

        wide = x.float()
        return (wide * _by_row(scale, wide)[:, None]).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (_by_row(torch.nn.functional.silu, gate).view_as(up) * up).to(gate_up.dtype)

    def rope_store(
        self,
        qkv: Tensor,
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,
        cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        num_rows = len(qkv)
        split = [heads.num_q, heads.num_kv, heads.num_kv]
        q, k, v = qkv.view(num_rows, sum(split), heads.dim).split(split, dim=1)
        cos, sin = rope[rows.positions][:, None].chunk(2, dim=-1)
        if q_norm is not None:
            q = self.rms_norm(q.reshape(-1, heads.dim), q_norm, eps).view_as(q)
        if k_norm is not None:
            k = self.rms_norm(k.reshape(-1, heads.dim), k_norm, eps).view_as(k)
        flat = cache.view(2, -1, heads.num_kv, heads.dim)
        flat[0, rows.kv_index] = _rotate(k, cos, sin)
        flat[1, rows.kv_index] = v
        return _rotate(q, cos, sin).reshape(num_rows, heads.num_q * heads.dim)

    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        out = torch.empty_like(q)
        _, counts = torch.unique_consecutive(rows.slots, return_counts=True)
        start = 0
        for count in counts.tolist():
            for at in range(start, start + count, BLOCK):
                part = slice(at, min(at + BLOCK, start + count))
                pages = rows.page_table[rows.slots[at]]
                out[part] = _attend(q[part], rows.positions[part], pages, heads, cache)
            start += count
        return out

    # --- sampling ---------------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        # torch.argmax does not promise which of equal values it names
        return _ids(lambda row: (row == row.max()).nonzero()[:1, 0], logits)

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        noise = [
            _gumbel(scaled.shape[1], seed, position, stream, scaled.device)
            for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
        ]
        return self.argmax(scaled + torch.stack(noise)) if noise else seeds.new_zeros(0)

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        draws = [_uniform(1, s, p, stream, seeds.device)[0] for s, p in pairs]
        return torch.stack(draws) if draws else seeds.new_zeros(0, dtype=torch.float64)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return _by_row(lambda row: torch.logsumexp(row, 0), logits)

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        value = logits.gather(1, ids[:, None])
        tokens = torch.arange(logits.shape[1], device=logits.device)
        before = (logits > value) | ((logits == value) & (tokens < ids[:, None]))
        return 1 + before.sum(-1)

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = torch.stack([_order(row, k) for row in logits]) if len(logits) else None
        if ids is None:
            ids = torch.zeros((0, k), dtype=torch.int64, device=logits.device)
        return logits.gather(1, ids), ids

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        out = torch.full_like(scaled, -math.inf)
        limits = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
        for r, (k, p, m) in enumerate(limits):
            ids = _kept(scaled[r].clone(), k, p, m)
            out[r, ids] = scaled[r, ids]
        return out


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each row alone; the copy puts every row at the same alignment."""
    return torch.stack([function(row.clone()) for row in x]) if len(x) else x.new_zeros(0)


def _ids(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found = [function(row) for row in x]
    none = torch.zeros(1, dtype=torch.int64, device=x.device)  # a row of NaN equals nothing
    rows = [ids if len(ids) else none for ids in found]
    return torch.cat(rows) if rows else none[:0]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(heads.dtype)


def _attend(q: Tensor, positions: Tensor, pages: Tensor, heads: AttentionShape, cache: Tensor) -> Tensor:
    """Up to BLOCK rows of one slot against its keys, in ascending blocks of KEYS."""
    num_rows, group = len(q), heads.num_q // heads.num_kv
    page_size, device = cache.shape[2], q.device
    query = torch.zeros((BLOCK, heads.num_kv, group, heads.dim), device=device)
    query[:num_rows] = q.view(num_rows, heads.num_kv, group, heads.dim)
    query = query.transpose(0, 1).reshape(heads.num_kv, BLOCK * group, heads.dim) * heads.scale
    at = torch.full((BLOCK, 1, 1), -1, dtype=torch.int64, device=device)
    at[:num_rows, 0, 0] = positions
    shape = (BLOCK, heads.num_q, 1)
    best = torch.full(shape, -math.inf, device=device)
    total = torch.zeros(shape, device=device)
    acc = torch.zeros((BLOCK, heads.num_q, heads.dim), device=device)
    last = int(positions.max())
    first = max(0, int(positions.min()) - heads.window + 1) if heads.window else 0
    for start in range(first // KEYS * KEYS, last + 1, KEYS):
        key_at = torch.arange(start, start + KEYS, device=device)
        hidden = (key_at > at) | ((key_at <= at - heads.window) if heads.window else False)
        held = key_at.clamp(max=last)  # pages beyond the last row may not exist
        index = pages[held // page_size].long() * page_size + held % page_size
        keys, values = cache.view(2, -1, heads.num_kv, heads.dim)[:, index].float()
        # a key no row may see could hold anything, NaN too, and 0 * NaN is not 0
        values = torch.where((key_at <= last)[:, None, None], values, 0.0)
        scores = torch.bmm(query, keys.permute(1, 2, 0).contiguous())
        scores = scores.view(heads.num_kv, BLOCK, group, KEYS).transpose(0, 1)
        scores = scores.reshape(BLOCK, heads.num_q, KEYS).masked_fill(hidden, -math.inf)
        new = torch.maximum(best, scores.amax(-1, keepdim=True))
        base = torch.where(new == -math.inf, 0.0, new)
        weights = _by_row(torch.exp, scores - base)  # [BLOCK, num_q, KEYS]
        decay = _by_row(torch.exp, best - base)
        sums = _by_row(lambda w: w.sum(-1, keepdim=True), weights)
        mixed = weights.view(BLOCK, heads.num_kv, group, KEYS).transpose(0, 1)
        mixed = mixed.reshape(heads.num_kv, BLOCK * group, KEYS)
        mixed = torch.bmm(mixed, values.transpose(0, 1).contiguous())
        mixed = mixed.view(heads.num_kv, BLOCK, group, heads.dim).transpose(0, 1)
        acc = acc * decay + mixed.reshape(BLOCK, heads.num_q, heads.dim)
        total, best = total * decay + sums, new
    return (acc / total)[:num_rows].reshape(num_rows, -1).to(q.dtype)


def _order(row: Tensor, k: int) -> Tensor:
    """Ids of the first k in the order (value down, id up)."""
    if 4 * k < len(row):
        edge = row.topk(k).values[-1]
        ids = (row >= edge).nonzero()[:, 0]
        if len(ids) >= k:  # fewer only if the row holds NaN
            return ids[row[ids].sort(descending=True, stable=True).indices[:k]]
    return row.sort(descending=True, stable=True).indices[:k]


def _kept(row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids that survive top-k, then top-p, then min-p."""
    best = row.max()
    size = min(top_k or len(row), len(row))
    if top_p >= 1:
        ids = _order(row, size) if size < len(row) else torch.arange(size, device=row.device)
    else:
        total = torch.exp((row - best).double()).sum()
        take = min(size, 256)
        while True:  # a longer prefix only extends a shorter one
            ids = _order(row, take)
            mass = torch.exp((row[ids] - best).double()).cumsum(0)
            whole = mass[-1] if size < len(row) and take == size else total
            if take == size or (size == len(row) and bool(mass[-1] >= top_p * whole)):
                break
            take = min(size, take * 16) if size == len(row) else size
        before = torch.cat([mass.new_zeros(1), mass[:-1]])
        ids = ids[before < top_p * whole]
    return ids[torch.exp((row[ids] - best).double()) >= min_p]


def _mulhilo(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of constant * x, both 32 bits, in int64 without overflow."""
    low = constant * (x & 0xFFFF)  # < 2^48
    high = constant * (x >> 16) + (low >> 16)
    return (high >> 16) & 0xFFFFFFFF, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _uniform(count: int, seed: int, position: int, stream: int, device: torch.device) -> Tensor:
    """u of the ids 0..count-1, fp64."""
    c0 = torch.arange((count + 3) // 4, device=device)
    c1 = torch.full_like(c0, position)
    c2 = torch.full_like(c0, stream)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        left_high, left_low = _mulhilo(0xD2511F53, c0)
        right_high, right_low = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = right_high ^ c1 ^ k0, right_low, left_high ^ c3 ^ k1, left_low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = torch.stack([c0, c1, c2, c3], dim=-1).view(-1)[:count]
    return (words.double() + 0.5) * 2.0**-32


def _gumbel(count: int, seed: int, position: int, stream: int, device: torch.device) -> Tensor:
    u = _uniform(count, seed, position, stream, device)
    return (-torch.log(-torch.log1p(-u))).float()
