"""Reference definition of n-gram search, suffix search and draft selection."""

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
    AcceptanceRecord,
    BegunDrafts,
    DraftCandidate,
    DraftSearchOps,
    SuffixOptions,
    SuffixPool,
    acceptance_rate,
    stack_candidates,
)
from draftproof.types import DeviceBatch, FinishStatus, SlotColumns


@dataclass
class _Match:
    """Earlier occurrence of the newest tokens; `line` -1: in the text itself."""

    tokens: list[int]
    at: int  # position after the match
    matched: int
    weight: int
    line: int = -1


class ReferenceSearch(DraftSearchOps):
    """Draft search as loops over entries and matches."""

    def search_ngram(
        self, batch: DeviceBatch, min_match: int, max_match: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        tokens = torch.zeros((len(slots), columns.draft.shape[1]), dtype=torch.int64)
        count, matched = torch.zeros((2, len(slots)), dtype=torch.int64)
        for b, (slot, wanted) in enumerate(zip(slots.tolist(), budget.tolist(), strict=True)):
            if slot < 0 or wanted == 0 or columns.finish_status[slot] != FinishStatus.RUNNING:
                continue
            text = columns.tokens[slot, : int(columns.length[slot])].tolist()
            at, n = _latest_match(text, min_match, max_match)
            if not n:
                continue
            for j in range(wanted):
                text.append(text[at + j])
                tokens[b, j] = text[-1]
            count[b], matched[b] = wanted, n
        return tokens, count, matched

    def search_suffix(
        self, batch: DeviceBatch, pool: SuffixPool, options: SuffixOptions, begun: BegunDrafts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        shape = len(slots), columns.draft.shape[1]
        tokens = torch.zeros(shape, dtype=torch.int64) if begun is None else begun[0].clone()
        count, expected = torch.zeros((2, len(slots)), dtype=torch.int64)
        for b, (slot, wanted) in enumerate(zip(slots.tolist(), budget.tolist(), strict=True)):
            had = 0 if begun is None else int(begun[1][b])
            count[b] = had
            if slot < 0 or wanted <= had or columns.finish_status[slot] != FinishStatus.RUNNING:
                continue
            text = columns.tokens[slot, : int(columns.length[slot])].tolist() + tokens[b, :had].tolist()
            matches = _own_matches(text, options.min_match)
            matches += _pool_matches(text, pool, int(pool.slot_owner[slot]))
            drafts, expected[b] = _extend(text, matches, min(wanted, shape[1]) - had, pool, options)
            tokens[b, had : had + len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            count[b] += len(drafts)
        return tokens, count, expected

    def select_drafts(
        self, batch: DeviceBatch, record: AcceptanceRecord, candidates: Sequence[DraftCandidate], search: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        tokens, count, expected = stack_candidates(candidates)
        members, entries, k = tokens.shape
        out = torch.zeros((entries, k), dtype=torch.int64)
        number, room = torch.zeros((2, entries), dtype=torch.int64)
        source = torch.full((entries, k), max(search, 0), dtype=torch.int8)
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            rates = _rates(columns, record, slot)
            counts = [min(int(count[m, b]), int(budget[b]), k) for m in range(members)]
            by_rate = [_expected_tokens(rate, n) for rate, n in zip(rates, counts, strict=True)]
            scores = [int(expected[m, b]) if expected[m, b] >= 0 else by_rate[m][0] for m in range(members)]
            winner = scores.index(max(scores))
            number[b], out[b], source[b, : counts[winner]] = counts[winner], tokens[winner, b], winner
            if search >= 0 and winner != search and counts[winner] and by_rate[winner][1] >= EXTEND_MIN_PROB:
                room[b] = budget[b]
            entry = int(columns.seed[slot]), int(columns.length[slot]), counts[winner], winner
            record.last[:, slot] = torch.tensor(entry)
        return out, number, source, room


def _latest_match(text: list[int], min_match: int, max_match: int) -> tuple[int, int]:
    """Return the position after the latest earlier occurrence of the longest suffix, and its tokens."""
    for n in range(max_match, min_match - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == text[len(text) - n :]:
                return at, n
    return 0, 0


def _rates(columns: SlotColumns, record: AcceptanceRecord, slot: int) -> list[int]:
    """Update the record of a slot and return the acceptance rate of each proposer, in FIXED_ONE."""
    seed, length, given, winner = record.last[:, slot].tolist()
    if seed != int(columns.seed[slot]):
        record.accepted[slot], record.rejected[slot], given = 0, 0, 0
    num_accepted = min(max(int(columns.length[slot]) - length - 1, 0), given)
    rates = []
    for m in range(record.accepted.shape[1]):
        accepted, rejected = int(record.accepted[slot, m]), int(record.rejected[slot, m])
        accepted, rejected = accepted - (accepted >> DECAY_SHIFT), rejected - (rejected >> DECAY_SHIFT)
        if given and m == winner:
            accepted += num_accepted * FIXED_ONE
            rejected += (num_accepted < given) * FIXED_ONE
        record.accepted[slot, m], record.rejected[slot, m] = accepted, rejected
        rates.append(acceptance_rate(accepted, rejected))
    return rates


def _expected_tokens(rate: int, count: int) -> tuple[int, int]:
    """Return the expected accepted tokens of `count` drafts and the probability that all are accepted."""
    prob, expected = FIXED_ONE, 0
    for _ in range(count):
        prob = prob * rate // FIXED_ONE
        expected += prob
    return expected, prob


def bucket_of(owner: int, newest_first: list[int], buckets: int) -> int:
    """Return the bucket of an n-gram in the table of its size; `buckets` is a power of two."""
    key = owner
    for token in newest_first:
        key = (key ^ token) * HASH_MULTIPLIER % (1 << 64)
    return (key >> 33) & (buckets - 1)


def _matched(tokens: list[int], at: int, text: list[int], limit: int) -> int:
    """Return how many tokens before `at` equal the newest tokens of the text, at most `limit`."""
    n = 0
    while n < min(limit, at, len(text)) and tokens[at - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


def _own_matches(text: list[int], min_match: int) -> list[_Match]:
    """Return the best matches in the text itself."""
    ranked = [(_matched(text, at, text, MAX_RANKED_MATCH), at) for at in range(1, len(text))]
    best = sorted((pair for pair in ranked if pair[0] >= min(min_match, MAX_RANKED_MATCH)), reverse=True)[
        :MAX_OWN_MATCHES
    ]
    found = [_Match(text, at, _matched(text, at, text, MAX_MATCH_TOKENS), 1) for _, at in best]
    return [match for match in found if match.matched >= min_match]


def _pool_matches(text: list[int], pool: SuffixPool, owner: int) -> list[_Match]:
    """Return the matches in the pool for the largest hashed size that has any."""
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
                found.append(_Match(tokens, at, matched, weight, line))
        if found:
            return found
    return []


def _extend(
    text: list[int], matches: list[_Match], room: int, pool: SuffixPool, options: SuffixOptions
) -> tuple[list[int], int]:
    """Return the drafts that the matches vote for, at most `room`, and their expected accepted tokens."""
    drafts: list[int] = []
    expected, prob = 0, np.float32(1.0)
    while len(drafts) < room:
        j = len(drafts)
        alive = [match for match in matches if match.line < 0 or match.at + j < len(match.tokens)]
        if not alive:
            break
        # `text` grows with the drafts, so that it can be read past its end
        next_of = [(text if p.line < 0 else p.tokens)[p.at + j] for p in alive]
        votes = [p.weight * p.matched**2 for p in alive]
        support = [sum(v for v, other in zip(votes, next_of, strict=True) if other == t) for t in next_of]
        token = next_of[support.index(max(support))]
        matches = [p for p, t in zip(alive, next_of, strict=True) if t == token]
        m = max(p.matched for p in matches) + j
        prob = prob * (np.float32(max(support)) / np.float32(sum(votes)))
        prob = prob * (np.float32(m) / (np.float32(m) + np.float32(options.match_prior)))
        if prob < np.float32(options.min_prob):
            break
        if not drafts:
            pool.used[[p.line for p in matches if p.line >= 0]] = pool.clock
        drafts.append(token)
        text.append(token)
        expected += int(prob * np.float32(FIXED_ONE))
    return drafts, expected
