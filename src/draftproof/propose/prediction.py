"""Drafts from the text that the caller predicts: by the proposer `given`, and beside any other proposer.

While the output follows the prediction, its next tokens are drafted. After a divergence the last tokens of
the output are searched in the prediction, longest match first and the nearest position behind the divergence,
so that an edited file is found again behind the edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftproof.propose.base import Proposer, ProposerEnv
from draftproof.propose.ngram import MATCH_OPTIONS, match_lengths
from draftproof.types import PREDICTION_SOURCE, Draft, ProposeBatch, Request, SlotColumns


class GivenProposer(Proposer):
    """Drafts from the prediction of each request, on the host."""

    sources = (PREDICTION_SOURCE,)
    is_free = True
    takes_prediction = True
    defaults = MATCH_OPTIONS

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        """Check the match lengths."""
        super().__init__(env, options)
        self._cursors = PredictionCursors(self.options)

    def start(self, slot: int, request: Request) -> None:
        """Place a cursor at the start of the request's prediction."""
        self._cursors.start(slot, request)

    def propose(self, batch: ProposeBatch) -> Draft:
        """Return the tokens behind each cursor."""
        drafts = self._cursors.next_tokens(batch.columns, batch.slots, batch.lengths, batch.budget)
        return Draft.from_lists(drafts, self.env.k)

    def stop(self, slot: int) -> None:
        """Drop the cursor."""
        self._cursors.stop(slot)


class PredictionCursors:
    """Cursors of the requests with a prediction, by slot."""

    def __init__(self, options: Mapping[str, Any] = MATCH_OPTIONS) -> None:
        """Check the match lengths."""
        self.min_match, self.max_match = match_lengths(options)
        self._cursors: dict[int, PredictionCursor] = {}

    def __len__(self) -> int:
        """Return the number of cursors."""
        return len(self._cursors)

    def __contains__(self, slot: int) -> bool:
        """Return whether the request in `slot` has a prediction."""
        return slot in self._cursors

    def start(self, slot: int, request: Request) -> None:
        """Place a cursor at the start of the request's prediction."""
        if request.prediction_ids:
            self._cursors[slot] = PredictionCursor(
                request.prediction_ids,
                start=len(request.prompt_token_ids),
                min_match=self.min_match,
                max_match=self.max_match,
            )

    def next_tokens(
        self, columns: SlotColumns, slots: Sequence[int], lengths: Sequence[int], budgets: Sequence[int]
    ) -> list[list[int]]:
        """Return the tokens behind each cursor, at most `budgets`; lengths: committed tokens."""
        drafts: list[list[int]] = []
        for slot, length, budget in zip(slots, lengths, budgets, strict=True):
            cursor = self._cursors.get(slot)
            if cursor is None or budget == 0:
                drafts.append([])
                continue
            cursor.advance(columns.tokens[slot, cursor.num_seen : length].tolist())
            drafts.append(cursor.next_tokens(budget))
        return drafts

    def stop(self, slot: int) -> None:
        """Drop the cursor."""
        self._cursors.pop(slot, None)


class PredictionCursor:
    """Position of an output in its prediction.

    The prediction is not indexed: that would delay all requests when this one starts.
    """

    def __init__(self, prediction: Sequence[int], start: int, min_match: int, max_match: int) -> None:
        """Begin at the first token; `start`: tokens of the prompt."""
        self.prediction = np.array(prediction, np.int64)
        self.num_seen = start  # committed tokens, prompt included, that the cursor has followed
        self.position: int | None = 0  # prediction[position] is expected next; None: no match
        self.max_match, self.min_match = max_match, min_match
        self._divergence = 0  # position at which the output last left the prediction
        self._tail: list[int] = []  # the last `max_match` tokens of the output

    def advance(self, tokens: list[int]) -> None:
        """Follow committed tokens."""
        self.num_seen += len(tokens)
        for token in tokens:
            self._tail = [*self._tail, token][-self.max_match :]
            if self.position is not None and self.position < len(self.prediction):
                if self.prediction[self.position] == token:
                    self.position += 1
                    continue
                self._divergence = self.position
            self.position = self._find()

    def next_tokens(self, count: int) -> list[int]:
        """Return up to `count` tokens of the prediction."""
        if self.position is None:
            return []
        tokens: list[int] = self.prediction[self.position : self.position + count].tolist()
        return tokens

    def _find(self) -> int | None:
        """Return the position behind the longest match of the last tokens."""
        tail, places = self._tail, np.flatnonzero(self.prediction[:-1] == self._tail[-1]) + 1
        size, longer = 1, places
        while size < len(tail) and len(longer):
            longer = longer[longer > size]
            longer = longer[self.prediction[longer - size - 1] == tail[-size - 1]]
            if len(longer):
                size, places = size + 1, longer
        if size < self.min_match or not len(places):
            return None
        behind = places[places >= self._divergence]
        return int(behind[0] if len(behind) else places[-1])
