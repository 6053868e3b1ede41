"""The statistical tests that share the sampled tokens of an audit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftproof.audit.client.answer import Answer
from draftproof.audit.stats.bernoulli import (
    DRAFT_ALTERNATIVES,
    TOP1_ALTERNATIVES,
    BernoulliTest,
    BoundedTest,
)
from draftproof.audit.stats.categories import CategoryTest
from draftproof.audit.stats.detectable import smallest_bias
from draftproof.audit.stats.error_rate import log_threshold
from draftproof.audit.stats.reported_distributions import listed
from draftproof.audit.stats.reuse import ReuseTest, Vocabulary, noise
from draftproof.audit.stats.rows import DECILES, RANK_ENDS, Rows, rows

MIN_RANK_ENTRIES = 3  # listed tokens that the tests of ranks and deciles need

TITLES = {
    "top1": "the sampled token is the top-1 token with its reported probability",
    "ranks": "ranks 1 to 20 are sampled with their reported probabilities",
    "deciles": "tokens are sampled alike in each tenth of reported probability",
    "reuse": "no position is sampled with the noise of one of the 8 before",
    "reuse_chunks": "no position is sampled with the noise of another one of its stream event",
    "drafts": "tokens that an n-gram lookup would draft are sampled with their reported probability",
    "chunks": "later tokens of a stream event are sampled with their reported probability",
    "repeats": "two answers to one prompt agree as often as their probabilities imply",
}


@dataclass(frozen=True)
class Statistic:
    """State of one sequential test."""

    test: str
    log_value: float
    log_peak: float
    events: int
    smallest_bias: float | None = None

    @property
    def is_rejected(self) -> bool:
        """Return whether the null hypothesis is rejected at its share of the error rate."""
        return self.log_peak >= log_threshold(self.test)

    @property
    def e_value(self) -> float:
        """Return the largest e-value so far, bounded for printing."""
        return math.exp(min(self.log_peak, 690.0))

    @property
    def p_value(self) -> float:
        """Return a p-value that is valid at any stopping time."""
        return min(1.0, math.exp(-self.log_peak))


class TokenTests:
    """All e-processes over the sampled tokens, in the order of the requests."""

    def __init__(self, top_count: int) -> None:
        self.top_count = top_count
        self.tokens = 0
        self._bernoulli = {
            "top1": BernoulliTest(TOP1_ALTERNATIVES),
            "chunks": BernoulliTest(TOP1_ALTERNATIVES),
            "drafts": BernoulliTest(DRAFT_ALTERNATIVES),
        }
        self._categories = {"ranks": CategoryTest(len(RANK_ENDS) + 1), "deciles": CategoryTest(DECILES)}
        self.reuse = {"reuse": ReuseTest(False), "reuse_chunks": ReuseTest(True)}
        self._repeats = BoundedTest()
        self.vocabulary = Vocabulary()
        self._top1_probs: list[np.ndarray] = []

    def add(self, answer: Answer, prompt: str) -> Rows:
        """Add the tokens of one answer at temperature 1."""
        found = listed(answer.positions, self.top_count)
        made = rows(answer.positions, found, prompt)
        self._add_rows(made)
        spans = noise(answer.positions, found, self.vocabulary)
        for test in self.reuse.values():
            test.update(spans)
        # used from the next answer on: an order of tokens must not depend on what is sampled in it
        self.vocabulary.learn(answer.positions)
        return made

    def _add_rows(self, made: Rows) -> None:
        """Add the events of one answer."""
        self.tokens += len(made.top1_probs)
        self._top1_probs.append(made.top1_probs)
        self._bernoulli["top1"].update(made.is_top1, made.top1_probs)
        later = made.places > 0
        self._bernoulli["chunks"].update(made.is_top1[later], made.top1_probs[later])
        self._bernoulli["drafts"].update(made.is_draft, made.draft_probs)
        if self.top_count >= MIN_RANK_ENTRIES:
            self._categories["ranks"].update(made.ranks, made.rank_probs)
            self._categories["deciles"].update(made.deciles, made.decile_probs)

    def add_pair(self, first: Answer, second: Answer, first_rows: Rows, second_rows: Rows) -> None:
        """Compare two answers to one prompt up to their first difference."""
        bounds, other = first_rows.square_sums, second_rows.square_sums
        agreed, lower, upper = [], [], []
        for number, (a, b) in enumerate(zip(first.positions, second.positions, strict=False)):
            has_ids = a.token_id is not None and b.token_id is not None
            is_same = a.token_id == b.token_id if has_ids else a.token == b.token
            if number in bounds and number in other:
                agreed.append(is_same)
                lower.append(bounds[number][0])
                upper.append(bounds[number][1 if has_ids else 2])
            if not is_same or (a.has_bytes and not has_ids):
                break
        self._repeats.update(np.array(agreed, dtype=bool), np.array(lower), np.array(upper))

    def statistics(self) -> list[Statistic]:
        """Return the state of every test that has events."""
        found = []
        for name, test in self._all().items():
            bias = None
            if name == "top1" and self._top1_probs:
                probs = np.concatenate(self._top1_probs)
                bias = smallest_bias(probs, TOP1_ALTERNATIVES, log_threshold(name))
            if test.events:
                found.append(Statistic(name, test.log_value, test.log_peak, test.events, bias))
        return found

    def rejected(self) -> Sequence[str]:
        """Return the tests that reject so far."""
        return [name for name, test in self._all().items() if test.log_peak >= log_threshold(name)]

    def _all(self) -> dict[str, BernoulliTest | CategoryTest | ReuseTest | BoundedTest]:
        """Return every e-process by name."""
        return {**self._bernoulli, **self._categories, **self.reuse, "repeats": self._repeats}

    def category(self, name: str) -> CategoryTest:
        """Return observed and expected counts of ranks or deciles."""
        return self._categories[name]
