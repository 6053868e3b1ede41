"""A CPU backend that fails when it is told to: memory runs out, a step raises, the device is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from draftproof.ops import PendingCopy
from draftproof.ops.cpu.backend import CpuOps

STEP_OPS = ("layout", "sample", "commit", "logprobs", "search_ngram", "store_drafts", "fetch")
When = Callable[["FaultyOps", str, int], bool]


class FaultyOps(CpuOps):
    """`when(ops, name, count)`: does the count-th call of an op fail? `late`: after it has done its work.

    `name` is "read" where results are waited for. Engines are built first: `when` is set afterwards.
    """

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.when: When | None = None
        self.late = False
        self.gone = False
        self.raised = 0
        self._counts: Counter[str] = Counter()

    def meet(self, name: str) -> None:
        if self.gone:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.when is None:
            return
        self._counts[name] += 1
        if self.when(self, name, self._counts[name]):
            self.raised += 1
            raise torch.OutOfMemoryError("planted: out of memory")


def _guarded(name: str) -> Callable[..., Any]:
    whole = getattr(CpuOps, name)

    def call(self: FaultyOps, *args: Any, **options: Any) -> Any:
        if not self.late:
            self.meet(name)
        result = whole(self, *args, **options)
        if self.late:
            self.meet(name)
        return result

    return call


for _name in STEP_OPS:
    setattr(FaultyOps, _name, _guarded(_name))


def _fetch(self: FaultyOps, tensor: torch.Tensor) -> PendingCopy:
    trial = tensor.numel() == 1 and not self.gone  # somebody asks whether anything works at all
    read = CpuOps.fetch(self, tensor)
    if trial:
        return read
    self.meet("fetch")

    def later() -> torch.Tensor:
        self.meet("read")
        return read()

    return PendingCopy(later, read.is_ready)


FaultyOps.fetch = _fetch  # type: ignore[method-assign]


class CapturedOps(FaultyOps):
    """One that captures steps, or fails to."""

    asynchronous = True

    def graph(self, function: Callable[[], Any], apart: bool = False) -> Callable[[], Any]:
        function()  # as a capture does
        self.meet("graph")
        return function
