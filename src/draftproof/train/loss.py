"""The loss: how far a head's law is from the target's at the same place, for every step of a drafted chain.

Logits of all rows and steps would be by far the largest tensors of training, so they are made some rows at a
time, turned into the gradient at once, and dropped: the LM head is the target's and learns nothing. On a GPU
the rest is one pass over them: `slope` is compiled there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.train.fuse import fused

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


def unrolled_loss(
    student: Tensor,  # [steps, N, hidden]: the head's rows after its norm, one text after the other
    teacher: Tensor,  # [N, hidden]: the target's rows after its norm
    head: Tensor,  # [draft vocab, hidden]: rows of the target's LM head
    weight: Tensor,  # [steps, N] fp32: of row p at step j, compared with the target's row p + 1 + j
    cold: Tensor,  # [N] fp32: 1 for rows of texts of temperature 0, else 0
    aim: Aim,
    measure: bool = True,
) -> tuple[Tensor, Tensor]:
    """(what to call `backward` of, [steps] fp32: the weighted sum of divergences at each step).

    The slope does not need the values, and they cost a third of the time: they are NaN unless measured. Where
    row p + 1 + j belongs to the next text, the weight must be 0.
    """
    total, parts = _Unrolled.apply(student, teacher, head, weight, cold, aim, measure)
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
        aim: Aim,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        steps, rows, _ = student.shape
        gradient = torch.zeros_like(student)
        parts = torch.full((steps,), 0.0 if measure else torch.nan, device=student.device)
        slope = fused(_slope, student.device)
        hard = (aim.hard * cold)[:, None]  # [N, 1]
        some = max(1, CHUNK_BYTES // (4 * len(head)))
        for first in range(0, rows, some):
            last = min(first + some, rows)
            said_there = F.linear(teacher[first + 1 : last + steps], head)  # [<= some + steps - 1, vocab]
            for step in range(steps):
                count = min(last, rows - 1 - step) - first  # beyond it there is no target
                if count <= 0:
                    break
                here = slice(first, first + count)
                logits, there = F.linear(student[step, here], head), said_there[step : step + count]
                share = weight[step, here]
                if measure:
                    parts[step] += (share * _divergence(logits, there, hard[here], aim.overlap)).sum()
                uphill = slope(logits, there, hard[here], share[:, None], aim.overlap)
                gradient[step, here] = uphill @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return parts.sum(), parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None


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
