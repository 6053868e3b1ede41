"""The suffix search, and the choice between proposers, in torch: all requests and all places at once."""

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


class TorchSuffix(DraftSearch):
    def search_suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        pool: SuffixPool,
        options: SuffixOptions,
        begun: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slot = slots.clamp(min=0)
        k = columns.draft.shape[1]
        out = torch.zeros((len(slots), k), dtype=torch.int64, device=slots.device)
        had = torch.zeros_like(slots)
        if begun is not None:
            out, had = begun[0].clone(), begun[1]
        live = (slots >= 0) & (budget > had) & (columns.ended[slot] == FinishStatus.RUNNING)
        room = torch.where(live, budget.clamp(max=k) - had, 0)
        text, size = _texts(columns, slot, out, had)
        at, matched = _own_places(text, size, options.min_match)
        line, there, other = _pool_places(text, size, pool, pool.slot_owner[slot])
        lanes = torch.cat([torch.full_like(at, -1), line], 1)
        at, matched = torch.cat([at, there], 1), torch.cat([matched, other], 1)
        found = _follow(text, size, pool, options, lanes, at, matched, room)
        tokens, made, worth, first = found
        pool.used[lanes[first & (lanes >= 0)]] = pool.clock
        place = torch.arange(k, device=slots.device)
        moved = tokens.gather(1, (place - had[:, None]).clamp(min=0))
        return torch.where(place < had[:, None], out, moved), had + made, worth

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
        real, slot, k = slots >= 0, slots.clamp(min=0), tokens.shape[2]
        rates = _rates(columns, record, real, slot)  # [M, B]
        count = torch.minimum(count, torch.where(real, budget, 0).clamp(0, k))
        chance, reckoned, all_stand = (torch.full_like(count, x) for x in (FIXED_ONE, 0, FIXED_ONE))
        for j in range(k):
            chance = chance * rates // FIXED_ONE
            reckoned = reckoned + torch.where(j < count, chance, 0)
            all_stand = torch.where(j < count, chance, all_stand)
        value = torch.where(worth >= 0, worth, reckoned)
        order = torch.arange(len(value), device=slot.device)[:, None]
        who = torch.where(value == value.amax(0), order, len(value)).amin(0)
        at = torch.arange(len(who), device=slot.device)
        number = count[who, at]
        goes_on = (who != search) & (number > 0) & (all_stand[who, at] >= EXTEND_MIN_PROB) & (search >= 0)
        place = torch.arange(k, device=slot.device)
        whose = torch.where(place < number[:, None], who[:, None], max(search, 0)).to(torch.int8)
        facts = torch.stack([columns.seed[slot], columns.length[slot], number, who])
        record.last[:, slot[real]] = facts[:, real]
        return tokens[who, at], number, whose, torch.where(goes_on, budget, 0)


def _rates(columns: SlotColumns, record: AcceptanceRecord, real: Tensor, slot: Tensor) -> Tensor:
    """[M, B] in FIXED_ONE; the record is brought up to date."""
    seed, length, given, who = record.last[:, slot]
    same = seed == columns.seed[slot]
    given = torch.where(same, given, 0)
    stood = torch.minimum((columns.length[slot] - length - 1).clamp(min=0), given)
    member = torch.arange(record.accepted.shape[1], device=slot.device)
    its = ((member == who[:, None]) & (given > 0)[:, None]) * FIXED_ONE
    good, bad = (torch.where(same[:, None], x[slot], 0) for x in (record.accepted, record.rejected))
    good = good - (good >> DECAY_SHIFT) + its * stood[:, None]
    bad = bad - (bad >> DECAY_SHIFT) + its * (stood < given)[:, None]
    record.accepted[slot[real]], record.rejected[slot[real]] = good[real], bad[real]
    rates: Tensor = (
        (good + PRIOR_ACCEPTED * FIXED_ONE)
        * FIXED_ONE
        // (good + bad + (PRIOR_ACCEPTED + PRIOR_REJECTED) * FIXED_ONE)
    )
    return rates.T


def _texts(columns: SlotColumns, slot: Tensor, begun: Tensor, had: Tensor) -> tuple[Tensor, Tensor]:
    """Committed tokens and drafts in one line each [B, wide + K], and how many [B]; other tokens are -1."""
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


