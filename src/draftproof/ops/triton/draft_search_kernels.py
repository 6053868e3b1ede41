"""N-gram and suffix search, and the selection between the drafts of several proposers.

Every kernel has one program per entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.ops.contract import draft_search
from draftproof.ops.triton.kernel_utils import pdl_sync

BLOCK = 2048  # positions of the text that are compared at a time
FIRST_TOKENS = tl.constexpr(4)  # of a match that are compared first; most blocks have no longer match
NUM_LANES = tl.constexpr(16)  # matches that are extended: own text in the first half, pool in the second
HASHED_NGRAM_SIZES = tl.constexpr(draft_search.HASHED_NGRAM_SIZES)
BUCKET_WAYS = tl.constexpr(draft_search.BUCKET_WAYS)
MAX_RANKED_MATCH = tl.constexpr(draft_search.MAX_RANKED_MATCH)
MAX_MATCH_TOKENS = tl.constexpr(draft_search.MAX_MATCH_TOKENS)
MAX_LINE_WEIGHT = tl.constexpr(draft_search.MAX_LINE_WEIGHT)
FIXED_ONE = tl.constexpr(draft_search.FIXED_ONE)
HASH_MULTIPLIER = tl.constexpr(draft_search.HASH_MULTIPLIER)
PRIOR_ACCEPTED = tl.constexpr(draft_search.PRIOR_ACCEPTED * draft_search.FIXED_ONE)
PRIOR_TOTAL = tl.constexpr(PRIOR_ACCEPTED.value + draft_search.PRIOR_REJECTED * draft_search.FIXED_ONE)
DECAY_SHIFT = tl.constexpr(draft_search.DECAY_SHIFT)
EXTEND_MIN_PROB = tl.constexpr(draft_search.EXTEND_MIN_PROB)
assert draft_search.MAX_OWN_MATCHES == 4 and draft_search.BUCKET_WAYS == 8


@triton.jit
def count_matched_tokens(
    slot_tokens, position, total, matches, matched, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """Compare the tokens FIRST..LAST before `position` with those before `total`; count equal ones."""
    for n in tl.static_range(FIRST, LAST + 1):
        # not masked by `matches`, so that the loads of all n overlap
        here = tl.load(slot_tokens + position - n, mask=position >= n, other=-1)
        last = tl.load(slot_tokens + total - n, mask=total >= n, other=-2)
        matches = matches & (position >= n) & (here == last)
        matched += matches.to(tl.int64)
    return matches, matched


@triton.jit
def ngram_kernel(
    slots, budgets, ended, length, tokens, out, counts, match_lengths, MAX_LEN, K, smallest,
    LARGEST: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store drafts out [B, K], counts and match lengths [B]; a program per entry searches from the end.

    A candidate is the position after a match. The best one has the most matched tokens before it, then the
    largest position. Once a block has a match of LARGEST tokens, older blocks cannot be better.
    """
    pdl_sync(PDL)
    entry = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, DEPTHS).to(tl.int64)
    slot, budget = tl.load(slots + entry), tl.load(budgets + entry)
    has_slot = slot >= 0
    total = tl.load(length + slot, mask=has_slot, other=0)
    live = (budget > 0) & (tl.load(ended + slot, mask=has_slot, other=1) == 0)
    total = tl.where(live, total, 0)
    slot_tokens = tokens + slot * MAX_LEN
    best = total * 0  # matched tokens in the high half, position in the low half
    end = total  # positions in [1, end) are not compared yet
    while (end > 1) & ((best >> 32) < LARGEST):
        position = end - BLOCK + tl.arange(0, BLOCK)
        matches = position >= 1
        matched = tl.zeros((BLOCK,), tl.int64)
        FIRST: tl.constexpr = min(FIRST_TOKENS, LARGEST)
        matches, matched = count_matched_tokens(slot_tokens, position, total, matches, matched, 1, FIRST)
        if LARGEST > FIRST:  # noqa: SIM102 - a constant, then a value on the device
            if tl.max(matched, axis=0) == FIRST:
                matches, matched = count_matched_tokens(
                    slot_tokens, position, total, matches, matched, FIRST + 1, LARGEST
                )
        key = tl.where(position >= 1, (matched << 32) + position, 0)
        best = tl.maximum(best, tl.max(key, axis=0))
        end = end - BLOCK
    found = (best >> 32) >= smallest
    start = best & 0xFFFFFFFF
    period = tl.maximum(total - start, 1)
    count = tl.where(found, budget, 0)
    ok = found & (index < count)
    draft_token = tl.load(slot_tokens + start + index % period, mask=ok & (index < K), other=0)
    tl.store(out + entry * K + index, draft_token, mask=index < K)
    tl.store(counts + entry, count)
    tl.store(match_lengths + entry, tl.where(found, best >> 32, 0))


