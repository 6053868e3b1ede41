"""A simulated GPU: all of a start but the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


class Chip:
    multi_processor_count = 132
    shared_memory_per_block_optin = 227 << 10
    shared_memory_per_multiprocessor = 228 << 10
    major = 9


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Callable[[], object]]]:
    """Make the backend use the simulated GPU; return launched kernels and compiled functions."""
    from triton.runtime.jit import JITFunction

    from draftproof.ops.triton import compile_ahead, graphs, kernel_utils

    kernels: list[str] = []
    gone_through: list[Callable[[], object]] = []

    def compile_without_a_pool(self: Any, functions: Any, tick: Any) -> None:
        with compile_ahead._compile_only_launches(), compile_ahead._zeroed_allocations():
            for function in functions:
                function()
                gone_through.append(function)
        tick(0, 0)

    def send(self: Any, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return source if target is None else target.copy_(source)

    for owner, name, value in (
        (kernel_utils, "check_device", lambda device: None),
        (kernel_utils, "_usable", lambda name, x, dtypes: x),
        (JITFunction, "run", lambda self, *a, **k: kernels.append(self.fn.__name__)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "get_device_properties", lambda device: Chip),
        (graphs.TritonRuntime, "open_queue", lambda self: setattr(self, "asynchronous", True)),
        (graphs.TritonRuntime, "graph", lambda self, function, pool=0: function),
        (graphs.TritonRuntime, "seconds", lambda self, function, times=5: 1.0),
        (graphs.TritonRuntime, "send", send),
        (graphs.TritonRuntime, "compile", compile_without_a_pool),
        (graphs.TritonRuntime, "free_memory", lambda self: 1 << 30),
    ):
        monkeypatch.setattr(owner, name, value)
    return kernels, gone_through
