"""Metrics of an HTTP process for /metrics, under the names that dashboards and load clients read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from draftproof.metrics import BOUNDS, Histogram, SpecStats
from draftproof.sampling_params import SamplingParams
from draftproof.serve.api.shared_metrics import MetricTotals, SharedMetrics

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

    # --- collection ---

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
        """Yield the speculation counters under a prefix."""
        for name, text, value in (
            ("drafts", "Verify steps with drafts.", stats.num_drafts),
            ("draft_tokens", "Drafted tokens.", stats.num_draft_tokens),
            ("accepted_tokens", "Accepted drafts, without bonus tokens.", stats.num_accepted_tokens),
            (
                "emitted_tokens",
                "Committed tokens, including recovered and bonus tokens.",
                stats.num_emitted_tokens,
            ),
        ):
            yield self._counter(f"{prefix}:spec_decode_num_{name}", text, value)
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Accepted drafts by position.", labels=["model_name", "position"])
        for position, count in enumerate(stats.accepted_per_position):
            family.add_metric([self.model, str(position)], count)
        yield family

    def _server(self, totals: MetricTotals) -> Iterator[Metric]:
        """Yield the metrics of the HTTP processes."""
        labels = ["model_name", "path", "status"]
        family = CounterMetricFamily("draftproof:http_requests", "HTTP requests.", labels=labels)
        for key, count in totals.requests.items():
            path, status = key.rsplit(" ", 1)
            family.add_metric([self.model, path, status], count)
        yield family
        for attribute, (name, text) in COUNTS.items():
            build = self._gauge if attribute == "num_open" else self._counter
            yield build(f"draftproof:{name}", text, totals.counts[attribute])
        for attribute, (name, text) in HISTOGRAMS.items():
            yield self._histogram(f"draftproof:{name}", text, totals.histograms[attribute])

    def _engine(self) -> Iterator[Metric]:
        """Yield the metrics of the engine."""
        strategy, lossless = self._llm.strategy_label(SamplingParams())
        labels = ["model_name", "strategy"]
        text = "1 if the verification of requests without own options is lossless."
        family = GaugeMetricFamily("draftproof:lossless", text, labels=labels)
        family.add_metric([self.model, strategy], int(lossless))
        yield family
        stats = self._llm.engine_stats()
        for name, text, value in (
            ("num_requests_running", "Running requests.", stats.num_running),
            ("num_requests_waiting", "Waiting requests.", stats.num_waiting),
            ("kv_pages", "Pages of the KV cache.", stats.num_pages),
            ("kv_pages_used", "Used pages of the KV cache.", stats.num_used_pages),
            (
                "kv_pages_cached",
                "Unused pages with cached content.",
                stats.num_cached_pages,
            ),
        ):
            yield self._gauge(f"draftproof:{name}", text, value)
        for name, text, value in (
            ("num_preemptions", "Preemptions because no page was free.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.num_queried_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
        ):
            yield self._counter(f"draftproof:{name}", text, value)
        worker, steps = self._llm.worker_status(), self._llm.step_totals()
        if worker is not None and steps is not None:  # the engine has a process of its own
            up = int(worker.state == "ready")
            yield self._gauge("draftproof:worker_up", "1 while the engine's process serves requests.", up)
            for name, text, value in (
                ("worker_restarts", "Restarts of the engine's process.", worker.restarts),
                ("engine_steps", "Steps of the engine.", steps.num_steps),
                ("engine_step_seconds", "Seconds spent in steps of the engine.", steps.seconds),
            ):
                yield self._counter(f"draftproof:{name}", text, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        rows = zip([*map(str, BOUNDS), "+Inf"], map(float, accumulate(histogram.counts)), strict=True)
        family.add_metric([self.model], list(rows), histogram.total)
        return family
