"""Results that users receive: outputs of a prompt, stream events, logprobs and draft records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Bools, Floats32, Ints
from draftproof.metrics import SpecStats

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One draft, accepted or rejected."""

    token_id: int
    position: int  # 0-based index in the output it was proposed for
    source: str
    accepted: bool
    draft_logprob: float | None  # by the drafter; None: it reported none
    target_logprob: float | None  # by the target model
    draft_rank: int | None = None  # of the token in the drafter's distribution
    draft_top: tuple[tuple[int, float], ...] = ()  # likeliest tokens of the drafter and their logprobs


class DraftColumns(NamedTuple):
    """Columns of D drafts, accepted or rejected, of several requests. Drafts of one request are adjacent."""

    entry: Ints  # [D] index of the request
    token: Ints  # [D]
    position: Ints  # [D] 0-based index in the output it was proposed for
    source: NDArray[np.int8]  # [D] index into the names of the sources
    accepted: Bools  # [D]
    draft_logprob: Floats32  # [D] by the drafter; NaN: it reported none
    target_logprob: Floats32  # [D] by the target model
    rank: Ints  # [D] of the token in the drafter's distribution; 0: none
    top_width: Ints  # [D] likeliest tokens of the drafter that are reported
    top_ids: Ints  # [D, T] likeliest tokens of the drafter, valid up to `top_width`
    top_logprobs: Floats32  # [D, T]

    @property
    def num_drafts(self) -> int:
        """Return D."""
        return len(self.entry)

    def select(self, at: Any) -> DraftColumns:
        """Return the drafts at a slice, indices or a mask."""
        return DraftColumns(*(column[at] for column in self))

    def of_requests(self, at: Ints, num_requests: int) -> DraftColumns:
        """Return the drafts of the requests `at` of `num_requests`, renumbered in the order of `at`."""
        place = np.full(num_requests, -1)
        place[at] = np.arange(len(at))
        entry = place[self.entry]
        return self._replace(entry=entry).select(entry >= 0)

    @classmethod
    def concatenate(cls, several: Sequence[DraftColumns]) -> DraftColumns:
        """Return the drafts of all columns, which have equal T."""
        return several[0] if len(several) == 1 else cls(*map(np.concatenate, zip(*several, strict=True)))

    def records(self, sources: Sequence[str]) -> list[DraftRecord]:
        """Return one record a draft."""
        rows = zip(*(column.tolist() for column in self[1:]), strict=True)
        return [
            DraftRecord(
                token_id=token,
                position=position,
                source=sources[source],
                accepted=accepted,
                draft_logprob=None if own != own else own,  # NaN
                target_logprob=None if target != target else target,
                draft_rank=rank or None,
                draft_top=tuple(zip(ids[:width], logprobs[:width], strict=True)),
            )
            for token, position, source, accepted, own, target, rank, width, ids, logprobs in rows
        ]


class Logprob(NamedTuple):
    """One entry of a `.logprobs` mapping."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)  # many per step, as StepOutput: freezing takes three times as long
class LogprobRow:
    """Logprobs at one position: the token itself first, then the other tokens."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    @classmethod
    def from_columns(
        cls,
        values: list[list[float]],
        ids: list[list[int]],
        ranks: list[int],
        tokens: Sequence[int],
        top: int,
    ) -> list[LogprobRow]:
        """Return rows from columns of at least `top` best: values [n, 1 + _], ids [n, _], ranks [n]."""
        below = list(range(1, top + 1))
        return [
            cls([token, *best[:top]], value[: top + 1], [rank, *below])
            for token, value, best, rank in zip(tokens, values, ids, ranks, strict=True)
        ]


def logprob_map(row: LogprobRow, token_text: Callable[[int], str]) -> dict[int, Logprob]:
    """Return the logprobs of a row by token id, with the text of each token."""
    entries: dict[int, Logprob] = {}
    new = tuple.__new__  # half the time of Logprob(...)
    for token, value, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
        if token not in entries:
            entries[token] = new(Logprob, (value, rank, token_text(token)))
    return entries


