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
    tilt,
)
from draftproof.audit.stats.categories import CategoryTest
from draftproof.audit.stats.detectable import smallest_bias
from draftproof.audit.stats.error_rate import log_threshold
from draftproof.audit.stats.rows import DECILES, RANK_ENDS, Rows, rows

MIN_RANK_ENTRIES = 3  # listed tokens that the tests of ranks and deciles need
SERIAL_ALTERNATIVES = {tilt(0.3): 0.25, tilt(1.0): 0.25, tilt(2.5): 0.25, tilt(-0.5): 0.25}

TITLES = {
    "top1": "the sampled token is the top-1 token with its reported probability",
    "ranks": "ranks 1 to 20 are sampled with their reported probabilities",
    "deciles": "tokens are sampled alike in each tenth of reported probability",
    "serial": "each position is sampled independently of the one before",
    "serial_chunks": "each position of a stream event is sampled independently of the one before",
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
            "serial": BernoulliTest(SERIAL_ALTERNATIVES),
            "serial_chunks": BernoulliTest(SERIAL_ALTERNATIVES),
        }
        self._categories = {"ranks": CategoryTest(len(RANK_ENDS) + 1), "deciles": CategoryTest(DECILES)}
        self._repeats = BoundedTest()
        self._top1_probs: list[np.ndarray] = []

    def add(self, answer: Answer, prompt: str) -> Rows:
        """Add the tokens of one answer at temperature 1."""
        made = rows(answer.positions, self.top_count, prompt)
        self.add_rows(made)
        return made

    def add_rows(self, made: Rows) -> None:
        """Add the events of one answer."""
        self.tokens += len(made.top1_probs)
        self._top1_probs.append(made.top1_probs)
        self._bernoulli["top1"].update(made.is_top1, made.top1_probs)
        later = made.places > 0
        self._bernoulli["chunks"].update(made.is_top1[later], made.top1_probs[later])
        self._bernoulli["drafts"].update(made.is_draft, made.draft_probs)
        again = made.follows
        before = np.roll(made.is_top1, 1)
        chance = np.where(before, made.top1_probs, 1 - made.top1_probs)
        for name, events in (("serial", again), ("serial_chunks", again & later)):
            self._bernoulli[name].update((made.is_top1 == before)[events], chance[events])
        if self.top_count >= MIN_RANK_ENTRIES:
            self._categories["ranks"].update(made.ranks, made.rank_probs)
            self._categories["deciles"].update(made.deciles, made.decile_probs)

    def add_pair(self, first: Answer, second: Answer, first_rows: Rows, second_rows: Rows) -> None:
        """Compare two answers to one prompt up to their first difference."""
        bounds, other = first_rows.square_sums, second_rows.square_sums
        agreed, lower, upper = [], [], []
        for number, (a, b) in enumerate(zip(first.positions, second.positions, strict=False)):
            if number in bounds and number in other:
                agreed.append(a.token == b.token)
                lower.append(bounds[number][0])
                upper.append(bounds[number][1])
            if a.token != b.token:
                break
        self._repeats.update(np.array(agreed, dtype=bool), np.array(lower), np.array(upper))

    def statistics(self) -> list[Statistic]:
        """Return the state of every test that has events."""
        found = []
        for name, test in self._bernoulli.items():
            bias = None
            if name == "top1" and self._top1_probs:
                probs = np.concatenate(self._top1_probs)
                bias = smallest_bias(probs, TOP1_ALTERNATIVES, log_threshold(name))
            found.append(Statistic(name, test.log_value, test.log_peak, test.events, bias))
        for name, category in self._categories.items():
            found.append(Statistic(name, category.log_value, category.log_peak, category.events))
        pairs = self._repeats
        found.append(Statistic("repeats", pairs.log_value, pairs.log_peak, pairs.events))
        return [statistic for statistic in found if statistic.events]

    def rejected(self) -> Sequence[str]:
        """Return the tests that reject so far."""
        tests: dict[str, BernoulliTest | CategoryTest | BoundedTest] = {
            **self._bernoulli,
            **self._categories,
            "repeats": self._repeats,
        }
        return [name for name, test in tests.items() if test.log_peak >= log_threshold(name)]

    def category(self, name: str) -> CategoryTest:
        """Return observed and expected counts of ranks or deciles."""
        return self._categories[name]
