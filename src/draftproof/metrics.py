"""One definition of drafted, accepted and emitted, for every proposer, per request and in total."""

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
