"""The slopes of an update, replayed where a device can: op by op, the host takes longer to ask than a GPU.

What is replayed has a shape: a batch is filled up with empty texts, and the rows that are learnt from with
one that weighs nothing. Every update is replayed, the first of a shape too: a run that was cut has the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.ops import Ops

Found = tuple[Sequence[Tensor], Tensor]  # of each weight; [unroll] fp32: the loss at each step of a chain
GRAINS = 8  # numbers of learnt rows that a width of texts is captured for, at most


@dataclass(frozen=True, slots=True)
class Task:
    """What slopes are computed from, on the host or on the device. N = B * T."""

    tokens: Tensor  # [B, T] int64
    stored: Tensor  # [B, T] int64: where the target's rows are kept; [0] where they are not
    weight: Tensor  # [unroll, N] fp32
    cold: Tensor  # [N] fp32
    chosen: Tensor  # [M] int64; this and the next three: `loss.Rows`
    places: Tensor  # [N] int64
    heard: Tensor  # [S] int64
    compared: Tensor  # [unroll, M] int64

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


class Slopes:
    """compute(task, measure): the slopes and the loss, with tensors of the device."""

    def __init__(
        self, compute: Callable[[Task, bool], Found], weights: Sequence[Tensor], unroll: int, ops: Ops
    ) -> None:
        self._compute, self._ops = compute, ops
        self.replays = ops.runtime.asynchronous
        self._made: dict[tuple[torch.Size, ...], tuple[Task, Callable[[], None]]] = {}
        if self.replays:
            self._slopes = [torch.empty_like(weight) for weight in weights]
            self._losses = torch.empty(unroll, device=ops.device)

    def __call__(self, task: Task, measure: bool) -> Found:
        """Of a task on the host. What is replayed is always measured, and valid until the next one."""
        if not self.replays:
            return self._compute(Task(*(self._ops.runtime.send(part) for part in task.parts)), measure)
        shape = tuple(part.shape for part in task.parts)
        if shape not in self._made:
            self._made[shape] = self._captured(task)
        given, replay = self._made[shape]
        for part, target in zip(task.parts, given.parts, strict=True):
            if len(part):
                self._ops.runtime.send(part, target)
        replay()
        return self._slopes, self._losses

    def _captured(self, task: Task) -> tuple[Task, Callable[[], None]]:
        given = Task(*(self._ops.runtime.send(part) for part in task.parts))

        def run() -> None:
            slopes, losses = self._compute(given, True)
            torch._foreach_copy_(self._slopes, list(slopes))
            self._losses.copy_(losses)

        return given, self._ops.runtime.graph(run)
