"""Gradients of an update as a captured graph, because launching op by op is slower than a GPU computes.

A graph has fixed shapes: a batch is padded with empty texts, and the trained rows with one of weight 0. Every
update is replayed, the first of a shape too, so that a resumed run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.ops import Ops

# one gradient per weight; [unroll] fp32: loss at each draft position
GradientsAndLoss = tuple[Sequence[Tensor], Tensor]
MAX_ROW_COUNTS = 8  # captured numbers of trained rows per text width


class BatchTensors(NamedTuple):
    """Input tensors of a gradient computation, on the host or on the device. N = B * T."""

    tokens: Tensor  # [B, T] int64
    stored: Tensor  # [B, T] int64: rows of the cached target states; [0]: not cached
    weight: Tensor  # [unroll, N] fp32
    greedy_rows: Tensor  # [N] fp32
    chosen: Tensor  # [M] int64; this and the next three: `loss.Rows`
    places: Tensor  # [N] int64
    target_rows: Tensor  # [S] int64
    target_index: Tensor  # [unroll, M] int64


class GradientGraph:
    """Gradient computation, captured where the device has graphs. compute: function of device tensors."""

    def __init__(
        self,
        compute: Callable[[BatchTensors, bool], GradientsAndLoss],
        weights: Sequence[Tensor],
        unroll: int,
        ops: Ops,
    ) -> None:
        self._compute, self._ops = compute, ops
        self.replays = ops.runtime.asynchronous
        self._made: dict[tuple[torch.Size, ...], tuple[BatchTensors, Callable[[], None]]] = {}
        if self.replays:
            self._gradients = [torch.empty_like(weight) for weight in weights]
            self._losses = torch.empty(unroll, device=ops.device)

    def __call__(self, batch_tensors: BatchTensors, measure: bool) -> GradientsAndLoss:
        """Compute gradients of host tensors. A replay always measures; its results last until the next."""
        if not self.replays:
            return self._compute(BatchTensors(*map(self._ops.runtime.send, batch_tensors)), measure)
        shape = tuple(part.shape for part in batch_tensors)
        if shape not in self._made:
            self._made[shape] = self._captured(batch_tensors)
        given, replay = self._made[shape]
        for part, target in zip(batch_tensors, given, strict=True):
            if len(part):
                self._ops.runtime.send(part, target)
        replay()
        return self._gradients, self._losses

    def _captured(self, batch_tensors: BatchTensors) -> tuple[BatchTensors, Callable[[], None]]:
        given = BatchTensors(*map(self._ops.runtime.send, batch_tensors))

        def run() -> None:
            gradients, losses = self._compute(given, True)
            torch._foreach_copy_(self._gradients, list(gradients))
            self._losses.copy_(losses)

        return given, self._ops.runtime.graph(run)
