"""What is measured for /metrics, in the names that dashboards and load clients already read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from draftproof.metrics import BOUNDS, Histogram, SpecStats
from draftproof.serve.api.shared_metrics import Board, Totals

HISTOGRAMS = {
    "queue": ("request_queue_time_seconds", "From a request's arrival in the engine to its first step."),
    "first_token": ("time_to_first_token_seconds", "From a request to the first token of its stream."),
    "between_tokens": ("inter_token_latency_seconds", "Of streams; tokens that came together share it."),
    "whole_request": ("e2e_request_latency_seconds", "From a request to the end of its answer."),
    "steps": ("engine_step_duration_seconds", "Steps of an engine's process with results for this server."),
}
COUNTS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were answered."),
    "generated_tokens": ("generation_tokens", "Tokens told to clients."),
    "disconnects": ("client_disconnects", "Requests whose client left."),
    "open": ("http_requests_open", "Requests that are being answered."),
}


class Meters:
    """One server process's. Everything about the engine is asked of it when somebody looks."""

    def __init__(
        self,
        llm: Any,
        model: str,
        vllm_names: bool = False,
        steps: Histogram | None = None,  # filled by whoever connects to the engine's process
        board: Board | None = None,  # where other server processes tell theirs
    ) -> None:
        self._llm, self._model, self._vllm, self._board = llm, model, vllm_names, board
        self.queue, self.first_token = Histogram(), Histogram()
        self.between_tokens, self.whole_request = Histogram(), Histogram()
        self.steps = steps or Histogram()
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.prompt_tokens = self.generated_tokens = self.disconnects = self.open = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def totals(self) -> Totals:
        """Of this process."""
        speculation = SpecStats()
        speculation.add(self._llm.stats)
        return Totals(
            speculation=speculation,
            histograms={name: getattr(self, name).copy() for name in HISTOGRAMS},
            counts={name: getattr(self, name) for name in COUNTS},
            requests={f"{path} {status}": count for (path, status), count in self.requests.items()},
        )

    def post(self) -> None:
        """For the other processes."""
        if self._board is not None:
            self._board.post(self.totals())

    def page(self) -> bytes:
        """For Prometheus, in its text format."""
        return generate_latest(self._registry)

    # --- collecting ---------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        totals = self.totals()
        for other in self._board.others() if self._board else []:
            totals.add(other)
        yield from self._speculation("draftproof", totals.speculation)
        if self._vllm:
            yield from self._speculation("vllm", totals.speculation)
        yield from self._server(totals)
        yield from self._engine()

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering asks nothing of an engine

    def _speculation(self, prefix: str, stats: SpecStats) -> Iterator[Metric]:
        for name, text, value in (
            ("drafts", "Verify steps that had drafts.", stats.num_drafts),
            ("draft_tokens", "Drafted tokens.", stats.num_draft_tokens),
            ("accepted_tokens", "Drafts that stood; without bonus tokens.", stats.num_accepted_tokens),
            ("emitted_tokens", "Committed tokens, with recovered and bonus.", stats.num_emitted_tokens),
        ):
            yield self._counter(f"{prefix}:spec_decode_num_{name}", text, value)
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Accepted drafts by position.", labels=["model_name", "position"])
        for position, count in enumerate(stats.accepted_per_position):
            family.add_metric([self._model, str(position)], count)
        yield family

    def _server(self, totals: Totals) -> Iterator[Metric]:
        labels = ["model_name", "path", "status"]
        family = CounterMetricFamily("draftproof:http_requests", "HTTP requests.", labels=labels)
        for key, count in totals.requests.items():
            path, status = key.rsplit(" ", 1)
            family.add_metric([self._model, path, status], count)
        yield family
        for attribute, (name, text) in COUNTS.items():
            make = self._gauge if attribute == "open" else self._counter
            yield make(f"draftproof:{name}", text, totals.counts[attribute])
        for attribute, (name, text) in HISTOGRAMS.items():
            yield self._histogram(f"draftproof:{name}", text, totals.histograms[attribute])

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
        worker, steps = self._llm.worker_status(), self._llm.step_totals()
        if worker is not None and steps is not None:  # the engine has a process of its own
            up = int(worker.state == "ready")
            yield self._gauge("draftproof:worker_up", "1 while the engine's process serves.", up)
            for name, text, value in (
                ("worker_restarts", "Times the engine's process was started again.", worker.restarts),
                ("engine_steps", "Steps of the engine.", steps.num_steps),
                ("engine_step_seconds", "Time spent in them.", steps.seconds),
            ):
                yield self._counter(f"draftproof:{name}", text, value)

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
        rows = zip([*map(str, BOUNDS), "+Inf"], map(float, accumulate(histogram.counts)), strict=True)
        family.add_metric([self._model], list(rows), histogram.total)
        return family
