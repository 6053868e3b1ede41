"""The suffix search, and the choice between proposers, as native loops: some microseconds a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftproof.numba_jit import native
from draftproof.ops.contract import draft_search
from draftproof.ops.contract.draft_search import (
    AcceptanceRecord,
    DraftCandidate,
    DraftSearch,
    SuffixOptions,
    SuffixPool,
    stack_candidates,
)
from draftproof.types import FinishStatus, SlotColumns

# numba caches compiled loops by this file alone, so what they take from elsewhere is spelt out here
SMALL, MIDDLE, LARGE = 3, 6, 12
BUCKET_WAYS, MAX_OWN_MATCHES, MAX_RANKED_MATCH, MAX_MATCH_TOKENS, MAX_LINE_WEIGHT, FIXED_ONE = (
    8,
    4,
    8,
    32,
    16,
    65536,
)
HASH_MULTIPLIER = -7046029254386353131
NOT_YET = 0
PRIOR_ACCEPTED, PRIOR_REJECTED, DECAY_SHIFT, EXTEND_MIN_PROB = 2, 1, 4, 13107
assert (
    draft_search.HASHED_NGRAM_SIZES == (SMALL, MIDDLE, LARGE)
    and draft_search.HASH_MULTIPLIER == HASH_MULTIPLIER
)
assert (draft_search.BUCKET_WAYS, draft_search.MAX_OWN_MATCHES, draft_search.MAX_RANKED_MATCH) == (
    BUCKET_WAYS,
    MAX_OWN_MATCHES,
    MAX_RANKED_MATCH,
)
assert (draft_search.MAX_MATCH_TOKENS, draft_search.MAX_LINE_WEIGHT, draft_search.FIXED_ONE) == (
    MAX_MATCH_TOKENS,
    MAX_LINE_WEIGHT,
    FIXED_ONE,
)
assert (
    draft_search.PRIOR_ACCEPTED,
    draft_search.PRIOR_REJECTED,
    draft_search.DECAY_SHIFT,
    draft_search.EXTEND_MIN_PROB,
) == (
    PRIOR_ACCEPTED,
    PRIOR_REJECTED,
    DECAY_SHIFT,
    EXTEND_MIN_PROB,
)
assert FinishStatus.RUNNING == NOT_YET
compiled = native(boundscheck=False)


class CpuSuffix(DraftSearch):
    """Tensors are read and written in place."""

    def search_suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        pool: SuffixPool,
        options: SuffixOptions,
        begun: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        number, k = len(slots), columns.draft.shape[1]
        tokens = np.zeros((number, k), np.int64) if begun is None else begun[0].numpy().copy()
        count = np.zeros(number, np.int64) if begun is None else begun[1].numpy().copy()
        worth = np.zeros(number, np.int64)
        _suffix(
            columns.tokens.numpy(), columns.length.numpy(), columns.ended.numpy(),
            slots.numpy(), budget.numpy(),
            pool.tokens.numpy(), pool.filled.numpy(), pool.owner.numpy(), pool.weight.numpy(),
            pool.used.numpy(), pool.table.numpy(), pool.slot_owner.numpy(), pool.clock.numpy(),
            options.min_match, np.float32(options.match_prior), np.float32(options.min_prob),
            tokens, count, worth,
        )  # fmt: skip
        return torch.from_numpy(tokens), torch.from_numpy(count), torch.from_numpy(worth)

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
        _, entries, k = tokens.shape
        out = np.zeros((entries, k), np.int64)
        number, room = np.zeros((2, entries), np.int64)
        whose = np.full((entries, k), max(search, 0), np.int8)
        _arbitrate(
            columns.seed.numpy(), columns.length.numpy(), slots.numpy(), budget.numpy(),
            record.last.numpy(), record.accepted.numpy(), record.rejected.numpy(),
            tokens.numpy(), count.numpy(), worth.numpy(), search, out, number, whose, room,
        )  # fmt: skip
        return tuple(torch.from_numpy(x) for x in (out, number, whose, room))


@compiled
def _arbitrate(  # type: ignore[no-untyped-def]
    seeds, lengths, slots, budget, last, stood, fell, tokens, count, worth, search, out, number, whose, room,
):  # fmt: skip
    members, _, k = tokens.shape
    for b in range(len(slots)):
        s = slots[b]
        if s < 0:
            continue
        given = last[2, s]
        if last[0, s] != seeds[s]:
            stood[s], fell[s], given = 0, 0, 0
        well = min(max(lengths[s] - last[1, s] - 1, 0), given)
        best, who, likely = np.int64(-1), 0, 0
        for m in range(members):
            stood[s, m] -= stood[s, m] >> DECAY_SHIFT
            fell[s, m] -= fell[s, m] >> DECAY_SHIFT
            if given > 0 and last[3, s] == m:
                stood[s, m] += well * FIXED_ONE
                fell[s, m] += FIXED_ONE if well < given else 0
            rate = (
                (stood[s, m] + PRIOR_ACCEPTED * FIXED_ONE)
                * FIXED_ONE
                // (stood[s, m] + fell[s, m] + (PRIOR_ACCEPTED + PRIOR_REJECTED) * FIXED_ONE)
            )
            chance, value, n = FIXED_ONE, 0, min(min(count[m, b], budget[b]), k)
            for _ in range(n):
                chance = chance * rate // FIXED_ONE
                value += chance
            if worth[m, b] >= 0:
                value = worth[m, b]
            if value > best:
                best, who, likely = value, m, chance
        n = min(min(count[who, b], budget[b]), k)
        out[b] = tokens[who, b]
        whose[b, :n] = who
        number[b] = n
        if search >= 0 and who != search and n > 0 and likely >= EXTEND_MIN_PROB:
            room[b] = budget[b]
        last[0, s], last[1, s], last[2, s], last[3, s] = seeds[s], lengths[s], n, who


@compiled
def _own_places(text, smallest, lines, at, matched):  # type: ignore[no-untyped-def]
    """Fill in the places in the text itself; how many. By matched tokens, then the latest first."""
    size, found = len(text), 0
    last = text[size - 1]
    near = np.zeros(MAX_OWN_MATCHES, np.int64)
    for e in range(size - 1, 0, -1):
        if text[e - 1] != last:
            continue
        n = 1
        while n < MAX_RANKED_MATCH and n < e and text[e - 1 - n] == text[size - 1 - n]:
            n += 1
        if n < min(smallest, MAX_RANKED_MATCH):
            continue
        i = found
        while i > 0 and near[i - 1] < n:  # an earlier place never goes before a later one that is as good
            i -= 1
        if i == MAX_OWN_MATCHES:
            continue
        found = min(found + 1, MAX_OWN_MATCHES)
        for other in range(found - 1, i, -1):
            near[other], at[other] = near[other - 1], at[other - 1]
        near[i], at[i] = n, e
        if found == MAX_OWN_MATCHES and near[MAX_OWN_MATCHES - 1] == MAX_RANKED_MATCH:
            break
    kept = 0
    for i in range(found):
        e, n = at[i], near[i]
        while n < MAX_MATCH_TOKENS and n < e and text[e - 1 - n] == text[size - 1 - n]:
            n += 1
        if n >= smallest:
            lines[kept], at[kept], matched[kept] = -1, e, n
            kept += 1
    return kept


@compiled
def _pool_places(text, me, pool_tokens, filled, owner, table, found, lines, at, matched):  # type: ignore[no-untyped-def]
    """The same in the pool, behind the first `found`."""
    size, wide, mask = len(text), pool_tokens.shape[1], table.shape[1] - 1
    key, begin = me, found
    keys = np.zeros(3, np.int64)
    for n in range(1, min(size, LARGE) + 1):
        key = (key ^ text[size - n]) * HASH_MULTIPLIER
        if n == SMALL:
            keys[0] = key
        elif n == MIDDLE:
            keys[1] = key
        elif n == LARGE:
            keys[2] = key
    for which in range(2, -1, -1):
        least = SMALL if which == 0 else (MIDDLE if which == 1 else LARGE)
        if least > size:
            continue
        bucket = (keys[which] >> 33) & mask
        for way in range(BUCKET_WAYS):
            entry = np.int64(table[which, bucket, way])
            if entry < 0:
                continue
            line, e = entry // wide, entry % wide
            if owner[line] != me or e > filled[line]:
                continue
            said, n = pool_tokens[line], 0
            while n < MAX_MATCH_TOKENS and n < e and n < size and said[e - 1 - n] == text[size - 1 - n]:
                n += 1
            if n >= least:
                lines[found], at[found], matched[found] = line, e, n
                found += 1
        if found > begin:
            break
    return found


@compiled
def _suffix(  # type: ignore[no-untyped-def]
    line_tokens, length, ended, slots, budget, pool_tokens, filled, owner, weight, used, table, slot_owner,
    clock, smallest, doubt, floor, out, count, worth,
):  # fmt: skip
    k = out.shape[1]
    lines, at, matched, said, votes = np.zeros((5, MAX_OWN_MATCHES + BUCKET_WAYS), np.int64)
    held = np.zeros(line_tokens.shape[1] + k, np.int64)
    for b in range(len(slots)):
        s, had = slots[b], count[b]
        if s < 0 or budget[b] <= had or ended[s] != NOT_YET:
            continue
        size = length[s] + had
        text = line_tokens[s, :size]
        if had > 0:
            held[: length[s]] = line_tokens[s, : length[s]]
            held[length[s] : size] = out[b, :had]
            text = held[:size]
        found = _own_places(text, smallest, lines, at, matched)
        found = _pool_places(
            text, slot_owner[s], pool_tokens, filled, owner, table, found, lines, at, matched
        )
        chance = np.float32(1.0)
        for j in range(min(budget[b], k) - had):
            alive, total = 0, 0
            for i in range(found):
                line = lines[i]
                if line >= 0 and at[i] + j >= filled[line]:
                    continue
                lines[alive], at[alive], matched[alive] = line, at[i], matched[i]
                if line < 0:
                    said[alive] = text[at[i] + j % (size - at[i])]
                    votes[alive] = matched[i] * matched[i]
                else:
                    said[alive] = pool_tokens[line, at[i] + j]
                    votes[alive] = min(weight[line], MAX_LINE_WEIGHT) * matched[i] * matched[i]
                total += votes[alive]
                alive += 1
            if alive == 0:
                break
            most, token = 0, 0
            for i in range(alive):
                support = 0
                for other in range(alive):
                    if said[other] == said[i]:
                        support += votes[other]
                if support > most:
                    most, token = support, said[i]
            found, longest = 0, 0
            for i in range(alive):
                if said[i] == token:
                    lines[found], at[found], matched[found] = lines[i], at[i], matched[i]
                    longest = max(longest, matched[i])
                    found += 1
            m = np.float32(longest + j)
            chance = chance * (np.float32(most) / np.float32(total))
            chance = chance * (m / (m + doubt))
            if chance < floor:
                break
            if j == 0:
                for i in range(found):
                    if lines[i] >= 0:
                        used[lines[i]] = clock[0]
            out[b, had + j] = token
            count[b] += 1
            worth[b] += np.int64(chance * np.float32(FIXED_ONE))
