"""Draft search in torch: all entries and all matches at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.ops.contract.draft_search import (
    BUCKET_WAYS,
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


class TorchSearch(DraftSearchOps):
    """Draft search on whole columns."""

    def search_ngram(
        self, batch: DeviceBatch, min_match: int, max_match: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        line = slots.clamp(min=0)
        tokens, length = columns.tokens[line], columns.length[line]
        width = tokens.shape[1]
        index, matched = _matched_before(tokens, length, max_match)
        best, _ = matched.max(1)
        at = (torch.where(matched == best[:, None], index, 0)).amax(1)  # the latest of the longest matches
        found = (best >= min_match) & (slots >= 0) & (columns.finish_status[line] == FinishStatus.RUNNING)
        count, best = torch.where(found, budget, 0), torch.where(found & (budget > 0), best, 0)
        ahead = torch.arange(columns.draft.shape[1], device=line.device)
        period = (length - at).clamp(min=1)
        source = at[:, None] + ahead % period[:, None]
        return tokens.gather(1, source.clamp(max=width - 1)), count, best

    def search_suffix(
        self, batch: DeviceBatch, pool: SuffixPool, options: SuffixOptions, begun: BegunDrafts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        slot = slots.clamp(min=0)
        k = columns.draft.shape[1]
        out = torch.zeros((len(slots), k), dtype=torch.int64, device=slots.device)
        had = torch.zeros_like(slots)
        if begun is not None:
            out, had = begun[0].clone(), begun[1]
        live = (slots >= 0) & (budget > had) & (columns.finish_status[slot] == FinishStatus.RUNNING)
        room = torch.where(live, budget.clamp(max=k) - had, 0)
        text, size = _texts(columns, slot, out, had)
        at, matched = _own_matches(text, size, options.min_match)
        line, there, other = _pool_matches(text, size, pool, pool.slot_owner[slot])
        lanes = torch.cat([torch.full_like(at, -1), line], 1)
        at, matched = torch.cat([at, there], 1), torch.cat([matched, other], 1)
        tokens, made, expected, first = _extend(text, size, pool, options, lanes, at, matched, room)
        pool.used[lanes[first & (lanes >= 0)]] = pool.clock
        index = torch.arange(k, device=slots.device)
        moved = tokens.gather(1, (index - had[:, None]).clamp(min=0))
        return torch.where(index < had[:, None], out, moved), had + made, expected

    def select_drafts(
        self, batch: DeviceBatch, record: AcceptanceRecord, candidates: Sequence[DraftCandidate], search: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        tokens, count, expected = stack_candidates(candidates)
        real, slot, k = slots >= 0, slots.clamp(min=0), tokens.shape[2]
        rates = _rates(columns, record, real, slot)  # [M, B]
        count = torch.minimum(count, torch.where(real, budget, 0).clamp(0, k))
        prob, by_rate, all_accepted = (torch.full_like(count, x) for x in (FIXED_ONE, 0, FIXED_ONE))
        for j in range(k):
            prob = prob * rates // FIXED_ONE
            by_rate = by_rate + torch.where(j < count, prob, 0)
            all_accepted = torch.where(j < count, prob, all_accepted)
        score = torch.where(expected >= 0, expected, by_rate)
        order = torch.arange(len(score), device=slot.device)[:, None]
        winner = torch.where(score == score.amax(0), order, len(score)).amin(0)
        at = torch.arange(len(winner), device=slot.device)
        number = count[winner, at]
        can_extend = (
            (winner != search) & (number > 0) & (all_accepted[winner, at] >= EXTEND_MIN_PROB) & (search >= 0)
        )
        index = torch.arange(k, device=slot.device)
        source = torch.where(index < number[:, None], winner[:, None], max(search, 0)).to(torch.int8)
        latest = torch.stack([columns.seed[slot], columns.length[slot], number, winner])
        record.last[:, slot[real]] = latest[:, real]
        return tokens[winner, at], number, source, torch.where(can_extend, budget, 0)


def _rates(columns: SlotColumns, record: AcceptanceRecord, real: Tensor, slot: Tensor) -> Tensor:
    """Update the record and return acceptance rates [M, B] in FIXED_ONE."""
    seed, length, given, winner = record.last[:, slot]
    same = seed == columns.seed[slot]
    given = torch.where(same, given, 0)
    num_accepted = torch.minimum((columns.length[slot] - length - 1).clamp(min=0), given)
    member = torch.arange(record.accepted.shape[1], device=slot.device)
    its = ((member == winner[:, None]) & (given > 0)[:, None]) * FIXED_ONE
    accepted, rejected = (torch.where(same[:, None], x[slot], 0) for x in (record.accepted, record.rejected))
    accepted = accepted - (accepted >> DECAY_SHIFT) + its * num_accepted[:, None]
    rejected = rejected - (rejected >> DECAY_SHIFT) + its * (num_accepted < given)[:, None]
    record.accepted[slot[real]], record.rejected[slot[real]] = accepted[real], rejected[real]
    rates: Tensor = acceptance_rate(accepted, rejected)
    return rates.T


def _texts(columns: SlotColumns, slot: Tensor, begun: Tensor, had: Tensor) -> tuple[Tensor, Tensor]:
    """Return committed tokens and drafts per entry [B, width + K], -1 beyond, and their number [B]."""
    k, length = begun.shape[1], columns.length[slot][:, None]
    text = torch.nn.functional.pad(columns.tokens[slot], (0, k))
    ahead = torch.arange(text.shape[1], device=slot.device) - length
    text = torch.where(ahead < 0, text, begun.gather(1, ahead.clamp(0, k - 1)))
    return torch.where(ahead < had[:, None], text, -1), length[:, 0] + had


def _depth(text: Tensor, size: Tensor, before: Tensor, at: Tensor) -> Tensor:
    """Return how many of before [B, P, tokens], nearest first, equal the newest tokens of the text."""
    back = torch.arange(1, MAX_MATCH_TOKENS + 1, device=size.device)
    last = text.gather(1, (size[:, None] - back).clamp(min=0))[:, None]
    inside = (back <= at[..., None]) & (back <= size[:, None, None])
    return ((before == last) & inside).long().cumprod(2).sum(2)


def _matched_before(text: Tensor, size: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return every index of the text, and how many tokens before it equal the newest ones, up to `limit`."""
    index = torch.arange(text.shape[1], device=size.device)
    matched = torch.zeros_like(text)
    still = (index >= 1) & (index < size[:, None])
    for n in range(1, limit + 1):
        last = text.gather(1, (size - n).clamp(min=0)[:, None])
        still = still & (index >= n) & (text.roll(n, 1) == last)
        matched += still
    return index, matched


