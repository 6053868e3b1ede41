"""Results of a step: tokens, logprobs and finished requests, as columns over all requests.

Only requests that finished or have logprobs queued behind the step are handled one by one. A `StepOutput` per
request is made from the columns when it is read. Free of torch: HTTP processes decode the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Floats32, Ints
from draftproof.errors import NO_TOKEN_LEFT, EngineClosedError, RequestError
from draftproof.outputs import DraftColumns, DraftRecord, FinishReason, LogprobRow
from draftproof.sampling_params import SamplingParams, top_of
from draftproof.types import (
    FINISH_STATUS,
    FIRST_ROW,
    MAX_NAMED_IDS,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    PREDICTION_SOURCE,
    TOKENS,
    FinishStatus,
    LogprobKind,
    Request,
    StepOutput,
)

GrammarErrors = Mapping[int, Mapping[int, str]]  # entry -> depth -> message of the grammar's exception
MAX_DEVICE_TOP = 64  # alternatives that the device lists
ERROR_MESSAGES = {
    FinishStatus.NO_ALLOWED_TOKEN: NO_TOKEN_LEFT,
    FinishStatus.NOT_FINITE: "the logits are not finite (NaN or infinity)",
}


@dataclass(slots=True)
class LogprobColumns:
    """Logprobs of the committed tokens of a step, for requests that want this kind."""

    values: Floats32  # [N, 1 + top]: the token's own, then the best
    ids: Ints  # [N, top]
    ranks: Ints  # [N]
    named_values: Floats32 | None = None  # [N, M]: of the ids that a request names
    named_ranks: Ints | None = None  # [N, M]


class LogprobWidth(NamedTuple):
    """Logprobs of a token besides its own: the best, and those of named ids."""

    top: int = 0
    num_named: int = 0


@dataclass(slots=True)
class HostOutput:
    """Results of one entry that the columns do not hold."""

    logprobs: list[LogprobRow] | None = None  # longer lists than a step holds
    prompt_logprobs: list[LogprobRow] | None = None
    embedding: Floats32 | None = None  # [hidden]


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason for which a request finished."""

    reason: FinishReason
    stop: int | None = None  # the stop token
    error: str | None = None


FINISHED_BY_LENGTH = Finish("length")


