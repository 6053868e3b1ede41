"""CUDA graphs of steps, and copies between host and device without waiting.

A graph is captured from a function of static tensors, one per size and kind of step. Unused rows are padding
with slot -1: they store nothing and attend to nothing, and every other op works row by row. Graphs share a
memory pool for each `GraphPool`: those of one pool run one at a time, in one queue, and the result of a graph
is valid until the next graph of its pool runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from draftproof.ops.contract.memory import TensorMemory
from draftproof.ops.contract.runtime import GraphPool, Runtime
from draftproof.ops.contract.types import PendingCopy
from draftproof.ops.triton.compile_ahead import compile_ahead
from draftproof.ops.triton.gemm.autotune import TileTuner
from draftproof.ops.triton.kernel_utils import LaunchContext
from draftproof.ops.triton.memory.virtual import VirtualMemory
from draftproof.registry import no_collection

T = TypeVar("T")
CAPTURED_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
EAGER_RUNS = 2  # runs before a capture: compile kernels, verify cuBLAS pieces, grow scratch


def bucket_of(rows: int) -> int:
    """Return the captured number of rows for `rows`.

    Above 512: multiples of 512, which cuBLAS may compute whole; above 8192, of larger steps.
    """
    for size in CAPTURED_ROWS:
        if rows <= size:
            return size
    step = max(512, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


class TritonRuntime(Runtime):
    """Runtime with a queue and CUDA graphs; on the interpreter, which has none, the defaults apply."""

    def __init__(self, launch: LaunchContext, tuner: TileTuner | None = None) -> None:
        super().__init__(launch.device)
        self._tuner = tuner
        self.cuda = launch.cuda
        self.asynchronous = self.cuda
        self.open_queue()

    def open_queue(self) -> None:
        """Create the streams, memory pools and staging buffers."""
        if self.cuda:
            self._pools = [torch.cuda.graph_pool_handle() for _ in GraphPool]
            self._side, self._forked = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self._beside = torch.cuda.Stream(self.device)
            self._begins, self._ends = torch.cuda.Event(), torch.cuda.Event()  # of the work on `_beside`
            self._stages, self._here = StagingBuffers(), torch.cuda.current_stream(self.device)

    def releasable(self, tensors: Iterable[Tensor], has_content: bool) -> TensorMemory:
        if not self.cuda:
            return super().releasable(tensors, has_content)
        return VirtualMemory(tensors, has_content, self.device)

    def free_memory(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0] if self.cuda else None

    def compile(self, functions: Sequence[Callable[[], object]], tick: Callable[[int, int], None]) -> None:
        if self.cuda:
            compile_ahead(functions, tick)
            if self._tuner is not None:
                self._tuner.tune(compile_ahead, tick)

    def bucket(self, rows: int) -> int:
        return bucket_of(rows) if self.cuda else rows

    def graph(self, function: Callable[[], T], pool: GraphPool = GraphPool.STEP) -> Callable[[], T]:
        if not self.cuda:
            return function
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            for _ in range(EAGER_RUNS):
                function()
        here.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with (
            no_collection(),  # freeing device memory would break the graph
            torch.cuda.graph(
                graph, pool=self._pools[pool], stream=self._side, capture_error_mode="thread_local"
            ),
        ):
            out = function()

        def replay() -> T:
            graph.replay()
            return out

        return replay

    def run_parallel(self, function: Callable[[], T]) -> Callable[[], T]:
        if not self.cuda or not torch.cuda.is_current_stream_capturing():
            return super().run_parallel(function)
        here = torch.cuda.current_stream()
        self._forked.wait_stream(here)
        try:
            with torch.cuda.stream(self._forked):
                result = function()
        except BaseException:  # an unjoined stream would break later captures
            here.wait_stream(self._forked)
            raise

        def joined() -> T:
            here.wait_stream(self._forked)
            return result

        return joined

    def run_beside(self, graph: Callable[[], object]) -> Callable[[], object]:
        if not self.cuda:
            return super().run_beside(graph)
        here, beside = self._stream, self._beside
        self._begins.record(here)
        beside.wait_event(self._begins)
        with torch.cuda.stream(beside):
            graph()
        self._ends.record(beside)
        return lambda: here.wait_event(self._ends)

    def seconds(self, function: Callable[[], object], times: int = 5) -> float:
        if not self.cuda:
            return super().seconds(function, times)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        marks[-1].synchronize()
        return min(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) / 1000

    @property
    def _stream(self) -> torch.cuda.Stream:
        """Return the current stream; the object is cached, because it rarely changes."""
        if torch._C._cuda_getCurrentRawStream(self._here.device_index) != self._here.cuda_stream:
            self._here = torch.cuda.current_stream(self.device)
        return self._here

    def send(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        if not self.cuda:
            return super().send(source, target)
        stage = self._stages.take(source)
        pinned = stage.like(source)
        pinned.copy_(source)
        out = torch.empty_like(source, device=self.device) if target is None else target
        out.copy_(pinned, non_blocking=True)
        stage.copied.record(self._stream)
        self._stages.put(stage)
        return out

    def fetch(self, tensor: Tensor) -> PendingCopy:
        if not self.cuda:
            return super().fetch(tensor)
        stage = self._stages.take(tensor)
        pinned = stage.like(tensor)
        pinned.copy_(tensor, non_blocking=True)
        stage.copied.record(self._stream)
        copies: list[Tensor] = []

        def read() -> Tensor:
            if not copies:
                stage.copied.synchronize()
                copies.append(torch.from_numpy(pinned.numpy().copy()))  # torch's copy wakes all its threads
                self._stages.put(stage)
            return copies[0]

        return PendingCopy(read, lambda: bool(copies) or stage.copied.query())  # a stage is reused once read


class StagingBuffer:
    """Pinned staging buffer with an event after its last copy."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()
        self._like: Tensor | None = None  # last view: usually the same shape again

    def like(self, tensor: Tensor) -> Tensor:
        """Return a view of the buffer with the shape and dtype of `tensor`."""
        last, shape, dtype = self._like, tensor.shape, tensor.dtype
        if last is None or last.dtype != dtype or last.shape != shape:
            last = self.bytes[: tensor.numel() * tensor.element_size()].view(dtype).view(shape)
            self._like = last
        return last


class StagingBuffers:
    """Free staging buffers by size; a buffer is reused once its copy has completed."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[StagingBuffer]] = {}

    def take(self, tensor: Tensor) -> StagingBuffer:
        """Return a free buffer for `tensor`, or a new one."""
        size = max(256, 1 << (tensor.numel() * tensor.element_size() - 1).bit_length())
        idle = self._idle.setdefault(size, deque())
        return idle.popleft() if idle and idle[0].copied.query() else StagingBuffer(size)

    def put(self, stage: StagingBuffer) -> None:
        """Give a buffer back."""
        self._idle[stage.size].append(stage)
