"""CPU backend that pads and captures steps as a GPU does."""

from __future__ import annotations

from typing import Any

import torch

from draftproof.ops.cpu.backend import CpuOps, CpuRuntime
from draftproof.ops.triton.graphs import bucket_of


class PaddedRuntime(CpuRuntime):
    """Runtime with few padded sizes, which replays what was captured once on an empty plan."""

    asynchronous = True

    def bucket(self, rows: int) -> int:
        return bucket_of(rows)

    def graph(self, function: Any, pool: int = 0) -> Any:
        function()
        return function


class PaddedOps(CpuOps):
    """CPU backend with padded and captured steps."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.runtime = PaddedRuntime(device, self.executor)
