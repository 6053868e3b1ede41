"""One definition of what is counted, per request and in total: drafts, cached tokens, preemptions."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecStats:
    """Counts of real drafts only: a placeholder or padded row never enters."""

    num_steps: int = 0  # verify steps that committed something
    num_drafts: int = 0  # steps that had at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that stood and were committed
    num_emitted_tokens: int = 0  # committed tokens, recovered and bonus ones included
    accepted_per_position: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """One verify step of one request."""
        self.num_steps += 1
        self.num_drafts += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += emitted
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
    """What the engine did for one request beside its tokens; kept up to date until it ends."""

    num_cached_tokens: int = 0  # of its prompt, not computed when it was first seated: they were there
    num_preemptions: int = 0  # how often it was put aside because pages ran out


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How an engine stands between two steps. Totals are since it was built."""

    num_running: int
    num_waiting: int  # those that were put aside among them
    num_preemptions: int  # in total
    num_queried_tokens: int  # in total: prompt tokens of seated requests, if prefixes are cached
    num_cached_tokens: int  # in total: of those, how many were there
    num_pages: int
    num_used_pages: int  # by somebody
    num_cached_pages: int  # by nobody, with content that can be found
