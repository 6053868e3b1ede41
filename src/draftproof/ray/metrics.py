"""Export of the server's metrics through Ray, with the tags of Ray Serve."""

from __future__ import annotations

from typing import Any

from prometheus_client.core import Metric
from ray.serve.metrics import Counter, Gauge

from draftproof.serve.api.metrics import ServerMetrics


class MetricExporter:
    """Metrics of a replica under Ray's names: `draftproof_` in place of `draftproof:`.

    Buckets, counts and sums of histograms are counters, with the bound as tag `le`.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._made: dict[str, Any] = {}  # Ray's metrics by name
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}  # exported value of a counter

    def export(self) -> None:
        """Export the present values."""
        for family in self._metrics.collect():
            for sample in family.samples:
                self._export(family, sample.name, dict(sample.labels), sample.value)

    def _export(self, family: Metric, name: str, tags: dict[str, str], value: float) -> None:
        shown = name.replace(":", "_").removesuffix("_total")
        is_gauge = family.type == "gauge"
        if shown not in self._made:
            kind = Gauge if is_gauge else Counter
            self._made[shown] = kind(shown, description=family.documentation, tag_keys=tuple(tags))
        if is_gauge:
            self._made[shown].set(value, tags=tags)
            return
        key = (shown, tuple(tags.values()))
        if (increase := value - self._last.get(key, 0.0)) > 0:
            self._made[shown].inc(increase, tags=tags)
            self._last[key] = value
