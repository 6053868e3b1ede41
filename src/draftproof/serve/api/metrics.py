"""Metrics of an HTTP process for /metrics, under the names that dashboards and load clients read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from draftproof.metrics import BOUNDS, EngineStats, Histogram, SpecStats
from draftproof.sampling_params import SamplingParams

# attribute of ServerMetrics: (name, help text)
HISTOGRAMS = {
    "queue": ("request_queue_time_seconds", "Time from a request's arrival in the engine to its first step."),
    "first_token": ("time_to_first_token_seconds", "Time from a request to the first token of its stream."),
    "between_tokens": (
        "inter_token_latency_seconds",
        "Time between two tokens of a stream; tokens of one step share it equally.",
    ),
    "whole_request": ("e2e_request_latency_seconds", "Time from a request to the end of its response."),
    "steps": ("engine_step_duration_seconds", "Duration of steps with results for this HTTP process."),
}
COUNTS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of completed requests."),
    "generated_tokens": ("generation_tokens", "Generated tokens of completed requests."),
    "lossy_requests": ("lossy_requests", "Completed requests whose verification is not lossless."),
    "disconnects": ("client_disconnects", "Requests whose client disconnected."),
    "num_open": ("http_requests_open", "Requests in progress."),
}
# attribute of SpecStats: (name, help text)
SPECULATION = {
    "num_drafts": ("drafts", "Verify steps with drafts."),
    "num_draft_tokens": ("draft_tokens", "Drafted tokens."),
    "num_accepted_tokens": ("accepted_tokens", "Accepted drafts, without bonus tokens."),
    "num_emitted_tokens": ("emitted_tokens", "Committed tokens, including recovered and bonus tokens."),
}
# attribute of EngineStats: (kind, name, help text)
ENGINE = {
    "num_running": (Gauges, "num_requests_running", "Running requests."),
    "num_waiting": (Gauges, "num_requests_waiting", "Waiting requests."),
    "num_pages": (Gauges, "kv_pages", "Pages of the KV cache."),
    "num_used_pages": (Gauges, "kv_pages_used", "Used pages of the KV cache."),
    "num_cached_pages": (Gauges, "kv_pages_cached", "Unused pages with cached content."),
    "num_preemptions": (Counters, "num_preemptions", "Preemptions because no page was free."),
    "num_queried_tokens": (Counters, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "num_cached_tokens": (Counters, "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "weights_version": (Gauges, "weights_version", "Version of the weights; 0 as loaded."),
    "sleep_level": (Gauges, "sleep_level", "Level of the engine's sleep; 0: awake."),
}
KV_USAGE = "Share of the KV cache in use, 0 to 1."
# gauges that the Gateway API inference extension and llm-d read: name after "vllm:", attribute of EngineStats
GATEWAY = {"num_requests_waiting": "num_waiting", "num_requests_running": "num_running"}


class MetricTotals(msgspec.Struct):
    """Metrics that are summed over processes."""

    speculation: SpecStats
    histograms: dict[str, Histogram]
    counts: dict[str, int]
    requests: dict[str, int]  # by "path status"

    def add(self, other: MetricTotals) -> None:
        """Add the metrics of another process."""
        self.speculation.add(other.speculation)
        for name, histogram in other.histograms.items():
            self.histograms[name].add(histogram)
        for mine, theirs in ((self.counts, other.counts), (self.requests, other.requests)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count


class SharedMetrics:
    """Folder with one small file per HTTP process of an engine, written every second; `name` is this one's.

    Files of processes that have ended stay, so that totals never decrease.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._own_path = folder, folder / f"totals-{name}.json"

    def write(self, totals: MetricTotals) -> None:
        """Replace this process's file atomically. An error of the disk is ignored."""
        part = self._own_path.with_suffix(".part")
        with suppress(OSError):
            part.write_bytes(msgspec.json.encode(totals))
            os.replace(part, self._own_path)

    def read_others(self) -> list[MetricTotals]:
        """Return the metrics of the other processes."""
        found = []
        for path in self._folder.glob("totals-*.json"):
            if path != self._own_path:
                with suppress(OSError, msgspec.MsgspecError):
                    found.append(msgspec.json.decode(path.read_bytes(), type=MetricTotals))
        return found


