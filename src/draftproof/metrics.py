"""Counters and timings of requests, steps and speculation.

Times are in seconds of `time.monotonic`, which all processes of a machine share. A request is queued from
`Engine.add` until it is first scheduled. Its first token exists when the step that committed it has been
read. A step lasts from when the device could begin it (it was queued and the step before it was read) until
it has been read.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


@dataclass(slots=True)
class Histogram:
    """Histogram of durations: counts[i] above BOUNDS[i - 1] and at most BOUNDS[i]; the last above all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0  # seconds

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times

    def add(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def copy(self) -> Histogram:
        return Histogram(list(self.counts), self.total)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean duration; 0 without observations."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class SpecStats:
    """Counters of speculation: real drafts only, no placeholders or padded rows."""

    num_steps: int = 0  # verify steps that committed a token
    num_drafts: int = 0  # steps that had at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that were accepted and committed
    num_emitted_tokens: int = 0  # committed tokens, recovered and bonus ones included
    accepted_per_position: list[int] = field(default_factory=list)
    num_predicted_drafts: int = 0  # drafts from the request's prediction
    num_accepted_predicted: int = 0

    def record(self, drafted: int, accepted: int, emitted: int, is_predicted: bool = False) -> None:
        """Count one verify step of one request."""
        self.num_steps += 1
        self.num_drafts += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += emitted
        if is_predicted:
            self.num_predicted_drafts += drafted
            self.num_accepted_predicted += accepted
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(missing, 0))
        for i in range(accepted):
            self.accepted_per_position[i] += 1

    def add(self, other: SpecStats) -> None:
        self.num_steps += other.num_steps
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_predicted_drafts += other.num_predicted_drafts
        self.num_accepted_predicted += other.num_accepted_predicted
        missing = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(missing, 0))
        for i, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[i] += count

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verify step, bonus included."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True)
class RequestStats:
    """Counters and times of one request, updated by the engine until the request finishes."""

    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first scheduled
    num_preemptions: int = 0
    arrived_at: float = field(default_factory=lambda: time.monotonic())
    scheduled_at: float | None = None  # for the first time
    first_token_at: float | None = None  # its first token was there
    ended_at: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """Time from arrival to the first scheduling."""
        return None if self.scheduled_at is None else self.scheduled_at - self.arrived_at

    @property
    def first_token_seconds(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def seconds(self) -> float | None:
        """Time from arrival to the end."""
        return None if self.ended_at is None else self.ended_at - self.arrived_at


@dataclass(slots=True)
class Timings:
    """Histograms of request and step times since the engine was built."""

    queue: Histogram = field(default_factory=Histogram)  # requests, until first scheduled
    first_token: Histogram = field(default_factory=Histogram)  # requests, until their first token
    decode_steps: Histogram = field(default_factory=Histogram)  # steps in which every request decodes
    prompt_steps: Histogram = field(default_factory=Histogram)  # steps with prompts in them

    def copy(self) -> Timings:
        return Timings(
            self.queue.copy(), self.first_token.copy(), self.decode_steps.copy(), self.prompt_steps.copy()
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and totals of an engine between two steps. Totals count from its start."""

    num_running: int
    num_waiting: int  # preempted ones included
    num_preemptions: int  # total
    num_queried_tokens: int  # total: prompt tokens of scheduled requests, if prefixes are cached
    num_cached_tokens: int  # total: how many of them were found in the cache
    num_pages: int
    num_used_pages: int  # in use by requests
    num_cached_pages: int  # unused, with cached prefixes
    weights_version: int = 0
    sleep_level: int = 0  # 0: awake
    timings: Timings = field(default_factory=Timings, kw_only=True)  # of a remote engine: up to a second old


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Steps of a worker process since it was started."""

    num_steps: int = 0
    seconds: float = 0.0


WorkerState = Literal["starting", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of the worker process that runs the engine."""

    state: WorkerState
    restarts: int = 0  # number of restarts so far
    reason: str | None = None  # why the worker ended last
    pid: int | None = None
    since: float = 0.0  # time.time() at which this state began