@dataclass(frozen=True, eq=False)
class StepResults(Sequence[StepOutput]):
    """Results of a step for n requests, as columns. As a sequence: one StepOutput per request."""

    requests: list[Request]  # [n]
    table: Ints  # [n, TOKENS + K + 1], see types.Outcome
    columns: dict[LogprobKind, LogprobColumns]
    source_names: tuple[str, ...] = ()  # of the drafts
    # [n, K] index into `source_names`; None: all drafts are of the first
    draft_sources: NDArray[np.int8] | None = None
    finishes: dict[int, Finish] = field(default_factory=dict)
    host_outputs: dict[int, HostOutput] = field(default_factory=dict)
    drafts: DraftColumns | None = None  # of the requests with include_draft_logprobs; None: none has any
    # Errors that a remote engine reports after `add`, by the id of the first request of a prompt.
    refused: dict[str, RequestError | EngineClosedError] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.requests)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # slices are lists
        """Return the output of one request, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._output(index % len(self))

    def only(self, at: Ints) -> StepResults:
        """Return the results of the requests `at`, to which all that finished belong."""
        place = {b: i for i, b in enumerate(at.tolist())}
        return StepResults(
            requests=[self.requests[b] for b in place],
            table=self.table[at],
            columns=self.columns,
            source_names=self.source_names,
            draft_sources=None if self.draft_sources is None else self.draft_sources[at],
            finishes={place[b]: finish for b, finish in self.finishes.items()},
            host_outputs={place[b]: one for b, one in self.host_outputs.items() if b in place},
            drafts=None if self.drafts is None else self.drafts.of_requests(at, len(self)),
        )

    @cached_property
    def _lines(self) -> list[list[int]]:
        """Return the table as lists: a reader of one line mostly reads all of them."""
        return self.table.tolist()  # type: ignore[no-any-return]

    @cached_property
    def _columns(self) -> dict[LogprobKind, tuple[list[list[float]], list[list[int]], list[int]]]:
        return {
            kind: (each.values.tolist(), each.ids.tolist(), each.ranks.tolist())
            for kind, each in self.columns.items()
        }

    @cached_property
    def _draft_records(self) -> list[DraftRecord]:
        return [] if self.drafts is None else self.drafts.records(self.source_names)

    def tokens(self, i: int) -> list[int]:
        """Return the committed tokens of request i."""
        line = self._lines[i]
        return line[TOKENS : TOKENS + line[NUM_OUT]]

    def _output(self, i: int) -> StepOutput:
        request, line = self.requests[i], self._lines[i]
        extra, finish = self.host_outputs.get(i), self.finishes.get(i)
        accepted = line[NUM_ACCEPTED]
        return StepOutput(
            request_id=request.id,
            token_ids=self.tokens(i),
            logprobs=self._logprobs(i, extra),
            prompt_logprobs=extra.prompt_logprobs if extra else None,
            num_draft=line[NUM_DRAFT],
            num_accepted=accepted,
            sources=self.sources_of(i, accepted),
            drafts=self._drafts(i),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop if finish else None,
            error=finish.error if finish else None,
            is_predicted=bool(request.prediction_ids) and self._is_predicted(i),
            embedding=extra.embedding if extra else None,
        )

    def sources_of(self, i: int, count: int) -> list[str]:
        """Return the source names of the first `count` drafts of request i."""
        if self.draft_sources is None:
            return [self.source_names[0]] * count if count else []
        return [self.source_names[number] for number in self.draft_sources[i, :count].tolist()]

    def _is_predicted(self, i: int) -> bool:
        """Return whether the drafts of request i are from its prediction."""
        return self._lines[i][NUM_DRAFT] > 0 and self.sources_of(i, 1) == [PREDICTION_SOURCE]

    def _drafts(self, i: int) -> list[DraftRecord] | None:
        """Return the drafts of request i; None where it does not report drafts or had no window."""
        has_window = self._lines[i][NUM_OUT] > 0 or i in self.finishes
        if not self.requests[i].params.include_draft_logprobs or not has_window:
            return None
        if self.drafts is None:
            return []
        first, end = self.drafts.entry.searchsorted((i, i + 1)).tolist()
        return self._draft_records[first:end]

    def _logprobs(self, i: int, extra: HostOutput | None) -> list[LogprobRow] | None:
        params = self.requests[i].params
        if extra is not None and extra.logprobs is not None:
            return extra.logprobs
        if not params.needs_logprobs:
            return None
        tokens = self.tokens(i)
        if not tokens:
            return []
        kind = requested_logprob_kind(params)
        values, ids, ranks = self._columns[kind]
        top = top_of(params.logprobs, self.columns[kind].ids.shape[1])
        first = self._lines[i][PICK]
        end = first + len(tokens)
        rows = LogprobRow.from_columns(values[first:end], ids[first:end], ranks[first:end], tokens, top)
        if params.logprob_token_ids:
            found = self.columns[kind]
            assert found.named_values is not None and found.named_ranks is not None
            named = found.named_values[first:end].tolist(), found.named_ranks[first:end].tolist()
            add_named(rows, params.logprob_token_ids, *named)
        return rows


def add_named(
    rows: list[LogprobRow],
    named_ids: Sequence[int],
    values: Sequence[Sequence[float]],
    ranks: Sequence[Sequence[int]],
) -> None:
    """Append the named ids to rows [n]; values and ranks [n, at least the number of ids]."""
    count = len(named_ids)
    for row, some_values, some_ranks in zip(rows, values, ranks, strict=True):
        row.token_ids += named_ids
        row.logprobs += some_values[:count]
        row.ranks += some_ranks[:count]


def requested_logprob_kind(params: SamplingParams) -> LogprobKind:
    """Return the kind of logprobs that a request selects, if it has any."""
    return LogprobKind.RAW if params.logprobs_mode == "raw" else LogprobKind.PROCESSED


def column_logprob_kind(params: SamplingParams, vocab: int) -> LogprobKind:
    """Return the kind of columns that hold the logprobs of a request's tokens."""
    if not params.needs_logprobs or has_long_logprobs(params, vocab):
        return LogprobKind.NONE
    return requested_logprob_kind(params)


def logprob_width_of(params: SamplingParams, vocab: int) -> LogprobWidth:
    """Return how many logprobs a token of a request has."""
    return LogprobWidth(top_of(params.logprobs, vocab), len(params.logprob_token_ids or ()))


def widest(requests: Iterable[tuple[LogprobKind, LogprobWidth]]) -> dict[LogprobKind, LogprobWidth]:
    """Return the largest widths of requests, by the kind of their logprobs."""
    found: dict[LogprobKind, LogprobWidth] = {}
    for kind, width in requests:
        if kind is not LogprobKind.NONE:
            found[kind] = LogprobWidth(*map(max, width, found.get(kind, LogprobWidth())))
    return found


def has_long_logprobs(params: SamplingParams, vocab: int) -> bool:
    """Return whether the logprobs of a token are more than a step holds."""
    width = logprob_width_of(params, vocab)
    return width.top > MAX_DEVICE_TOP or width.num_named > MAX_NAMED_IDS


def finish_of(request: Request, line: Sequence[int], errors: Mapping[int, str]) -> Finish:
    """Return how a request finished by its line of the outcome table; `errors` by logits row."""
    ended = line[FINISH_STATUS]
    if ended == FinishStatus.LENGTH:
        return FINISHED_BY_LENGTH
    if ended == FinishStatus.STOP:
        params = request.params
        last = line[TOKENS + line[NUM_OUT] - 1]
        is_eos = last in request.eos_token_ids and not params.ignore_eos
        return Finish("stop", None if is_eos and last not in params.stop_token_ids else last)
    row = line[FIRST_ROW] + line[NUM_OUT]
    return Finish("error", error=errors.get(row) or ERROR_MESSAGES[FinishStatus(ended)])