def no_text(token_id: int) -> str:
    """Return the text of a token without a tokenizer."""
    return ""


class WeightsSpan(NamedTuple):
    """Tokens of an output that were made with one version of the weights."""

    version: int
    first_token: int  # index in the output; the span ends where the next one begins


@dataclass(slots=True)  # one per streamed token: freezing it would take three times as long
class TokenEvent:
    """One committed token of a stream. The texts of all events add up to the output text."""

    index: int  # which of the n outputs
    token_id: int | None  # None: the output ended without another token, by an error or an abort
    text: str
    provenance: str
    logprob_row: LogprobRow | None
    step_end: bool  # last token that its step committed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text_offset: int = 0  # first character in the output text, unless a stop string cuts it off
    num_draft: int = 0  # with `step_end`: drafts verified in the step
    drafts: list[DraftRecord] | None = None  # with `step_end` and `include_draft_logprobs`
    weights_version: int = 0  # of the weights that the token was made with
    token_text: Callable[[int], str] = field(default=no_text, repr=False, compare=False)

    @property
    def logprobs(self) -> dict[int, Logprob] | None:
        """Logprobs by token id, built when they are read: the token itself, then the best."""
        return None if self.logprob_row is None else logprob_map(self.logprob_row, self.token_text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the texts of the row's tokens in place of the tokenizer, which may not be picklable."""
        values = [getattr(self, each.name) for each in fields(self)]
        ids = () if self.logprob_row is None else self.logprob_row.token_ids
        values[-1] = {token: self.token_text(token) for token in ids}.__getitem__ if ids else no_text
        return TokenEvent, tuple(values)


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt. `token_ids`, `logprobs`, `provenance`, `text_offsets` have equal length."""

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[dict[int, Logprob]] | None = None  # made when they are read
    cumulative_logprob: float | None = None
    provenance: list[str] = field(default_factory=list)  # "plain", "accepted:ngram", "recovered", "bonus"
    text_offsets: list[int] = field(default_factory=list)
    drafts: Sequence[DraftRecord] | None = None  # with `include_draft_logprobs`; made when they are read
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: SpecStats = field(default_factory=SpecStats)
    weights_versions: list[WeightsSpan] = field(default_factory=list)  # several after an update in between

    @property
    def weights_version(self) -> int:
        """Return the version of the weights that the last token was made with."""
        return self.weights_versions[-1].version if self.weights_versions else 0

    def finished(self) -> bool:
        """Return whether generation has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: SpecStats
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache, for the first output
    num_preemptions: int = 0  # over all outputs
    queue_seconds: float | None = field(default=None, compare=False)  # first output; None: not scheduled
    first_token_seconds: float | None = field(default=None, compare=False)  # since arrival, first output
    strategy: str = ""  # verification strategy and its label
    lossless: bool = True
    embedding: Floats32 | None = field(default=None, compare=False)  # [hidden] of `embed`, as it was pooled

    @property
    def weights_version(self) -> int:
        """Return the version of the weights that the newest token was made with."""
        return max((output.weights_version for output in self.outputs), default=0)

    @property
    def usage(self) -> dict[str, Any]:
        """Return token counts by OpenAI's names."""
        out = sum(len(o.token_ids) for o in self.outputs)
        prompt = len(self.prompt_token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return the number of dimensions."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """Result of `embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = True
    weights_version: int = 0  # of the weights that it was computed with


@dataclass(slots=True)
class ScoreOutput:
    """Log-likelihood of a continuation after its context. The lists have one entry a token."""

    prompt_token_ids: list[int]  # of the context
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool  # each token is the likeliest at its position
    weights_version: int = 0  # of the weights that it was computed with

    @property
    def logprob(self) -> float:
        """Sum of the logprobs of the tokens."""
        return math.fsum(self.token_logprobs)
