"""The suffix search, and the choice between proposers, in torch: all requests and all places at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.ops.contract.draft_search import (
    DEPTH,
    FADES,
    FEARED,
    HEAVY,
    HOPED,
    MULTIPLIER,
    NEAR,
    OWN,
    REACH,
    SIZES,
    UNIT,
    WAYS,
    DraftSearch,
    Offer,
    Record,
    SuffixPool,
    SuffixRule,
    stacked,
)
from draftproof.types import End, SlotColumns


class TorchSuffix(DraftSearch):
    def suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        pool: SuffixPool,
        rule: SuffixRule,
        begun: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slot = slots.clamp(min=0)
        k = columns.draft.shape[1]
        out = torch.zeros((len(slots), k), dtype=torch.int64, device=slots.device)
        had = torch.zeros_like(slots)
        if begun is not None:
            out, had = begun[0].clone(), begun[1]
        live = (slots >= 0) & (budget > had) & (columns.ended[slot] == End.NOT_YET)
        room = torch.where(live, budget.clamp(max=k) - had, 0)
        text, size = _texts(columns, slot, out, had)
        at, matched = _own_places(text, size, rule.smallest)
        line, there, other = _pool_places(text, size, pool, pool.slot_owner[slot])
        lanes = torch.cat([torch.full_like(at, -1), line], 1)
        at, matched = torch.cat([at, there], 1), torch.cat([matched, other], 1)
        found = _follow(text, size, pool, rule, lanes, at, matched, room)
        tokens, made, worth, first = found
        pool.used[lanes[first & (lanes >= 0)]] = pool.clock
        place = torch.arange(k, device=slots.device)
        moved = tokens.gather(1, (place - had[:, None]).clamp(min=0))
        return torch.where(place < had[:, None], out, moved), had + made, worth

    def arbitrate(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        record: Record,
        offers: Sequence[Offer],
        search: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, count, worth, lead = stacked(offers)
        real, slot, k = slots >= 0, slots.clamp(min=0), tokens.shape[2]
        rates = _rates(columns, record, real, slot)  # [M, B]
        count = torch.minimum(count, torch.where(real, budget, 0).clamp(0, k))
        chance, reckoned, all_stand = (torch.full_like(count, x) for x in (UNIT, 0, UNIT))
        for j in range(k):
            chance = chance * rates // UNIT
            reckoned = reckoned + torch.where(j < count, chance, 0)
            all_stand = torch.where(j < count, chance, all_stand)
        value = torch.where(worth >= 0, worth, reckoned) + torch.where(count > 0, lead[:, None], 0)
        order = torch.arange(len(value), device=slot.device)[:, None]
        who = torch.where(value == value.amax(0), order, len(value)).amin(0)
        at = torch.arange(len(who), device=slot.device)
        number = count[who, at]
        goes_on = (who != search) & (number > 0) & (all_stand[who, at] >= REACH) & (search >= 0)
        place = torch.arange(k, device=slot.device)
        whose = torch.where(place < number[:, None], who[:, None], max(search, 0)).to(torch.int8)
        facts = torch.stack([columns.seed[slot], columns.length[slot], number, who])
        record.last[:, slot[real]] = facts[:, real]
        return tokens[who, at], number, whose, torch.where(goes_on, budget, 0)


def _rates(columns: SlotColumns, record: Record, real: Tensor, slot: Tensor) -> Tensor:
    """[M, B] in UNIT; the record is brought up to date."""
    seed, length, given, who = record.last[:, slot]
    same = seed == columns.seed[slot]
    given = torch.where(same, given, 0)
    stood = torch.minimum((columns.length[slot] - length - 1).clamp(min=0), given)
    member = torch.arange(record.stood.shape[1], device=slot.device)
    its = ((member == who[:, None]) & (given > 0)[:, None]) * UNIT
    good, bad = (torch.where(same[:, None], x[slot], 0) for x in (record.stood, record.fell))
    good = good - (good >> FADES) + its * stood[:, None]
    bad = bad - (bad >> FADES) + its * (stood < given)[:, None]
    record.stood[slot[real]], record.fell[slot[real]] = good[real], bad[real]
    rates: Tensor = (good + HOPED * UNIT) * UNIT // (good + bad + (HOPED + FEARED) * UNIT)
    return rates.T


def _texts(columns: SlotColumns, slot: Tensor, begun: Tensor, had: Tensor) -> tuple[Tensor, Tensor]:
    """Committed tokens and drafts in one line each [B, wide + K], and how many [B]; other tokens are -1."""
    k, length = begun.shape[1], columns.length[slot][:, None]
    text = torch.nn.functional.pad(columns.tokens[slot], (0, k))
    ahead = torch.arange(text.shape[1], device=slot.device) - length
    text = torch.where(ahead < 0, text, begun.gather(1, ahead.clamp(0, k - 1)))
    return torch.where(ahead < had[:, None], text, -1), length[:, 0] + had


def _depth(text: Tensor, size: Tensor, before: Tensor, at: Tensor) -> Tensor:
    """before [B, P, DEPTH]: tokens before place at [B, P], nearest first. How many are the text's last?"""
    back = torch.arange(1, DEPTH + 1, device=size.device)
    last = text.gather(1, (size[:, None] - back).clamp(min=0))[:, None]
    inside = (back <= at[..., None]) & (back <= size[:, None, None])
    return ((before == last) & inside).long().cumprod(2).sum(2)


