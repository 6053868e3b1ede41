"""Metrics shared between the HTTP processes of one engine: one small file per process, written every second.

Files of processes that have ended stay, so that totals never decrease.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from draftproof.metrics import Histogram, SpecStats


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
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, count in other.requests.items():
            self.requests[name] = self.requests.get(name, 0) + count


class SharedMetrics:
    """Folder with the metrics files of all processes; `name` is this process's."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._own_path = folder, folder / f"totals-{name}.json"

    def write(self, totals: MetricTotals) -> None:
        """Replace this process's file atomically. An error of the disk is ignored."""
        part = self._own_path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(totals))
            os.replace(part, self._own_path)
        except OSError:
            return

    def read_others(self) -> list[MetricTotals]:
        """Return the metrics of the other processes."""
        found = []
        for path in self._folder.glob("totals-*.json"):
            if path != self._own_path:
                try:
                    found.append(msgspec.json.decode(path.read_bytes(), type=MetricTotals))
                except (OSError, msgspec.MsgspecError):
                    continue
        return found
