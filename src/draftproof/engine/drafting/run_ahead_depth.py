"""Run-ahead depth: how many steps are queued before the oldest one is read.

Two are enough while the host finishes its part of a step before the device finishes the next one. Three keep
the device busy while the host is late for more than 4 % of the steps. Not always: a finished request is then
noticed one step later, and a new one waits for one step more.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_LATE_STEP_SHARE = 0.04  # share of late steps above which the deeper queue is used
LATE_RATE = 1 / 64  # weight of a step in that share
BUSY_SHARE = 0.75  # of a step's seconds, for which the device is taken to be busy after a read


class StepTimes(NamedTuple):
    """Clock readings of one step, in seconds."""

    started_at: float  # the host began to plan it
    wait_began_at: float  # the host had nothing else to do and began to wait for it
    read_at: float  # its results were there
    is_queued_behind: bool  # the device went from the step before straight to it
    was_ready: bool  # its results were there when the host began to wait: the host was late


class StepSeconds(NamedTuple):
    """Durations of one step."""

    device: float
    host: float | None  # of the host's part beside the device; None: they did not overlap
    is_clean: bool  # the device did not idle before or after it


class RunAhead:
    """Queue depth, and the seconds of steps from the times at which they are read."""

    def __init__(self, asynchronous: bool, min_depth: int = 2, max_depth: int = 3) -> None:
        """Start with the lower depth; not `asynchronous`: the device runs on the host's threads."""
        self.asynchronous = asynchronous
        self.min_depth, self.max_depth = min_depth, max_depth
        self.late_rate = 0.0  # share of recent steps for which the host was late
        self._last_read = 0.0
        self._last_seconds = 0.0
        self._was_late = False  # for the last step

    @property
    def depth(self) -> int:
        """Return how many steps may be in flight."""
        return self.max_depth if self.late_rate > MAX_LATE_STEP_SHARE else self.min_depth

    def is_device_busy(self, now: float) -> bool:
        """Return whether the queued steps are likely to keep the device busy for a while."""
        return now - self._last_read < BUSY_SHARE * self._last_seconds

    def record_orphan(self, times: StepTimes) -> None:
        """Record a step whose requests have all ended; its times are not used."""
        self._last_read, self._last_seconds, self._was_late = times.read_at, 0.0, True

    def record_step(self, times: StepTimes) -> StepSeconds:
        """Record a step that was just read.

        A step lasts from one read to the next, unless the host was late for either of them.
        """
        since = self._last_read if times.is_queued_behind else times.started_at
        self._last_read, self._last_seconds = times.read_at, times.read_at - since
        was_late, self._was_late, host = self._was_late, False, None
        if times.is_queued_behind and self.asynchronous:
            self._was_late = times.was_ready
            self.late_rate += LATE_RATE * (times.was_ready - self.late_rate)
            host = times.wait_began_at - since
        return StepSeconds(self._last_seconds, host, not was_late and not self._was_late)
