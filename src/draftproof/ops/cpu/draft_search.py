"""The suffix search, and the choice between proposers, as native loops: some microseconds a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftproof.numba_jit import native
from draftproof.ops.contract import draft_search
from draftproof.ops.contract.draft_search import DraftSearch, Offer, Record, SuffixPool, SuffixRule, stacked
from draftproof.types import End, SlotColumns

# numba caches compiled loops by this file alone, so what they take from elsewhere is spelt out here
SMALL, MIDDLE, LARGE = 3, 6, 12
WAYS, OWN, NEAR, DEPTH, HEAVY, UNIT = 8, 4, 8, 32, 16, 65536
MULTIPLIER = -7046029254386353131
NOT_YET = 0
HOPED, FEARED, FADES, REACH = 2, 1, 4, 13107
assert draft_search.SIZES == (SMALL, MIDDLE, LARGE) and draft_search.MULTIPLIER == MULTIPLIER
assert (draft_search.WAYS, draft_search.OWN, draft_search.NEAR) == (WAYS, OWN, NEAR)
assert (draft_search.DEPTH, draft_search.HEAVY, draft_search.UNIT) == (DEPTH, HEAVY, UNIT)
assert (draft_search.HOPED, draft_search.FEARED, draft_search.FADES, draft_search.REACH) == (
    HOPED,
    FEARED,
    FADES,
    REACH,
)
assert End.NOT_YET == NOT_YET
compiled = native(boundscheck=False)


class CpuSuffix(DraftSearch):
    """Tensors are read and written in place."""

    def suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        pool: SuffixPool,
        rule: SuffixRule,
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
            rule.smallest, np.float32(rule.doubt), np.float32(rule.floor), tokens, count, worth,
        )  # fmt: skip
        return torch.from_numpy(tokens), torch.from_numpy(count), torch.from_numpy(worth)

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
        _, entries, k = tokens.shape
        out = np.zeros((entries, k), np.int64)
        number, room = np.zeros((2, entries), np.int64)
        whose = np.full((entries, k), max(search, 0), np.int8)
        _arbitrate(
            columns.seed.numpy(), columns.length.numpy(), slots.numpy(), budget.numpy(),
            record.last.numpy(), record.stood.numpy(), record.fell.numpy(),
            tokens.numpy(), count.numpy(), worth.numpy(), lead.numpy(), search, out, number, whose, room,
        )  # fmt: skip
        return tuple(torch.from_numpy(x) for x in (out, number, whose, room))


@compiled
def _arbitrate(  # type: ignore[no-untyped-def]
    seeds, lengths, slots, budget, last, stood, fell, tokens, count, worth, lead, search, out, number, whose,
    room,
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
            stood[s, m] -= stood[s, m] >> FADES
            fell[s, m] -= fell[s, m] >> FADES
            if given > 0 and last[3, s] == m:
                stood[s, m] += well * UNIT
                fell[s, m] += UNIT if well < given else 0
            rate = (stood[s, m] + HOPED * UNIT) * UNIT // (stood[s, m] + fell[s, m] + (HOPED + FEARED) * UNIT)
            chance, value, n = UNIT, 0, min(min(count[m, b], budget[b]), k)
            for _ in range(n):
                chance = chance * rate // UNIT
                value += chance
            if worth[m, b] >= 0:
                value = worth[m, b]
            if n > 0:
                value += lead[m]
            if value > best:
                best, who, likely = value, m, chance
        n = min(min(count[who, b], budget[b]), k)
        out[b] = tokens[who, b]
        whose[b, :n] = who
        number[b] = n
        if search >= 0 and who != search and n > 0 and likely >= REACH:
            room[b] = budget[b]
        last[0, s], last[1, s], last[2, s], last[3, s] = seeds[s], lengths[s], n, who


@compiled
def _own_places(text, smallest, lines, at, matched):  # type: ignore[no-untyped-def]
    """Fill in the places in the text itself; how many. By matched tokens, then the latest first."""
    size, found = len(text), 0
    last = text[size - 1]
    near = np.zeros(OWN, np.int64)
    for e in range(size - 1, 0, -1):
        if text[e - 1] != last:
            continue
        n = 1
        while n < NEAR and n < e and text[e - 1 - n] == text[size - 1 - n]:
            n += 1
        if n < min(smallest, NEAR):
            continue
        i = found
        while i > 0 and near[i - 1] < n:  # an earlier place never goes before a later one that is as good
            i -= 1
        if i == OWN:
            continue
        found = min(found + 1, OWN)
        for other in range(found - 1, i, -1):
            near[other], at[other] = near[other - 1], at[other - 1]
        near[i], at[i] = n, e
        if found == OWN and near[OWN - 1] == NEAR:
            break
    kept = 0
    for i in range(found):
        e, n = at[i], near[i]
        while n < DEPTH and n < e and text[e - 1 - n] == text[size - 1 - n]:
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
        key = (key ^ text[size - n]) * MULTIPLIER
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
        for way in range(WAYS):
            entry = np.int64(table[which, bucket, way])
            if entry < 0:
                continue
            line, e = entry // wide, entry % wide
            if owner[line] != me or e > filled[line]:
                continue
            said, n = pool_tokens[line], 0
            while n < DEPTH and n < e and n < size and said[e - 1 - n] == text[size - 1 - n]:
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
    lines, at, matched, said, votes = np.zeros((5, OWN + WAYS), np.int64)
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
                    votes[alive] = min(weight[line], HEAVY) * matched[i] * matched[i]
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
            worth[b] += np.int64(chance * np.float32(UNIT))
