"""Columnar store of outputs that are not streamed.

Steps are buffered and appended to the columns together, because a few array operations cost as much for one
step as for many. Each output has a line of the columns. A line is flushed to its `BulkOutput` when it is
nearly full and when the output finishes, so the columns hold tokens of unfinished outputs alone. Lines are
flushed at different steps on purpose, so that no step flushes all of them. The result equals
`StreamingOutput` bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftproof.outputs import CompletionOutput, DraftColumns, FinishReason
from draftproof.text.bulk.detokenizer import BulkDetokenizer, TokenTexts, push_many
from draftproof.text.bulk.logprob_rows import longer
from draftproof.text.bulk.output import BulkOutput
from draftproof.text.bulk.output_columns import Ints, LogprobArrays, OutputColumns, StepColumns, joined
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import NUM_ACCEPTED, NUM_OUT, TOKENS, LogprobKind, Request

MIN_LINE_TOKENS = 256
MAX_BATCHED_STEPS = 32
MAX_BATCHED_CELLS = 32768  # numbers that are appended together
FIXED_CELLS_PER_TOKEN = 8  # cost of a token beside its logprobs, in cells
MAX_DEFERRED_CLOSES = 16
# a line is flushed for the first time this many tokens before the output reaches max_tokens ...
FLUSH_MARGIN_TOKENS = 16
FLUSH_SPREAD_TOKENS = 64  # ... and up to this many earlier, by its number


class FinishedOutput(NamedTuple):
    """Output that has finished, and how."""

    output: BulkOutput
    reason: FinishReason
    stop: int | str | None = None
    error: str | None = None


class OutputTable:
    """Assignment of lines to outputs, buffer of steps, and flushing."""

    def __init__(self, vocab: int, max_drafts: int, sources: Sequence[str]) -> None:
        self._vocab = vocab
        self._max_steps = max(1, min(MAX_BATCHED_STEPS, MIN_LINE_TOKENS // (max_drafts + 1)))
        max_appended = self._max_steps * (max_drafts + 1)  # tokens of a line in one append
        width = max(MIN_LINE_TOKENS, 2 * max_appended)
        self._flush_at = width - max_appended  # a line with fewer tokens has room for one more append
        self._columns = OutputColumns(width, max_drafts, sources)
        self._sources = tuple(sources)
        self._token_texts: dict[tuple[int, bool], TokenTexts] = {}
        self._outputs: list[BulkOutput | None] = []  # by line
        self._free: list[int] = []
        self._first_flush = np.zeros(0, np.int64)  # [lines] tokens at which a line is flushed
        self._num_with_stops = 0  # outputs with stop strings
        self._steps: list[StepColumns] = []  # not appended yet
        self._step_kind: Any = None  # shapes that the buffered steps share
        self._num_cells = 0  # in the buffered steps
        self._finished: list[FinishedOutput] = []  # not closed yet

    # --- outputs ------------------------------------------------------------------------------------

    def new_output(self, index: int, request: Request, tokenizer: Tokenizer | None) -> BulkOutput:
        """Create an output; it gets a line with `open`."""
        token_texts = None
        if tokenizer is not None:
            key = id(tokenizer), request.params.skip_special_tokens
            if key not in self._token_texts:  # the entry keeps the tokenizer alive, so its id stays unique
                self._token_texts[key] = TokenTexts(tokenizer, key[1], self._vocab)
            token_texts = self._token_texts[key]
        return BulkOutput(index, request, tokenizer, token_texts, self._vocab, self._sources)

    def open(self, output: BulkOutput) -> int:
        """Assign a line to an output until it is closed."""
        if not self._free:
            self._add_lines()
        line = output.line = self._free.pop()
        self._outputs[line] = output
        self._first_flush[line] = self._first_flush_at(line, output.max_tokens)
        self._num_with_stops += output.stop_scanner is not None
        self._columns.reset(line, output.logprob_kind, output.top, bool(output.named_ids))
        return line

    def close(
        self, output: BulkOutput, reason: FinishReason, stop: int | str | None, error: str | None
    ) -> CompletionOutput:
        """Finish one output, free its line and return it."""
        self.close_all([FinishedOutput(output, reason, stop, error)])
        return output.output

    def close_all(self, finished: Sequence[FinishedOutput]) -> None:
        """Finish outputs now; many of one step cost little more than one."""
        if finished:  # otherwise the buffered steps can wait
            self._finished += finished
            self.flush_steps()

    def close_deferred(self, finished: Sequence[FinishedOutput]) -> None:
        """Finish outputs when the steps so far are appended; now if few outputs are open."""
        self._finished += finished
        limit = min(MAX_DEFERRED_CLOSES, self.num_open)
        if len(self._finished) >= limit or not self._steps:  # without steps all their tokens are appended
            self.flush_steps()

    def num_tokens(self, output: BulkOutput) -> int:
        """Return the tokens of an output so far."""
        self.flush_steps()
        unflushed = int(self._columns.fill[output.line]) if output.line >= 0 else 0
        return len(output.output.token_ids) + unflushed

    @property
    def num_open(self) -> int:
        """Outputs that have a line."""
        return len(self._outputs) - len(self._free)

    def _add_lines(self) -> None:
        have = len(self._outputs)
        added = max(8, have)
        self._free.extend(range(have + added - 1, have - 1, -1))
        self._outputs.extend([None] * added)
        self._columns.resize(have + added)
        self._first_flush = longer(self._first_flush, have + added)
        self._first_flush[have:] = self._flush_at

    def _first_flush_at(self, line: int, max_tokens: int | None) -> int:
        """Return the tokens at which a new line is flushed; later flushes come when it is full.

        Outputs that reach max_tokens often finish with the same step, when no device work hides the cost.
        Flushing shortly before leaves little to do then.
        """
        if max_tokens is None or max_tokens <= 2 * FLUSH_MARGIN_TOKENS:
            return self._flush_at - line % self._flush_at
        early = FLUSH_MARGIN_TOKENS + line % FLUSH_SPREAD_TOKENS
        return (max_tokens - early) % self._flush_at or self._flush_at

    # --- steps --------------------------------------------------------------------------------------

    def add(
        self,
        lines: Ints,
        table: Ints,
        source: NDArray[np.int8] | None,
        logprobs: Mapping[LogprobKind, LogprobArrays],
        finishes: Mapping[int, FinishReason],
        drafts: DraftColumns | None = None,
    ) -> list[int]:
        """Buffer a step of n outputs and return the indices of those that a stop string ends.

        lines [n], table [n, …] (types.Outcome), source [n, K]. `finishes`: reason by index, for outputs that
        the engine has finished. drafts: of outputs that report them. The arrays must not change afterwards.
        """
        matched: list[int] = []
        if not len(lines):
            return matched
        if self._num_with_stops:
            table, matched = self._scan_stops(lines, table, finishes)
        if drafts is not None and matched:
            drafts = _counted_drafts(drafts, table)
        if drafts is not None and not drafts.num_drafts:
            drafts = None  # those of the step are of other outputs
        tops = [(kind, *_widths(found)) for kind, found in logprobs.items()]
        step_kind = table.shape[1], tops
        if step_kind != self._step_kind:
            self.flush_steps()
            self._step_kind = step_kind
        self._steps.append(StepColumns(lines, table, source, logprobs, drafts))
        cells_per_token = FIXED_CELLS_PER_TOKEN + sum(top + num_named for _, top, num_named in tops)
        self._num_cells += int(np.add.reduce(table[:, NUM_OUT])) * cells_per_token
        if drafts is not None:
            self._num_cells += drafts.num_drafts * (FIXED_CELLS_PER_TOKEN + drafts.top_ids.shape[1])
        # a single step can wait for the next one: `flush_if_due` may run before it
        is_large = self._num_cells >= MAX_BATCHED_CELLS and len(self._steps) > 1
        if len(self._steps) == self._max_steps or is_large:
            self.flush_steps()
        return matched

    def flush_if_due(self) -> None:
        """Append steps that would be due soon; for times when the device is busy."""
        is_due = 2 * len(self._steps) >= self._max_steps or 2 * self._num_cells >= MAX_BATCHED_CELLS
        if is_due or 4 * len(self._finished) >= MAX_DEFERRED_CLOSES:
            self.flush_steps()

    def flush_steps(self) -> None:
        """Append the buffered steps and close the outputs that finished with them."""
        if self._steps:
            self._flush_full_lines()
            steps, self._steps, self._num_cells = self._steps, [], 0
            self._columns.append(steps)
            self._add_drafts(steps)
        if self._finished:
            self._close_finished()

    def _add_drafts(self, steps: Sequence[StepColumns]) -> None:
        """Append the drafts of steps to their outputs, in the order of the steps."""
        found = [(step.lines[step.drafts.entry], step.drafts) for step in steps if step.drafts is not None]
        for _, some in groupby(found, lambda pair: pair[1].top_ids.shape[1]):  # equal widths
            all_lines, columns = zip(*some, strict=True)
            lines = joined(list(all_lines))
            order = lines.argsort(kind="stable")
            lines, drafts = lines[order], DraftColumns.concatenate(columns)
            begins = [0, *((lines[1:] != lines[:-1]).nonzero()[0] + 1).tolist()]
            for line, first, end in zip(
                lines[begins].tolist(), begins, [*begins[1:], len(lines)], strict=True
            ):
                output = self._outputs[line]
                assert output is not None
                output.draft_parts.append((drafts, order, first, end))

    def _close_finished(self) -> None:
        """Close finished outputs; their last step is appended and not flushed."""
        finished, self._finished = self._finished, []
        open_ones = [each for each in finished if each.output.line >= 0]
        if open_ones:
            lines = np.array([each.output.line for each in open_ones], np.int64)
            self._flush_lines(lines, [each.output.hides_last(each.reason) for each in open_ones])
            num_tokens = [len(each.output.output.token_ids) for each in open_ones]
            for (output, *_), (stats, total) in zip(
                open_ones, self._columns.summaries(lines, num_tokens), strict=True
            ):
                output.output.metrics, output.cumulative_logprob = stats, total
                self._outputs[output.line] = None
                self._num_with_stops -= output.stop_scanner is not None
                self._free.append(output.line)
                output.line = -1
        for output, reason, stop, error in finished:
            output.finish(reason, stop, error)

    def _scan_stops(
        self, lines: Ints, table: Ints, finishes: Mapping[int, FinishReason]
    ) -> tuple[Ints, list[int]]:
        """Return the table without tokens after a stop string, and the indices where one was found."""
        matched: list[int] = []
        rows = table.tolist()
        for i, line in enumerate(lines.tolist()):
            output = self._outputs[line]
            if output is None or output.stop_scanner is None:
                continue
            tokens = rows[i][TOKENS : TOKENS + rows[i][NUM_OUT]]
            kept = output.stop_scanner.push(tokens, i in finishes and output.hides_last(finishes[i]))
            if output.stop_scanner.match is not None:
                if not matched:
                    table = table.copy()
                table[i, NUM_OUT], table[i, NUM_ACCEPTED] = kept, min(rows[i][NUM_ACCEPTED], kept)
                matched.append(i)
        return table, matched

    # --- lines --------------------------------------------------------------------------------------

    def _flush_full_lines(self) -> None:
        """Flush lines that are nearly full; none of their tokens is hidden, since no output finished."""
        lines = (self._columns.fill >= self._first_flush).nonzero()[0]
        if len(lines):
            self._flush_lines(lines, [False] * len(lines))
            self._first_flush[lines] = self._flush_at

    def _flush_lines(self, lines: Ints, hides_last: list[bool]) -> None:
        """Move the tokens of these lines to their outputs. `hides_last`: the last token adds no text."""
        sizes = self._columns.fill[lines]
        if not sizes.all():
            hides_last = [hidden for hidden, size in zip(hides_last, sizes.tolist(), strict=True) if size]
            lines, sizes = lines[sizes > 0], sizes[sizes > 0]
        if not len(lines):
            return
        ends = sizes.cumsum()
        tokens, origins = self._columns.read(lines, sizes)
        ids = tokens.tolist()
        texts: list[BulkDetokenizer | None] = []
        begin = 0
        for line, end in zip(lines.tolist(), ends.tolist(), strict=True):
            output = self._outputs[line]
            assert output is not None
            texts.append(output.text)
            output.output.token_ids += ids[begin:end]
            output.output.provenance += origins[begin:end]
            if output.logprob_kind is not LogprobKind.NONE:
                output.logprob_parts.append(self._columns.logprob_rows(line, end - begin, output.top))
            begin = end
        push_many(texts, tokens, ends, hides_last)


def _widths(found: LogprobArrays) -> tuple[int, int]:
    """Return the number of best tokens and of named ids."""
    return found.ids.shape[1], 0 if found.named_values is None else found.named_values.shape[1]


def _counted_drafts(drafts: DraftColumns, table: Ints) -> DraftColumns:
    """Return the drafts of requests that committed a token; those behind a stop string are not accepted."""
    counts = table[drafts.entry]
    begins = drafts.entry.searchsorted(drafts.entry)
    place = np.arange(drafts.num_drafts) - begins
    drafts = drafts._replace(accepted=drafts.accepted & (place < counts[:, NUM_ACCEPTED]))
    return drafts.select(counts[:, NUM_OUT] > 0)
