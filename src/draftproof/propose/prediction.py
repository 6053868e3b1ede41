"""given: drafts from a text that the caller predicts, found again after the output leaves it.

While the output follows the prediction, the next tokens of it are drafted. After a divergence the last
tokens of the output are looked up in the prediction, longest match first and the nearest place after
where the output left it, so that an edited file is picked up again behind the edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftproof.propose import Proposer, ProposerEnv, ngram_sizes
from draftproof.types import Draft, ProposeBatch, Request


class GivenProposer(Proposer):
    sources = ("given",)
    cheap = True
    takes_prediction = True
    defaults = {"prompt_lookup_min": None, "prompt_lookup_max": None}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.smallest, self.largest = ngram_sizes(self.options)
        self._cursors: dict[int, _Cursor] = {}

    def start(self, slot: int, request: Request) -> None:
        if request.prediction_ids:
            self._cursors[slot] = _Cursor(
                request.prediction_ids,
                len(request.prompt_token_ids),
                self.smallest,
                self.largest,
            )

    def propose(self, batch: ProposeBatch) -> Draft:
        guesses: list[list[int]] = []
        for slot, budget, length in zip(batch.slots, batch.budget, batch.lengths, strict=True):
            cursor = self._cursors.get(slot)
            if cursor is None or budget == 0:
                guesses.append([])
                continue
            cursor.follow(batch.columns.tokens[slot, cursor.seen : length].tolist())
            guesses.append(cursor.ahead(budget))
        return Draft.from_lists(guesses, self.env.k)

    def stop(self, slot: int) -> None:
        self._cursors.pop(slot, None)


class _Cursor:
    """Where in a prediction the output stands. It is searched as it is: to index it first would keep all
    others waiting when its request comes."""

    def __init__(self, prediction: Sequence[int], start: int, smallest: int, largest: int) -> None:
        self.prediction = np.array(prediction, np.int64)
        self.seen = start  # committed tokens followed so far, prompt included
        self.at: int | None = 0  # the next token expected is prediction[at]; None = lost
        self.left = 0  # where the output left the prediction
        self.tail: list[int] = []  # the last `largest` tokens of the output
        self.smallest, self.largest = smallest, largest

    def follow(self, tokens: list[int]) -> None:
        self.seen += len(tokens)
        for token in tokens:
            self.tail = [*self.tail, token][-self.largest :]
            if self.at is not None and self.at < len(self.prediction):
                if self.prediction[self.at] == token:
                    self.at += 1
                    continue
                self.left = self.at
            self.at = self._find()

    def ahead(self, count: int) -> list[int]:
        drafts: list[int] = [] if self.at is None else self.prediction[self.at : self.at + count].tolist()
        return drafts

    def _find(self) -> int | None:
        """Behind the longest match of the last tokens."""
        places = np.flatnonzero(self.prediction[:-1] == self.tail[-1]) + 1
        size, longer = 1, places
        while size < len(self.tail) and len(longer):
            longer = longer[longer > size]
            longer = longer[self.prediction[longer - size - 1] == self.tail[-size - 1]]
            if len(longer):
                size, places = size + 1, longer
        if size < self.smallest or not len(places):
            return None
        later = places[places >= self.left]
        return int(later[0] if len(later) else places[-1])
