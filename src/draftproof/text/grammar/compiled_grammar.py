"""Compiled grammar, and the state of one request in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.text.grammar.reasoning import ReasoningEnd
from draftproof.text.grammar.surrogates import SURROGATE, SurrogateTokens
from draftproof.types import GrammarState


class TextGrammar:
    """Compiled grammar, optionally after an unconstrained section. Shared by any number of requests."""

    def __init__(
        self,
        compiled: Any,
        vocab_size: int,
        stops: Sequence[int],
        end: ReasoningEnd | None,
        forbidden: frozenset[int],
        surrogates: SurrogateTokens,
    ) -> None:
        """`forbidden`: tokens that never follow, whatever the compiled grammar allows."""
        self.compiled = compiled
        self.words = math.ceil(vocab_size / 32)
        self.leads = surrogates.first
        self.forbidden = forbidden | surrogates.complete
        self.forbidden_after_lead = self.forbidden | surrogates.second
        self._allowed = self._mask_without(self.forbidden)  # [W]
        self._allowed_after_lead = self._mask_without(self.forbidden_after_lead)  # [W]
        self.stops = frozenset(stops)
        self.end = end
        self._closed: dict[int, Tensor] = {}

    def start(self) -> GrammarState:
        return TextGrammarState(self)

    def _mask_without(self, forbidden: frozenset[int]) -> Tensor | None:
        if not forbidden:
            return None
        bits = np.ones(self.words * 32, np.bool_)
        bits[list(forbidden)] = False
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def forbid(self, row: Tensor, after_lead: bool) -> None:
        """Clear the bits of forbidden tokens in a row [W]; `after_lead`: a surrogate may have begun."""
        allowed = self._allowed_after_lead if after_lead else self._allowed
        if allowed is not None:
            row &= allowed

    def free_mask(self, matched: int, matcher: Any) -> Tensor:
        """Return the mask [W] of the unconstrained section, `matched` bytes into its end.

        It forbids tokens that complete the end and continue with bytes that the grammar cannot begin with.
        """
        if matched not in self._closed:
            assert self.end is not None
            mask = torch.full((self.words,), -1, dtype=torch.int32)
            view = mask.numpy().view(np.uint32)
            for token, rest in self.end.overshooting(matched):
                if not SURROGATE.search(rest) and matcher.accept_string(rest):
                    matcher.rollback(1)
                else:
                    view[token // 32] &= ~np.uint32(1 << token % 32)
            self._closed[matched] = mask
        return self._closed[matched]


class TextGrammarState:
    """State of one request in its grammar. Every accepted token can be rolled back."""

    def __init__(self, grammar: TextGrammar) -> None:
        import xgrammar

        self._grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._row = torch.zeros((1, grammar.words), dtype=torch.int32)
        self._free = grammar.end is not None
        self._matched = 0  # bytes of the unconstrained section's end so far
        self._after_lead = False  # the constrained text ends with the first byte of a surrogate
        # before each token: unconstrained, bytes of the end matched, after a lead; steps of the matcher
        self._done: list[tuple[bool, int, bool, int]] = []

    def fill(self, row: Tensor) -> None:
        """Fill row [W] int32: bit t % 32 of word t // 32 is set if token t may follow."""
        if self._free:
            row.copy_(self._grammar.free_mask(self._matched, self._matcher))
        elif self._matcher.is_terminated():
            row.zero_()
            view = row.numpy().view(np.uint32)
            for token in self._grammar.stops:
                view[token // 32] |= np.uint32(1 << token % 32)
        else:
            # into a separate row: the matcher ignores strides
            self._matcher.fill_next_token_bitmask(self._row)
            row.copy_(self._row[0])
            self._grammar.forbid(row, self._after_lead)

    def accept(self, token: int) -> bool:
        """Advance by a token; return False and change nothing if it may not follow."""
        before = self._free, self._matched, self._after_lead
        grammar, steps = self._grammar, 0
        if self._free:
            assert grammar.end is not None
            matched, rest = grammar.end.advance(self._matched, token)
            if rest:
                if SURROGATE.search(rest) or not self._matcher.accept_string(rest):
                    return False
                steps = 1
            self._matched, self._free = matched, rest is None
        elif not self._matcher.is_terminated():
            forbidden = grammar.forbidden_after_lead if self._after_lead else grammar.forbidden
            if token in forbidden or not self._matcher.accept_token(token):
                return False
            steps = 1
        elif token not in grammar.stops:
            return False
        self._after_lead = bool(steps) and token in grammar.leads
        self._done.append((*before, steps))
        return True

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        steps = 0
        for _ in range(count):
            self._free, self._matched, self._after_lead, more = self._done.pop()
            steps += more
        if steps:
            self._matcher.rollback(steps)
