"""Guesses from what was said before: the contract of the searches, and what a suffix search looks in.

A suffix search looks in two places: the request's own tokens, and a pool of lines that other requests have
said. What is in the pool is found by hash: for each of `SIZES` there is a table of buckets, each with the
places of the last `WAYS` n-grams that fell into it. An entry is only a hint, because tokens and owner are
compared before it counts: a line that has been given to somebody else needs no entry removed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.types import SlotColumns

SIZES = (3, 6, 12)  # tokens that are hashed: from the newest back
WAYS = 8  # places a bucket holds
OWN = 4  # places in the request's own tokens that are followed
NEAR = 8  # by so many matched tokens these are chosen
DEPTH = 32  # a match is not measured beyond
HEAVY = 16  # a line that was said more often counts as much as one that was said so often
UNIT = 1 << 16  # of a score: one token that is sure to stand
HOPED, FEARED = 2, 1  # drafts that stood and that fell, of a proposer of whom nothing is known
FADES = 4  # what is known of one shrinks by 1 / 2^FADES at every step
MOST_OFFERS = 4  # proposers that are chosen between
REACH = UNIT // 5  # drafts are gone on with if all of them are expected to stand with so much
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; as an int64


@dataclass(frozen=True, slots=True)
class SuffixPool:
    """N lines of `wide` tokens, and where their n-grams are. The tensors never move."""

    tokens: Tensor  # [N, wide] int32
    filled: Tensor  # [N] int64: tokens of the line
    owner: Tensor  # [N] int64: whose requests may use it; -1: nobody's
    weight: Tensor  # [N] int64: how often it was said
    used: Tensor  # [N] int64: `clock` when drafts were last taken from it; written by the search
    table: Tensor  # [SIZES, buckets, WAYS] int32: line * wide + the place where the n-gram goes on; -1: none
    slot_owner: Tensor  # [S] int64: whose request is in a slot
    clock: Tensor  # [1] int64


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """What a match is worth. A draft behind m matched tokens is thought to stand with m / (m + doubt)."""

    smallest: int  # matched tokens in the request's own text, at least
    doubt: float
    floor: float  # a draft that is reached and stands with less is not made


@dataclass(frozen=True, slots=True)
class Record:
    """What became of the drafts of M proposers, by slot. The tensors never move."""

    last: Tensor  # [4, S] int64: seed and length of the request that was given drafts, how many, whose
    stood: Tensor  # [S, M] int64, in UNIT
    fell: Tensor  # [S, M] int64


@dataclass(frozen=True, slots=True)
class Offer:
    """A proposer's drafts for B entries."""

    tokens: Tensor  # [B, K] int64
    count: Tensor  # [B] int64
    worth: Tensor | None  # [B] int64, in UNIT; below 0, or None for all: to be reckoned from the record
    lead: int = 0  # in UNIT: how much more its drafts count for, if there are any


class DraftSearch(ABC):
    """A part of the ops contract: guesses from what was said before."""

    @abstractmethod
    def ngram(
        self, columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int
    ) -> tuple[Tensor, Tensor]:
        """Drafts from what followed the last n committed tokens before: tokens [B, K], count [B].

        The longest n in smallest..largest that occurs earlier (followed by at least one token), of its
        occurrences the latest. `budget` tokens from there; past the end it goes on with what it has just
        said. None: count 0, as for budget 0 and for requests that have ended. Beyond count: any token.
        """

    @abstractmethod
    def suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,  # [B] int64
        budget: Tensor,  # [B] int64
        pool: SuffixPool,
        rule: SuffixRule,
        begun: tuple[Tensor, Tensor] | None = None,  # drafts [B, K] and how many [B] are there already
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts [B, K], their number [B], and what those made here are worth [B], in `UNIT`.

        The text is the committed tokens and the drafts begun. Followed are (a) the OWN places of the text
        with most matched tokens before them (counted up to NEAR, at least `smallest`), of those the latest
        first; (b) of the longest size that has any, the places in its bucket whose line the slot's owner
        owns and whose last n tokens are the text's. They vote on the next token, each with its line's
        weight (1 in the text, HEAVY at most) times its matched tokens (up to DEPTH) squared; the first in
        the order told wins a tie. The chance of the draft is the share of its votes times m / (m + doubt),
        m being the longest match that votes for it and the drafts made since; it is multiplied with that of
        those before it, in fp32, share first. If the product is below `floor`, or nobody is left, or the
        budget is used up, that is all; else those who voted for it go on. Past its end the text goes on with
        what was drafted; a line of the pool does not. The worth is the sum of the products, each rounded
        down to 1 / UNIT. Lines that voted for the first draft made have `used` set to `clock`.

        Without a slot, a budget beyond what was begun, or if the request has ended: what was begun, worth 0.
        Beyond the number: any token.
        """

    @abstractmethod
    def arbitrate(
        self,
        columns: SlotColumns,
        slots: Tensor,  # [B] int64
        budget: Tensor,  # [B] int64
        record: Record,
        offers: Sequence[Offer],  # of its M proposers, MOST_OFFERS at most
        search: int,  # which of them can go on from another's; -1: none
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whose drafts are taken: tokens [B, K], number [B], whose [B, K] int8; the budget [B] of `search`.

        First the record is brought up to date, if it is of the same request (by its seed; else it begins
        with zeros): of the drafts that were given last, as many stood as the request has grown beyond one
        token; all shrinks by 1 / 2^FADES, then UNIT is added to the giver's `stood` for each that stood and
        to its `fell` if one fell. A draft of m stands with rate (stood + HOPED) / (stood + fell + HOPED +
        FEARED), in UNIT, rounded down. Drafts are worth rate + rate² + …, each product rounded down, or what
        is said of them; if there are any within the budget, the offer's `lead` is added. The greatest wins,
        the first of equals; its drafts are cut to the budget and put on record. Drafts behind them will be
        those of `search`, whose budget is the whole one if the winner is another with at least one draft, all
        of whose drafts stand with REACH, else 0. Entries without a slot: no drafts.
        """

    def unbeaten(
        self,
        columns: SlotColumns,
        slots: Tensor,  # [B] int64
        budget: Tensor,  # [B] int64
        record: Record,
        offers: Sequence[Offer],  # tokens are not looked at
        member: int,
    ) -> Tensor:
        """The budget [B] where `arbitrate` would take the drafts of `member`, if it made so many; else 0.

        The record stays as it is. Fewer drafts are never worth more, so for whoever has 0 here no drafts of
        the member will be taken, and they need not be made.
        """
        trial = Record(record.last.clone(), record.stood.clone(), record.fell.clone())
        _, number, whose, _ = self.arbitrate(columns, slots, budget, trial, offers, -1)
        return budget * ((number > 0) & (whose[:, 0] == member))


def stacked(offers: Sequence[Offer]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [M, B, K], counts and worths [M, B], leads [M]."""
    none = torch.full_like(offers[0].count, -1)
    tokens, counts = torch.stack([one.tokens for one in offers]), torch.stack([one.count for one in offers])
    worths = torch.stack([none if one.worth is None else one.worth for one in offers])
    return tokens, counts, worths, torch.tensor([one.lead for one in offers], device=counts.device)
