"""Masks of a grammar, row by row: each is that of the committed tokens and the drafts before the row.

The drafts are walked through the grammar and taken back. One that the grammar does not allow is given
probability 0 by its own row's mask, so it falls under every strategy; rows after it decide nothing and are
left open.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftproof.types import Grammar, GrammarState

OPEN = -1  # a word of a mask with every bit set


class Guide:
    """A request's place in its grammar.

    What the grammar's code raises fails the row that needed it, which counts only if that row's token would
    be committed: so a grammar that fails on a draft which falls anyway fails nothing. The place is then found
    again from the committed tokens.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state: GrammarState | None = None
        self._said: list[int] = []  # committed

    def fill(self, drafts: Sequence[int], rows: Tensor) -> dict[int, str]:
        """rows [1 + drafts, W] int32 on the host: the masks of a window; errors by row, which is closed."""
        rows.fill_(OPEN)
        row = 0
        try:
            state = self._here()
            state.fill(rows[0])
            while row < len(drafts) and is_set(rows[row], drafts[row]):
                row += 1  # what may go wrong from here on is about the next row
                _accept(state, drafts[row - 1])
                state.fill(rows[row])
        except Exception as error:  # a grammar is a plug-in: it may raise anything
            self._state = None
            rows[row] = 0
            return {row: f"the grammar raised {type(error).__name__}: {error}"}
        self._take_back(row)
        return {}

    def commit(self, tokens: Sequence[int]) -> None:
        self._said += tokens
        if self._state is None:
            return
        try:
            for token in tokens:
                _accept(self._state, token)
        except Exception:
            self._state = None  # the next row will hear of it, if there is one

    def _here(self) -> GrammarState:
        if self._state is None:
            state = self._grammar.start()
            for token in self._said:
                _accept(state, token)
            self._state = state
        return self._state

    def _take_back(self, count: int) -> None:
        assert self._state is not None
        try:
            self._state.rollback(count)
        except Exception:  # the masks are right; only the place is lost
            self._state = None


def is_set(mask: Tensor, token: int) -> bool:
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def _accept(state: GrammarState, token: int) -> None:
    if not state.accept(token):
        raise RuntimeError(f"it does not go on by token {token}, which it had allowed")