def _own_places(text: Tensor, size: Tensor, smallest: int) -> tuple[Tensor, Tensor]:
    """at, matched [B, OWN]; matched 0: no such place."""
    place = torch.arange(text.shape[1], device=size.device)
    near = torch.zeros_like(text)
    still = (place >= 1) & (place < size[:, None])
    for n in range(1, NEAR + 1):
        last = text.gather(1, (size - n).clamp(min=0)[:, None])
        still = still & (place >= n) & (text.roll(n, 1) == last)
        near += still
    key = torch.where(near >= min(smallest, NEAR), near * text.shape[1] + place, -1)
    key = torch.nn.functional.pad(key, (0, max(0, OWN - key.shape[1])), value=-1).topk(OWN, 1).values
    at = key.clamp(min=0) % text.shape[1]
    back = torch.arange(1, DEPTH + 1, device=size.device)
    before = text.gather(1, (at[..., None] - back).clamp(min=0).flatten(1)).view(*at.shape, DEPTH)
    matched = _depth(text, size, before, at)
    return at, torch.where((key >= 0) & (matched >= smallest), matched, 0)


def _pool_places(
    text: Tensor, size: Tensor, pool: SuffixPool, owner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """line, at, matched [B, WAYS] of the longest size that has any; matched 0: no such place."""
    wide, key = pool.tokens.shape[1], owner
    back = torch.arange(1, DEPTH + 1, device=size.device)
    line, at, matched = torch.zeros((3, len(size), WAYS), dtype=torch.int64, device=size.device)
    for n in range(1, SIZES[-1] + 1):
        token = text.gather(1, (size - n).clamp(min=0)[:, None])[:, 0]
        key = (key ^ token) * MULTIPLIER
        if n not in SIZES:
            continue
        table = pool.table[SIZES.index(n)]
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
    rule: SuffixRule,
    lanes: Tensor,
    at: Tensor,
    matched: Tensor,
    room: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lanes [B, P]: the line of a place, -1: the text. Drafts, number, worth, and who voted for the first."""
    own, line, number = lanes < 0, lanes.clamp(min=0), lanes.shape[1]
    weight = torch.where(own, 1, pool.weight[line].clamp(max=HEAVY))
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
        chance = chance * (m / (m + rule.doubt))
        going = going & (chance >= rule.floor)
        if j == 0:
            first = alive & going[:, None]
        tokens.append(said.gather(1, winner)[:, 0])
        made += going
        worth += torch.where(going, chance * UNIT, 0.0).long()
    wide = text.shape[1]
    drafts = torch.stack(tokens, 1) if tokens else size.new_zeros((len(size), 0))
    return torch.nn.functional.pad(drafts, (0, wide - drafts.shape[1])), made, worth, first
