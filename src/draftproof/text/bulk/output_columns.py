"""Columns of the output table: one line of `width` tokens for each unfinished output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import ragged_indices
from draftproof.metrics import SpecStats
from draftproof.outputs import DraftColumns
from draftproof.text.bulk.logprob_rows import LogprobBuffer, Rows, longer, pack_rows
from draftproof.types import NUM_ACCEPTED, NUM_DRAFT, NUM_OUT, PICK, PREDICTION_SOURCE, TOKENS, LogprobKind

Ints = NDArray[np.int64]
PLAIN, BONUS, RECOVERED, ACCEPTED = range(4)  # provenance of a token; ACCEPTED + i: a draft of source i
# columns of the counters
NUM_STEPS, NUM_DRAFTED_STEPS, NUM_DRAFTED, NUM_ACCEPTED_DRAFTS, MAX_DRAFTED = range(5)
NUM_PREDICTED, NUM_ACCEPTED_PREDICTED, NUM_COUNTERS = range(5, 8)


class LogprobArrays(Protocol):
    """Logprobs of the picked tokens of a step."""

    @property
    def values(self) -> NDArray[np.float32]:
        """[N, 1 + top]: the token's own, then the best."""

    @property
    def ids(self) -> Ints:
        """[N, top] ids of the best tokens."""

    @property
    def ranks(self) -> Ints:
        """[N] ranks of the tokens."""

    @property
    def named_values(self) -> NDArray[np.float32] | None:
        """[N, M] logprobs of the ids that a request names."""

    @property
    def named_ranks(self) -> Ints | None:
        """[N, M] ranks of these ids."""


class StepColumns(NamedTuple):
    """One step of n requests."""

    lines: Ints  # [n] lines of the table
    table: Ints  # [n, …], see types.Outcome
    source: NDArray[np.int8] | None  # [n, K] index of each draft's proposer; None: all are the first
    logprobs: Mapping[LogprobKind, LogprobArrays]
    drafts: DraftColumns | None = None  # of the requests that report them


