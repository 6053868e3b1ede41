"""The definition of every op: plain loops, one row at a time, float64 inside. Slow and obviously right."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from draftproof.ops import AttentionShape, Rows
from draftproof.ops.reference.step import ReferenceStep

_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32 with ten rounds (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & _MASK,
            (left >> 32) ^ c3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int, token: int) -> float:
    words = philox((token // 4, position, stream, 0), (seed & _MASK, seed >> 32 & _MASK))
    return (words[token % 4] + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, stream: int, token: int) -> float:
    return -math.log(-math.log1p(-uniform(seed, position, stream, token)))


class ReferenceOps(ReferenceStep):
    """Loops over rows; nothing is fused, nothing is shared between rows."""

    name: ClassVar[str] = "reference"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return weight.double(), None if bias is None else bias.double()

    def linear(
        self,
        x: Tensor,
        packed: tuple[Tensor, Tensor | None],
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        weight, bias = packed
        rows = []
        for row in x.double():
            y = torch.stack([(row * line).sum() for line in weight])
            rows.append(y if bias is None else y + bias)
        return _stack(rows, (len(x), len(weight)), out_dtype or x.dtype)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return _stack([table[int(t)] for t in tokens], (len(tokens), table.shape[1]), table.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = [_norm(row, weight, eps) for row in x]
        return _stack(rows, tuple(x.shape), x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = (x.double() + residual.double()).to(x.dtype)
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

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
        out = []
        page_size = cache.shape[2]
        for r in range(len(qkv)):
            q, k, v = qkv[r].view(-1, heads.dim).split([heads.num_q, heads.num_kv, heads.num_kv])
            at = rope[int(rows.positions[r])]
            q = torch.stack([_rotate(_norm(h, q_norm, eps), at) for h in q])
            k = torch.stack([_rotate(_norm(h, k_norm, eps), at) for h in k])
            page, offset = divmod(int(rows.kv_index[r]), page_size)
            cache[0, page, offset] = k
            cache[1, page, offset] = v
            out.append(q.reshape(-1))
        return _stack(out, (len(qkv), heads.num_q * heads.dim), qkv.dtype)

    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        out = []
        group = heads.num_q // heads.num_kv
        page_size = cache.shape[2]
        for r in range(len(q)):
            position, pages = int(rows.positions[r]), rows.page_table[int(rows.slots[r])]
            first = max(0, position - heads.window + 1) if heads.window else 0
            at = [divmod(j, page_size) for j in range(first, position + 1)]
            stored = torch.stack([cache[:, int(pages[p]), o] for p, o in at]).double()
            for h, query in enumerate(q[r].view(heads.num_q, heads.dim).double()):
                keys, values = stored[:, 0, h // group], stored[:, 1, h // group]
                scores = (keys * query).sum(-1) * heads.scale
                weights = torch.exp(scores - scores.max())
                out.append((weights[:, None] * values).sum(0) / weights.sum())
        return _stack(out, (len(q) * heads.num_q, heads.dim), q.dtype).view_as(q)

    # --- sampling ---------------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        return self.top(logits, 1)[1][:, 0]

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        best = []
        for row, seed, position in zip(scaled, seeds.tolist(), positions.tolist(), strict=True):
            noise = [gumbel(seed, position, stream, i) for i in range(len(row))]
            best.append(row + torch.tensor(noise, dtype=torch.float64).float())
        return self.argmax(torch.stack(best)) if best else torch.zeros(0, dtype=torch.int64)

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        return torch.tensor([uniform(s, p, stream, 0) for s, p in pairs], dtype=torch.float64)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return torch.tensor([float(torch.logsumexp(row.double(), 0)) for row in logits])

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        ranks = []
        for row, token in zip(logits.tolist(), ids.tolist(), strict=True):
            before = [i for i, x in enumerate(row) if x > row[token] or (x == row[token] and i < token)]
            ranks.append(1 + len(before))
        return torch.tensor(ranks, dtype=torch.int64)

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = [_order(row)[:k] for row in logits]
        index = torch.tensor(ids, dtype=torch.int64).view(len(logits), k)
        return logits.gather(1, index), index

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        out = torch.full_like(scaled, -math.inf)
        for r, row in enumerate(scaled):
            order = _order(row)
            if int(top_k[r]):
                order = order[: int(top_k[r])]
            kept = row[order].double()
            probs = torch.exp(kept - kept[0])
            mass = torch.cat([torch.zeros(1, dtype=torch.float64), probs.cumsum(0)[:-1]]) / probs.sum()
            keep = probs >= float(min_p[r])
            if float(top_p[r]) < 1:
                keep &= mass < float(top_p[r])
            for token, stays in zip(order, keep.tolist(), strict=True):
                if stays:
                    out[r, token] = row[token]
        return out


def _order(row: Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def _norm(row: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return row
    x = row.double()
    return ((x / torch.sqrt((x * x).mean() + eps)).to(row.dtype).double() * weight.double()).to(row.dtype)


def _rotate(head: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope.double().chunk(2)
    first, second = head.double().chunk(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin]).to(head.dtype)


def _stack(rows: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack(rows).to(dtype) if rows else torch.zeros(shape, dtype=dtype)
