"""E-processes: valid at any stopping time, powerful against bias, conditional on the end token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof.audit.client.answer import Position
from draftproof.audit.stats.bernoulli import (
    DRAFT_ALTERNATIVES,
    PROBABILITY_MARGIN,
    TOP1_ALTERNATIVES,
    BernoulliTest,
    BoundedTest,
    log_ratios,
)
from draftproof.audit.stats.categories import CategoryTest
from draftproof.audit.stats.detectable import smallest_bias
from draftproof.audit.stats.error_rate import ERROR_RATE, WEIGHTS, log_threshold
from draftproof.audit.stats.reported_distributions import is_end_token, listed
from draftproof.audit.stats.rows import Rows, rows

PROBABILITIES = st.floats(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)


def text_probs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return top-1 probabilities like those of text: half of them near 1."""
    sharp = rng.random(count) < 0.45
    return np.clip(np.where(sharp, rng.beta(8, 0.6, count), rng.beta(1.6, 2, count)), 0.02, 0.999)


def events(positions: list[Position], top_count: int, prompt: str = "") -> Rows:
    """Return the events of an answer."""
    return rows(positions, listed(positions, top_count), prompt)


@given(PROBABILITIES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_expectation_of_every_ratio_is_one(prob: float) -> None:
    """Check the martingale property of each alternative at any reported probability."""
    for table in (TOP1_ALTERNATIVES, DRAFT_ALTERNATIVES):
        names = list(table)
        yes = np.exp(log_ratios(np.array([True]), np.array([prob]), names))
        no = np.exp(log_ratios(np.array([False]), np.array([prob]), names))
        np.testing.assert_allclose(prob * yes + (1 - prob) * no, 1.0, rtol=1e-9)


@given(PROBABILITIES, PROBABILITIES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bounded_bets_never_gain_inside_the_bounds(low: float, inside: float) -> None:
    """Check that the mean e-value of one event is at most 1 for any probability between the bounds."""
    lower, upper = min(low, inside), max(low, inside)
    values = []
    for hit in (True, False):
        test = BoundedTest()
        test.update(np.array([hit]), np.array([lower]), np.array([upper]))
        values.append(math.exp(test.log_value))
    for true in (lower, (lower + upper) / 2, upper):
        assert true * values[0] + (1 - true) * values[1] <= 1 + 1e-9


def test_category_ratios_have_expectation_one() -> None:
    """Check the martingale property of the estimated alternative after any history."""
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.ones(7), size=400)
    history = rng.integers(0, 7, size=400)
    expected = 0.0
    for outcome in range(7):
        test = CategoryTest(7)
        test.update(history, probs)
        before = test.log_value
        test.update(np.array([outcome]), probs[:1])
        expected += probs[0, outcome] * math.exp(test.log_value - before)
    assert expected == pytest.approx(1.0)


def test_false_alarms_at_any_time_stay_below_the_rate() -> None:
    """Check Ville's bound for the largest e-value of 600 honest runs at a rate of 5 %."""
    rng = np.random.default_rng(2)
    alarms = 0
    for _ in range(600):
        probs = text_probs(rng, 600)
        test = BernoulliTest(TOP1_ALTERNATIVES)
        test.update(rng.random(600) < probs, probs)
        alarms += test.log_peak >= -math.log(0.05)
    assert alarms <= 0.05 * 600


@pytest.mark.parametrize(("bias", "tokens"), [(0.03, 5_000), (0.01, 40_000), (-0.03, 8_000)])
def test_bias_is_found_within_its_budget(bias: float, tokens: int) -> None:
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(12):
        probs = text_probs(rng, tokens)
        test = BernoulliTest(TOP1_ALTERNATIVES)
        test.update(rng.random(tokens) < np.clip(probs + bias, 0, 1), probs)
        found += test.log_peak >= log_threshold("top1")
    assert found >= 12


def test_smallest_bias_shrinks_with_tokens_and_is_found() -> None:
    """Check that a reported smallest bias is found in about nine of ten runs."""
    rng = np.random.default_rng(4)
    sizes = [
        smallest_bias(text_probs(rng, n), TOP1_ALTERNATIVES, log_threshold("top1"))
        for n in (1000, 4000, 16_000)
    ]
    assert sizes[0] and sizes[1] and sizes[2] and sizes[0] > sizes[1] > sizes[2] > 0.005
    found = 0
    for _ in range(30):
        probs = text_probs(rng, 4000)
        test = BernoulliTest(TOP1_ALTERNATIVES)
        test.update(rng.random(4000) < np.minimum(probs + sizes[1], 1), probs)
        found += test.log_peak >= log_threshold("top1")
    assert found >= 23
    assert smallest_bias(np.array([0.5]), TOP1_ALTERNATIVES, log_threshold("top1")) is None


def test_thresholds_share_one_error_rate() -> None:
    assert sum(math.exp(-log_threshold(test)) for test in WEIGHTS) == pytest.approx(ERROR_RATE)


def test_probabilities_are_conditional_on_no_end_token() -> None:
    """Check that a hidden end token does not bias the events that are shown."""
    top = (("<|im_end|>", math.log(0.5)), (" a", math.log(0.3)), (" b", math.log(0.1)))
    made = events([Position(" a", math.log(0.3), top), Position("<|im_end|>", math.log(0.5), top)], 3)
    assert made.top1_probs == pytest.approx([0.6]) and made.is_top1.tolist() == [True]
    assert made.rank_probs[0] == pytest.approx([0.6, 0.2, 0, 0, 0, 0, 0.2])
    assert is_end_token("</s>") and is_end_token("") and not is_end_token(" a")


def test_equal_texts_are_separated_by_logprob() -> None:
    """Check that a token with the text of another one is not counted as that one."""
    top = (("\ufffd", math.log(0.6)), (" a", math.log(0.2)))
    assert events([Position("\ufffd", math.log(0.01), top)], 2).ranks.tolist() == [6]
    assert events([Position("\ufffd", math.log(0.6), top)], 2).ranks.tolist() == [0]


def test_ngram_lookup_finds_the_draft() -> None:
    """Check that the token after the last occurrence of the n-gram is the draft, if it is listed."""
    top = ((" x", math.log(0.5)), (" d", math.log(0.3)))
    tokens = [" a", " b", " c", " x"]
    positions = [Position(token, math.log(0.5), ((token, math.log(0.5)),)) for token in tokens[:3]]
    made = events([*positions, Position(" x", math.log(0.5), top)], 2, prompt="a b c d a b c d")
    assert made.draft_probs == pytest.approx([0.3]) and made.is_draft.tolist() == [False]
