"""Graphs share memory: outputs of a graph are valid until the next graph of its pool runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.engine.step.device_step import DeviceStep
from draftproof.ops import Runtime
from draftproof.ops.torch.backend import TorchOps
from exact import Batch, Case, Setup


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)


class PooledRuntime(Runtime):
    """Runtime that overwrites the memory of a graph as soon as the next of its pool begins."""

    asynchronous = True

    def graph(self, function: Callable[[], Any], pool: int = 0) -> Callable[[], Any]:
        # Memory that the two calls do not share was allocated by the graph, in the pool.
        first, second = function(), function()
        persistent = {t.untyped_storage().data_ptr() for t in tensors(first)}
        persistent &= {t.untyped_storage().data_ptr() for t in tensors(second)}
        pools, first_outputs = self.__dict__.setdefault("pools", ([], [], [])), (first, second)

        def replay() -> Any:
            assert first_outputs
            for tensor in pools[pool]:
                tensor.fill_(97 if tensor.dtype != torch.bool else True)
            out = function()
            pools[pool][:] = [t for t in tensors(out) if t.untyped_storage().data_ptr() not in persistent]
            return out

        return replay

    def run_beside(self, graph: Callable[[], object]) -> Callable[[], object]:
        """Run the graph as late as a device may: after the drafts."""
        return graph


class PooledOps(TorchOps):
    """Torch backend with graph memory that is reused."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.runtime = PooledRuntime(device)


CASES = [
    Case(1, "all_logprobs", 0.7, length=18, max_tokens=8),
    Case(2, "named_logprobs", 0.0, length=9, max_tokens=8),
    Case(3, "draft_logprobs", 1.0, length=3, max_tokens=8),
    Case(4, "processed", 1.0, length=4, prompt=False, max_tokens=8),
]


def batch(method: str) -> Batch:
    spec = {"method": method, "num_speculative_tokens": 3}
    setup = Setup(backend="test_graph_memory:PooledOps")
    return Batch(CASES, setup, spec, chunk=16, arrivals=[0, 0, 2, 3], overlap=True)


@pytest.mark.parametrize("method", ["ngram", "eagle3", "proposers:SelfModel"])
def test_no_graph_output_is_read_after_the_next_graph(method: str) -> None:
    assert batch(method).differences() == []


def test_control_logprobs_after_the_next_step_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the logprob pass of a head's step is never waited for."""
    monkeypatch.setattr(PooledRuntime, "run_beside", lambda self, graph: lambda: None)
    assert any("logprobs" in found for found in batch("eagle3").differences())


def test_control_hidden_rows_in_the_pool_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the verification graph runs before prompt logprobs read the rows."""

    def forward_into_the_pool(self: DeviceStep, size: int, ends: int) -> Tensor:
        self._lay_out(size, self.max_logits)
        return self._forward(size, ends)

    monkeypatch.setattr(DeviceStep, "_forward_only", forward_into_the_pool)
    assert any("prompt logprobs" in found for found in batch("ngram").differences())
