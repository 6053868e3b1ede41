"""A forward pass as CUDA graphs, one per row bucket, captured when a bucket is first met.

The rows of a call are copied into static buffers (one kernel, no host sync) and padded up to the bucket. A
padded row has slot -1: `rope_store` stores nothing for it, `attention` does nothing for it, every other op
works row by row; so it can hurt nobody. Its token and position are 0. Graphs share one memory pool: only
one of them runs at a time, and what one returns is valid until the next call of the same function.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import Rows

STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
EAGER_RUNS = 2  # before a capture: compiles kernels, proves cuBLAS pieces, grows scratch


def buckets(max_rows: int) -> list[int]:
    """Row counts that are captured; the last one holds `max_rows`.

    Above 512: 2, 3, 4, 6, 8 … times 512, which are sums of the pieces that cuBLAS may take.
    """
    found = list(STEPS)
    size = 512
    while found[-1] < max_rows:
        found += [1024] if size == 512 else [size * 3 // 2, size * 2]
        size *= 2
    return [n for n in found if n < max_rows] + [next(n for n in found if n >= max_rows)]


@triton.jit
def load_rows_kernel(
    tokens, positions, slots, kv_index, to_tokens, to_positions, to_slots, to_kv_index, R, B,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies R rows and pads to B."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, ok = at < R, at < B
    tl.store(to_tokens + at, tl.load(tokens + at, mask=real, other=0), mask=ok)
    tl.store(to_positions + at, tl.load(positions + at, mask=real, other=0), mask=ok)
    tl.store(to_slots + at, tl.load(slots + at, mask=real, other=-1), mask=ok)
    tl.store(to_kv_index + at, tl.load(kv_index + at, mask=real, other=0), mask=ok)


class Captured:
    """`forward` for up to `max_rows` rows, by graphs."""

    def __init__(self, forward: Callable[[Rows], Tensor], max_rows: int, device: torch.device) -> None:
        self.forward = forward
        self.max_rows = max_rows
        self.buckets = buckets(max_rows)
        self.columns = torch.zeros((4, self.buckets[-1]), dtype=torch.int64, device=device)
        self.page_table: Tensor | None = None  # [slots, max_pages] int32, static
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, rows: Rows) -> Tensor:
        count = len(rows.tokens)
        if count > self.max_rows:
            raise ConfigError(f"{count} rows in a forward pass captured for at most {self.max_rows}")
        size = next(n for n in self.buckets if n >= count)
        self._load(rows, count, size)
        if size not in self.graphs:
            self._capture(size)
            self._load(rows, count, size)
        graph, out = self.graphs[size]
        graph.replay()
        return out[:count]

    def prepare(self, page_table: Tensor, sizes: list[int] | None = None) -> None:
        """Capture these buckets now (default: all), the largest first: the others then share its memory."""
        self._hold(page_table)
        for size in sorted(sizes or self.buckets, reverse=True):
            if size not in self.graphs:
                self._capture(size)

    def _hold(self, page_table: Tensor) -> Tensor:
        if self.page_table is None or self.page_table.shape != page_table.shape:
            self.graphs.clear()  # they read the old table
            self.page_table = torch.zeros_like(page_table, memory_format=torch.contiguous_format)
        return self.page_table

    def _load(self, rows: Rows, count: int, size: int) -> None:
        self._hold(rows.page_table).copy_(rows.page_table)
        tokens, positions, slots, kv_index = (
            x.contiguous() for x in (rows.tokens, rows.positions, rows.slots, rows.kv_index)
        )
        load_rows_kernel[(triton.cdiv(size, 256),)](
            tokens, positions, slots, kv_index, *self.columns, count, size, BLOCK=256, num_warps=4
        )

    def _capture(self, size: int) -> None:
        assert self.page_table is not None
        rows = Rows(*(column[:size] for column in self.columns), page_table=self.page_table)
        self.columns.zero_()
        self.columns[2].fill_(-1)  # all rows are padding: a warm-up writes to no page
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(EAGER_RUNS):
                self.forward(rows)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            out = self.forward(rows)
        self.graphs[size] = (graph, out)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection during a capture: what it frees on the device would spoil the graph."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
