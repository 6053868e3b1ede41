"""Causal attention of torch that also returns the log of the sum of exponents, both differentiable.

Later steps of a head attend to one more key per step; the two parts are joined by their sums of exponents.
The library computes no gradient of that sum. The gradient of a score is share * (gradient of its value -
mean of those gradients), where the mean is computed as out * gradient of out. A column of ones in the values,
whose gradient is that of the sum, adds the missing term; it is 0 in `out`, so the mean does not include it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_COLUMNS = 8  # added columns: the library requires multiples of it


def causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [B, heads, T, dim] and the log of the sum of exponents [B, heads, T] fp32."""
    out, total = _Causal.apply(q, k, v)
    return out, total


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ops = torch.ops.aten
        ctx.more = ()
        if q.is_cuda:
            found = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
            out, total = found[0], found[1]
            # cumulative and maximum lengths, and the state of the dropout, which is not used
            ctx.more = (*found[2:6], *found[6:8])
        else:
            out, total = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, total = ctx.saved_tensors
        ops, dim = torch.ops.aten, q.shape[-1]
        ones = F.pad(torch.ones_like(v[..., :1]), (0, PAD_COLUMNS - 1))
        gradient = F.pad(gradients[1][..., None].to(q.dtype), (0, PAD_COLUMNS - 1))
        q, k, out = (F.pad(x, (0, PAD_COLUMNS)) for x in (q, k, out))
        v, gradient = torch.cat([v, ones], dim=-1), torch.cat([gradients[0], gradient], dim=-1)
        given = gradient, q, k, v, out, total
        if ctx.more:
            lengths, noise = ctx.more[:4], ctx.more[4:]
            found = ops._scaled_dot_product_flash_attention_backward(
                *given, *lengths, 0.0, True, *noise, scale=dim**-0.5
            )
        else:
            found = ops._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, True, scale=dim**-0.5
            )
        return found[0][..., :dim], found[1][..., :dim], found[2][..., :dim]
