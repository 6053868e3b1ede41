"""Arrays of the sampled positions of one answer.

A server may leave the token that ends the output out of the logprobs. Positions where that token was
likely and was not sampled would then be over-represented. All probabilities are therefore conditional on
"not an end token", and a sampled end token is no event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from draftproof.audit.client.answer import Position
from draftproof.audit.stats.arrays import Bools, Floats, Ints

RANK_ENDS = (1, 2, 3, 5, 10, 20)  # last rank of each category; one more for all later ranks
DECILES = 10
END_TOKEN = re.compile(r"<[|\uff5c]?[^\s<>]{1,40}>|\[/?[A-Z_]{2,20}\]|")  # special tokens, or no text at all
MATCH_NATS = 0.02  # the sampled token and its entry in the list have the same logprob
NGRAM_TOKENS = 3
LONGEST_TOKEN_CHARACTERS = 40
MAX_END_MASS = 0.999  # a position that is almost surely the end is no event


@dataclass
class Rows:
    """Events of one answer. N positions with usable logprobs."""

    top1_probs: Floats  # [N]
    is_top1: Bools  # [N]
    rank_probs: Floats  # [N, len(RANK_ENDS) + 1]
    ranks: Ints  # [N]
    decile_probs: Floats  # [N, DECILES]
    deciles: Ints  # [N]
    follows: Bools  # [N] the position before is an event too
    places: Ints  # [N] index in the stream event
    draft_probs: Floats  # [D]
    is_draft: Bools  # [D]
    square_sums: dict[int, tuple[float, float]]  # position: bounds of the sum of squared probabilities


@cache
def is_end_token(token: str) -> bool:
    """Return whether a token may end an output."""
    return END_TOKEN.fullmatch(token) is not None


def rows(positions: Sequence[Position], top_count: int, prompt: str = "") -> Rows:
    """Return the events of an answer. `top_count`: entries that were requested for each position."""
    numbers = [i for i, p in enumerate(positions) if p.top and not is_end_token(p.token)]
    values = np.full((len(numbers), top_count), -np.inf)  # [N, K]
    ends = np.ones((len(numbers), top_count), dtype=bool)  # [N, K] end tokens and empty places
    sampled = np.full(len(numbers), -1)  # [N] index in the list, -1 if not listed
    for row, number in enumerate(numbers):
        position = positions[number]
        listed = position.top[:top_count]
        values[row, : len(listed)] = [value for _, value in listed]
        ends[row, : len(listed)] = [is_end_token(token) for token, _ in listed]
        sampled[row] = _sampled_index(position, listed)
    probs = np.exp(values)
    empty = values == -np.inf
    end_mass = np.where(ends, probs, 0).sum(axis=1)
    usable = (end_mass <= MAX_END_MASS) & ~(ends | empty).all(axis=1)
    numbers = [number for number, is_used in zip(numbers, usable, strict=True) if is_used]
    ends, sampled = ends[usable] | empty[usable], sampled[usable]
    probs = np.where(ends, 0, probs[usable]) / (1 - end_mass[usable, None])
    return _events(positions, numbers, probs, ends, sampled, prompt)


def _sampled_index(position: Position, listed: Sequence[tuple[str, float]]) -> int:
    """Return the index of the sampled token, -1 if it is not listed.

    Texts of different tokens may be equal; then the logprob decides.
    """
    for index, (_, value) in enumerate(listed):
        if position.listed_at(index) and abs(value - position.logprob) <= MATCH_NATS:
            return index
    return -1


def _events(
    positions: Sequence[Position], numbers: list[int], probs: Floats, ends: Bools, sampled: Ints, prompt: str
) -> Rows:
    """Return the events of positions `numbers`, with conditional probabilities [N, K]."""
    index = np.arange(len(numbers))
    rest = np.maximum(0.0, 1 - probs.sum(axis=1))  # [N]
    rank = np.searchsorted(RANK_ENDS, np.cumsum(~ends, axis=1) - 1, side="right")  # [N, K]
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
    largest_squares = np.minimum(1.0, squares + rest * np.minimum(smallest, rest))
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
        np.array([i > 0 and numbers[i - 1] == number - 1 for i, number in enumerate(numbers)], dtype=bool),
        np.array([position.chunk_place for position in chosen], dtype=int),
        np.minimum(probs[index, drafts], 1.0)[has_draft],
        (drafts == sampled)[has_draft],
        {n: (float(a), float(b)) for n, a, b in zip(numbers, squares, largest_squares, strict=True)},
    )


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
            listed = [(i, t) for i, (t, _) in enumerate(position.top[: ends.shape[1]]) if not ends[row, i]]
            found[row] = _lookup(text, ngram, listed)
        text += position.token
    return found


def _lookup(text: str, ngram: str, listed: Sequence[tuple[int, str]]) -> int:
    """Return the listed token that continues the last earlier occurrence of the n-gram, -1 for none.

    It is the draft of an n-gram proposer. It depends on earlier tokens and the reported list alone.
    """
    start = text.rfind(ngram, 0, len(text) - 1) if ngram else -1
    if start < 0:
        return -1
    rest = text[start + len(ngram) : start + len(ngram) + LONGEST_TOKEN_CHARACTERS]
    fitting = [(len(token), index) for index, token in listed if rest.startswith(token)]
    return max(fitting)[1] if fitting else -1
