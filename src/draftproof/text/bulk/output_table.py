"""Answers that nobody looks at before they are complete, taken down step by step as columns.

Steps are kept as they came and written down together, because a few array operations cost as much for one
step as for many; a large batch fills that measure with a step or two. Each answer has a line of a page; when
its line is nearly full, or it ends, the line is made into lists, so memory holds what belongs to answers that
are still under way and nothing else. Lines are emptied at different times on purpose: then no step has to do
it for all. An answer that ended may wait until steps are written down anyway (`close_soon`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftproof.metrics import SpecStats
from draftproof.text.bulk.detokenizer import BulkDetokenizer, Pieces, push_all
from draftproof.text.bulk.logprob_rows import LogprobPage, rows_of
from draftproof.text.bulk.output import Answer
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import (
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    PICK,
    TOKENS,
    CompletionOutput,
    FinishReason,
    LogprobKind,
    Request,
)

Ints = NDArray[np.int64]
# values [N, 1 + top], ids [N, top], ranks [N] of the picked tokens of a step
Found = tuple[NDArray[np.float32], Ints, Ints]
Ended = tuple[Answer, FinishReason, int | str | None, str | None]  # why, by which stop, with which error
# whose lines, their lines of the table, who proposed what, logprobs
Step = tuple[Ints, Ints, NDArray[np.int8] | None, Mapping[LogprobKind, Found]]

PAGE = 256  # tokens of a line, at least
AT_ONCE = 32  # steps that are written down together at most
MANY = 16384  # numbers, likewise: no step shall wait for many
EACH = 8  # numbers that a token is worth beside its logprobs
SOON = 16  # answers that wait to be closed, at most
LAST, SPREAD = 16, 64  # tokens before an expected end: lines are emptied some time before LAST, spread out
PLAIN, BONUS, RECOVERED, ACCEPTED = range(4)  # where a token came from; from ACCEPTED on: by its source
STEPS, DRAFTS, DRAFTED, STOOD, WIDEST = range(5)  # columns of the counts


class Ledger:
    """The page and who has which line of it."""

    def __init__(self, vocab: int, max_drafts: int, sources: Sequence[str]) -> None:
        self._vocab = vocab
        self._at_once = max(1, min(AT_ONCE, PAGE // (max_drafts + 1)))  # steps
        most = self._at_once * (max_drafts + 1)
        self._width = max(PAGE, 2 * most)
        self._limit = self._width - most  # a line as full as this has room for so many steps
        names = ["plain", "bonus", "recovered", *(f"accepted:{source}" for source in sources)]
        self._names = np.array(names, object)
        self._pieces: dict[tuple[int, bool], Pieces] = {}
        self._answers: list[Answer | None] = []
        self._free: list[int] = []
        self._num_watched = 0  # answers with stop strings
        self._steps: list[Step] = []  # that are not written down yet
        self._kind: Any = None  # what they have in common
        self._ended: list[Ended] = []  # with one of these steps, and are not closed yet
        self._due = 0  # numbers in them
        self._fill = np.zeros(0, np.int64)
        self._full = np.zeros(0, np.int64)  # tokens at which a line is emptied
        self._wants = np.zeros(0, np.int64)
        self._counts = np.zeros((0, 5), np.int64)
        self._stood = np.zeros((0, max_drafts), np.int64)  # by the draft's place in its window
        self._tokens = np.zeros(0, np.int64)  # [lines * width]
        self._origins = np.zeros(0, np.int16)
        self._logprobs = LogprobPage()  # likewise
        self._totals = np.zeros(0, np.float64)  # of the tokens' own logprobs

    # --- who ----------------------------------------------------------------------------------------

    def answer(self, index: int, request: Request, tokenizer: Tokenizer | None) -> Answer:
        pieces = None
        if tokenizer is not None:
            key = id(tokenizer), request.params.skip_special_tokens
            if key not in self._pieces:  # which keeps the tokenizer, so that its id stays its own
                self._pieces[key] = Pieces(tokenizer, key[1], self._vocab)
            pieces = self._pieces[key]
        return Answer(index, request, tokenizer, pieces, self._vocab)

    def open(self, answer: Answer) -> int:
        """A line for it, until `close`."""
        if not self._free:
            self._more_lines()
        line = answer.line = self._free.pop()
        self._answers[line] = answer
        self._fill[line] = self._counts[line] = self._stood[line] = self._totals[line] = 0
        self._full[line] = self._first_full(line, answer.max_tokens)
        self._wants[line] = answer.wants
        self._num_watched += answer.watch is not None
        if answer.wants is not LogprobKind.NONE and answer.top > self._logprobs.top:
            self._logprobs.widen(answer.top)
        return line

    def close(
        self, answer: Answer, reason: FinishReason, stop: int | str | None, error: str | None
    ) -> CompletionOutput:
        """It ended: the whole of it; its line is free."""
        self.close_all([(answer, reason, stop, error)])
        return answer.output

    def close_all(self, ended: Sequence[Ended]) -> None:
        """`close` for some: many that end with one step cost little more than one."""
        if ended:  # else nobody has to know by now what has come
            self._ended += ended
            self.write()

    def close_soon(self, ended: Sequence[Ended]) -> None:
        """`close_all`, when the steps up to now are written down; that is now if nobody has more to say."""
        self._ended += ended
        most = min(SOON, self.num_open)
        if len(self._ended) >= most or not self._steps:  # their last step is written down by now
            self.write()

    def _close(self) -> None:
        """Those that ended. All that they said is written down, and not yet tidied away."""
        ended, self._ended = self._ended, []
        open_ones = [(answer, reason) for answer, reason, *_ in ended if answer.line >= 0]
        if open_ones:
            lines = np.array([answer.line for answer, _ in open_ones], np.int64)
            self._empty(lines, [answer.hides_last(reason) for answer, reason in open_ones])
            columns = (column[lines].tolist() for column in (self._counts, self._stood, self._totals))
            for (answer, _), counts, stood, total in zip(open_ones, *columns, strict=True):
                answer.output.metrics = _stats(counts, stood, len(answer.output.token_ids))
                answer.total = total
                self._answers[answer.line] = None
                self._num_watched -= answer.watch is not None
                self._free.append(answer.line)
                answer.line = -1
        for answer, reason, stop, error in ended:
            answer.finish(reason, stop, error)

    def num_tokens(self, answer: Answer) -> int:
        self.write()
        line = answer.line
        return len(answer.output.token_ids) + (int(self._fill[line]) if line >= 0 else 0)

    @property
    def num_open(self) -> int:
        return len(self._answers) - len(self._free)

    def _more_lines(self) -> None:
        have = len(self._answers)
        more = max(8, have)
        self._free.extend(range(have + more - 1, have - 1, -1))
        self._answers.extend([None] * more)
        for name in ("_fill", "_full", "_wants", "_counts", "_stood", "_totals"):
            setattr(self, name, _longer(getattr(self, name), have + more))
        self._full[have:] = self._limit
        for name in ("_tokens", "_origins"):
            setattr(self, name, _longer(getattr(self, name), (have + more) * self._width))
        self._logprobs.lengthen((have + more) * self._width)

    def _first_full(self, line: int, max_tokens: int | None) -> int:
        """When to empty a line for the first time; later it is emptied when it has no more room.

        So that little is left to do when its answer is as long as it may be, which others are with the same
        step: nothing is under way then beside which it could be done.
        """
        if max_tokens is None or max_tokens <= 2 * LAST:
            return self._limit - line % self._limit
        return (max_tokens - LAST - line % SPREAD) % self._limit or self._limit

    # --- what ---------------------------------------------------------------------------------------

    def add(
        self,
        lines: Ints,
        table: Ints,
        source: NDArray[np.int8] | None,
        columns: Mapping[LogprobKind, Found],
        ends: Mapping[int, FinishReason],
    ) -> list[int]:
        """A step: [n] lines, the table's lines of their requests (types.Outcome), and who proposed what.

        `ends`: of those of the n that ended, why. Which of them a stop string ended. What is given here must
        stay as it is.
        """
        matched: list[int] = []
        if not len(lines):
            return matched
        if self._num_watched:
            table, matched = self._look(lines, table, ends)
        kind = table.shape[1], source is None, [(name, found[1].shape[1]) for name, found in columns.items()]
        if kind != self._kind:
            self.write()
            self._kind = kind
        self._steps.append((lines, table, source, columns))
        self._due += int(table[:, NUM_OUT].sum()) * (EACH + sum(top for _, top in kind[2]))
        # a step by itself can wait for the next one: `catch_up` may come before it
        if len(self._steps) == self._at_once or (self._due >= MANY and len(self._steps) > 1):
            self.write()
        return matched

    def catch_up(self) -> None:
        """There is time: write down what would soon be due."""
        if 2 * len(self._steps) >= self._at_once or 2 * self._due >= MANY or 4 * len(self._ended) >= SOON:
            self.write()

    def write(self) -> None:
        """Write down the steps that have come, and close the answers that ended with them."""
        if self._steps:
            self._tidy()
            steps, self._steps, self._due = self._steps, [], 0
            self._write(steps)
        if self._ended:
            self._close()

    def _write(self, steps: list[Step]) -> None:
        """S steps, of n lines in all; a line is in each of them once at most."""
        lines = _joined([lines for lines, *_ in steps])  # [n]
        table = _joined([table for _, table, *_ in steps])  # [n, …]
        step = np.repeat(np.arange(len(steps)), [len(lines) for lines, *_ in steps])  # [n] which it is of
        out = table[:, NUM_OUT]
        by_step = self._by_step(step, lines, out)
        before = by_step.cumsum(0)
        begin = lines * self._width + self._fill[lines] + before[step, lines] - out
        # one entry a token: whose it is and which of its step's
        owner = np.repeat(np.arange(len(out)), out)
        place = np.arange(len(owner)) - np.repeat(out.cumsum() - out, out)
        where = begin[owner] + place
        self._tokens[where] = table[owner, TOKENS + place]
        self._fill += before[-1]
        self._counts[:, STEPS] += (by_step > 0).sum(0)
        if table[:, NUM_DRAFT].any():
            source = None if steps[0][2] is None else _joined([s for *_, s, _ in steps if s is not None])
            self._origins[where] = _origins(owner, place, table, source)
            told = out > 0  # a step that committed nothing is no step
            self._count_drafts(step[told], lines[told], table[told, NUM_DRAFT], table[told, NUM_ACCEPTED])
        else:
            self._origins[where] = PLAIN
        if steps[0][3]:
            self._add_logprobs(lines, step, owner, where, place, table, [columns for *_, columns in steps])

    def _by_step(self, step: Ints, lines: Ints, column: Ints) -> Ints:
        """A column [n] as [S, lines of the page]; 0 where there is nothing."""
        found = np.zeros((int(step[-1]) + 1 if len(step) else 1, len(self._fill)), np.int64)
        found[step, lines] = column
        return found

    def _look(self, lines: Ints, table: Ints, ends: Mapping[int, FinishReason]) -> tuple[Ints, list[int]]:
        """The table without what was committed behind a stop string, and who has met one."""
        matched: list[int] = []
        rows = table.tolist()
        for i, line in enumerate(lines.tolist()):
            answer = self._answers[line]
            if answer is None or answer.watch is None:
                continue
            tokens = rows[i][TOKENS : TOKENS + rows[i][NUM_OUT]]
            kept = answer.watch.push(tokens, i in ends and answer.hides_last(ends[i]))
            if answer.watch.match is not None:
                if not matched:
                    table = table.copy()
                table[i, NUM_OUT], table[i, NUM_ACCEPTED] = kept, min(rows[i][NUM_ACCEPTED], kept)
                matched.append(i)
        return table, matched

    def _count_drafts(self, step: Ints, lines: Ints, num_draft: Ints, num_accepted: Ints) -> None:
        drafted, accepted = (self._by_step(step, lines, column) for column in (num_draft, num_accepted))
        counts = self._counts
        counts[:, DRAFTS] += (drafted > 0).sum(0)
        counts[:, DRAFTED] += drafted.sum(0)
        counts[:, STOOD] += accepted.sum(0)
        np.maximum(counts[:, WIDEST], drafted.max(0), out=counts[:, WIDEST])
        self._stood += (accepted[..., None] > np.arange(self._stood.shape[1])).sum(0)

    def _add_logprobs(
        self,
        lines: Ints,
        step: Ints,
        owner: Ints,
        where: Ints,
        place: Ints,
        table: Ints,
        steps: Sequence[Mapping[LogprobKind, Found]],
    ) -> None:
        wants = self._wants[lines]
        begins = step.searchsorted(np.arange(len(steps)))
        ends = np.maximum.reduceat(table[:, PICK] + table[:, NUM_OUT], begins).tolist()
        for kind in steps[0]:
            mine = wants == kind
            if not mine.any():
                continue
            found = [columns[kind] for columns in steps]
            used = [max(0, min(end, len(ranks))) for end, (_, _, ranks) in zip(ends, found, strict=True)]
            first = np.cumsum([0, *used[:-1]])  # of each step, among all that are used
            values, ids, ranks = (
                _joined([column[:end] for column, end in zip(columns, used, strict=True)])
                for columns in zip(*found, strict=True)
            )
            at, whose, which = where, owner, place
            if not mine.all():
                of_kind = mine[owner]
                at, whose, which = where[of_kind], owner[of_kind], place[of_kind]
            if not len(at):
                continue
            rows = which + table[whose, PICK] + first[step[whose]]
            # mostly they lie one behind the other: then nothing is gathered
            in_a_row = (rows[1:] - rows[:-1] == 1).all()
            pick: Any = slice(int(rows[0]), int(rows[-1]) + 1) if in_a_row else rows
            page = self._logprobs
            page.rows[at] = rows_of(self._tokens[at], values[pick], ids[pick], ranks[pick], page.top)

    def _tidy(self) -> None:
        """Empty the lines that are nearly full. All that is in them was told: nothing is unseen."""
        lines = (self._fill >= self._full).nonzero()[0]
        if len(lines):
            self._empty(lines, [False] * len(lines))
            self._full[lines] = self._limit

    def _empty(self, lines: Ints, unseen: list[bool]) -> None:
        """Give their answers what is in them. `unseen`: of these the last token is not shown."""
        sizes = self._fill[lines]
        if not sizes.all():
            unseen = [hidden for hidden, size in zip(unseen, sizes.tolist(), strict=True) if size]
            lines, sizes = lines[sizes > 0], sizes[sizes > 0]
        if not len(lines):
            return
        ends = sizes.cumsum()
        at = np.arange(int(ends[-1])) + np.repeat(lines * self._width - ends + sizes, sizes)
        tokens = self._tokens[at]
        ids, origins = tokens.tolist(), self._names[self._origins[at]].tolist()
        texts: list[BulkDetokenizer | None] = []
        begin = 0
        for line, end in zip(lines.tolist(), ends.tolist(), strict=True):
            answer = self._answers[line]
            assert answer is not None
            texts.append(answer.text)
            answer.output.token_ids += ids[begin:end]
            answer.output.provenance += origins[begin:end]
            if answer.wants is not LogprobKind.NONE:
                first = line * self._width
                answer.parts.append(self._logprobs.take(first, first + end - begin, answer.top))
            begin = end
        self._fill[lines] = 0
        if (self._wants[lines] != LogprobKind.NONE).any():
            self._add_up(lines, sizes, at - np.repeat(lines * self._width, sizes), at)
        push_all(texts, tokens, ends, unseen)

    def _add_up(self, lines: Ints, sizes: Ints, place: Ints, at: Ints) -> None:
        """Each line's logprobs to its total, one after the other, as if token by token."""
        terms = np.zeros((1 + int(sizes.max()), len(lines)))  # zeros behind them change no bit
        terms[0] = self._totals[lines]
        own = self._logprobs.own[at]
        own[np.repeat(self._wants[lines] == LogprobKind.NONE, sizes)] = 0.0  # of lines that others had
        terms[1 + place, np.repeat(np.arange(len(lines)), sizes)] = own
        self._totals[lines] = np.add.accumulate(terms)[-1]


def _stats(counts: list[int], stood: list[int], emitted: int) -> SpecStats:
    return SpecStats(
        num_steps=counts[STEPS],
        num_drafts=counts[DRAFTS],
        num_draft_tokens=counts[DRAFTED],
        num_accepted_tokens=counts[STOOD],
        num_emitted_tokens=emitted,
        accepted_per_position=stood[: counts[WIDEST]],
    )


def _origins(owner: Ints, place: Ints, table: Ints, source: NDArray[np.int8] | None) -> NDArray[Any]:
    """Accepted drafts come first; the token behind them is named by what became of the rest."""
    drafted, accepted = table[:, NUM_DRAFT], table[:, NUM_ACCEPTED]
    last = np.where(drafted == 0, PLAIN, np.where(accepted == drafted, BONUS, RECOVERED))
    stood = place < accepted[owner]
    if source is None:
        return np.where(stood, ACCEPTED, last[owner])
    who = source[owner, np.minimum(place, source.shape[1] - 1)].astype(np.int64)
    return np.where(stood, ACCEPTED + who, last[owner])


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _longer(column: NDArray[Any], rows: int) -> NDArray[Any]:
    made = np.zeros((rows, *column.shape[1:]), column.dtype)
    made[: len(column)] = column
    return made
