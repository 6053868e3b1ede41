"""The loss: how far a head's law is from the target's at the same place, for every step of a drafted chain.

Logits of all rows and steps would be by far the largest tensors of training, so they are made a few texts at a
time, turned into the gradient at once, and dropped: the LM head is the target's and learns nothing.
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

    The target's law is taken over the draft vocabulary. `hard` of it is put on the target's best token, which is
    what counts at temperature 0. `overlap` adds the share of two coupled draws that differ, 1 - sum min(p, q),
    which is what counts above it; divergence alone gets there too, by a longer way.
    """

    hard: float = 0.0
    overlap: float = 0.0


def unrolled_loss(
    student: Tensor,  # [steps, B, T, hidden]: the head's rows after its norm
    teacher: Tensor,  # [B, T, hidden]: the target's rows after its norm
    head: Tensor,  # [draft vocab, hidden]: rows of the target's LM head
    weight: Tensor,  # [steps, B, T] fp32: of row p at step j, which is compared with the target's row p + 1 + j
    aim: Aim,
) -> tuple[Tensor, Tensor]:
    """(the weighted sum of divergences, to be minimised; [steps] the same step by step with no gradient)."""
    total, parts = _Unrolled.apply(student, teacher, head, weight, aim)
    return total, parts


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor, aim: Aim
    ) -> tuple[Tensor, Tensor]:
        steps, batch, length, _ = student.shape
        gradient = torch.zeros_like(student)
        parts = torch.zeros(steps, dtype=torch.float32, device=student.device)
        texts = max(1, CHUNK_BYTES // (4 * length * len(head)))
        for first in range(0, batch, texts):
            some = slice(first, min(first + texts, batch))
            law = _law(F.linear(teacher[some], head), aim.hard)  # [b, T, draft vocab] fp32
            for step in range(steps):
                rows = length - 1 - step  # the others' target lies beyond the text
                if rows <= 0:
                    break
                logits = F.linear(student[step, some, :rows], head)
                value, slope = _divergence(
                    logits, law[:, 1 + step :], weight[step, some, :rows], aim.overlap
                )
                parts[step] += value
                gradient[step, some, :rows] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return parts.sum(), parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def _law(logits: Tensor, hard: float) -> Tensor:
    """What the head is to say, in fp32."""
    law = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if hard:
        best = logits.argmax(-1, keepdim=True)
        law.mul_(1 - hard)
        law.scatter_(-1, best, law.gather(-1, best) + hard)
    return law


def _divergence(logits: Tensor, law: Tensor, weight: Tensor, overlap: float) -> tuple[Tensor, Tensor]:
    """(sum over rows of weight * divergence, its slope [.., draft vocab] fp32 by the logits)."""
    said = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    # xlogy: a token that the target never says costs nothing
    apart = (torch.xlogy(law, law) - law * said).sum(-1)  # KL(target || head), row by row
    said = said.exp_()
    slope = said - law
    if overlap:
        low = torch.where(said < law, said, 0.0)  # where more of the head's share is wanted
        apart = apart + overlap * (1 - torch.minimum(said, law).sum(-1))
        slope += overlap * (said * low.sum(-1, keepdim=True) - low)
    slope *= weight[..., None]
    return (apart * weight).sum(), slope
