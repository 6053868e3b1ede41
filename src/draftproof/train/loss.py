"""The loss: how far a head's law is from the target's at the same place, for every step of a drafted chain.

Logits of all rows and steps would be by far the largest tensors of training, so they are made a few texts at
a time, turned into the gradient at once, and dropped: the LM head is the target's and learns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 1 << 29  # of fp32 logits at a time


@dataclass(frozen=True, slots=True)
class Aim:
    """What counts, and how much.

    The target's law is taken over the draft vocabulary. `hard` of it is put on the target's best token, which
    is what counts at temperature 0. `overlap` adds the share of two coupled draws that differ, 1 - sum min(p,
    q), which is what counts above it; divergence alone gets there too, by a longer way.
    """

    hard: float = 0.0
    overlap: float = 0.0


def unrolled_loss(
    student: Tensor,  # [steps, B, T, hidden]: the head's rows after its norm
    teacher: Tensor,  # [B, T, hidden]: the target's rows after its norm
    head: Tensor,  # [draft vocab, hidden]: rows of the target's LM head
    weight: Tensor,  # [steps, B, T] fp32: of row p at step j, compared with the target's row p + 1 + j
    aim: Aim,
    measure: bool = True,
) -> tuple[Tensor, Tensor]:
    """(what to call `backward` of, [steps] fp32: the weighted sum of divergences at each step).

    The slope does not need the values, and they cost a third of the time: they are NaN unless measured.
    """
    total, parts = _Unrolled.apply(student, teacher, head, weight, aim, measure)
    return total, parts


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor, aim: Aim, measure: bool
    ) -> tuple[Tensor, Tensor]:
        steps, batch, length, _ = student.shape
        gradient = torch.zeros_like(student)
        parts = torch.full((steps,), 0.0 if measure else torch.nan, device=student.device)
        texts = max(1, CHUNK_BYTES // (4 * length * len(head)))
        for first in range(0, batch, texts):
            some = slice(first, min(first + texts, batch))
            law = _law(F.linear(teacher[some], head), aim.hard)  # [b, T, draft vocab] fp32
            for step in range(steps):
                rows = length - 1 - step  # the others' target lies beyond the text
                if rows <= 0:
                    break
                logits = F.linear(student[step, some, :rows], head)
                share, wanted = weight[step, some, :rows], law[:, 1 + step :]
                if measure:
                    parts[step] += (share * _divergence(logits, wanted, aim.overlap)).sum()
                slope = _slope(logits, wanted, aim.overlap) @ head
                gradient[step, some, :rows] = slope * share[..., None].to(slope.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return parts.sum(), parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def _law(logits: Tensor, hard: float) -> Tensor:
    """What the head is to say, in fp32."""
    law = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if hard:
        best = torch.arange(law.shape[-1], device=law.device) == logits.argmax(-1, keepdim=True)
        law.mul_(1 - hard).add_(best, alpha=hard)
    return law


def _divergence(logits: Tensor, law: Tensor, overlap: float) -> Tensor:
    """KL(target || head) of each row, and what of the overlap is missing."""
    said = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    # xlogy: a token that the target never says costs nothing
    apart = (torch.xlogy(law, law) - law * said).sum(-1)
    if overlap:
        apart = apart + overlap * (1 - torch.minimum(said.exp_(), law).sum(-1))
    return apart


def _slope(logits: Tensor, law: Tensor, overlap: float) -> Tensor:
    """Of the divergence by the logits, in their dtype."""
    said = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if not overlap:
        return torch.sub(said, law, out=torch.empty_like(logits))
    low = torch.where(said < law, said, 0.0)  # where more of the head's share is wanted
    more = said * (overlap * low.sum(-1, keepdim=True)) - overlap * low
    return (said - law + more).to(logits.dtype)
