"""A CPU backend that fails on demand: out of memory, a step that raises, a lost device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from draftproof.ops import PendingCopy
from draftproof.ops.cpu.backend import CpuOps

STEP_OPS = ("layout", "sample", "commit", "logprobs", "search_ngram", "store_drafts")
When = Callable[["FaultyOps", str, int], bool]


class FaultyOps(CpuOps):
    """Backend whose count-th call of an op fails if `when(ops, name, count)`; `late`: after its work.

    `name` is "read" where results are waited for. Engines are built first: `when` is set afterwards.
    """

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.when: When | None = None
        self.late = False
        self.is_device_lost = False
        self.raised = 0
        self._counts: Counter[str] = Counter()
        self._fetch, self.runtime.fetch = self.runtime.fetch, self._fetch_guarded  # type: ignore[method-assign]
        for name in STEP_OPS:
            family = next(f for f in (self.sampling, self.step, self.search) if hasattr(f, name))
            setattr(family, name, self._guarded(name, getattr(family, name)))

    def raise_if_planned(self, name: str) -> None:
        """Raise if the device is lost or this call of an op is planned to fail."""
        if self.is_device_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.when is None:
            return
        self._counts[name] += 1
        if self.when(self, name, self._counts[name]):
            self.raised += 1
            raise torch.OutOfMemoryError("planted: out of memory")

    def _guarded(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self.late:
                self.raise_if_planned(name)
            result = whole(*args, **options)
            if self.late:
                self.raise_if_planned(name)
            return result

        return call

    def _fetch_guarded(self, tensor: torch.Tensor) -> PendingCopy:
        is_probe = tensor.numel() == 1 and not self.is_device_lost  # a check whether the device still works
        read = self._fetch(tensor)
        if is_probe:
            return read
        self.raise_if_planned("fetch")

        def later() -> torch.Tensor:
            self.raise_if_planned("read")
            return read()

        return PendingCopy(later, read.is_ready)


class CapturedOps(FaultyOps):
    """Faulty backend that captures steps, or fails to."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.runtime.asynchronous = True
        self.runtime.graph = self._graph  # type: ignore[method-assign,assignment]

    def _graph(self, function: Callable[[], Any], pool: int = 0) -> Callable[[], Any]:
        function()  # a capture runs the step
        self.raise_if_planned("graph")
        return function
