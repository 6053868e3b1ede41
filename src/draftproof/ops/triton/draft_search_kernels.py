"""The suffix search, and the choice between proposers, on the GPU: a program an entry, nothing that waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.ops.contract import draft_search
from draftproof.ops.contract.draft_search import (
    MAX_CANDIDATES,
    AcceptanceRecord,
    DraftCandidate,
    SuffixOptions,
    SuffixPool,
)
from draftproof.ops.triton.runtime import begin, launch_options, power_of_two
from draftproof.types import SlotColumns

BLOCK = 2048  # places of the text that are compared at a time
LANES = tl.constexpr(16)  # places that are followed: those of the text in the first half, the pool's behind
HASHED_NGRAM_SIZES = tl.constexpr(draft_search.HASHED_NGRAM_SIZES)
BUCKET_WAYS = tl.constexpr(draft_search.BUCKET_WAYS)
MAX_OWN_MATCHES = tl.constexpr(draft_search.MAX_OWN_MATCHES)
MAX_RANKED_MATCH = tl.constexpr(draft_search.MAX_RANKED_MATCH)
MAX_MATCH_TOKENS = tl.constexpr(draft_search.MAX_MATCH_TOKENS)
MAX_LINE_WEIGHT = tl.constexpr(draft_search.MAX_LINE_WEIGHT)
FIXED_ONE = tl.constexpr(draft_search.FIXED_ONE)
HASH_MULTIPLIER = tl.constexpr(draft_search.HASH_MULTIPLIER)
PRIOR_ACCEPTED = tl.constexpr(draft_search.PRIOR_ACCEPTED * draft_search.FIXED_ONE)
KNOWN = tl.constexpr((draft_search.PRIOR_ACCEPTED + draft_search.PRIOR_REJECTED) * draft_search.FIXED_ONE)
DECAY_SHIFT = tl.constexpr(draft_search.DECAY_SHIFT)
EXTEND_MIN_PROB = tl.constexpr(draft_search.EXTEND_MIN_PROB)
assert draft_search.MAX_OWN_MATCHES == 4 and draft_search.BUCKET_WAYS == 8


@triton.jit
def text_at(line, begun, place, length, mask, BEGUN: tl.constexpr):
    """Tokens of the text: committed ones, then drafts."""
    found = tl.load(line + place, mask=mask & (place < length), other=-1)
    if BEGUN:
        drafted = tl.load(begun + place - length, mask=mask & (place >= length), other=-1)
        found = tl.where(place < length, found, drafted)
    return found


@triton.jit
def own_places(line, begun, length, size, smallest, BEGUN: tl.constexpr, BLOCK: tl.constexpr):
    """The best keys: matched tokens (up to MAX_RANKED_MATCH) above, place below; 0: none."""
    first = size * 0
    second, third, fourth = first, first, first
    least = tl.minimum(smallest, MAX_RANKED_MATCH)
    stop = size  # places before this one are not yet looked at; the least is 1
    while (stop > 1) & ((fourth >> 32) < MAX_RANKED_MATCH):
        place = stop - BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        still = place >= 1
        matched = tl.zeros((BLOCK,), tl.int64)
        for n in tl.static_range(1, MAX_RANKED_MATCH + 1):
            here = text_at(line, begun, place - n, length, place >= n, BEGUN)
            last = text_at(line, begun, size - n, length, size >= n, BEGUN)
            still = still & (place >= n) & (here == last)
            matched += still.to(tl.int64)
        key = tl.where((place >= 1) & (matched >= least), (matched << 32) + place, 0)
        best = tl.max(key, axis=0)
        while best > fourth:
            key = tl.where(key == best, 0, key)
            down = tl.minimum(first, best)
            first = tl.maximum(first, best)
            after = tl.minimum(second, down)
            second = tl.maximum(second, down)
            down = tl.minimum(third, after)
            third = tl.maximum(third, after)
            fourth = tl.maximum(fourth, down)
            best = tl.max(key, axis=0)
        stop = stop - BLOCK
    return first, second, third, fourth


@triton.jit
def depths(before, last, inside):
    """Return how many tokens of before [LANES, tokens] agree with last [tokens], nearest first."""
    back = tl.arange(0, MAX_MATCH_TOKENS).to(tl.int64)
    differs = (before != last[None, :]) | (inside == 0)
    return tl.min(tl.where(differs, back[None, :], MAX_MATCH_TOKENS), axis=1)


@triton.jit
def pool_places(
    line, begun, said, size, mine, last, pool_tokens, filled, owner, table, LINE, BUCKETS, BEGUN: tl.constexpr
):
    """Lines, places in them and matched tokens [LANES], of the longest size that has any; 0 matched: none."""
    lane = tl.arange(0, LANES).to(tl.int64)
    back = tl.arange(0, MAX_MATCH_TOKENS).to(tl.int64)
    where = lane * 0
    at = lane * 0
    matched = lane * 0
    hashed = mine
    for n in tl.static_range(1, HASHED_NGRAM_SIZES[2] + 1):
        token = text_at(line, begun, size - n, said, size >= n, BEGUN)
        hashed = (hashed ^ token) * HASH_MULTIPLIER
        if n == HASHED_NGRAM_SIZES[0] or n == HASHED_NGRAM_SIZES[1] or n == HASHED_NGRAM_SIZES[2]:
            which = 0 if n == HASHED_NGRAM_SIZES[0] else (1 if n == HASHED_NGRAM_SIZES[1] else 2)
            bucket = which * BUCKETS + ((hashed >> 33) & (BUCKETS - 1))
            entry = tl.load(
                table + bucket * BUCKET_WAYS + lane - BUCKET_WAYS,
                mask=(lane >= BUCKET_WAYS) & (size >= n),
                other=-1,
            )
            entry = entry.to(tl.int64)
            sound = entry >= 0
            here = tl.where(sound, entry, 0) // LINE
            there = tl.where(sound, entry, 0) % LINE
            sound = sound & (tl.load(owner + here, mask=sound, other=-2) == mine)
            sound = sound & (there <= tl.load(filled + here, mask=sound, other=-1))
            inside = sound[:, None] & (back[None, :] < there[:, None]) & (back[None, :] < size)
            spot = pool_tokens + here[:, None] * LINE + there[:, None] - 1 - back[None, :]
            before = tl.load(spot, mask=inside, other=-1).to(tl.int64)
            agree = depths(before, last, inside)
            agree = tl.where(sound & (agree >= n), agree, 0)
            better = tl.max(agree, axis=0) > 0
            where = tl.where(better, here, where)
            at = tl.where(better, there, at)
            matched = tl.where(better, agree, matched)
    return where, at, matched


@triton.jit
def follow(
    line, begun, said, size, where, at, matched, pool_tokens, filled, weight, used, now, out, room,
    LINE, doubt, floor, BEGUN: tl.constexpr,
):  # fmt: skip
    """The drafts go to `out`; how many, and their worth."""
    lane = tl.arange(0, LANES).to(tl.int64)
    own = lane < BUCKET_WAYS
    theirs = (lane >= BUCKET_WAYS) & (matched > 0)
    ends = tl.load(filled + where, mask=theirs, other=0)
    times = tl.load(weight + where, mask=theirs, other=0)
    vote = tl.where(own, 1, tl.minimum(times, MAX_LINE_WEIGHT)) * matched * matched
    alive = matched > 0
    period = tl.maximum(tl.where(own, size - at, 1), 1)
    chance = 1.0
    worth = size * 0
    made = size * 0
    going = made < room
    while going:
        alive = alive & (own | (at + made < ends))
        text = text_at(line, begun, at + made % period, said, alive & own, BEGUN)
        other = tl.load(pool_tokens + where * LINE + at + made, mask=alive & (own == 0), other=-1)
        next_of = tl.where(own, text, other.to(tl.int64))
        votes = tl.where(alive, vote, 0)
        together = (next_of[:, None] == next_of[None, :]) & alive[:, None] & alive[None, :]
        support = tl.sum(tl.where(together, votes[None, :], 0), axis=1)
        most = tl.max(support, axis=0)
        winner = tl.min(tl.where(support == most, lane, LANES), axis=0)
        guess = tl.sum(tl.where(lane == winner, next_of, 0), axis=0)
        alive = alive & (next_of == guess)
        m = (tl.max(tl.where(alive, matched, 0), axis=0) + made).to(tl.float32)
        total = tl.maximum(tl.sum(votes, axis=0), 1)
        chance = chance * tl.div_rn(most.to(tl.float32), total.to(tl.float32))
        chance = chance * tl.div_rn(m, m + doubt)
        going = (most > 0) & (chance >= floor)
        if going:
            tl.store(out + made, guess)
            tl.store(used + where, now, mask=alive & (own == 0) & (made == 0))
            worth += (chance * FIXED_ONE).to(tl.int64)
            made += 1
            going = made < room
    return made, worth


@triton.jit
def suffix_kernel(
    slots, budgets, ended, length, tokens, begun, begun_count,  # begun [B, K], begun_count [B]
    pool_tokens, filled, owner, weight, used, table, slot_owner, clock,
    out, counts, worths, WIDE, K, LINE, BUCKETS, smallest, doubt, floor,
    BEGUN: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    me = tl.program_id(0).to(tl.int64)
    ahead = tl.arange(0, DRAFTS).to(tl.int64)
    slot = tl.load(slots + me)
    had = slot * 0
    begun += me * K
    out += me * K
    if BEGUN:
        had = tl.load(begun_count + me)
        kept = tl.load(begun + ahead, mask=ahead < tl.minimum(had, K), other=0)
        tl.store(out + ahead, kept, mask=ahead < tl.minimum(had, K))
    named = slot >= 0
    budget = tl.load(budgets + me, mask=named, other=0)
    live = named & (budget > had) & (tl.load(ended + slot, mask=named, other=1) == 0)
    room = tl.where(live, tl.minimum(budget, K) - had, 0)
    said = tl.load(length + slot, mask=live, other=0)
    size = tl.where(live, said + had, 0)
    line = tokens + slot * WIDE
    mine = tl.load(slot_owner + slot, mask=live, other=-1)
    first, second, third, fourth = own_places(line, begun, said, size, smallest, BEGUN, BLOCK)
    lane = tl.arange(0, LANES).to(tl.int64)
    key = tl.where(lane == 0, first, 0)
    key = tl.where(lane == 1, second, key)
    key = tl.where(lane == 2, third, key)
    key = tl.where(lane == 3, fourth, key)
    at = key & 0xFFFFFFFF
    back = tl.arange(0, MAX_MATCH_TOKENS).to(tl.int64)
    last = text_at(line, begun, size - 1 - back, said, back < size, BEGUN)
    inside = (back[None, :] < at[:, None]) & (back[None, :] < size)
    before = text_at(line, begun, at[:, None] - 1 - back[None, :], said, inside, BEGUN)
    matched = depths(before, last, inside)
    matched = tl.where((key > 0) & (matched >= smallest), matched, 0)
    where, other, depth = pool_places(
        line, begun, said, size, mine, last, pool_tokens, filled, owner, table, LINE, BUCKETS, BEGUN
    )
    at = tl.where(lane < BUCKET_WAYS, at, other)
    matched = tl.where(lane < BUCKET_WAYS, matched, depth)
    made, worth = follow(
        line, begun, said, size, where, at, matched, pool_tokens, filled, weight, used, tl.load(clock),
        out + had, room, LINE, doubt, floor, BEGUN,
    )  # fmt: skip
    tl.store(counts + me, had + made)
    tl.store(worths + me, worth)


def search_suffix(
    columns: SlotColumns,
    slots: Tensor,
    budget: Tensor,
    pool: SuffixPool,
    options: SuffixOptions,
    begun: tuple[Tensor, Tensor] | None,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    entries, k, wide = len(slots), columns.draft.shape[1], columns.tokens.shape[1]
    tokens = torch.empty((entries, k), dtype=torch.int64, device=slots.device)
    counts, worths = torch.empty((2, entries), dtype=torch.int64, device=slots.device)
    drafts, number = (tokens, counts) if begun is None else begun
    suffix_kernel[(entries,)](
        slots, budget, columns.ended, columns.length, columns.tokens, drafts, number,
        pool.tokens, pool.filled, pool.owner, pool.weight, pool.used, pool.table, pool.slot_owner, pool.clock,
        tokens, counts, worths, wide, k, pool.tokens.shape[1], pool.table.shape[1],
        options.min_match, options.match_prior, options.min_prob,
        BEGUN=begun is not None, DRAFTS=power_of_two(k), BLOCK=min(BLOCK, power_of_two(wide + k)),
        **launch_options(pdl, num_warps=8),
    )  # fmt: skip
    return tokens, counts, worths


@triton.jit
def reckoned(count, rate):
    """What so many drafts are worth, and how likely all of them stand."""
    chance = count * 0 + FIXED_ONE
    value = count * 0
    j = count * 0
    while j < count:
        chance = (chance * rate) // FIXED_ONE
        value += chance
        j += 1
    return value, chance


@triton.jit
def arbitrate_kernel(
    slots, budgets, seeds, length, last, stood, fell, tokens_0, tokens_1, tokens_2, tokens_3,
    count_0, count_1, count_2, count_3, worth_0, worth_1, worth_2, worth_3, out, number, whose, room, S, K,
    down_0, down_1, down_2, down_3, across_0, across_1, across_2, across_3,
    SEARCH: tl.constexpr, M: tl.constexpr, TOLD: tl.constexpr, DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of M offers tokens, which lie `down` from entry to entry and `across` from draft to draft, count [B]
    and worth [B], if its bit of TOLD is set; last [4, S], stood and fell [S, M].
    """
    begin(PDL)
    tokens, count = (tokens_0, tokens_1, tokens_2, tokens_3), (count_0, count_1, count_2, count_3)
    worth = (worth_0, worth_1, worth_2, worth_3)
    down, across = (down_0, down_1, down_2, down_3), (across_0, across_1, across_2, across_3)
    me = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, DRAFTS).to(tl.int64)
    slot = tl.load(slots + me)
    named = slot >= 0
    budget = tl.minimum(tl.load(budgets + me, mask=named, other=0), K)
    seed = tl.load(seeds + slot, mask=named, other=0)
    size = tl.load(length + slot, mask=named, other=0)
    same = tl.load(last + slot, mask=named, other=0) == seed
    given = tl.where(same, tl.load(last + 2 * S + slot, mask=named, other=0), 0)
    before = tl.load(last + S + slot, mask=named, other=0)
    giver = tl.load(last + 3 * S + slot, mask=named, other=0)
    well = tl.minimum(tl.maximum(size - before - 1, 0), given)
    best = size * 0 - 1
    who = size * 0
    likely = size * 0
    made = size * 0
    for m in tl.static_range(M):
        good = tl.where(same, tl.load(stood + slot * M + m, mask=named, other=0), 0)
        bad = tl.where(same, tl.load(fell + slot * M + m, mask=named, other=0), 0)
        its = (giver == m) & (given > 0)
        good = good - (good >> DECAY_SHIFT) + tl.where(its, well * FIXED_ONE, 0)
        bad = bad - (bad >> DECAY_SHIFT) + tl.where(its & (well < given), FIXED_ONE, 0)
        tl.store(stood + slot * M + m, good, mask=named)
        tl.store(fell + slot * M + m, bad, mask=named)
        rate = ((good + PRIOR_ACCEPTED) * FIXED_ONE) // (good + bad + KNOWN)
        here = tl.maximum(tl.minimum(tl.load(count[m] + me), budget), 0)
        value, chance = reckoned(here, rate)
        if (TOLD >> m) % 2:
            said = tl.load(worth[m] + me)
            value = tl.where(said >= 0, said, value)
        better = value > best
        best = tl.where(better, value, best)
        who = tl.where(better, m, who)
        likely = tl.where(better, chance, likely)
        made = tl.where(better, here, made)
    for m in tl.static_range(M):
        its = (place < K) & (who == m)
        chosen = tl.load(tokens[m] + me * down[m] + place * across[m], mask=its, other=0)
        tl.store(out + me * K + place, chosen, mask=its)
    source = tl.where(place < made, who, max(SEARCH, 0)).to(tl.int8)
    tl.store(whose + me * K + place, source, mask=place < K)
    goes_on = named & (who != SEARCH) & (made > 0) & (likely >= EXTEND_MIN_PROB) & (SEARCH >= 0)
    tl.store(room + me, tl.where(goes_on, tl.load(budgets + me), 0))
    tl.store(number + me, made)
    tl.store(last + slot, seed, mask=named)
    tl.store(last + S + slot, size, mask=named)
    tl.store(last + 2 * S + slot, made, mask=named)
    tl.store(last + 3 * S + slot, who, mask=named)


