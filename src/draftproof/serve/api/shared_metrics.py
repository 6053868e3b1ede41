"""Where server processes of one engine tell each other what they counted: a small file each, once a second.

Files of processes that have died stay, so that totals never go back.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from draftproof.metrics import Histogram, SpecStats


class Totals(msgspec.Struct):
    """Everything that can be added up over processes."""

    speculation: SpecStats
    histograms: dict[str, Histogram]
    counts: dict[str, int]
    requests: dict[str, int]  # by "path status"

    def add(self, other: Totals) -> None:
        self.speculation.add(other.speculation)
        for name, histogram in other.histograms.items():
            self.histograms[name].add(histogram)
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, count in other.requests.items():
            self.requests[name] = self.requests.get(name, 0) + count


class Board:
    """One process's place among the others."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._mine = folder, folder / f"totals-{name}.json"

    def post(self, totals: Totals) -> None:
        """Whole or not at all; a full disk costs the figures of this process and nothing else."""
        part = self._mine.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(totals))
            os.replace(part, self._mine)
        except OSError:
            return

    def others(self) -> list[Totals]:
        found = []
        for path in self._folder.glob("totals-*.json"):
            if path != self._mine:
                try:
                    found.append(msgspec.json.decode(path.read_bytes(), type=Totals))
                except (OSError, msgspec.MsgspecError):
                    continue
        return found
