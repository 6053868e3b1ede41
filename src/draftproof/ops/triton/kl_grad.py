"""The slope of the loss by a head's logits, on a GPU: one kernel, one pass over each row of the vocabulary.

Both rows are read once and kept in registers, and the slope is written over the head's logits. What a
compiler makes of the same lines in `loss` reads them several times, since it cuts a row into parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 32768  # ids of a row that registers hold
THREADS_HOLD = 1024  # ids of a row for each warp


@triton.jit
def slope_kernel(
    logits, there, place, hard, share, value, V, overlap, MEASURE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Row r: logits [V] becomes its slope times share[r]; the target's row is there[place[r]]."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    inside = ids < V
    weight = tl.load(share + row)
    extra = tl.load(hard + row)
    at = tl.load(place + row)
    x = tl.load(logits + row * V + ids, mask=inside, other=float("-inf")).to(tl.float32)
    y = tl.load(there + at * V + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(y, axis=0)
    best = tl.min(tl.where(y == top, ids, BLOCK), axis=0)
    law = tl.exp(y - top)
    law = law * ((1.0 - extra) / tl.sum(law, axis=0)) + tl.where(ids == best, extra, 0.0)
    peak = tl.max(x, axis=0)
    x = x - peak
    said = tl.exp(x)
    total = tl.sum(said, axis=0)
    said = said * (1.0 / total)
    if MEASURE:
        apart = tl.where(law > 0, law * (tl.log(tl.maximum(law, 1e-37)) - x + tl.log(total)), 0.0)
        missing = 1.0 - tl.sum(tl.minimum(said, law), axis=0)
        tl.store(value + row, weight * (tl.sum(apart, axis=0) + overlap * missing))
    low = tl.where(said < law, said, 0.0)  # where more of the head's share is wanted
    slope = said - law + overlap * (said * tl.sum(low, axis=0) - low)
    tl.store(logits + row * V + ids, (slope * weight).to(logits.dtype.element_ty), mask=inside)


def slope_in_place(
    logits: Tensor,  # [R, V]: of the head; the slope afterwards
    there: Tensor,  # [S, V]: of the target
    place: Tensor,  # [R] int64: which row of the target's
    hard: Tensor,  # [R] fp32
    share: Tensor,  # [R] fp32
    overlap: float,
    measure: bool,
) -> Tensor:
    """The weighted divergence of each row, [R] fp32; zeros unless measured."""
    rows, width = logits.shape
    value = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(width)
    warps = max(1, min(32, block // THREADS_HOLD))
    slope_kernel[(rows,)](
        logits, there, place, hard, share, value, width, overlap,
        MEASURE=measure, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return value
