"""Causal attention of a library that also says how much all keys weigh together, with slopes of both.

A head's later steps attend to a few more keys, one of each step: the two are joined by their weights, which
are the sums of exponents that the library has anyway. It takes no slope of them, but can be led to: the slope
of a score is share * (slope of its value - mean of those slopes), the mean as out * slope of out. One more
column of the values, all ones, with the slope of the sum as its slope adds that to the first of the two; in
`out` that column is given as 0, so that it is not in the mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_COLUMNS = 8  # columns more: the library wants multiples of it


def causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[B, heads, T, dim] each -> out [B, heads, T, dim], log of the sum of exponents [B, heads, T] fp32."""
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
            # cumulated lengths and the longest ones, state of the noise that is not used
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