class ServerMetrics:
    """Metrics of one HTTP process. Those of the engine are read when the page is built."""

    def __init__(
        self,
        llm: Any,
        model: str,
        vllm_names: bool = False,
        steps: Histogram | None = None,  # filled by the connection to the engine's process
        shared: SharedMetrics | None = None,  # of several HTTP processes
    ) -> None:
        self.model = model
        self._llm, self._vllm_names, self._shared = llm, vllm_names, shared
        self.queue, self.first_token = Histogram(), Histogram()
        self.between_tokens, self.whole_request = Histogram(), Histogram()
        self.steps = steps or Histogram()
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.prompt_tokens = self.generated_tokens = self.lossy_requests = 0
        self.disconnects = self.num_open = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @contextmanager
    def count_open(self) -> Iterator[None]:
        """Count a request as open within the context."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def totals(self) -> MetricTotals:
        """Return the metrics of this process."""
        speculation = SpecStats()
        speculation.add(self._llm.stats)
        return MetricTotals(
            speculation=speculation,
            histograms={name: getattr(self, name).copy() for name in HISTOGRAMS},
            counts={name: getattr(self, name) for name in COUNTS},
            requests={f"{path} {status}": count for (path, status), count in self.requests.items()},
        )

    def write_shared(self) -> None:
        """Write the metrics of this process for the others."""
        if self._shared is not None:
            self._shared.write(self.totals())

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, summed over the HTTP processes."""
        totals = self.totals()
        for other in self._shared.read_others() if self._shared else []:
            totals.add(other)
        yield from self._speculation("draftproof", totals.speculation)
        if self._vllm_names:
            yield from self._speculation("vllm", totals.speculation)
        yield from self._server(totals)
        yield from self._engine()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not read the engine's metrics."""
        return []

    def _speculation(self, prefix: str, stats: SpecStats) -> Iterator[Metric]:
        for attribute, (name, text) in SPECULATION.items():
            yield self._one(Counters, f"{prefix}:spec_decode_num_{name}", text, getattr(stats, attribute))
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = Counters(name, "Accepted drafts by position.", labels=["model_name", "position"])
        for position, count in enumerate(stats.accepted_per_position):
            family.add_metric([self.model, str(position)], count)
        yield family

    def _server(self, totals: MetricTotals) -> Iterator[Metric]:
        labels = ["model_name", "path", "status"]
        family = Counters("draftproof:http_requests", "HTTP requests.", labels=labels)
        for key, count in totals.requests.items():
            path, status = key.rsplit(" ", 1)
            family.add_metric([self.model, path, status], count)
        yield family
        for attribute, (name, text) in COUNTS.items():
            kind = Gauges if attribute == "num_open" else Counters
            yield self._one(kind, f"draftproof:{name}", text, totals.counts[attribute])
        for attribute, (name, text) in HISTOGRAMS.items():
            yield self._histogram(f"draftproof:{name}", text, totals.histograms[attribute])

    def _engine(self) -> Iterator[Metric]:
        strategy, lossless = self._llm.strategy_label(SamplingParams())
        labels = ["model_name", "strategy"]
        text = "1 if the verification of requests without own options is lossless."
        family = Gauges("draftproof:lossless", text, labels=labels)
        family.add_metric([self.model, strategy], int(lossless))
        yield family
        stats = self._llm.engine_stats()
        for attribute, (kind, name, text) in ENGINE.items():
            yield self._one(kind, f"draftproof:{name}", text, getattr(stats, attribute))
        used = stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0
        yield self._one(Gauges, "draftproof:kv_cache_usage_perc", KV_USAGE, used)
        if self._vllm_names:
            yield from self._gateway(stats, used)
        worker, steps = self._llm.worker_status(), self._llm.step_totals()
        if worker is not None and steps is not None:  # the engine has a process of its own
            up = int(worker.state == "ready")
            for kind, name, text, value in (
                (Gauges, "worker_up", "1 while the engine's process serves requests.", up),
                (Counters, "worker_restarts", "Restarts of the engine's process.", worker.restarts),
                (Counters, "engine_steps", "Steps of the engine.", steps.num_steps),
                (Counters, "engine_step_seconds", "Seconds spent in steps of the engine.", steps.seconds),
            ):
                yield self._one(kind, f"draftproof:{name}", text, value)

    def _gateway(self, stats: EngineStats, used: float) -> Iterator[Metric]:
        """Yield what routers read: queue, running requests, share of used KV, size of the KV cache."""
        for name, attribute in GATEWAY.items():
            yield self._one(Gauges, f"vllm:{name}", ENGINE[attribute][2], getattr(stats, attribute))
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second before vLLM 0.10
            yield self._one(Gauges, f"vllm:{name}", KV_USAGE, used)
        size = {"block_size": self._llm.config.page_size, "num_gpu_blocks": stats.num_pages}
        family = Gauges("vllm:cache_config_info", "Size of the KV cache.", labels=["model_name", *size])
        family.add_metric([self.model, *map(str, size.values())], 1)
        yield family

    def _one(self, kind: type[Counters] | type[Gauges], name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        rows = zip([*map(str, BOUNDS), "+Inf"], map(float, accumulate(histogram.counts)), strict=True)
        family.add_metric([self.model], list(rows), histogram.total)
        return family
