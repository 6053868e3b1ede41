"""E-process of noise that several positions share.

A sampler that inverts the cumulative distribution maps one uniform number to a token. The reported
probabilities show the span of that number: between the mass before the token and the mass up to it. The
order of the tokens is that of the probabilities or that of the token ids. If the number of an earlier
position is used again, the spans of both positions overlap. A sampler with noise for each token is tested
by `stats/gumbel_reuse.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftproof.audit.client.answer import Position
from draftproof.audit.stats.array_types import Bools, Floats, Ints
from draftproof.audit.stats.gumbel_reuse import RACE_LAGS, race_ratios
from draftproof.audit.stats.reported_distributions import Listed

LAGS = 8
REUSED_SHARES = np.array([0.1, 0.4, 0.9])  # of positions that use the noise of the earlier one
SHARE_WEIGHTS = (0.2, 0.3, 0.5)
SAMPLERS = 3  # in the order of ranks, in the order of ids, and a race
SPAN_MARGIN = 0.02  # of a number whose span is not exact, since some tokens are not listed
SMALLEST_SPAN = 1e-12
UNKNOWN = -1


class Numbers(dict[str, int]):
    """Numbers of texts in the order of their first use."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


class Vocabulary:
    """Numbers of token texts, and the token ids that sampled tokens had."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._ids: dict[int, int] = {}

    def numbers(self, positions: Sequence[Position], found: Listed) -> Ints:
        """Return the number of each listed text, [N, K]; UNKNOWN for empty places."""
        made, width = np.full(found.probs.shape, UNKNOWN), found.probs.shape[1]
        for row, number in enumerate(found.numbers):
            texts = [text for text, _ in positions[number].top[:width]]
            made[row, : len(texts)] = [*map(self._numbers.__getitem__, texts)]
        return made

    def ids(self, positions: Sequence[Position], found: Listed, numbers: Ints) -> Ints:
        """Return the token id of each entry, reported or known from earlier answers, [N, K]."""
        known = np.full(len(self._numbers) + 1, UNKNOWN)  # the last is that of empty places
        for number, token_id in self._ids.items():
            known[number] = token_id
        made = known[numbers]
        for row, number in enumerate(found.numbers):
            given = positions[number].top_ids[: made.shape[1]]
            if given and None not in given:
                made[row, : len(given)] = given
        return made

    def learn(self, positions: Sequence[Position]) -> None:
        """Store the ids of the sampled tokens of an answer."""
        for position in positions:
            number = self._numbers.get(position.token)
            if number is not None and position.token_id is not None:
                self._ids[number] = position.token_id


@dataclass
class Noise:
    """What an answer's P positions show about their noise; NaN where there is no event."""

    rank_spans: Floats  # [P, 2] tokens in the order of their probability
    id_spans: Floats  # [P, 2] tokens in the order of their ids
    race_ratios: Floats  # [P, RACE_LAGS] likelihood ratio of the race with the noise of an earlier position
    places: Ints  # [P] index in the stream event


def noise(positions: Sequence[Position], found: Listed, vocabulary: Vocabulary) -> Noise:
    """Return the spans of an answer. `vocabulary` holds what earlier answers showed."""
    numbers = vocabulary.numbers(positions, found)
    ids = vocabulary.ids(positions, found, numbers)
    made = Noise(
        np.full((len(positions), 2), np.nan),
        np.full((len(positions), 2), np.nan),
        np.full((len(positions), RACE_LAGS), np.nan),
        np.array([position.chunk_place for position in positions], dtype=int),
    )
    made.rank_spans[found.numbers] = _rank_spans(found)
    made.id_spans[found.numbers] = _id_spans(found, ids)
    made.race_ratios[found.numbers] = race_ratios(found, numbers)
    return made


def _rank_spans(found: Listed) -> Floats:
    """Return spans with the most likely token first and tokens that are not listed last, [N, 2]."""
    sums = np.cumsum(found.probs, axis=1)  # [N, K]
    sums /= np.maximum(1.0, sums[:, -1:])
    padded = np.concatenate([np.zeros((len(sums), 1)), sums, np.ones((len(sums), 1))], axis=1)  # [N, K + 2]
    index, place = np.arange(len(sums)), np.where(found.sampled < 0, sums.shape[1], found.sampled)
    return np.stack([padded[index, place], padded[index, place + 1]], axis=1)


