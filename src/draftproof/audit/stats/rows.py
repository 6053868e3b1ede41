"""Events of the sampled positions of one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftproof.audit.client.answer import Position, is_partial_text
from draftproof.audit.stats.array_types import Bools, Floats, Ints
from draftproof.audit.stats.reported_distributions import Listed

RANK_ENDS = (1, 2, 3, 5, 10, 20)  # last rank of each category; one more for all later ranks
DECILES = 10
NGRAM_TOKENS = 3
LONGEST_TOKEN_CHARACTERS = 40


@dataclass
class Rows:
    """Events of one answer. N positions with usable logprobs."""

    top1_probs: Floats  # [N]
    is_top1: Bools  # [N]
    rank_probs: Floats  # [N, len(RANK_ENDS) + 1]
    ranks: Ints  # [N]
    decile_probs: Floats  # [N, DECILES]
    deciles: Ints  # [N]
    places: Ints  # [N] index in the stream event
    draft_probs: Floats  # [D]
    is_draft: Bools  # [D]
    # bounds of the sum of squared probabilities by position: least, most by id, most by text
    square_sums: dict[int, tuple[float, float, float]]


def rows(positions: Sequence[Position], found: Listed, prompt: str = "") -> Rows:
    """Return the events of an answer."""
    numbers, probs, ends, sampled = found.numbers, found.probs, found.ends, found.sampled
    index = np.arange(len(numbers))
    rest = np.maximum(0.0, 1 - probs.sum(axis=1))  # [N]
    rank: Ints = np.searchsorted(RANK_ENDS, np.cumsum(~ends, axis=1) - 1, side="right")  # [N, K]
    decile = np.minimum(DECILES - 1, (probs * DECILES).astype(int))  # [N, K]
    is_listed = sampled >= 0
    rank_probs = _sums(probs, rank, len(RANK_ENDS) + 1)
    rank_probs[:, -1] += rest
    # tokens that are not listed are in the lowest tenth
    decile_probs = _sums(probs, decile, DECILES)
    decile_probs[:, 0] += rest
    first = np.argmax(~ends, axis=1)  # [N]
    squares = (probs**2).sum(axis=1)
    smallest = np.where(ends, np.inf, probs).min(axis=1, initial=np.inf)
    # a short list: of tokens with equal texts one is listed, so that others may be more likely
    lengths = np.array([len(positions[number].top) for number in numbers], dtype=int)
    most = np.where(lengths < probs.shape[1], rest, np.minimum(smallest, rest))  # of a token not listed
    largest_squares = np.minimum(1.0, squares + rest * most)
    # parts of characters may all have the same text, and so may all tokens that are not listed
    is_partial = _partial(positions, found)
    unclear = np.where(is_partial, probs, 0).sum(axis=1) + rest
    text_squares = np.minimum(1.0, np.where(is_partial, 0, probs**2).sum(axis=1) + unclear**2)
    bounds = zip(squares, largest_squares, np.maximum(largest_squares, text_squares), strict=True)
    chosen = [positions[number] for number in numbers]
    drafts = _drafts(positions, numbers, ends, prompt)
    has_draft = drafts >= 0
    return Rows(
        np.minimum(probs[index, first], 1.0),
        sampled == first,
        rank_probs,
        np.where(is_listed, rank[index, sampled], len(RANK_ENDS)),
        decile_probs,
        np.where(is_listed, decile[index, sampled], 0),
        np.array([position.chunk_place for position in chosen], dtype=int),
        np.minimum(probs[index, drafts], 1.0)[has_draft],
        (drafts == sampled)[has_draft],
        {n: (float(a), float(b), float(c)) for n, (a, b, c) in zip(numbers, bounds, strict=True)},
    )


def _partial(positions: Sequence[Position], found: Listed) -> Bools:
    """Return which listed tokens are parts of characters, [N, K]."""
    made, width = np.zeros(found.probs.shape, dtype=bool), found.probs.shape[1]
    for row, number in enumerate(found.numbers):
        entries = positions[number].top[:width]
        made[row, : len(entries)] = [is_partial_text(token) for token, _ in entries]
    return made


def _sums(probs: Floats, category: Ints, count: int) -> Floats:
    """Return the probability of each category, [N, count]."""
    return np.stack([np.where(category == i, probs, 0).sum(axis=1) for i in range(count)], axis=1)


def _drafts(positions: Sequence[Position], numbers: list[int], ends: Bools, prompt: str) -> Ints:
    """Return the list index of the token that an n-gram lookup would draft, -1 for none, [N]."""
    found = np.full(len(numbers), -1)
    tokens = [position.token for position in positions]
    row_of = {number: row for row, number in enumerate(numbers)}
    text = prompt
    for number, position in enumerate(positions):
        row = row_of.get(number)
        if row is not None and number >= NGRAM_TOKENS:
            ngram = "".join(tokens[number - NGRAM_TOKENS : number])
            rest = _continuation(text, ngram)
            if rest is not None:
                found[row] = _longest(rest, [token for token, _ in position.top[: ends.shape[1]]], ends[row])
        text += position.token
    return found


def _continuation(text: str, ngram: str) -> str | None:
    """Return the text after the last earlier occurrence of the n-gram, None if there is none."""
    start = text.rfind(ngram, 0, len(text) - 1) if ngram else -1
    return None if start < 0 else text[start + len(ngram) : start + len(ngram) + LONGEST_TOKEN_CHARACTERS]


def _longest(rest: str, tokens: Sequence[str], is_end: Bools) -> int:
    """Return the longest listed token that begins a text, -1 for none.

    It is the draft of an n-gram proposer. It depends on earlier tokens and the reported list alone.
    """
    fitting = [(len(t), i) for i, t in enumerate(tokens) if rest.startswith(t) and not is_end[i]]
    return max(fitting)[1] if fitting else -1