@triton.jit
def load_text(slot_tokens, prefix, position, length, mask, HAS_PREFIX: tl.constexpr):
    """Load tokens of the text: the committed ones, then the drafts of `prefix`."""
    found = tl.load(slot_tokens + position, mask=mask & (position < length), other=-1)
    if HAS_PREFIX:
        drafted = tl.load(prefix + position - length, mask=mask & (position >= length), other=-1)
        found = tl.where(position < length, found, drafted)
    return found


@triton.jit
def find_own_matches(
    slot_tokens, prefix, length, size, min_match, HAS_PREFIX: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the four best matches in the own text; 0 means no match.

    A match is a key: matched tokens (at most MAX_RANKED_MATCH) in the high half, position in the low half.
    """
    first = size * 0
    second, third, fourth = first, first, first
    min_match = tl.minimum(min_match, MAX_RANKED_MATCH)
    end = size  # positions in [1, end) are not compared yet
    while (end > 1) & ((fourth >> 32) < MAX_RANKED_MATCH):
        position = end - BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        matches = position >= 1
        matched = tl.zeros((BLOCK,), tl.int64)
        for n in tl.static_range(1, MAX_RANKED_MATCH + 1):
            line_index = load_text(slot_tokens, prefix, position - n, length, position >= n, HAS_PREFIX)
            last = load_text(slot_tokens, prefix, size - n, length, size >= n, HAS_PREFIX)
            matches = matches & (position >= n) & (line_index == last)
            matched += matches.to(tl.int64)
        key = tl.where((position >= 1) & (matched >= min_match), (matched << 32) + position, 0)
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
        end = end - BLOCK
    return first, second, third, fourth


@triton.jit
def match_lengths(before, last, inside):
    """Return how many tokens of before [LANES, tokens] agree with last [tokens], nearest first."""
    offset = tl.arange(0, MAX_MATCH_TOKENS).to(tl.int64)
    differs = (before != last[None, :]) | (inside == 0)
    return tl.min(tl.where(differs, offset[None, :], MAX_MATCH_TOKENS), axis=1)


@triton.jit
def find_pool_matches(
    slot_tokens, prefix, committed, size, slot_pool, last, pool_tokens, filled, owner, table, LINE, BUCKETS,
    HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """Return lines, offsets and matched tokens [NUM_LANES] of the longest n-gram size with a match."""
    lane = tl.arange(0, NUM_LANES).to(tl.int64)
    offset = tl.arange(0, MAX_MATCH_TOKENS).to(tl.int64)
    pool_line = lane * 0
    match_end = lane * 0
    matched = lane * 0
    hashed = slot_pool
    for n in tl.static_range(1, HASHED_NGRAM_SIZES[2] + 1):
        token = load_text(slot_tokens, prefix, size - n, committed, size >= n, HAS_PREFIX)
        hashed = (hashed ^ token) * HASH_MULTIPLIER
        if n == HASHED_NGRAM_SIZES[0] or n == HASHED_NGRAM_SIZES[1] or n == HASHED_NGRAM_SIZES[2]:
            which = 0 if n == HASHED_NGRAM_SIZES[0] else (1 if n == HASHED_NGRAM_SIZES[1] else 2)
            bucket = which * BUCKETS + ((hashed >> 33) & (BUCKETS - 1))
            entries = table + bucket * BUCKET_WAYS + lane - BUCKET_WAYS
            bucket_entry = tl.load(entries, mask=(lane >= BUCKET_WAYS) & (size >= n), other=-1).to(tl.int64)
            valid = bucket_entry >= 0
            line_index = tl.where(valid, bucket_entry, 0) // LINE
            line_offset = tl.where(valid, bucket_entry, 0) % LINE
            valid = valid & (tl.load(owner + line_index, mask=valid, other=-2) == slot_pool)
            valid = valid & (line_offset <= tl.load(filled + line_index, mask=valid, other=-1))
            inside = valid[:, None] & (offset[None, :] < line_offset[:, None]) & (offset[None, :] < size)
            pointers = pool_tokens + line_index[:, None] * LINE + line_offset[:, None] - 1 - offset[None, :]
            before = tl.load(pointers, mask=inside, other=-1).to(tl.int64)
            agreed = match_lengths(before, last, inside)
            agreed = tl.where(valid & (agreed >= n), agreed, 0)
            better = tl.max(agreed, axis=0) > 0
            pool_line = tl.where(better, line_index, pool_line)
            match_end = tl.where(better, line_offset, match_end)
            matched = tl.where(better, agreed, matched)
    return pool_line, match_end, matched


@triton.jit
def extend_matches(
    slot_tokens, prefix, committed, size, pool_line, match_end, matched, pool_tokens, filled, weight, used,
    now, out, room, LINE, match_prior, min_prob, HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """Store the drafts that follow the matches to `out`; return their number and expected accepted tokens."""
    lane = tl.arange(0, NUM_LANES).to(tl.int64)
    is_own = lane < BUCKET_WAYS
    in_pool = (lane >= BUCKET_WAYS) & (matched > 0)
    line_end = tl.load(filled + pool_line, mask=in_pool, other=0)
    line_weight = tl.load(weight + pool_line, mask=in_pool, other=0)
    vote = tl.where(is_own, 1, tl.minimum(line_weight, MAX_LINE_WEIGHT)) * matched * matched
    alive = matched > 0
    period = tl.maximum(tl.where(is_own, size - match_end, 1), 1)
    prob = 1.0
    expected = size * 0
    count = size * 0
    running = count < room
    while running:
        alive = alive & (is_own | (match_end + count < line_end))
        position = match_end + count % period
        text = load_text(slot_tokens, prefix, position, committed, alive & is_own, HAS_PREFIX)
        pointers = pool_tokens + pool_line * LINE + match_end + count
        other = tl.load(pointers, mask=alive & (is_own == 0), other=-1)
        next_token = tl.where(is_own, text, other.to(tl.int64))
        votes = tl.where(alive, vote, 0)
        agrees = (next_token[:, None] == next_token[None, :]) & alive[:, None] & alive[None, :]
        support = tl.sum(tl.where(agrees, votes[None, :], 0), axis=1)
        best_support = tl.max(support, axis=0)
        best_lane = tl.min(tl.where(support == best_support, lane, NUM_LANES), axis=0)
        draft_token = tl.sum(tl.where(lane == best_lane, next_token, 0), axis=0)
        alive = alive & (next_token == draft_token)
        m = (tl.max(tl.where(alive, matched, 0), axis=0) + count).to(tl.float32)
        total = tl.maximum(tl.sum(votes, axis=0), 1)
        prob = prob * tl.div_rn(best_support.to(tl.float32), total.to(tl.float32))
        prob = prob * tl.div_rn(m, m + match_prior)
        running = (best_support > 0) & (prob >= min_prob)
        if running:
            tl.store(out + count, draft_token)
            tl.store(used + pool_line, now, mask=alive & (is_own == 0) & (count == 0))
            expected += (prob * FIXED_ONE).to(tl.int64)
            count += 1
            running = count < room
    return count, expected


@triton.jit
def suffix_kernel(
    slots, budgets, ended, length, tokens, prefix, prefix_count,  # prefix [B, K], prefix_count [B]
    pool_tokens, filled, owner, weight, used, table, slot_owner, clock,
    out, counts, expected_tokens, MAX_LEN, K, LINE, BUCKETS, min_match, match_prior, min_prob,
    HAS_PREFIX: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store drafts out [B, K], counts [B] and expected accepted tokens [B] of the suffix search.

    With HAS_PREFIX the search continues the drafts `prefix` [B, K], which are copied to `out` first.
    """
    pdl_sync(PDL)
    entry = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, DRAFTS).to(tl.int64)
    slot = tl.load(slots + entry)
    prefix_len = slot * 0
    prefix += entry * K
    out += entry * K
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_count + entry)
        prefix_tokens = tl.load(prefix + index, mask=index < tl.minimum(prefix_len, K), other=0)
        tl.store(out + index, prefix_tokens, mask=index < tl.minimum(prefix_len, K))
    has_slot = slot >= 0
    budget = tl.load(budgets + entry, mask=has_slot, other=0)
    live = has_slot & (budget > prefix_len) & (tl.load(ended + slot, mask=has_slot, other=1) == 0)
    room = tl.where(live, tl.minimum(budget, K) - prefix_len, 0)
    committed = tl.load(length + slot, mask=live, other=0)
    size = tl.where(live, committed + prefix_len, 0)
    slot_tokens = tokens + slot * MAX_LEN
    slot_pool = tl.load(slot_owner + slot, mask=live, other=-1)
    own = find_own_matches(slot_tokens, prefix, committed, size, min_match, HAS_PREFIX, BLOCK)
    first, second, third, fourth = own
    lane = tl.arange(0, NUM_LANES).to(tl.int64)
    key = tl.where(lane == 0, first, 0)
    key = tl.where(lane == 1, second, key)
    key = tl.where(lane == 2, third, key)
    key = tl.where(lane == 3, fourth, key)
    match_end = key & 0xFFFFFFFF
    offset = tl.arange(0, MAX_MATCH_TOKENS).to(tl.int64)
    last = load_text(slot_tokens, prefix, size - 1 - offset, committed, offset < size, HAS_PREFIX)
    inside = (offset[None, :] < match_end[:, None]) & (offset[None, :] < size)
    position = match_end[:, None] - 1 - offset[None, :]
    before = load_text(slot_tokens, prefix, position, committed, inside, HAS_PREFIX)
    matched = match_lengths(before, last, inside)
    matched = tl.where((key > 0) & (matched >= min_match), matched, 0)
    pool_line, other, depth = find_pool_matches(
        slot_tokens, prefix, committed, size, slot_pool, last, pool_tokens, filled, owner, table,
        LINE, BUCKETS, HAS_PREFIX,
    )  # fmt: skip
    match_end = tl.where(lane < BUCKET_WAYS, match_end, other)
    matched = tl.where(lane < BUCKET_WAYS, matched, depth)
    count, expected = extend_matches(
        slot_tokens, prefix, committed, size, pool_line, match_end, matched, pool_tokens, filled, weight,
        used, tl.load(clock), out + prefix_len, room, LINE, match_prior, min_prob, HAS_PREFIX,
    )  # fmt: skip
    tl.store(counts + entry, prefix_len + count)
    tl.store(expected_tokens + entry, expected)


