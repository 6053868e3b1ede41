"""Thinking budget: after a number of reasoning tokens the end marker is the only allowed continuation.

The budget is a grammar like any other, so masks, drafts and devices need nothing of their own for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from draftproof.text.reasoning.section import Phase, ReasoningSection, SectionState
from draftproof.types import OPEN_WORD, Grammar, GrammarState


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Grammar that limits the reasoning of a request, together with the grammar of its answer."""

    section: ReasoningSection
    is_open: bool  # the prompt ends inside the reasoning
    num_tokens: int  # reasoning tokens at most
    end_ids: Sequence[int]
    answer: Grammar | None = None  # it allows the reasoning itself

    def start(self) -> GrammarState:
        """Return the state before the first token."""
        return ThinkingBudgetState(self)


class ThinkingBudgetState:
    """State of one request in its budget. Every accepted token can be rolled back."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._answer = None if budget.answer is None else budget.answer.start()
        self._states: list[SectionState] = [budget.section.begin(budget.is_open)]

    def fill(self, row: Tensor) -> None:
        """Fill row [W] int32: bit t % 32 of word t // 32 is set if token t may follow."""
        forced = self._forced_token()
        if forced is not None:
            row.zero_()
            row.numpy().view(np.uint32)[forced // 32] = np.uint32(1 << forced % 32)
        elif self._answer is not None:
            self._answer.fill(row)
        else:
            row.fill_(OPEN_WORD)

    def accept(self, token: int) -> bool:
        """Advance by a token; return False and change nothing if it may not follow."""
        forced, state = self._forced_token(), self._states[-1]
        if forced is not None and token != forced:
            return False
        if self._answer is not None and not self._answer.accept(token):
            return False
        if forced is None:
            state = self._budget.section.advance(state, token)
        elif state.num_forced + 1 == len(self._budget.end_ids):
            state = SectionState(Phase.AFTER, num_tokens=state.num_tokens)
        else:
            state = state._replace(num_forced=state.num_forced + 1)
        self._states.append(state)
        return True

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        del self._states[len(self._states) - count :]
        if self._answer is not None:
            self._answer.rollback(count)

    def _forced_token(self) -> int | None:
        """Return the only token that may follow; None if the budget is not used up."""
        state = self._states[-1]
        is_forced = state.phase is Phase.INSIDE and state.num_tokens >= self._budget.num_tokens
        return self._budget.end_ids[state.num_forced] if is_forced else None
