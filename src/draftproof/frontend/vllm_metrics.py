"""Metrics of an engine as a list, with the names and classes that `LLM.get_metrics` of vLLM has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from draftproof.metrics import BOUNDS, EngineStats, SpecStats
from draftproof.metrics import Histogram as Durations


@dataclass(frozen=True, slots=True)
class Metric:
    """Name and labels of a metric."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Total since the engine was built, or since `reset_stats` for those of speculation."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Present value."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Totals by position in the window."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Durations in seconds; `buckets`: the number of those up to each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_list(model: str, engine: EngineStats, speculation: SpecStats) -> list[Metric]:
    """Return the metrics of an engine."""
    labels = {"model_name": model}
    gauges = {
        "num_requests_running": engine.num_running,
        "num_requests_waiting": engine.num_waiting,
        "kv_cache_usage_perc": engine.num_used_pages / engine.num_pages,
    }
    counters = {
        "num_preemptions": engine.num_preemptions,
        "prefix_cache_queries": engine.num_queried_tokens,
        "prefix_cache_hits": engine.num_cached_tokens,
        "generation_tokens": speculation.num_emitted_tokens,
        "spec_decode_num_drafts": speculation.num_drafts,
        "spec_decode_num_draft_tokens": speculation.num_draft_tokens,
        "spec_decode_num_accepted_tokens": speculation.num_accepted_tokens,
    }
    durations = {
        "time_to_first_token_seconds": engine.timings.first_token,
        "request_queue_time_seconds": engine.timings.queue,
    }
    per_position = list(speculation.accepted_per_position)
    return [
        *(Gauge(f"vllm:{name}", labels, float(value)) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", labels, value) for name, value in counters.items()),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, per_position),
        *(_histogram(f"vllm:{name}", labels, value) for name, value in durations.items()),
    ]


def _histogram(name: str, labels: dict[str, str], durations: Durations) -> Histogram:
    bounds = [*map(str, BOUNDS), "+Inf"]
    buckets = dict(zip(bounds, accumulate(durations.counts), strict=True))
    return Histogram(name, labels, durations.count, durations.total, buckets)