@triton.jit
def expected_accepted(count, rate):
    """Return the expected accepted tokens of `count` drafts, and the probability that all are accepted."""
    prob = count * 0 + FIXED_ONE
    value = count * 0
    j = count * 0
    while j < count:
        prob = (prob * rate) // FIXED_ONE
        value += prob
        j += 1
    return value, prob


@triton.jit
def select_drafts_kernel(
    slots, budgets, seeds, length, last, accepted, rejected, tokens_0, tokens_1, tokens_2, tokens_3,
    count_0, count_1, count_2, count_3, expected_0, expected_1, expected_2, expected_3,
    out, counts, sources, room, S, K,
    stride_b_0, stride_b_1, stride_b_2, stride_b_3, stride_k_0, stride_k_1, stride_k_2, stride_k_3,
    SEARCH: tl.constexpr, M: tl.constexpr, HAS_EXPECTED: tl.constexpr,
    DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select the drafts with the most expected accepted tokens among M proposers.

    Each proposer has tokens [B, K] with two strides, count [B] and, if its bit of HAS_EXPECTED is set,
    expected accepted tokens [B]. The record is last [4, S], accepted and rejected [S, M].
    """
    pdl_sync(PDL)
    tokens, count = (tokens_0, tokens_1, tokens_2, tokens_3), (count_0, count_1, count_2, count_3)
    expected = (expected_0, expected_1, expected_2, expected_3)
    stride_b = (stride_b_0, stride_b_1, stride_b_2, stride_b_3)
    stride_k = (stride_k_0, stride_k_1, stride_k_2, stride_k_3)
    entry = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, DRAFTS).to(tl.int64)
    slot = tl.load(slots + entry)
    has_slot = slot >= 0
    budget = tl.minimum(tl.load(budgets + entry, mask=has_slot, other=0), K)
    seed = tl.load(seeds + slot, mask=has_slot, other=0)
    size = tl.load(length + slot, mask=has_slot, other=0)
    same_request = tl.load(last + slot, mask=has_slot, other=0) == seed
    last_count = tl.where(same_request, tl.load(last + 2 * S + slot, mask=has_slot, other=0), 0)
    last_length = tl.load(last + S + slot, mask=has_slot, other=0)
    last_source = tl.load(last + 3 * S + slot, mask=has_slot, other=0)
    last_accepted = tl.minimum(tl.maximum(size - last_length - 1, 0), last_count)
    best = size * 0 - 1
    best_source = size * 0
    best_prob = size * 0
    best_count = size * 0
    for m in tl.static_range(M):
        num_accepted = tl.where(same_request, tl.load(accepted + slot * M + m, mask=has_slot, other=0), 0)
        num_rejected = tl.where(same_request, tl.load(rejected + slot * M + m, mask=has_slot, other=0), 0)
        is_source = (last_source == m) & (last_count > 0)
        num_accepted = num_accepted - (num_accepted >> DECAY_SHIFT)
        num_accepted = num_accepted + tl.where(is_source, last_accepted * FIXED_ONE, 0)
        num_rejected = num_rejected - (num_rejected >> DECAY_SHIFT)
        num_rejected = num_rejected + tl.where(is_source & (last_accepted < last_count), FIXED_ONE, 0)
        tl.store(accepted + slot * M + m, num_accepted, mask=has_slot)
        tl.store(rejected + slot * M + m, num_rejected, mask=has_slot)
        rate = ((num_accepted + PRIOR_ACCEPTED) * FIXED_ONE) // (num_accepted + num_rejected + PRIOR_TOTAL)
        num_drafts = tl.maximum(tl.minimum(tl.load(count[m] + entry), budget), 0)
        value, prob = expected_accepted(num_drafts, rate)
        if (HAS_EXPECTED >> m) % 2:
            given_value = tl.load(expected[m] + entry)
            value = tl.where(given_value >= 0, given_value, value)
        better = value > best
        best = tl.where(better, value, best)
        best_source = tl.where(better, m, best_source)
        best_prob = tl.where(better, prob, best_prob)
        best_count = tl.where(better, num_drafts, best_count)
    for m in tl.static_range(M):
        is_source = (depth < K) & (best_source == m)
        chosen = tl.load(tokens[m] + entry * stride_b[m] + depth * stride_k[m], mask=is_source, other=0)
        tl.store(out + entry * K + depth, chosen, mask=is_source)
    source = tl.where(depth < best_count, best_source, max(SEARCH, 0)).to(tl.int8)
    tl.store(sources + entry * K + depth, source, mask=depth < K)
    can_extend = has_slot & (best_source != SEARCH) & (best_count > 0)
    can_extend = can_extend & (best_prob >= EXTEND_MIN_PROB) & (SEARCH >= 0)
    tl.store(room + entry, tl.where(can_extend, tl.load(budgets + entry), 0))
    tl.store(counts + entry, best_count)
    tl.store(last + slot, seed, mask=has_slot)
    tl.store(last + S + slot, size, mask=has_slot)
    tl.store(last + 2 * S + slot, best_count, mask=has_slot)
    tl.store(last + 3 * S + slot, best_source, mask=has_slot)
