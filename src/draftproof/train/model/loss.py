"""The loss: how far a head's law is from the target's at the same place, for every step of a drafted chain.

Logits of all rows and steps would be by far the largest tensors of training, so they are made some rows at a
time, turned into the gradient at once, and dropped: the LM head is the target's and learns nothing. On a GPU
the rest is one pass over them, in a kernel of its own. Rows that have no weight have no logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.ops.training import slope_kernel
from draftproof.train.model.compile import PLAIN, fused

CHUNK_BYTES = 1 << 30  # of fp32 logits at a time


@dataclass(frozen=True, slots=True)
class Aim:
    """What counts, and how much.

    The target's law is taken over the draft vocabulary. In texts of temperature 0 `hard` of it is put on the
    target's best token, which is all that counts there. `overlap` adds the share of two coupled draws that
    differ, 1 - sum min(p, q), which is what counts above it; divergence alone gets there by a longer way.
    """

    hard: float = 0.0
    overlap: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The chains that are learnt from, by the row where they begin, among N of texts one after the other."""

    chosen: Tensor  # [M] int64, ascending
    places: Tensor  # [N] int64: of each row among the chosen ones; M: it is none of them
    heard: Tensor  # [S] int64, ascending: the target's rows that they are compared with
    compared: Tensor  # [steps, M] int64: place in `heard` of row p + 1 + j

    @classmethod
    def of(cls, weight: Tensor, grain: int = 1) -> Rows:
        """Those with weight [steps, N], on the CPU; it is 0 where row p + 1 + j is not of the same text.

        M is made a multiple of `grain` by a row that weighs nothing; with more than one, all rows are heard.
        """
        steps, count = weight.shape
        some = weight[0].numpy() != 0  # a chain that is compared anywhere is compared first
        chosen = np.flatnonzero(some)
        if more := -len(chosen) % grain:
            chosen = np.concatenate([chosen, np.repeat(np.flatnonzero(~some)[:1], more)])
        places = np.where(some, np.cumsum(some) - 1, len(chosen))
        there = np.minimum(chosen + 1 + np.arange(steps)[:, None], count - 1)
        used = np.full(count, grain > 1)
        used[there] = True
        found = chosen, places, np.flatnonzero(used), (np.cumsum(used) - 1)[there]
        return cls(*(torch.from_numpy(part) for part in found))


def unrolled_loss(
    student: Tensor,  # [steps, N, hidden]: the head's rows after its norm, one text after the other
    teacher: Tensor,  # [N, hidden]: the target's rows after its norm
    head: Tensor,  # [draft vocab, hidden]: rows of the target's LM head
    weight: Tensor,  # [steps, N] fp32: of row p at step j, compared with the target's row p + 1 + j
    cold: Tensor,  # [N] fp32: 1 for rows of texts of temperature 0, else 0
    rows: Rows,  # of these weights
    aim: Aim,
    measure: bool = True,
) -> tuple[Tensor, Tensor]:
    """(what to call `backward` of, [steps] fp32: the weighted sum of divergences at each step).

    The slope does not need the values, which cost a third of the time on a CPU: they are NaN unless measured.
    """
    total, parts = _Unrolled.apply(student, teacher, head, weight, cold, rows, aim, measure)
    return total, parts


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        head: Tensor,
        weight: Tensor,
        cold: Tensor,
        rows: Rows,
        aim: Aim,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        steps, count, hidden = student.shape[0], len(rows.chosen), student.shape[2]
        gradient = torch.empty_like(student)
        parts = torch.full((steps,), 0.0 if measure else torch.nan, device=student.device)
        slope = _way(student.device, len(head))
        hard, share = (aim.hard * cold)[rows.chosen], weight[:, rows.chosen]  # [M], [steps, M]
        said_there = F.linear(teacher[rows.heard], head)  # [S, vocab]
        some = max(1, CHUNK_BYTES // (4 * len(head)))
        found = torch.zeros(count + 1, hidden, dtype=student.dtype, device=student.device)  # the last stays 0
        for step in range(steps):
            chosen = student[step, rows.chosen]
            for first in range(0, count, some):
                here = slice(first, min(first + some, count))
                logits = F.linear(chosen[here], head)
                which = rows.compared[step, here]
                uphill, values = slope(
                    logits, said_there, which, hard[here], share[step, here], aim.overlap, measure
                )
                if measure:
                    parts[step] += values.sum()
                torch.mm(uphill, head, out=found[here])
            gradient[step] = F.embedding(rows.places, found)  # a gather repeats its bits
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return parts.sum(), parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None, None


def _way(device: torch.device, width: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """How slopes are computed here: in one kernel where there is one, else written out."""
    kernel = slope_kernel(device, width) if os.environ.get(PLAIN) not in ("1", "slope") else None
    if kernel is None:
        return _written_out
    return lambda logits, *more: (logits, kernel(logits, *more))


def _written_out(
    logits: Tensor, said: Tensor, which: Tensor, hard: Tensor, share: Tensor, overlap: float, measure: bool
) -> tuple[Tensor, Tensor]:
    """As the kernel: the slope, and the values."""
    there, hard, share = said[which], hard[:, None], share[:, None]
    values = share[:, 0] * _divergence(logits, there, hard, overlap) if measure else share.new_zeros(0)
    return fused(_slope, logits.device)(logits, there, hard, share, overlap), values


def _law(logits: Tensor, hard: Tensor) -> Tensor:
    """What the head is to say, in fp32: [N, vocab]. hard [N, 1]."""
    law = torch.softmax(logits, dim=-1, dtype=torch.float32)
    best = torch.arange(law.shape[-1], device=law.device) == logits.argmax(-1, keepdim=True)
    return law * (1 - hard) + torch.where(best, hard, 0.0)


def _divergence(logits: Tensor, there: Tensor, hard: Tensor, overlap: float) -> Tensor:
    """KL(target || head) of each row, and what of the overlap is missing."""
    law = _law(there, hard)
    said = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    # xlogy: a token that the target never says costs nothing
    apart = (torch.xlogy(law, law) - law * said).sum(-1)
    if overlap:
        apart = apart + overlap * (1 - torch.minimum(said.exp_(), law).sum(-1))
    return apart


def _slope(logits: Tensor, there: Tensor, hard: Tensor, share: Tensor, overlap: float) -> Tensor:
    """Of the weighted divergence by the logits, in their dtype. share [N, 1]."""
    law = _law(there, hard)
    said = torch.softmax(logits, dim=-1, dtype=torch.float32)
    slope = said - law
    if overlap:
        low = torch.where(said < law, said, 0.0)  # where more of the head's share is wanted
        slope = slope + overlap * (said * low.sum(-1, keepdim=True) - low)
    return (slope * share).to(logits.dtype)