def _id_spans(found: Listed, ids: Ints) -> Floats:
    """Return spans in the order of ids, [N, 2]. Probabilities are conditional on tokens whose id is known."""
    is_known = (ids != UNKNOWN) & ~found.ends
    probs = np.where(is_known, found.probs, 0.0)
    order = np.argsort(ids, axis=1, kind="stable")
    sums = np.empty_like(probs)  # [N, K] mass up to each token
    np.put_along_axis(sums, order, np.cumsum(np.take_along_axis(probs, order, axis=1), axis=1), axis=1)
    total = np.maximum(probs.sum(axis=1), SMALLEST_SPAN)
    index = np.arange(len(probs))
    spans = np.stack([sums - probs, sums], axis=2)[index, found.sampled] / total[:, None]
    is_event = (found.sampled >= 0) & is_known[index, found.sampled]
    return np.where(is_event[:, None], spans, np.nan)


class ReuseTest:
    """Weighted mean of likelihood ratio products over samplers, lags and shares of reused noise.

    If a share s of positions uses the number of an earlier one, the density of the number at its span is
    1 - s, and s / width more inside the earlier span. The mean of this density over the span of each token
    is its likelihood ratio. Its expectation under the reported probabilities is 1.
    """

    def __init__(self, is_inside_chunks: bool) -> None:
        self._is_inside_chunks = is_inside_chunks  # positions of one stream event alone
        lag_weights = 1 / np.arange(1, LAGS + 1)
        race_weights = lag_weights[:RACE_LAGS]
        weights = np.concatenate(
            [*[lag_weights / lag_weights.sum() / SAMPLERS] * 2, race_weights / race_weights.sum() / SAMPLERS]
        )
        self._log_values = np.log(np.outer(weights, SHARE_WEIGHTS).ravel())  # [A]
        self.log_peak = 0.0
        self.events = 0

    @property
    def log_value(self) -> float:
        """Return the logarithm of the e-value now."""
        return float(np.logaddexp.reduce(self._log_values))

    def update(self, found: Noise) -> None:
        """Add the positions of one answer in their order."""
        if not len(found.places):
            return
        lags = [*range(1, LAGS + 1)] * 2 + [*range(1, RACE_LAGS + 1)]
        gains = [
            _overlap(spans, lag) for spans in (found.rank_spans, found.id_spans) for lag in range(1, LAGS + 1)
        ]
        ratios = np.concatenate(
            [np.stack(gains, axis=1), found.race_ratios], axis=1
        )  # [P, samplers and lags]
        is_event: Bools = ~np.isnan(ratios)
        if self._is_inside_chunks:
            is_event &= found.places[:, None] >= np.array(lags)
        mixed = 1 - REUSED_SHARES + REUSED_SHARES * np.where(is_event, ratios, 1.0)[:, :, None]
        path = self._log_values + np.cumsum(np.log(mixed).reshape(len(ratios), -1), axis=0)  # [P, A]
        self._log_values = path[-1]
        self.log_peak = max(self.log_peak, float(np.logaddexp.reduce(path, axis=1).max()))
        self.events += int(is_event.any(axis=1).sum())


def _overlap(spans: Floats, lag: int) -> Floats:
    """Return the likelihood ratio of a number inside the span of an earlier one, [P]; NaN without a pair."""
    before = np.full_like(spans, np.nan)
    before[lag:] = spans[:-lag]
    low, high = np.maximum(0, before[:, 0] - SPAN_MARGIN), np.minimum(1, before[:, 1] + SPAN_MARGIN)
    shared = np.minimum(spans[:, 1], high) - np.maximum(spans[:, 0], low)
    width = np.maximum(spans[:, 1] - spans[:, 0], SMALLEST_SPAN)
    gain: Floats = np.maximum(0.0, shared) / (width * (high - low))
    return gain
