"""Contract of model-free drafting: n-gram search, suffix search, and selection between proposers.

A suffix search reads two sources: the committed tokens of the request itself, and a pool of lines of tokens
from other requests. Pool lines are found by hash. For each size in `HASHED_NGRAM_SIZES` there is a table of
buckets, and each bucket holds the positions of the last `BUCKET_WAYS` n-grams that hashed into it. A table
entry is only a hint: tokens and owner are compared before a match counts, so a line that is reused for
another owner needs no table entry removed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from draftproof.types import DeviceBatch

HASHED_NGRAM_SIZES = (3, 6, 12)  # tokens per hashed n-gram, counted back from the newest token
BUCKET_WAYS = 8  # positions per hash bucket
MAX_OWN_MATCHES = 4  # matches followed in the request's own tokens
MAX_RANKED_MATCH = 8  # matched tokens that count when own matches are ranked
MAX_MATCH_TOKENS = 32  # matched tokens that are measured at most
MAX_LINE_WEIGHT = 16  # a pool line seen more often than this counts as if it was seen this often
FIXED_ONE = 1 << 16  # fixed-point one: the score of one draft token that is certain to be accepted
PRIOR_ACCEPTED, PRIOR_REJECTED = 2, 1  # pseudo counts of the Beta prior over a proposer's acceptance rate
DECAY_SHIFT = 4  # the accepted and rejected counts shrink by 1 / 2^DECAY_SHIFT per step
MAX_CANDIDATES = 4  # proposers in one selection
EXTEND_MIN_PROB = FIXED_ONE // 5  # drafts are extended by a search if all are accepted with this probability
HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; as an int64

Number = TypeVar("Number", int, Tensor)
BegunDrafts = tuple[Tensor, Tensor]  # drafts made so far [B, K] and their number [B]


@dataclass(frozen=True, slots=True)
class SuffixPool:
    """N pool lines of `wide` tokens and the hash tables over their n-grams, in static tensors."""

    tokens: Tensor  # [N, wide] int32
    filled: Tensor  # [N] int64: number of tokens in the line
    owner: Tensor  # [N] int64: owner whose requests may read the line; -1: none
    weight: Tensor  # [N] int64: how many times the line was generated
    used: Tensor  # [N] int64: value of `clock` when the line last produced drafts; written by the search
    table: Tensor  # [sizes, buckets, BUCKET_WAYS] int32: line * wide + position after the n-gram; -1: empty
    slot_owner: Tensor  # [S] int64: owner of the request in a slot
    clock: Tensor  # [1] int64


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """Scoring of matches: a draft after m matched tokens is accepted with m / (m + match_prior)."""

    min_match: int  # minimum number of matched tokens in the request's own text
    match_prior: float
    min_prob: float  # drafting stops when the probability that all drafts are accepted falls below this


@dataclass(frozen=True, slots=True)
class AcceptanceRecord:
    """Accepted and rejected drafts of M proposers, by slot, in static tensors."""

    last: Tensor  # [4, S] int64: seed and length of the request at its last drafts, their number, proposer
    accepted: Tensor  # [S, M] int64, in FIXED_ONE
    rejected: Tensor  # [S, M] int64, in FIXED_ONE


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """Drafts that one proposer offers for B entries."""

    tokens: Tensor  # [B, K] int64
    count: Tensor  # [B] int64
    expected_tokens: Tensor | None  # [B] int64, in FIXED_ONE; negative, or None for all: use the record


class DraftSearchOps(ABC):
    """Op family that drafts from tokens generated before, without a model."""

    @abstractmethod
    def search_ngram(
        self, batch: DeviceBatch, min_match: int, max_match: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return drafts copied from after an earlier occurrence of the newest n tokens.

        Result: tokens [B, K], count [B] and n [B]; tokens beyond count are undefined. The longest n in
        min_match..max_match that occurs earlier (followed by at least one token) is used; of its
        occurrences, the latest. `budget` tokens are copied from there; past the end of the text the copy
        continues with the drafts themselves. Count and n are 0 without a match, with budget 0, and for
        requests that have ended.
        """

    @abstractmethod
    def search_suffix(
        self, batch: DeviceBatch, pool: SuffixPool, options: SuffixOptions, begun: BegunDrafts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return drafts [B, K], their number [B], and the expected accepted tokens [B] in FIXED_ONE.

        The text is the committed tokens followed by the drafts in `begun`. Matches are: (a) the
        MAX_OWN_MATCHES positions of the text with the most matched tokens before them (counted up to
        MAX_RANKED_MATCH, at least `min_match`), latest first among equals; (b) for the largest hashed size
        with any match, the positions in its bucket whose line belongs to the slot's owner and whose last n
        tokens equal the text's. The matches vote for the next token. A vote counts the line's weight (1 in
        the text, at most MAX_LINE_WEIGHT) times the squared number of matched tokens (at most
        MAX_MATCH_TOKENS); ties go to the first in the order above.

        The probability of a draft is its share of the votes times m / (m + match_prior), where m is the
        longest match that votes for it plus the drafts made since. It is multiplied with those of the
        drafts before it, in fp32, share first. Drafting stops when the product is below `min_prob`, when no
        match is left, or when the budget is used; otherwise the matches that voted for the token continue.
        Past its end the text continues with the drafts; a pool line does not. The expected accepted tokens
        are the sum of the products, each rounded down to 1 / FIXED_ONE; drafts in `begun` add nothing.
        Lines that voted for the first new draft have `used` set to `clock`.

        Padding, requests that have ended, and budgets not above `begun` return `begun` and 0 expected tokens.
        Tokens beyond the number are undefined.
        """

    @abstractmethod
    def select_drafts(
        self,
        batch: DeviceBatch,
        record: AcceptanceRecord,
        candidates: Sequence[DraftCandidate],  # one per proposer of the record, at most MAX_CANDIDATES
        search: int,  # index of the candidate whose proposer can extend another's drafts; -1: none
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Select one candidate per entry and update the record.

        Result: tokens [B, K], number [B], source [B, K] int8, and the budget [B] left to `search`.

        The record is updated first. A record of another request (by its seed) starts from zeros. Of the
        drafts selected last, as many were accepted as the request has grown beyond one token. All counts
        shrink by 1 / 2^DECAY_SHIFT; then the selected proposer's `accepted` grows by FIXED_ONE per accepted
        draft, and its `rejected` by FIXED_ONE if one was rejected. The acceptance rate is
        (accepted + PRIOR_ACCEPTED) / (accepted + rejected + PRIOR_ACCEPTED + PRIOR_REJECTED), in FIXED_ONE,
        rounded down.

        A candidate scores rate + rate^2 + ... over its drafts, each product rounded down, or its
        `expected_tokens`. The highest score wins, the first among equals. Its drafts are cut to the budget
        and recorded. Later drafts come from `search`: its budget is the entry's budget if another proposer
        won with at least one draft and all of its drafts are accepted with EXTEND_MIN_PROB, else 0. Padding
        has no drafts.
        """


def acceptance_rate(accepted: Number, rejected: Number) -> Number:
    """Return the estimated acceptance rate of recorded counts; all in FIXED_ONE."""
    total = accepted + rejected + (PRIOR_ACCEPTED + PRIOR_REJECTED) * FIXED_ONE
    return (accepted + PRIOR_ACCEPTED * FIXED_ONE) * FIXED_ONE // total


def stack_candidates(candidates: Sequence[DraftCandidate]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack M candidates: tokens [M, B, K], counts and expected tokens [M, B]."""
    unknown = torch.full_like(candidates[0].count, -1)
    tokens = torch.stack([one.tokens for one in candidates])
    counts = torch.stack([one.count for one in candidates])
    expected = [unknown if one.expected_tokens is None else one.expected_tokens for one in candidates]
    return tokens, counts, torch.stack(expected)
