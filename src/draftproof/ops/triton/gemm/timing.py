"""Device time of kernel launches, measured inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_milliseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the milliseconds of one replay of a graph of `calls`.

    Single launches of short kernels would measure the host.
    """
    calls[0]()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
