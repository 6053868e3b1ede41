"""Distillation loss: divergence of the head's distribution from the target's at every draft position.

Logits of all rows and positions would be the largest tensors of training. They are computed for some rows at
a time, turned into the gradient at once, and dropped; the LM head belongs to the target and is not trained.
On a GPU one kernel makes the gradient in a single pass. Rows without weight have no logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.ops.training import kl_grad_kernel
from draftproof.train.model.compile import PLAIN, compiled

CHUNK_BYTES = 1 << 30  # of fp32 logits at a time


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the parts of the loss.

    The target's distribution is taken over the draft vocabulary. In texts of temperature 0 the share `hard`
    of it is moved to the target's best token, the only one that is accepted there. `overlap` weighs
    1 - sum min(target_probs, draft_probs), the probability that two coupled draws differ.
    """

    hard: float = 0.0
    overlap: float = 0.0


class Rows(NamedTuple):
    """Rows of the drafts that are trained, among the N rows of all texts concatenated."""

    chosen: Tensor  # [M] int64, ascending
    places: Tensor  # [N] int64: index among the chosen rows; M: not chosen
    target_rows: Tensor  # [S] int64, ascending: rows of the target that drafts are compared with
    target_index: Tensor  # [steps, M] int64: index in `target_rows` of row p + 1 + j

    @classmethod
    def from_weights(cls, weight: Tensor, grain: int = 1) -> Rows:
        """Select the rows with weight [steps, N], on the CPU; 0 where row p + 1 + j is of another text.

        M is padded to a multiple of `grain` with a row of weight 0; with a grain above 1 all target rows are
        used, so that shapes repeat.
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
    target_hidden: Tensor,  # [N, hidden]: the target's rows after its norm
    head: Tensor,  # [draft vocab, hidden]: rows of the target's LM head
    weight: Tensor,  # [steps, N] fp32: of row p at step j, compared with the target's row p + 1 + j
    greedy_rows: Tensor,  # [N] fp32: 1 for rows of texts of temperature 0, else 0
    rows: Rows,  # of these weights
    loss_weights: LossWeights,
    measure: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the weighted divergence of each draft position [steps] (NaN unless `measure`)."""
    total, parts = _Unrolled.apply(
        student, target_hidden, head, weight, greedy_rows, rows, loss_weights, measure
    )
    return total, parts


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        target_hidden: Tensor,
        head: Tensor,
        weight: Tensor,
        greedy_rows: Tensor,
        rows: Rows,
        loss_weights: LossWeights,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        steps, count, hidden = student.shape[0], len(rows.chosen), student.shape[2]
        gradient = torch.empty_like(student)
        parts = torch.full((steps,), 0.0 if measure else torch.nan, device=student.device)
        gradient_function = _gradient_function(student.device, len(head))
        hard = (loss_weights.hard * greedy_rows)[rows.chosen]  # [M]
        share = weight[:, rows.chosen]  # [steps, M]
        target_logits = F.linear(target_hidden[rows.target_rows], head)  # [S, vocab]
        some = max(1, CHUNK_BYTES // (4 * len(head)))
        found = torch.zeros(count + 1, hidden, dtype=student.dtype, device=student.device)  # the last stays 0
        for step in range(steps):
            chosen = student[step, rows.chosen]
            for first in range(0, count, some):
                here = slice(first, min(first + some, count))
                logits = F.linear(chosen[here], head)
                which = rows.target_index[step, here]
                logit_gradient, values = gradient_function(
                    logits, target_logits, which, hard[here], share[step, here], loss_weights.overlap, measure
                )
                if measure:
                    parts[step] += values.sum()
                torch.mm(logit_gradient, head, out=found[here])
            gradient[step] = F.embedding(rows.places, found)  # a gather repeats its bits
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return parts.sum(), parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None, None


def _gradient_function(device: torch.device, width: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the gradient function of this device: one kernel where there is one, else torch ops."""
    kernel = kl_grad_kernel(device, width) if os.environ.get(PLAIN) not in ("1", "slope") else None
    if kernel is None:
        return _gradient_eager
    return lambda logits, *more: (logits, kernel(logits, *more))


def _gradient_eager(
    logits: Tensor,
    target_logits: Tensor,
    which: Tensor,
    hard: Tensor,
    share: Tensor,
    overlap: float,
    measure: bool,
) -> tuple[Tensor, Tensor]:
    there, hard, share = target_logits[which], hard[:, None], share[:, None]
    values = share[:, 0] * _divergence(logits, there, hard, overlap) if measure else share.new_zeros(0)
    return compiled(_gradient, logits.device)(logits, there, hard, share, overlap), values


def _target_distribution(logits: Tensor, hard: Tensor) -> Tensor:
    """Return the distribution that the head is trained towards, in fp32 [N, vocab]. hard: [N, 1]."""
    distribution = torch.softmax(logits, dim=-1, dtype=torch.float32)
    best = torch.arange(distribution.shape[-1], device=distribution.device) == logits.argmax(-1, keepdim=True)
    return distribution * (1 - hard) + torch.where(best, hard, 0.0)


def _divergence(logits: Tensor, there: Tensor, hard: Tensor, overlap: float) -> Tensor:
    """Return KL(target || head) of each row plus the weighted missing overlap."""
    distribution = _target_distribution(there, hard)
    head_logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    # xlogy: a token of target probability 0 adds nothing
    apart = (torch.xlogy(distribution, distribution) - distribution * head_logprobs).sum(-1)
    if overlap:
        apart = apart + overlap * (1 - torch.minimum(head_logprobs.exp_(), distribution).sum(-1))
    return apart


def _gradient(logits: Tensor, there: Tensor, hard: Tensor, share: Tensor, overlap: float) -> Tensor:
    """Return the gradient of the weighted divergence by the logits, in their dtype. share: [N, 1]."""
    distribution = _target_distribution(there, hard)
    head_probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    gradient = head_probs - distribution
    if overlap:
        low = torch.where(head_probs < distribution, head_probs, 0.0)  # tokens that need more probability
        gradient = gradient + overlap * (head_probs * low.sum(-1, keepdim=True) - low)
    return (gradient * share).to(logits.dtype)
