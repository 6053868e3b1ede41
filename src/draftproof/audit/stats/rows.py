"""Arrays of the sampled positions of one answer.

A server may leave the token that ends the output out of the logprobs. Positions where that token was
likely and was not sampled would then be over-represented. All probabilities are therefore conditional on
"not an end token", and a sampled end token is no event.
"""

from __future__ import annotations

import math
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


def conditional_top(position: Position, top_count: int) -> list[tuple[str, float, float]] | None:
    """Return (token, logprob, probability given that it is no end token), or None if there is no event."""
    listed = position.top[:top_count]
    if not listed or not all(math.isfinite(value) or value == -math.inf for _, value in listed):
        return None
    if is_end_token(position.token):
        return None
    end_mass = sum(math.exp(value) for token, value in listed if is_end_token(token))
    if end_mass > MAX_END_MASS:
        return None
    kept = 1 - end_mass
    return [
        (token, value, math.exp(value) / kept) for token, value in listed if not is_end_token(token)
    ] or None


@cache
def is_end_token(token: str) -> bool:
    """Return whether a token may end an output."""
    return END_TOKEN.fullmatch(token) is not None


def sampled_index(position: Position, top: Sequence[tuple[str, float, float]]) -> int:
    """Return the index of the sampled token in the list, len(top) if it is not listed.

    Texts of different tokens may be equal; then the logprob decides.
    """
    for index, (token, value, _) in enumerate(top):
        if token == position.token and abs(value - position.logprob) <= MATCH_NATS:
            return index
    return len(top)


def rows(positions: Sequence[Position], top_count: int, prompt: str = "") -> Rows:
    """Return the events of an answer. `top_count`: entries that were requested for each position."""
    top1, hit, rank_probs, ranks, decile_probs, deciles = [], [], [], [], [], []
    follows, places, draft_probs, is_draft = [], [], [], []
    squares: dict[int, tuple[float, float]] = {}
    text, was_event = prompt, False
    tokens = [position.token for position in positions]
    for number, position in enumerate(positions):
        top = conditional_top(position, top_count)
        if top is not None:
            probs = [probability for _, _, probability in top]
            index = sampled_index(position, top)
            rest = max(0.0, 1 - sum(probs))
            top1.append(min(probs[0], 1.0))
            hit.append(index == 0)
            rank_probs.append(_rank_probs(probs, rest))
            ranks.append(_rank_category(index) if index < len(top) else len(RANK_ENDS))
            decile_probs.append(_decile_probs(probs, rest))
            deciles.append(_decile(probs[index]) if index < len(top) else 0)
            follows.append(was_event)
            places.append(position.chunk_place)
            lowest = sum(probability**2 for probability in probs)
            squares[number] = (lowest, min(1.0, lowest + rest * min(probs[-1], rest)))
            draft = _lookup(text, "".join(tokens[max(0, number - NGRAM_TOKENS) : number]), number, top)
            if draft is not None:
                draft_probs.append(min(probs[draft], 1.0))
                is_draft.append(draft == index)
        was_event = top is not None
        text += position.token
    return Rows(
        np.array(top1, dtype=float),
        np.array(hit, dtype=bool),
        np.array(rank_probs, dtype=float).reshape(-1, len(RANK_ENDS) + 1),
        np.array(ranks, dtype=int),
        np.array(decile_probs, dtype=float).reshape(-1, DECILES),
        np.array(deciles, dtype=int),
        np.array(follows, dtype=bool),
        np.array(places, dtype=int),
        np.array(draft_probs, dtype=float),
        np.array(is_draft, dtype=bool),
        squares,
    )


def _rank_category(index: int) -> int:
    """Return the category of a rank that begins at 0."""
    return next((i for i, end in enumerate(RANK_ENDS) if index < end), len(RANK_ENDS))


def _rank_probs(probs: Sequence[float], rest: float) -> list[float]:
    """Return the probability of each category of ranks."""
    found = [0.0] * (len(RANK_ENDS) + 1)
    for index, probability in enumerate(probs):
        found[_rank_category(index)] += probability
    found[-1] += rest
    return found


def _decile(probability: float) -> int:
    """Return the tenth that a probability lies in."""
    return min(DECILES - 1, int(probability * DECILES))


def _decile_probs(probs: Sequence[float], rest: float) -> list[float]:
    """Return the probability that the sampled token's own probability lies in each tenth.

    Tokens that are not listed are in the lowest tenth unless the list is very short; a list of one or
    two entries is not used for this test.
    """
    found = [0.0] * DECILES
    for probability in probs:
        found[_decile(probability)] += probability
    found[0] += rest
    return found


def _lookup(text: str, ngram: str, number: int, top: Sequence[tuple[str, float, float]]) -> int | None:
    """Return the listed token that continues the last earlier occurrence of the n-gram.

    It is the draft of an n-gram proposer. It depends on earlier tokens and the reported list alone.
    """
    if number < NGRAM_TOKENS or not ngram:
        return None
    start = text.rfind(ngram, 0, len(text) - 1)
    if start < 0:
        return None
    rest = text[start + len(ngram) : start + len(ngram) + 40]
    fitting = [i for i, (token, _, _) in enumerate(top) if token and rest.startswith(token)]
    return max(fitting, key=lambda i: len(top[i][0]), default=None)