def _own_matches(text: Tensor, size: Tensor, min_match: int) -> tuple[Tensor, Tensor]:
    """Return position and matched tokens [B, MAX_OWN_MATCHES] in the text; matched 0: no match."""
    index, near = _matched_before(text, size, MAX_RANKED_MATCH)
    key = torch.where(near >= min(min_match, MAX_RANKED_MATCH), near * text.shape[1] + index, -1)
    key = torch.nn.functional.pad(key, (0, max(0, MAX_OWN_MATCHES - key.shape[1])), value=-1)
    key = key.topk(MAX_OWN_MATCHES, 1).values
    at = key.clamp(min=0) % text.shape[1]
    back = torch.arange(1, MAX_MATCH_TOKENS + 1, device=size.device)
    before = text.gather(1, (at[..., None] - back).clamp(min=0).flatten(1)).view(*at.shape, MAX_MATCH_TOKENS)
    matched = _depth(text, size, before, at)
    return at, torch.where((key >= 0) & (matched >= min_match), matched, 0)


def _pool_matches(
    text: Tensor, size: Tensor, pool: SuffixPool, owner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return line, position, matched tokens [B, BUCKET_WAYS] of the largest size with any; 0: no match."""
    width, key = pool.tokens.shape[1], owner
    back = torch.arange(1, MAX_MATCH_TOKENS + 1, device=size.device)
    line, at, matched = torch.zeros((3, len(size), BUCKET_WAYS), dtype=torch.int64, device=size.device)
    for n in range(1, HASHED_NGRAM_SIZES[-1] + 1):
        token = text.gather(1, (size - n).clamp(min=0)[:, None])[:, 0]
        key = (key ^ token) * HASH_MULTIPLIER
        if n not in HASHED_NGRAM_SIZES:
            continue
        table = pool.table[HASHED_NGRAM_SIZES.index(n)]
        entry = table[(key >> 33) & (len(table) - 1)].long()
        here, there = entry.clamp(min=0) // width, entry.clamp(min=0) % width
        before = pool.tokens[here[..., None], (there[..., None] - back).clamp(min=0)]
        depth = _depth(text, size, before, there)
        is_valid = (entry >= 0) & (pool.owner[here] == owner[:, None]) & (there <= pool.filled[here])
        depth = torch.where(is_valid & (depth >= n), depth, 0)
        better = (depth > 0).any(1, keepdim=True)
        line, at = torch.where(better, here, line), torch.where(better, there, at)
        matched = torch.where(better, depth, matched)
    return line, at, matched


def _extend(
    text: Tensor,
    size: Tensor,
    pool: SuffixPool,
    options: SuffixOptions,
    lanes: Tensor,
    at: Tensor,
    matched: Tensor,
    room: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft from matches in lanes [B, P] (pool line; -1: the text).

    Returns drafts, their number, expected accepted tokens, and which lanes voted for the first draft.
    """
    own, line, number = lanes < 0, lanes.clamp(min=0), lanes.shape[1]
    weight = torch.where(own, 1, pool.weight[line].clamp(max=MAX_LINE_WEIGHT))
    alive, first = matched > 0, torch.zeros_like(own)
    order = torch.arange(number, device=size.device)
    period = (size[:, None] - at).clamp(min=1)
    prob = torch.ones(len(size), device=size.device)
    going, expected, made = room > 0, torch.zeros_like(size), torch.zeros_like(size)
    tokens = []
    for j in range(int(room.max()) if len(room) else 0):
        mine = text.gather(1, (at + j % period).clamp(max=text.shape[1] - 1))
        theirs = pool.tokens[line, (at + j).clamp(max=pool.tokens.shape[1] - 1)].long()
        alive = alive & (own | (at + j < pool.filled[line]))
        next_tokens = torch.where(own, mine, theirs)
        votes = torch.where(alive, weight * matched**2, 0)
        agree = (next_tokens[:, :, None] == next_tokens[:, None]) & alive[:, :, None] & alive[:, None]
        support = (agree * votes[:, None]).sum(2)
        best_support = support.amax(1, keepdim=True)
        winner = torch.where(support == best_support, order, number).amin(1, keepdim=True)
        alive = alive & (next_tokens == next_tokens.gather(1, winner))
        m = (torch.where(alive, matched, 0).amax(1) + j).float()
        going = going & (j < room) & (best_support[:, 0] > 0)
        prob = prob * (best_support[:, 0].float() / votes.sum(1).clamp(min=1).float())
        prob = prob * (m / (m + options.match_prior))
        going = going & (prob >= options.min_prob)
        if j == 0:
            first = alive & going[:, None]
        tokens.append(next_tokens.gather(1, winner)[:, 0])
        made += going
        expected += torch.where(going, prob * FIXED_ONE, 0.0).long()
    width = text.shape[1]
    drafts = torch.stack(tokens, 1) if tokens else size.new_zeros((len(size), 0))
    return torch.nn.functional.pad(drafts, (0, width - drafts.shape[1])), made, expected, first