class OutputColumns:
    """Storage of all lines. The caller assigns lines to outputs and keeps `fill` below `width`."""

    def __init__(self, width: int, max_drafts: int, sources: Sequence[str]) -> None:
        self.width = width  # tokens of a line
        self.fill = np.zeros(0, np.int64)  # [lines] tokens in use
        self._logprob_form = np.zeros(0, np.int64)  # [lines] 2 * LogprobKind, + 1 with named ids; 0: none
        self._counters = np.zeros((0, NUM_COUNTERS), np.int64)
        self._accepted_at = np.zeros((0, max_drafts), np.int64)  # by position in the draft window
        self._tokens = np.zeros(0, np.int64)  # [lines * width]
        self._origins = np.zeros(0, np.int16)  # [lines * width] provenance
        self._logprobs = LogprobBuffer()  # [lines * width]
        self._totals = np.zeros(0, np.float64)  # [lines] sum of the tokens' own logprobs
        names = ["plain", "bonus", "recovered", *(f"accepted:{source}" for source in sources)]
        self._origin_names = np.array(names, object)
        self._prediction = list(sources).index(PREDICTION_SOURCE) if PREDICTION_SOURCE in sources else -1

    def resize(self, num_lines: int) -> None:
        """Grow to `num_lines` lines."""
        for name in ("fill", "_logprob_form", "_counters", "_accepted_at", "_totals"):
            setattr(self, name, longer(getattr(self, name), num_lines))
        for name in ("_tokens", "_origins"):
            setattr(self, name, longer(getattr(self, name), num_lines * self.width))
        self._logprobs.resize(num_lines * self.width)

    def reset(self, line: int, kind: LogprobKind, top: int, has_named_ids: bool) -> None:
        """Prepare a line for a new output; top: logprobs a token besides its own."""
        self.fill[line] = self._counters[line] = self._accepted_at[line] = self._totals[line] = 0
        self._logprob_form[line] = 2 * kind + has_named_ids
        if kind is not LogprobKind.NONE and top > self._logprobs.top:
            self._logprobs.widen(top)

    # --- append -------------------------------------------------------------------------------------

    def append(self, steps: Sequence[StepColumns]) -> None:
        """Append S steps of n entries in all; a line occurs at most once in each step."""
        lines = joined([step.lines for step in steps])  # [n]
        table = joined([step.table for step in steps])  # [n, …]
        number = np.repeat(np.arange(len(steps)), [len(step.lines) for step in steps])  # [n] which step
        out = table[:, NUM_OUT]
        by_step = np.zeros((len(steps), len(self.fill)), np.int64)
        cell = number * len(self.fill) + lines
        by_step.ravel()[cell] = out
        before = by_step.cumsum(0)
        begin = lines * self.width + self.fill[lines] + before.ravel()[cell] - out
        # one element a token: its entry, and its place among the tokens of that entry
        owner, place = ragged_indices(out)
        where = begin[owner] + place
        tokens = table.ravel()[owner * table.shape[1] + TOKENS + place]
        self._tokens[where] = tokens
        self.fill += before[-1]
        self._counters[:, NUM_STEPS] += (by_step > 0).sum(0)
        if table[:, NUM_DRAFT].any():
            source = _joined_sources(steps)
            self._origins[where] = _origins(owner, place, table, source)
            self._count_drafts(lines, table, source)
        else:
            self._origins[where] = PLAIN
        if steps[0].logprobs:
            logprobs = [step.logprobs for step in steps]
            self._add_logprobs(lines, number, table, owner, where, place, tokens, logprobs)

    def _count_drafts(self, lines: Ints, table: Ints, source: NDArray[np.int8] | None) -> None:
        is_counted = table[:, NUM_OUT] > 0  # a step that committed no token is not counted
        drafted, accepted = table[:, NUM_DRAFT] * is_counted, table[:, NUM_ACCEPTED] * is_counted
        counters, (num_lines, width) = self._counters, self._accepted_at.shape
        counters[:, NUM_DRAFTED_STEPS] += _sums(lines, drafted > 0, num_lines)
        counters[:, NUM_DRAFTED] += _sums(lines, drafted, num_lines)
        counters[:, NUM_ACCEPTED_DRAFTS] += _sums(lines, accepted, num_lines)
        np.maximum.at(counters[:, MAX_DRAFTED], lines, drafted)
        # steps by number of accepted drafts, then cumulative from the largest number
        steps = np.bincount(lines * (width + 1) + accepted, minlength=num_lines * (width + 1))
        self._accepted_at += steps.reshape(num_lines, -1)[:, :0:-1].cumsum(1)[:, ::-1]
        is_predicted = self._prediction == 0 if source is None else source[:, 0] == self._prediction
        if np.any(is_predicted):
            counters[:, NUM_PREDICTED] += _sums(lines, drafted * is_predicted, num_lines)
            counters[:, NUM_ACCEPTED_PREDICTED] += _sums(lines, accepted * is_predicted, num_lines)

    def _add_logprobs(
        self,
        lines: Ints,
        number: Ints,
        table: Ints,
        owner: Ints,
        where: Ints,
        place: Ints,
        tokens: Ints,
        steps: Sequence[Mapping[LogprobKind, LogprobArrays]],
    ) -> None:
        """Copy the logprobs of the tokens at `where` from the steps' arrays."""
        forms, buffer = self._logprob_form[lines], self._logprobs
        begins = number.searchsorted(np.arange(len(steps)))
        ends = np.maximum.reduceat(table[:, PICK] + table[:, NUM_OUT], begins).tolist()
        is_alike = (forms == forms[:1]).all()
        for form in forms[:1].tolist() if is_alike else np.unique(forms).tolist():
            kind, is_named = LogprobKind(form // 2), form % 2 > 0
            if kind not in steps[0]:
                continue
            mine: Any = slice(None) if is_alike else (forms == form)[owner].nonzero()[0]
            at, entry, index, ids_at = where[mine], owner[mine], place[mine], tokens[mine]
            if not len(at):
                continue
            found = [logprobs[kind] for logprobs in steps]
            used = [max(0, min(end, len(each.ranks))) for end, each in zip(ends, found, strict=True)]
            first = np.cumsum([0, *used[:-1]])  # of each step, among all rows in use
            parts = [_logprob_arrays(each, end, is_named) for each, end in zip(found, used, strict=True)]
            values, ids, ranks = (joined(list(columns)) for columns in zip(*parts, strict=True))
            rows = index + (table[:, PICK] + first[number])[entry]
            # the rows are mostly consecutive: a slice then saves a gather
            is_consecutive = (rows[1:] - rows[:-1] == 1).all()
            pick: Any = slice(int(rows[0]), int(rows[-1]) + 1) if is_consecutive else rows
            buffer.put(at, pack_rows(ids_at, values[pick], ids[pick], ranks[pick], buffer.top))

    # --- read ---------------------------------------------------------------------------------------

    def read(self, lines: Ints, sizes: Ints) -> tuple[Ints, list[str]]:
        """Empty these lines into tokens and provenance, line after line; their logprobs go to the totals."""
        ends = sizes.cumsum()
        at = np.arange(int(ends[-1])) + np.repeat(lines * self.width - ends + sizes, sizes)
        tokens, origins = self._tokens[at], self._origin_names[self._origins[at]].tolist()
        if self._logprob_form[lines].any():
            self._add_totals(lines, sizes, at - np.repeat(lines * self.width, sizes), at)
        self.fill[lines] = 0
        return tokens, origins

    def logprob_rows(self, line: int, size: int, top: int) -> Rows:
        """Return a copy of the first `size` logprob rows of a line."""
        first = line * self.width
        return self._logprobs.copy_rows(first, first + size, top)

    def _add_totals(self, lines: Ints, sizes: Ints, place: Ints, at: Ints) -> None:
        """Add each line's logprobs to its total in token order, so the sum has the same bits."""
        terms = np.zeros((1 + int(sizes.max()), len(lines)))  # trailing zeros change no bit
        terms[0] = self._totals[lines]
        own = self._logprobs.token_logprobs[at]
        own[np.repeat(self._logprob_form[lines] == 0, sizes)] = 0.0  # values of earlier outputs
        terms[1 + place, np.repeat(np.arange(len(lines)), sizes)] = own
        self._totals[lines] = np.add.accumulate(terms)[-1]

    def summaries(self, lines: Ints, num_tokens: Sequence[int]) -> list[tuple[SpecStats, float]]:
        """Return the statistics and the cumulative logprob of each line."""
        columns = (column[lines].tolist() for column in (self._counters, self._accepted_at, self._totals))
        return [
            (_stats(counters, accepted_at, emitted), total)
            for counters, accepted_at, total, emitted in zip(*columns, num_tokens, strict=True)
        ]


def _sums(lines: Ints, numbers: NDArray[Any], num_lines: int) -> Ints:
    """Return the sum of the small numbers [n] of each line."""
    sums: Ints = np.bincount(lines, numbers, num_lines).astype(np.int64)
    return sums


def _logprob_arrays(found: LogprobArrays, end: int, is_named: bool) -> tuple[NDArray[Any], ...]:
    """Return values, ids and ranks of the first `end` rows; of named ids the ranks in place of the ids."""
    if not is_named:
        return found.values[:end], found.ids[:end], found.ranks[:end]
    assert found.named_values is not None and found.named_ranks is not None
    values = np.concatenate((found.values[:end, :1], found.named_values[:end]), 1)
    return values, found.named_ranks[:end], found.ranks[:end]


def _stats(counters: list[int], accepted_at: list[int], emitted: int) -> SpecStats:
    return SpecStats(
        num_steps=counters[NUM_STEPS],
        num_drafts=counters[NUM_DRAFTED_STEPS],
        num_draft_tokens=counters[NUM_DRAFTED],
        num_accepted_tokens=counters[NUM_ACCEPTED_DRAFTS],
        num_emitted_tokens=emitted,
        accepted_per_position=accepted_at[: counters[MAX_DRAFTED]],
        num_predicted_drafts=counters[NUM_PREDICTED],
        num_accepted_predicted=counters[NUM_ACCEPTED_PREDICTED],
    )


def _origins(owner: Ints, place: Ints, table: Ints, source: NDArray[np.int8] | None) -> NDArray[Any]:
    """Return the provenance of each token: accepted drafts first, then the token that follows them."""
    drafted, accepted = table[:, NUM_DRAFT], table[:, NUM_ACCEPTED]
    last = np.where(drafted == 0, PLAIN, np.where(accepted == drafted, BONUS, RECOVERED))
    is_accepted = place < accepted[owner]
    if source is None:
        return np.where(is_accepted, ACCEPTED, last[owner])
    proposer = source[owner, np.minimum(place, source.shape[1] - 1)].astype(np.int64)
    return np.where(is_accepted, ACCEPTED + proposer, last[owner])


def _joined_sources(steps: Sequence[StepColumns]) -> NDArray[np.int8] | None:
    """Return the sources [n, K] of all steps; None if all drafts are of the first source."""
    known = [step.source for step in steps if step.source is not None]
    if 0 < len(known) < len(steps):
        none = np.zeros((1, known[0].shape[1]), np.int8)
        known = [none.repeat(len(s.lines), 0) if s.source is None else s.source for s in steps]
    return joined(known) if known else None


def joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate arrays; a single one is returned without a copy."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
