"""Grammar masks by row: each row's mask is that of the committed tokens and the drafts before the row.

The drafts are accepted by the grammar one by one and then rolled back. A draft that the grammar forbids gets
probability 0 from its own row's mask, so every strategy rejects it. The rows after a forbidden draft are
never committed; their masks stay open.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftproof.types import Grammar, GrammarState

OPEN_WORD = -1  # a word of a mask with every bit set


class GrammarGuide:
    """Position of one request in its grammar.

    An exception in the grammar's code fails the row whose mask was computed, and counts only if that row's
    token is committed. The grammar state is then rebuilt from the committed tokens.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state: GrammarState | None = None
        self._committed: list[int] = []

    def fill(self, drafts: Sequence[int], rows: Tensor) -> dict[int, str]:
        """Write the masks of a window to `rows` [1 + drafts, W] int32 on the host; return errors by row."""
        rows.fill_(OPEN_WORD)
        row = 0
        try:
            state = self._current_state()
            state.fill(rows[0])
            while row < len(drafts) and is_set(rows[row], drafts[row]):
                row += 1  # an exception from here on belongs to the next row
                _accept(state, drafts[row - 1])
                state.fill(rows[row])
        except Exception as error:  # a grammar is a plug-in and may raise anything
            self._state = None
            rows[row] = 0
            return {row: f"the grammar raised {type(error).__name__}: {error}"}
        self._roll_back(row)
        return {}

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._committed += tokens
        if self._state is None:
            return
        try:
            for token in tokens:
                _accept(self._state, token)
        except Exception:
            self._state = None  # the next `fill` reports it, if there is one

    def _current_state(self) -> GrammarState:
        """Return the state after the committed tokens; replay them if it was lost."""
        if self._state is None:
            state = self._grammar.start()
            for token in self._committed:
                _accept(state, token)
            self._state = state
        return self._state

    def _roll_back(self, count: int) -> None:
        """Undo the drafts that were accepted; forget the state if the grammar cannot."""
        assert self._state is not None
        try:
            self._state.rollback(count)
        except Exception:  # the masks are valid; only the state is lost
            self._state = None


def is_set(mask: Tensor, token: int) -> bool:
    """Return whether the mask [W] allows the token."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def _accept(state: GrammarState, token: int) -> None:
    """Advance the state by one token; RuntimeError if the grammar rejects it."""
    if not state.accept(token):
        raise RuntimeError(f"it rejects token {token}, which its mask allowed")