def select_drafts(
    columns: SlotColumns,
    slots: Tensor,
    budget: Tensor,
    record: AcceptanceRecord,
    offers: Sequence[DraftCandidate],
    pdl: bool,
    search: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, number, whose and room."""
    entries, k = len(slots), columns.draft.shape[1]
    out = torch.empty((entries, k), dtype=torch.int64, device=slots.device)
    number, room = torch.empty((2, entries), dtype=torch.int64, device=slots.device)
    whose = torch.empty((entries, k), dtype=torch.int8, device=slots.device)
    four = [*offers, *[offers[0]] * (MAX_CANDIDATES - len(offers))]  # what is beyond their number is not read
    strides = [offer.tokens.stride() for offer in four]
    arbitrate_kernel[(entries,)](
        slots, budget, columns.seed, columns.length, record.last, record.accepted, record.rejected,
        *(offer.tokens for offer in four), *(offer.count for offer in four),
        *(offer.count if offer.expected_tokens is None else offer.expected_tokens for offer in four),
        out, number, whose, room, record.last.shape[1], k,
        *(down for down, _ in strides), *(across for _, across in strides),
        SEARCH=search, M=len(offers),
        TOLD=sum((offer.expected_tokens is not None) << m for m, offer in enumerate(offers)),
        DRAFTS=power_of_two(k), **launch_options(pdl, num_warps=1),
    )  # fmt: skip
    return out, number, whose, room
