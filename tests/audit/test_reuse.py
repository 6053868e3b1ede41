"""Noise that positions share: exact likelihoods, e-values with mean 1, shared noise found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftproof.audit.client.answer import Position
from draftproof.audit.probes.token_tests import TokenTests
from draftproof.audit.stats.gumbel_reuse import race
from draftproof.audit.stats.reported_distributions import listed
from draftproof.audit.stats.reuse import ReuseTest, Vocabulary, noise

FIRST = {" a": 0.5, " b": 0.2, " c": 0.2, "</s>": 0.05}
SECOND = {" c": 0.4, " a": 0.3, "\ufffd": 0.1, "</s>": 0.1}
IDS = {" a": 7, " b": 3, " c": 5, "\ufffd": 9, "</s>": 0}


def position(token: str, prob: float, row: dict[str, float], place: int, twice: bool = False) -> Position:
    """Return a position with the list of a row; `twice`: another token has the text of the first."""
    top = [(text, math.log(p)) for text, p in row.items()]
    if twice:
        top.insert(1, (next(iter(row)), math.log(0.05)))
    ids = tuple(IDS[text] for text, _ in top)
    return Position(token, math.log(prob), tuple(top), IDS.get(token), ids, chunk_place=place)


@pytest.mark.parametrize("is_inside_chunks", [False, True])
@pytest.mark.parametrize("first", [" a", " b", " z"])
def test_mean_of_the_e_value_is_one(is_inside_chunks: bool, first: str) -> None:
    """Check that no order, race, list with equal texts or hidden token changes the mean of the e-value."""
    mean, mass = 0.0, 0.0
    outcomes = [(text, prob) for text, prob in SECOND.items() if text != "</s>"]
    outcomes += [(" c", 0.05), (" z", 1 - sum(SECOND.values()) - 0.05)]  # a second " c", and not listed
    for token, prob in outcomes:
        before = position(first, FIRST.get(first, 0.05), FIRST, 0)
        positions = [before, position(token, prob, SECOND, 1, twice=True)]
        test = ReuseTest(is_inside_chunks)
        test.update(noise(positions, listed(positions, 5), Vocabulary()))
        mean, mass = mean + prob * math.exp(test.log_value), mass + prob
    assert mass == pytest.approx(0.9) and mean / mass == pytest.approx(1.0)


def test_race_equals_exponential_clocks() -> None:
    """Compare with a simulation of two races with the same clocks."""
    rng = np.random.default_rng(1)
    now, before = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    clocks = rng.exponential(size=(60_000, 5))
    winners, again = np.argmin(clocks / before, axis=1), np.argmin(clocks / now, axis=1)
    for winner in range(5):
        found = race(now[None], before[None], np.arange(5)[None] == winner)[0] * now
        counts = np.bincount(again[winners == winner], minlength=5)
        assert found.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(found, counts / counts.sum(), atol=5 / math.sqrt(counts.sum()))


def sampled(rng: np.random.Generator, sampler: str, is_shared: bool) -> TokenTests:
    """Test tokens of random rows in windows of three; ids are known from the sampled tokens alone."""
    tests, vocab = TokenTests(8), 12
    order = rng.permutation(vocab)  # token ids
    for _ in range(24):
        positions = []
        for number in range(90):
            probs = rng.dirichlet(np.full(vocab, 0.4))
            if number % 3 == 0 or not is_shared:
                number_drawn, clocks = rng.random(), rng.exponential(size=vocab)
            ranks = np.argsort(-probs)
            if sampler == "race":
                chosen = int(np.argmin(clocks / probs))
            else:
                line = ranks if sampler == "ranks" else np.argsort(order)
                place = np.searchsorted(np.cumsum(probs[line]), number_drawn)
                chosen = int(line[min(place, vocab - 1)])
            top = tuple((f" t{i}", math.log(probs[i])) for i in ranks[:8])
            token_id = int(order[chosen])
            place = number % 3
            positions.append(Position(f" t{chosen}", math.log(probs[chosen]), top, token_id, (), place))
        found = listed(positions, 8)
        for test in tests.reuse.values():
            test.update(noise(positions, found, tests.vocabulary))
        tests.vocabulary.learn(positions)
    return tests


@pytest.mark.parametrize("sampler", ["ranks", "ids", "race"])
def test_shared_noise_is_found_and_fresh_noise_is_not(sampler: str) -> None:
    rng = np.random.default_rng(2)
    assert set(sampled(rng, sampler, is_shared=True).rejected()) == {"reuse", "reuse_chunks"}
    assert not sampled(rng, sampler, is_shared=False).rejected()