def _own_places(text: Tensor, size: Tensor, smallest: int) -> tuple[Tensor, Tensor]:
    """at, matched [B, MAX_OWN_MATCHES]; matched 0: no such place."""
    place = torch.arange(text.shape[1], device=size.device)
    near = torch.zeros_like(text)
    still = (place >= 1) & (place < size[:, None])
    for n in range(1, MAX_RANKED_MATCH + 1):
        last = text.gather(1, (size - n).clamp(min=0)[:, None])
        still = still & (place >= n) & (text.roll(n, 1) == last)
        near += still
    key = torch.where(near >= min(smallest, MAX_RANKED_MATCH), near * text.shape[1] + place, -1)
    key = (
        torch.nn.functional.pad(key, (0, max(0, MAX_OWN_MATCHES - key.shape[1])), value=-1)
        .topk(MAX_OWN_MATCHES, 1)
        .values
    )
    at = key.clamp(min=0) % text.shape[1]
    back = torch.arange(1, MAX_MATCH_TOKENS + 1, device=size.device)
    before = text.gather(1, (at[..., None] - back).clamp(min=0).flatten(1)).view(*at.shape, MAX_MATCH_TOKENS)
    matched = _depth(text, size, before, at)
    return at, torch.where((key >= 0) & (matched >= smallest), matched, 0)


def _pool_places(
    text: Tensor, size: Tensor, pool: SuffixPool, owner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """line, at, matched [B, BUCKET_WAYS] of the longest size that has any; matched 0: no such place."""
    wide, key = pool.tokens.shape[1], owner
    back = torch.arange(1, MAX_MATCH_TOKENS + 1, device=size.device)
    line, at, matched = torch.zeros((3, len(size), BUCKET_WAYS), dtype=torch.int64, device=size.device)
    for n in range(1, HASHED_NGRAM_SIZES[-1] + 1):
        token = text.gather(1, (size - n).clamp(min=0)[:, None])[:, 0]
        key = (key ^ token) * HASH_MULTIPLIER
        if n not in HASHED_NGRAM_SIZES:
            continue
        table = pool.table[HASHED_NGRAM_SIZES.index(n)]
        entry = table[(key >> 33) & (len(table) - 1)].long()
        here, there = entry.clamp(min=0) // wide, entry.clamp(min=0) % wide
        before = pool.tokens[here[..., None], (there[..., None] - back).clamp(min=0)]
        depth = _depth(text, size, before, there)
        sound = (entry >= 0) & (pool.owner[here] == owner[:, None]) & (there <= pool.filled[here])
        depth = torch.where(sound & (depth >= n), depth, 0)
        better = (depth > 0).any(1, keepdim=True)
        line, at = torch.where(better, here, line), torch.where(better, there, at)
        matched = torch.where(better, depth, matched)
    return line, at, matched


def _follow(
    text: Tensor,
    size: Tensor,
    pool: SuffixPool,
    options: SuffixOptions,
    lanes: Tensor,
    at: Tensor,
    matched: Tensor,
    room: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lanes [B, P]: the line of a place, -1: the text. Drafts, number, worth, and who voted for the first."""
    own, line, number = lanes < 0, lanes.clamp(min=0), lanes.shape[1]
    weight = torch.where(own, 1, pool.weight[line].clamp(max=MAX_LINE_WEIGHT))
    alive, first = matched > 0, torch.zeros_like(own)
    order = torch.arange(number, device=size.device)
    period = (size[:, None] - at).clamp(min=1)
    chance = torch.ones(len(size), device=size.device)
    going, worth, made = room > 0, torch.zeros_like(size), torch.zeros_like(size)
    tokens = []
    for j in range(int(room.max()) if len(room) else 0):
        mine = text.gather(1, (at + j % period).clamp(max=text.shape[1] - 1))
        theirs = pool.tokens[line, (at + j).clamp(max=pool.tokens.shape[1] - 1)].long()
        alive = alive & (own | (at + j < pool.filled[line]))
        said = torch.where(own, mine, theirs)
        votes = torch.where(alive, weight * matched**2, 0)
        agree = (said[:, :, None] == said[:, None]) & alive[:, :, None] & alive[:, None]
        support = (agree * votes[:, None]).sum(2)
        most = support.amax(1, keepdim=True)
        winner = torch.where(support == most, order, number).amin(1, keepdim=True)
        alive = alive & (said == said.gather(1, winner))
        m = (torch.where(alive, matched, 0).amax(1) + j).float()
        going = going & (j < room) & (most[:, 0] > 0)
        chance = chance * (most[:, 0].float() / votes.sum(1).clamp(min=1).float())
        chance = chance * (m / (m + options.match_prior))
        going = going & (chance >= options.min_prob)
        if j == 0:
            first = alive & going[:, None]
        tokens.append(said.gather(1, winner)[:, 0])
        made += going
        worth += torch.where(going, chance * FIXED_ONE, 0.0).long()
    wide = text.shape[1]
    drafts = torch.stack(tokens, 1) if tokens else size.new_zeros((len(size), 0))
    return torch.nn.functional.pad(drafts, (0, wide - drafts.shape[1])), made, worth, first
