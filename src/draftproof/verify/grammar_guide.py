"""Grammar masks by row: each row's mask is that of the committed tokens and the drafts before the row.

The drafts are accepted by the grammar one by one and then rolled back. A draft that the grammar forbids gets
probability 0 from its own row's mask, so every strategy rejects it. The rows after a forbidden draft are
never committed; their masks stay open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import Tensor

from draftproof.errors import GRAMMAR_TOO_SLOW
from draftproof.types import OPEN_WORD, Grammar, GrammarState

ROW_SECONDS = 0.005  # CPU time of a row's mask that is not charged; ordinary grammars need 0.1 to 0.5 ms


class GrammarGuide:
    """Position of one request in its grammar.

    An exception in the grammar's code fails the row whose mask was computed, and counts only if that row's
    token is committed. The grammar state is then rebuilt from the committed tokens.

    CPU time beyond ROW_SECONDS a row is charged to the request's budget; cheaper rows refill it. A request
    whose budget is used up fails with its next token.
    """

    def __init__(self, grammar: Grammar, budget_seconds: float = math.inf) -> None:
        self._grammar = grammar
        self._budget_seconds = self.seconds_left = budget_seconds
        self._state: GrammarState | None = None
        self._committed: list[int] = []
        self._num_matched = 0  # of the committed tokens, those that the state has accepted
        self._failure = ""  # why no further mask is computed

    def fill(self, drafts: Sequence[int], rows: Tensor, limit_seconds: float = math.inf) -> dict[int, str]:
        """Write the masks of a window to `rows` [1 + drafts, W] int32 on the host; return errors by row.

        `limit_seconds` of CPU time; beyond it the row at hand fails, and the request with its next token.
        """
        rows.fill_(OPEN_WORD)
        row, started = 0, time.thread_time()
        try:
            if self._failure:
                raise _TooSlowError
            state = self._current_state()
            state.fill(rows[0])
            while row < len(drafts) and is_set(rows[row], drafts[row]):
                row += 1  # an exception from here on belongs to the next row
                if time.thread_time() - started > limit_seconds:
                    raise _TooSlowError
                _accept(state, drafts[row - 1])
                state.fill(rows[row])
            if time.thread_time() - started > limit_seconds:
                raise _TooSlowError
        except Exception as error:  # a grammar is a plug-in and may raise anything
            self._state = None
            rows[row] = 0
            if isinstance(error, _TooSlowError):
                return {row: self._failure or self.fail_as_too_slow()}
            return {row: f"the grammar raised {type(error).__name__}: {error}"}
        self._roll_back(row)
        charge = time.thread_time() - started - (1 + row) * ROW_SECONDS
        self.seconds_left = min(self._budget_seconds, self.seconds_left - charge)
        return {}

    def fail_as_too_slow(self) -> str:
        """Compute no further mask; return the reason, with which the request fails."""
        self._failure = (
            f"{GRAMMAR_TOO_SLOW}: more than {self._budget_seconds:g} s of CPU time beyond "
            f"{1e3 * ROW_SECONDS:g} ms a token. Write the grammar so that a text matches in one way only, "
            "for example without a repetition directly inside another one"
        )
        return self._failure

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens. The next `fill` advances the grammar by them."""
        self._committed += tokens

    def _current_state(self) -> GrammarState:
        """Return the state after the committed tokens; replay them all if it was lost."""
        if self._state is None:
            self._state, self._num_matched = self._grammar.start(), 0
        for token in self._committed[self._num_matched :]:
            _accept(self._state, token)
            self._num_matched += 1
        return self._state

    def _roll_back(self, count: int) -> None:
        """Undo the drafts that were accepted; forget the state if the grammar cannot."""
        assert self._state is not None
        try:
            self._state.rollback(count)
        except Exception:  # the masks are valid; only the state is lost
            self._state = None


class _TooSlowError(Exception):
    """The budget of a request or step is used up."""


def is_set(mask: Tensor, token: int) -> bool:
    """Return whether the mask [W] allows the token."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def _accept(state: GrammarState, token: int) -> None:
    """Advance the state by one token; RuntimeError if the grammar rejects it."""
    if not state.accept(token):
        raise RuntimeError(f"it rejects token {token}, which its mask allowed")
