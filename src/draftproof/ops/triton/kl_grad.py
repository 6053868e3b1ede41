"""Gradient of the distillation loss by the logits of a draft head: one kernel, one pass over each row.

Both rows are read once and kept in registers, and the gradient overwrites the logits of the head. The
compiled PyTorch version of `loss` reads each row several times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_VOCAB = 32768  # ids of a row that fit into registers
IDS_PER_WARP = 1024


@triton.jit
def kl_grad_kernel(
    logits, target_logits, target_row, hard_share, row_weight, losses, V, overlap,
    MEASURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite row r of logits [R, V] by its gradient times row_weight[r].

    The target distribution of row r is that of target_logits[target_row[r]]; `hard_share` of its mass moves
    to its best id.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    inside = ids < V
    weight = tl.load(row_weight + row)
    hard = tl.load(hard_share + row)
    source = tl.load(target_row + row)
    x = tl.load(logits + row * V + ids, mask=inside, other=float("-inf")).to(tl.float32)
    y = tl.load(target_logits + source * V + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(y, axis=0)
    best = tl.min(tl.where(y == top, ids, BLOCK), axis=0)
    target_prob = tl.exp(y - top)
    target_prob = target_prob * ((1.0 - hard) / tl.sum(target_prob, axis=0))
    target_prob = target_prob + tl.where(ids == best, hard, 0.0)
    peak = tl.max(x, axis=0)
    x = x - peak
    head_prob = tl.exp(x)
    total = tl.sum(head_prob, axis=0)
    head_prob = head_prob * (1.0 / total)
    if MEASURE:
        divergence = tl.where(
            target_prob > 0, target_prob * (tl.log(tl.maximum(target_prob, 1e-37)) - x + tl.log(total)), 0.0
        )
        missing = 1.0 - tl.sum(tl.minimum(head_prob, target_prob), axis=0)
        tl.store(losses + row, weight * (tl.sum(divergence, axis=0) + overlap * missing))
    deficit = tl.where(head_prob < target_prob, head_prob, 0.0)  # ids below the target's probability
    grad = head_prob - target_prob + overlap * (head_prob * tl.sum(deficit, axis=0) - deficit)
    tl.store(logits + row * V + ids, (grad * weight).to(logits.dtype.element_ty), mask=inside)


def kl_grad_in_place(
    logits: Tensor,  # [R, V]: logits of the head, overwritten by the gradient
    target_logits: Tensor,  # [S, V]
    target_row: Tensor,  # [R] int64: row of the target
    hard_share: Tensor,  # [R] fp32
    row_weight: Tensor,  # [R] fp32
    overlap: float,
    measure: bool,
) -> Tensor:
    """Return the weighted loss of each row, [R] fp32; zeros unless `measure`."""
    rows, width = logits.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(width)
    warps = max(1, min(32, block // IDS_PER_WARP))
    kl_grad_kernel[(rows,)](
        logits, target_logits, target_row, hard_share, row_weight, losses, width, overlap,
        MEASURE=measure, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return losses
