"""Settling a step: from the device's columns to what each request is told: tokens, logprobs, endings.

All requests at once, as columns. Only those that ended, or that asked for something rare, are looked at
one by one; whoever wants one object a request makes it from the columns when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.errors import NO_TOKEN_LEFT, EngineClosedError, RequestError
from draftproof.sampling_params import top_of
from draftproof.types import (
    ENDED,
    FIRST_ROW,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    DraftRecord,
    FinishReason,
    FinishStatus,
    LogprobKind,
    LogprobRow,
    Request,
    StepOutput,
)

Ints = NDArray[np.int64]

REASONS = {
    FinishStatus.NO_ALLOWED_TOKEN: NO_TOKEN_LEFT,
    FinishStatus.NOT_FINITE: "the logits are not finite (NaN or infinity)",
}
KINDS = tuple(
    (kind, (name, f"{name} ids", f"{name} ranks"))
    for kind, name in ((LogprobKind.RAW, "raw"), (LogprobKind.PROCESSED, "processed"))
)
Reals = NDArray[np.float32]


@dataclass(slots=True)
class LogprobColumns:
    """Logprobs of the picked tokens of a step."""

    values: Reals  # [N, 1 + top]: the token's own, then the best
    ids: Ints  # [N, top]
    ranks: Ints  # [N]


def columns_of(found: Mapping[str, NDArray[Any]]) -> dict[LogprobKind, LogprobColumns]:
    """Of the kinds that were computed, as they came from the device."""
    return {
        kind: LogprobColumns(*map(found.__getitem__, names)) for kind, names in KINDS if names[0] in found
    }


@dataclass(slots=True)
class HostLogprobs:
    """What one entry asked for that the columns do not hold."""

    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None
    drafts: list[DraftRecord] | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop: int | None = None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class StepResults(Sequence[StepOutput]):
    """What a step did for n requests, as columns; as a sequence, one StepOutput a request."""

    requests: list[Request]  # [n]
    table: Ints  # [n, …], see types.Outcome
    columns: dict[LogprobKind, LogprobColumns]
    sources: tuple[str, ...] = ()  # who may have proposed a draft
    source: NDArray[np.int8] | None = None  # [n, K]; None: all are the first
    finishes: dict[int, Finish] = field(default_factory=dict)
    host_logprobs: dict[int, HostLogprobs] = field(default_factory=dict)
    # by the id of a job's first request: what an engine that is asked from afar says later than `add`
    refused: dict[str, RequestError | EngineClosedError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # slices are lists
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._output(index % len(self))

    @cached_property
    def _lines(self) -> list[list[int]]:
        """The table as lists: whoever reads one line of a step mostly reads them all."""
        return self.table.tolist()  # type: ignore[no-any-return]

    @cached_property
    def _columns(self) -> dict[LogprobKind, tuple[list[list[float]], list[list[int]], list[int]]]:
        return {
            kind: (each.values.tolist(), each.ids.tolist(), each.ranks.tolist())
            for kind, each in self.columns.items()
        }

    def tokens(self, i: int) -> list[int]:
        line = self._lines[i]
        return line[TOKENS : TOKENS + line[NUM_OUT]]

    def _output(self, i: int) -> StepOutput:
        request, line = self.requests[i], self._lines[i]
        extra, ending = self.host_logprobs.get(i), self.finishes.get(i)
        accepted = line[NUM_ACCEPTED]
        return StepOutput(
            request_id=request.id,
            token_ids=self.tokens(i),
            logprobs=self._logprobs(i, extra),
            prompt_logprobs=extra.prompt_logprobs if extra else None,
            num_draft=line[NUM_DRAFT],
            num_accepted=accepted,
            sources=self.sources_of(i, accepted),
            drafts=extra.drafts if extra else None,
            finish_reason=ending.reason if ending else None,
            stop_reason=ending.stop if ending else None,
            error=ending.error if ending else None,
        )

    def sources_of(self, i: int, count: int) -> list[str]:
        if self.source is None:
            return [self.sources[0]] * count if count else []
        return [self.sources[number] for number in self.source[i, :count].tolist()]

    def _logprobs(self, i: int, extra: HostLogprobs | None) -> list[LogprobRow] | None:
        params = self.requests[i].params
        if extra is not None and extra.logprobs is not None:
            return extra.logprobs
        if not params.wants_logprobs:
            return None
        tokens = self.tokens(i)
        if not tokens:
            return []
        kind = LogprobKind.RAW if params.logprobs_mode == "raw" else LogprobKind.PROCESSED
        values, ids, ranks = self._columns[kind]
        top = top_of(params.logprobs, self.columns[kind].ids.shape[1])
        first = self._lines[i][PICK]
        end = first + len(tokens)
        return LogprobRow.from_columns(values[first:end], ids[first:end], ranks[first:end], tokens, top)


def finish_of(request: Request, line: Ints, errors: Mapping[int, str]) -> Finish | None:
    """How a request's line of the table says it ended. End-of-text has no stop; a stop token is its own."""
    ended = FinishStatus(int(line[ENDED]))
    if ended is FinishStatus.RUNNING:
        return None
    if ended is FinishStatus.LENGTH:
        return Finish("length")
    if ended is FinishStatus.STOP:
        params = request.params
        last = int(line[TOKENS + int(line[NUM_OUT]) - 1])
        is_eos = last in request.eos_token_ids and not params.ignore_eos
        return Finish("stop", None if is_eos and last not in params.stop_token_ids else last)
    row = int(line[FIRST_ROW]) + int(line[NUM_OUT])
    return Finish("error", error=errors.get(row) or REASONS[ended])
