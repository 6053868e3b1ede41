"""Events of simulated answers without HTTP, for many repetitions of the statistical tests."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from draftproof.audit.client.answer import Position
from draftproof.audit.stats.rows import NGRAM_TOKENS, Rows, rows
from draftproof.audit.stub.model import END_ID, StubModel

TOP_COUNT = 20
COLUMNS = ("top1_probs", "is_top1", "rank_probs", "ranks", "decile_probs", "deciles")


class RowTable:
    """Events by row of a stub model, as the audit computes them from logprobs."""

    def __init__(self, model: StubModel) -> None:
        self.vocab, self._row_index = model.vocab, model.row_index
        self.probs = np.exp([row.logprobs for row in model.rows])  # [R, V]
        self.top1 = np.array([row.order[0] for row in model.rows])  # [R]
        self._listed = [set(row.order[:TOP_COUNT]) for row in model.rows]
        made = []
        for row in model.rows:
            top = tuple((model.words[i], row.logprobs[i]) for i in row.order[:TOP_COUNT])
            positions = [Position(model.words[i], row.logprobs[i], top) for i in range(self.vocab)]
            made.append(rows(positions, TOP_COUNT))  # one event for each token but the end
        self._tables = {name: np.stack([getattr(found, name) for found in made]) for name in COLUMNS}
        self._sums: dict[float, list[list[float]]] = {}

    def answer(self, rng: np.random.Generator, length: int, bias: float) -> Rows:
        """Return the events of one answer; `bias` is added to the probability of the top-1 token."""
        if bias not in self._sums:
            self._sums[bias] = np.cumsum(self._biased(bias), axis=1).tolist()
        sums, states, tokens = self._sums[bias], [], [int(rng.integers(1, self.vocab))]
        for number in rng.random(length).tolist():
            state = self._row_index(tokens)
            token = min(bisect_right(sums[state], number * sums[state][-1]), self.vocab - 1)
            if token == END_ID:
                break
            states.append(state)
            tokens.append(token)
        return self._rows(states, tokens[1:])

    def _biased(self, bias: float) -> np.ndarray:
        """Return the distributions with a bias, [R, V]."""
        probs, index = self.probs.copy(), np.arange(len(self.probs))
        before = probs[index, self.top1]
        after = np.minimum(1.0, before + bias)
        probs *= ((1 - after) / (1 - before))[:, None]
        probs[index, self.top1] = after
        return probs

    def _rows(self, states: list[int], tokens: list[int]) -> Rows:
        """Return the events of tokens after states."""
        draft_probs, is_draft = [], []
        last_place: dict[tuple[int, ...], int] = {}
        for i in range(NGRAM_TOKENS, len(tokens)):
            key = tuple(tokens[i - NGRAM_TOKENS : i])
            if key in last_place and tokens[last_place[key]] in self._listed[states[i]]:
                draft = tokens[last_place[key]]
                draft_probs.append(self.probs[states[i], draft] / (1 - self.probs[states[i], END_ID]))
                is_draft.append(draft == tokens[i])
            last_place[key] = i
        where = (np.array(states, dtype=int), np.array(tokens, dtype=int) - 1)
        columns = {name: table[where] for name, table in self._tables.items()}
        count = len(tokens)
        return Rows(
            **columns,
            follows=np.arange(count) > 0,
            places=np.arange(count) % 3,  # in stream events
            draft_probs=np.array(draft_probs, dtype=float),
            is_draft=np.array(is_draft, dtype=bool),
            square_sums={},
        )
