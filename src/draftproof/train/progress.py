"""Progress reports of a training run: log lines and progress of a phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgressReporter:
    """Callbacks for log lines and for the progress of a phase; by default both are discarded."""

    log: Callable[[str], None] = lambda line: None
    update: Callable[[str, int, int], None] = lambda phase, done, total: None
