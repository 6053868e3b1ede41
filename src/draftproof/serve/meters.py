"""What is measured for /metrics, in the names that dashboards and load clients already read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from draftproof.metrics import SpecStats

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


class Histogram:
    """Counts by bucket. Cheap enough for every token: one binary search."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        total, rows = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows, self._sum


class Meters:
    """One server process's. Everything about the engine is asked of it when somebody looks."""

    def __init__(self, llm: Any, model: str, vllm_names: bool = False) -> None:
        self._llm, self._model, self._vllm = llm, model, vllm_names
        self.first_token = Histogram()
        self.between_tokens = Histogram()
        self.whole_request = Histogram()
        self.steps = Histogram()  # filled by whoever connects to the engine's process
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.prompt_tokens = self.generated_tokens = self.disconnects = self.open = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """For Prometheus, in its text format."""
        return generate_latest(self._registry)

    # --- collecting ---------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation("draftproof")
        if self._vllm:
            yield from self._speculation("vllm")
        yield from self._server()
        yield from self._engine()

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering asks nothing of an engine

    def _speculation(self, prefix: str) -> Iterator[Metric]:
        stats: SpecStats = self._llm.stats
        for name, text, value in (
            ("drafts", "Verify steps that had drafts.", stats.num_drafts),
            ("draft_tokens", "Drafted tokens.", stats.num_draft_tokens),
            (
                "accepted_tokens",
                "Drafted tokens that stood; without bonus tokens.",
                stats.num_accepted_tokens,
            ),
            (
                "emitted_tokens",
                "Committed tokens, recovered and bonus ones included.",
                stats.num_emitted_tokens,
            ),
        ):
            yield self._counter(f"{prefix}:spec_decode_num_{name}", text, value)
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Accepted drafts by position.", labels=["model_name", "position"])
        for position, count in enumerate(stats.accepted_per_position):
            family.add_metric([self._model, str(position)], count)
        yield family

    def _server(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "draftproof:http_requests", "HTTP requests.", labels=["model_name", "path", "status"]
        )
        for (path, status), count in self.requests.items():
            family.add_metric([self._model, path, str(status)], count)
        yield family
        yield self._counter("draftproof:prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield self._counter("draftproof:generation_tokens", "Tokens told to clients.", self.generated_tokens)
        yield self._counter("draftproof:client_disconnects", "Requests whose client left.", self.disconnects)
        yield self._gauge("draftproof:http_requests_open", "Requests that are being answered.", self.open)
        yield self._histogram(
            "draftproof:time_to_first_token_seconds",
            "From the request to the first token of a stream.",
            self.first_token,
        )
        yield self._histogram(
            "draftproof:inter_token_latency_seconds",
            "Between tokens of a stream; those that came together share the time.",
            self.between_tokens,
        )
        yield self._histogram(
            "draftproof:e2e_request_latency_seconds",
            "From the request to the end of its answer.",
            self.whole_request,
        )

    def _engine(self) -> Iterator[Metric]:
        stats = self._llm.engine_stats()
        for name, text, value in (
            ("num_requests_running", "Requests in the engine's batch.", stats.num_running),
            ("num_requests_waiting", "Requests in the engine's queue.", stats.num_waiting),
            ("kv_pages", "Pages of the KV cache.", stats.num_pages),
            ("kv_pages_used", "Pages in use.", stats.num_used_pages),
            (
                "kv_pages_cached",
                "Pages that nobody uses, with content that can be found.",
                stats.num_cached_pages,
            ),
        ):
            yield self._gauge(f"draftproof:{name}", text, value)
        for name, text, value in (
            ("num_preemptions", "Requests put aside because pages ran out.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.num_queried_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.num_cached_tokens),
        ):
            yield self._counter(f"draftproof:{name}", text, value)
        if hasattr(self._llm, "worker"):  # the engine has a process of its own
            worker, steps = self._llm.worker(), self._llm.steps()
            yield self._counter(
                "draftproof:worker_restarts", "Times the engine's process was restarted.", worker.restarts
            )
            up = int(worker.state == "ready")
            yield self._gauge("draftproof:worker_up", "1 while the engine's process serves.", up)
            yield self._counter("draftproof:engine_steps", "Steps of the engine.", steps.num_steps)
            yield self._counter("draftproof:engine_step_seconds", "Time spent in them.", steps.seconds)
            yield self._histogram(
                "draftproof:engine_step_duration_seconds",
                "Steps that had results for this server.",
                self.steps,
            )

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        rows, total = histogram.samples()
        family.add_metric([self._model], rows, total)
        return family
