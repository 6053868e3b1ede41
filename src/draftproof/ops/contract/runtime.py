"""Contract of the runtime: graph capture, host-device copies, timing, compilation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.memory import TensorMemory
from draftproof.ops.contract.types import PendingCopy

T = TypeVar("T")
Forward = Callable[..., tuple[Tensor, ...]]  # called with Rows and with tensors of as many rows


class GraphPool(IntEnum):
    """Memory pool of captured graphs. Graphs of one pool run one at a time, in one queue."""

    STEP = 0
    DRAFT = 1
    LOGPROB = 2


class Runtime:
    """Execution services of a device; the defaults suit a device without a queue."""

    asynchronous: bool = False  # work is queued: the host can run ahead of the device

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, forward: Forward, max_rows: int) -> Forward:
        """Return `forward` in a form that is fast to repeat, for calls of at most `max_rows` rows.

        `forward` is called with rows and, optionally, tensors [rows, ...] of the same widths each time. The
        tensors that a captured function returns are valid until its next call.
        """
        return forward

    def bucket(self, rows: int) -> int:
        """Return the number of rows that a step of `rows` is padded to, so that few sizes are captured."""
        return rows

    def graph(self, function: Callable[[], T], pool: GraphPool = GraphPool.STEP) -> Callable[[], T]:
        """Return `function`, which reads and writes static tensors, in a form that is fast to repeat.

        `function` may run during this call. The result of a graph is valid until another graph of the same
        pool runs.
        """
        return function

    def run_beside(self, graph: Callable[[], object]) -> Callable[[], object]:
        """Run a captured graph beside graphs of other pools; return the call that ends this.

        What is queued behind that call begins after the graph. Here the graph runs at once.
        """
        graph()
        return lambda: None

    def run_parallel(self, function: Callable[[], T]) -> Callable[[], T]:
        """Run `function` beside the ops that follow, until its result is called for; in a graph only."""
        result = function()
        return lambda: result

    def compile(self, functions: Sequence[Callable[[], object]], tick: Callable[[int, int], None]) -> None:
        """Compile the kernels that `functions` launch, if compilation is slow; they have no side effects now.

        `tick` is called with the number of compiled kernels and their total.
        """

    def send(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy a host tensor to the device, to `target` if given, without waiting for the queue."""
        return source.to(self.device) if target is None else target.copy_(source)

    def fetch(self, tensor: Tensor) -> PendingCopy:
        """Start a copy to the host of what `tensor` holds at this point of the queue."""
        copy = tensor.to("cpu", copy=True)
        return PendingCopy(lambda: copy)

    def seconds(self, function: Callable[[], object], times: int = 5) -> float:
        """Measure the device time of `function` as the minimum of several runs."""
        spent = []
        for _ in range(times):
            begin = time.perf_counter()
            function()
            spent.append(time.perf_counter() - begin)
        return min(spent)

    def releasable(self, tensors: Iterable[Tensor], has_content: bool) -> TensorMemory:
        """Return the memory of tensors, moved to where it can be released; without content it may be zeroed.

        It is called before any step is captured.
        """
        if self.device.type != "cpu":
            raise ConfigError(f"memory on {self.device} is released by the backend triton alone: choose it")
        return TensorMemory(tensors, has_content)

    def free_memory(self) -> int | None:
        """Return the bytes that can still be allocated on the device; None if unknown."""
        return None

    def step_context(self) -> AbstractContextManager[None]:
        """Return the context of a step; a backend with its own threads may limit torch's threads here."""
        return nullcontext()
