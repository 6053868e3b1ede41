"""The definition of the suffix search, and of the choice between several proposers: plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.ops.contract.draft_search import (
    DECAY_SHIFT,
    EXTEND_MIN_PROB,
    FIXED_ONE,
    HASH_MULTIPLIER,
    HASHED_NGRAM_SIZES,
    MAX_LINE_WEIGHT,
    MAX_MATCH_TOKENS,
    MAX_OWN_MATCHES,
    MAX_RANKED_MATCH,
    PRIOR_ACCEPTED,
    PRIOR_REJECTED,
    AcceptanceRecord,
    DraftCandidate,
    DraftSearch,
    SuffixOptions,
    SuffixPool,
    stack_candidates,
)
from draftproof.types import FinishStatus, SlotColumns


@dataclass
class _Place:
    """Where somebody said the same, and what followed; `line` -1: in the text itself."""

    tokens: list[int]
    at: int
    matched: int
    weight: int
    line: int = -1


class ReferenceSuffix(DraftSearch):
    def search_suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        pool: SuffixPool,
        options: SuffixOptions,
        begun: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = len(slots), columns.draft.shape[1]
        tokens = torch.zeros(shape, dtype=torch.int64) if begun is None else begun[0].clone()
        count, worth = torch.zeros((2, len(slots)), dtype=torch.int64)
        for b, (slot, wanted) in enumerate(zip(slots.tolist(), budget.tolist(), strict=True)):
            had = 0 if begun is None else int(begun[1][b])
            count[b] = had
            if slot < 0 or wanted <= had or columns.ended[slot] != FinishStatus.RUNNING:
                continue
            text = columns.tokens[slot, : int(columns.length[slot])].tolist() + tokens[b, :had].tolist()
            places = _own_places(text, options.min_match)
            places += _pool_places(text, pool, int(pool.slot_owner[slot]))
            drafts, worth[b] = _follow(text, places, min(wanted, shape[1]) - had, pool, options)
            tokens[b, had : had + len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            count[b] += len(drafts)
        return tokens, count, worth

    def select_drafts(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        record: AcceptanceRecord,
        offers: Sequence[DraftCandidate],
        search: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, count, worth = stack_candidates(offers)
        members, entries, k = tokens.shape
        out = torch.zeros((entries, k), dtype=torch.int64)
        number, room = torch.zeros((2, entries), dtype=torch.int64)
        whose = torch.full((entries, k), max(search, 0), dtype=torch.int8)
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            rates = _rates(columns, record, slot)
            given = [min(int(count[m, b]), int(budget[b]), k) for m in range(members)]
            reckoned = [_reckon(rate, n) for rate, n in zip(rates, given, strict=True)]
            values = [int(worth[m, b]) if worth[m, b] >= 0 else reckoned[m][0] for m in range(members)]
            who = values.index(max(values))
            number[b], out[b], whose[b, : given[who]] = given[who], tokens[who, b], who
            if search >= 0 and who != search and given[who] and reckoned[who][1] >= EXTEND_MIN_PROB:
                room[b] = budget[b]
            facts = int(columns.seed[slot]), int(columns.length[slot]), given[who], who
            record.last[:, slot] = torch.tensor(facts)
        return out, number, whose, room


def _rates(columns: SlotColumns, record: AcceptanceRecord, slot: int) -> list[int]:
    """Of each member, in FIXED_ONE; the record is brought up to date."""
    seed, length, given, who = record.last[:, slot].tolist()
    if seed != int(columns.seed[slot]):
        record.accepted[slot], record.rejected[slot], given = 0, 0, 0
    stood = min(max(int(columns.length[slot]) - length - 1, 0), given)
    rates = []
    for m in range(record.accepted.shape[1]):
        good, bad = int(record.accepted[slot, m]), int(record.rejected[slot, m])
        good, bad = good - (good >> DECAY_SHIFT), bad - (bad >> DECAY_SHIFT)
        if given and m == who:
            good, bad = good + stood * FIXED_ONE, bad + (stood < given) * FIXED_ONE
        record.accepted[slot, m], record.rejected[slot, m] = good, bad
        rates.append(
            (good + PRIOR_ACCEPTED * FIXED_ONE)
            * FIXED_ONE
            // (good + bad + (PRIOR_ACCEPTED + PRIOR_REJECTED) * FIXED_ONE)
        )
    return rates


def _reckon(rate: int, count: int) -> tuple[int, int]:
    """What so many drafts are worth, and how likely all of them stand."""
    chance, worth = FIXED_ONE, 0
    for _ in range(count):
        chance = chance * rate // FIXED_ONE
        worth += chance
    return worth, chance


def bucket_of(owner: int, newest_first: list[int], buckets: int) -> int:
    """Of an n-gram in the table of its size; `buckets` is a power of two."""
    key = owner
    for token in newest_first:
        key = (key ^ token) * HASH_MULTIPLIER % (1 << 64)
    return (key >> 33) & (buckets - 1)


def _matched(tokens: list[int], at: int, text: list[int], most: int) -> int:
    n = 0
    while n < min(most, at, len(text)) and tokens[at - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


def _own_places(text: list[int], smallest: int) -> list[_Place]:
    near = [(_matched(text, at, text, MAX_RANKED_MATCH), at) for at in range(1, len(text))]
    best = sorted((pair for pair in near if pair[0] >= min(smallest, MAX_RANKED_MATCH)), reverse=True)[
        :MAX_OWN_MATCHES
    ]
    found = [_Place(text, at, _matched(text, at, text, MAX_MATCH_TOKENS), 1) for _, at in best]
    return [place for place in found if place.matched >= smallest]


def _pool_places(text: list[int], pool: SuffixPool, owner: int) -> list[_Place]:
    wide = pool.tokens.shape[1]
    for n, table in reversed(list(zip(HASHED_NGRAM_SIZES, pool.table, strict=True))):
        if n > len(text):
            continue
        found = []
        bucket = bucket_of(owner, text[: -n - 1 : -1], len(table))
        for entry in table[bucket].tolist():
            line, at = entry // wide, entry % wide
            if entry < 0 or int(pool.owner[line]) != owner:
                continue
            tokens = pool.tokens[line, : int(pool.filled[line])].tolist()
            matched = _matched(tokens, at, text, MAX_MATCH_TOKENS) if at <= len(tokens) else 0
            if matched >= n:
                weight = min(int(pool.weight[line]), MAX_LINE_WEIGHT)
                found.append(_Place(tokens, at, matched, weight, line))
        if found:
            return found
    return []


def _follow(
    text: list[int], places: list[_Place], room: int, pool: SuffixPool, options: SuffixOptions
) -> tuple[list[int], int]:
    drafts: list[int] = []
    worth, chance = 0, np.float32(1.0)
    while len(drafts) < room:
        j = len(drafts)
        said = [place for place in places if place.line < 0 or place.at + j < len(place.tokens)]
        if not said:
            break
        # `text` grows with the drafts, so that it can be read past its end
        next_of = [(text if p.line < 0 else p.tokens)[p.at + j] for p in said]
        votes = [p.weight * p.matched**2 for p in said]
        support = [sum(v for v, other in zip(votes, next_of, strict=True) if other == t) for t in next_of]
        token = next_of[support.index(max(support))]
        places = [p for p, t in zip(said, next_of, strict=True) if t == token]
        m = max(p.matched for p in places) + j
        chance = chance * (np.float32(max(support)) / np.float32(sum(votes)))
        chance = chance * (np.float32(m) / (np.float32(m) + np.float32(options.match_prior)))
        if chance < np.float32(options.min_prob):
            break
        if not drafts:
            pool.used[[p.line for p in places if p.line >= 0]] = pool.clock
        drafts.append(token)
        text.append(token)
        worth += int(chance * np.float32(FIXED_ONE))
    return drafts, worth
