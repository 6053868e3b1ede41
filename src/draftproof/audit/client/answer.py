"""One answer of an endpoint in a form that does not depend on the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@cache
def is_partial_text(token: str) -> bool:
    """Return whether a token's text is not exact because it is part of a character."""
    return "\ufffd" in token or token.startswith("bytes:")


@dataclass(frozen=True, slots=True)
class Position:
    """One sampled token with the logprobs reported for its position."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()  # largest first
    token_id: int | None = None
    top_ids: tuple[int | None, ...] = ()
    chunk_place: int = 0  # index of the token in its stream event
    has_bytes: bool = False  # the token is part of a character: its text is not exact

    @property
    def is_placeholder(self) -> bool:
        """Return whether the logprob is 0.0 without a list: no probability was computed."""
        return self.logprob == 0.0 and not self.top

    def listed_at(self, index: int) -> bool:
        """Return whether an entry of the list is this token: by id where both are known, else by text."""
        token_id = self.top_ids[index] if index < len(self.top_ids) else None
        if token_id is not None and self.token_id is not None:
            return token_id == self.token_id
        return self.top[index][0] == self.token

    def same_bits(self, other: Position) -> bool:
        """Return whether token and logprobs are equal, bit for bit."""
        return (self.token, self.logprob, self.top) == (other.token, other.logprob, other.top)


@dataclass
class Answer:
    """Output of one request, and what was wrong with it."""

    label: str
    path: str
    body: Mapping[str, Any]
    url: str = ""  # of the endpoint
    text: str = ""
    positions: list[Position] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    status: int = 200
    seconds: float = 0.0
    has_logprobs: bool = False
    problems: list[str] = field(default_factory=list)  # the answer is not what the API defines
    error: str | None = None  # no answer
    draft_tokens: int | None = None  # drafted, where the endpoint reports it
    accepted_tokens: int | None = None
    switch: Mapping[str, Any] | None = None  # fields that switch speculation off, where they are known
    prompt_ids: list[int] = field(default_factory=list)  # where the endpoint reports them

    @property
    def is_ok(self) -> bool:
        """Return whether there is an answer."""
        return self.error is None

    @property
    def token_count(self) -> int:
        """Return the number of generated tokens: reported, else counted, else estimated."""
        if self.completion_tokens is not None:
            return max(self.completion_tokens, len(self.positions))
        return len(self.positions) or len(self.text) // 4

    def tokens(self) -> list[str]:
        """Return the text of each token."""
        return [position.token for position in self.positions]

    def same_tokens(self, other: Answer) -> bool:
        """Return whether both outputs have the same tokens, or text where there are no tokens."""
        if self.positions and other.positions:
            return self.tokens() == other.tokens()
        return self.text == other.text

    def same_bits(self, other: Answer) -> bool:
        """Return whether tokens, logprobs, text and finish reason are equal."""
        pairs = zip(self.positions, other.positions, strict=False)
        return (
            len(self.positions) == len(other.positions)
            and (self.text, self.finish_reason) == (other.text, other.finish_reason)
            and all(a.same_bits(b) for a, b in pairs)
        )
