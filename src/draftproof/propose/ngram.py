"""ngram: repeat what followed the last n tokens, the longest n first.

Prompt and output are one sequence, so a match may straddle the boundary between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.propose import Proposer, ProposerEnv, ngram_sizes
from draftproof.propose.history import History
from draftproof.types import Draft, ProposeBatch, Request


class NgramProposer(Proposer):
    sources = ("ngram",)
    defaults = {"prompt_lookup_min": None, "prompt_lookup_max": None}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self.smallest, self.largest = ngram_sizes(self.options)
        self._history: dict[int, History] = {}

    def start(self, slot: int, request: Request) -> None:
        self._history[slot] = History(self.smallest, self.largest)

    def propose(self, batch: ProposeBatch) -> Draft:
        guesses: list[list[int]] = []
        for slot, budget, length in zip(batch.slots, batch.budget, batch.lengths, strict=True):
            history = self._history[slot]
            if budget == 0:  # catch up only when it matters: a long prefill is indexed once
                guesses.append([])
                continue
            known = len(history.tokens)
            history.extend(batch.columns.tokens[slot, known:length].tolist())
            at = history.find(history.tokens[-self.largest :])
            guesses.append([] if at is None else history.continuation(at, budget))
        return Draft.of(guesses, self.env.k)

    def stop(self, slot: int) -> None:
        self._history.pop(slot, None)
