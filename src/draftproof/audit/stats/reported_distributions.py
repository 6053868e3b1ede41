"""Reported distributions of one answer, conditional on "no end token".

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
from draftproof.audit.stats.array_types import Bools, Floats, Ints

END_TOKEN = re.compile(r"<[|\uff5c]?[^\s<>]{1,40}>|\[/?[A-Z_]{2,20}\]|")  # special tokens, or no text at all
MATCH_NATS = 0.02  # the sampled token and its entry in the list have the same logprob
MAX_END_MASS = 0.999  # a position that is almost surely the end is no event


@dataclass
class Listed:
    """Positions of an answer with usable logprobs: N of them, K entries in a list."""

    numbers: list[int]  # [N] index in the answer
    probs: Floats  # [N, K] conditional, largest first; 0 for end tokens and empty places
    ends: Bools  # [N, K] end tokens and empty places
    sampled: Ints  # [N] index in the list, -1 if not listed


@cache
def is_end_token(token: str) -> bool:
    """Return whether a token may end an output."""
    return END_TOKEN.fullmatch(token) is not None


def listed(positions: Sequence[Position], top_count: int) -> Listed:
    """Return the distributions of an answer. `top_count`: entries that were requested for each position."""
    numbers = [i for i, p in enumerate(positions) if p.top and not is_end_token(p.token)]
    values = np.full((len(numbers), top_count), -np.inf)  # [N, K]
    ends: Bools = np.ones((len(numbers), top_count), dtype=bool)  # [N, K]
    sampled = np.full(len(numbers), -1)  # [N]
    for row, number in enumerate(numbers):
        position = positions[number]
        entries = position.top[:top_count]
        tokens, logprobs = zip(*entries, strict=True)
        values[row, : len(entries)] = logprobs
        ends[row, : len(entries)] = [*map(is_end_token, tokens)]
        sampled[row] = _sampled_index(position, entries)
    probs = np.exp(values)
    empty = values == -np.inf
    end_mass = np.where(ends, probs, 0).sum(axis=1)
    usable = (end_mass <= MAX_END_MASS) & ~(ends | empty).all(axis=1)
    ends = ends[usable] | empty[usable]
    probs = np.where(ends, 0, probs[usable]) / (1 - end_mass[usable, None])
    kept = [number for number, is_used in zip(numbers, usable, strict=True) if is_used]
    return Listed(kept, probs, ends, sampled[usable])


def _sampled_index(position: Position, entries: Sequence[tuple[str, float]]) -> int:
    """Return the index of the sampled token, -1 if it is not listed.

    Texts of different tokens may be equal; then the logprob decides.
    """
    for index, (_, value) in enumerate(entries):
        if position.listed_at(index) and abs(value - position.logprob) <= MATCH_NATS:
            return index
    return -1
