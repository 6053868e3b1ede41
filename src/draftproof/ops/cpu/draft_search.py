"""Draft search as native loops: some microseconds per request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftproof.numba_jit import native
from draftproof.ops.contract import draft_search
from draftproof.ops.contract.draft_search import (
    AcceptanceRecord,
    BegunDrafts,
    DraftCandidate,
    DraftSearchOps,
    SuffixOptions,
    SuffixPool,
    stack_candidates,
)
from draftproof.types import DeviceBatch, FinishStatus

# numba caches compiled loops by this file alone, so constants of other files are repeated here
SMALL, MIDDLE, LARGE = 3, 6, 12
BUCKET_WAYS, MAX_OWN_MATCHES, MAX_RANKED_MATCH, MAX_MATCH_TOKENS, MAX_LINE_WEIGHT = 8, 4, 8, 32, 16
HASH_MULTIPLIER = -7046029254386353131
FIXED_ONE = 65536
PRIOR_ACCEPTED, PRIOR_REJECTED, DECAY_SHIFT, EXTEND_MIN_PROB = 2, 1, 4, 13107
RUNNING = 0
_REPEATED = {
    name: value for name, value in globals().items() if name in vars(draft_search) and name.isupper()
}
assert len(_REPEATED) == 11 and all(vars(draft_search)[name] == value for name, value in _REPEATED.items())
assert draft_search.HASHED_NGRAM_SIZES == (SMALL, MIDDLE, LARGE)
assert FinishStatus.RUNNING == RUNNING
compiled = native(boundscheck=False)


class CpuSearch(DraftSearchOps):
    """Draft search that reads and writes tensors in place."""

    def search_ngram(
        self, batch: DeviceBatch, min_match: int, max_match: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        tokens = np.zeros((len(slots), columns.draft.shape[1]), np.int64)
        count, matched = np.zeros((2, len(slots)), np.int64)
        inputs = [x.numpy() for x in (columns.tokens, columns.length, columns.finish_status, slots, budget)]
        _ngram(*inputs, min_match, max_match, tokens, count, matched)
        return torch.from_numpy(tokens), torch.from_numpy(count), torch.from_numpy(matched)

    def search_suffix(
        self, batch: DeviceBatch, pool: SuffixPool, options: SuffixOptions, begun: BegunDrafts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        number, k = len(slots), columns.draft.shape[1]
        tokens = np.zeros((number, k), np.int64) if begun is None else begun[0].numpy().copy()
        count = np.zeros(number, np.int64) if begun is None else begun[1].numpy().copy()
        expected = np.zeros(number, np.int64)
        _suffix(
            columns.tokens.numpy(), columns.length.numpy(), columns.finish_status.numpy(),
            slots.numpy(), budget.numpy(),
            pool.tokens.numpy(), pool.filled.numpy(), pool.owner.numpy(), pool.weight.numpy(),
            pool.used.numpy(), pool.table.numpy(), pool.slot_owner.numpy(), pool.clock.numpy(),
            options.min_match, np.float32(options.match_prior), np.float32(options.min_prob),
            tokens, count, expected,
        )  # fmt: skip
        return torch.from_numpy(tokens), torch.from_numpy(count), torch.from_numpy(expected)

    def select_drafts(
        self, batch: DeviceBatch, record: AcceptanceRecord, candidates: Sequence[DraftCandidate], search: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        tokens, count, expected = stack_candidates(candidates)
        _, entries, k = tokens.shape
        out = np.zeros((entries, k), np.int64)
        number, room = np.zeros((2, entries), np.int64)
        source = np.full((entries, k), max(search, 0), np.int8)
        _select(
            columns.seed.numpy(), columns.length.numpy(), slots.numpy(), budget.numpy(),
            record.last.numpy(), record.accepted.numpy(), record.rejected.numpy(),
            tokens.numpy(), count.numpy(), expected.numpy(), search, out, number, source, room,
        )  # fmt: skip
        return tuple(torch.from_numpy(x) for x in (out, number, source, room))


@compiled
def _select(  # type: ignore[no-untyped-def]
    seeds, lengths, slots, budget, last, accepted, rejected, tokens, count, expected, search, out, number,
    source, room,
):  # fmt: skip
    """Select a candidate per entry and update the record; see `DraftSearchOps.select_drafts`."""
    num_candidates, _, k = tokens.shape
    for b in range(len(slots)):
        s = slots[b]
        if s < 0:
            continue
        given = last[2, s]
        if last[0, s] != seeds[s]:
            accepted[s], rejected[s], given = 0, 0, 0
        num_accepted = min(max(lengths[s] - last[1, s] - 1, 0), given)
        best, winner, all_accepted = np.int64(-1), 0, 0
        for m in range(num_candidates):
            accepted[s, m] -= accepted[s, m] >> DECAY_SHIFT
            rejected[s, m] -= rejected[s, m] >> DECAY_SHIFT
            if given > 0 and last[3, s] == m:
                accepted[s, m] += num_accepted * FIXED_ONE
                rejected[s, m] += FIXED_ONE if num_accepted < given else 0
            rate = (
                (accepted[s, m] + PRIOR_ACCEPTED * FIXED_ONE)
                * FIXED_ONE
                // (accepted[s, m] + rejected[s, m] + (PRIOR_ACCEPTED + PRIOR_REJECTED) * FIXED_ONE)
            )
            prob, score, n = FIXED_ONE, 0, min(min(count[m, b], budget[b]), k)
            for _ in range(n):
                prob = prob * rate // FIXED_ONE
                score += prob
            if expected[m, b] >= 0:
                score = expected[m, b]
            if score > best:
                best, winner, all_accepted = score, m, prob
        n = min(min(count[winner, b], budget[b]), k)
        out[b] = tokens[winner, b]
        source[b, :n] = winner
        number[b] = n
        if search >= 0 and winner != search and n > 0 and all_accepted >= EXTEND_MIN_PROB:
            room[b] = budget[b]
        last[0, s], last[1, s], last[2, s], last[3, s] = seeds[s], lengths[s], n, winner


@compiled
def _own_matches(text, min_match, lines, at, matched):  # type: ignore[no-untyped-def]
    """Write the matches in the text itself, longest first, latest first among equals; return their number."""
    size, found = len(text), 0
    last = text[size - 1]
    ranked = np.zeros(MAX_OWN_MATCHES, np.int64)
    for e in range(size - 1, 0, -1):
        if text[e - 1] != last:
            continue
        n = 1
        while n < MAX_RANKED_MATCH and n < e and text[e - 1 - n] == text[size - 1 - n]:
            n += 1
        if n < min(min_match, MAX_RANKED_MATCH):
            continue
        i = found
        while i > 0 and ranked[i - 1] < n:  # an earlier match does not precede a later one of the same length
            i -= 1
        if i == MAX_OWN_MATCHES:
            continue
        found = min(found + 1, MAX_OWN_MATCHES)
        for other in range(found - 1, i, -1):
            ranked[other], at[other] = ranked[other - 1], at[other - 1]
        ranked[i], at[i] = n, e
        if found == MAX_OWN_MATCHES and ranked[MAX_OWN_MATCHES - 1] == MAX_RANKED_MATCH:
            break
    kept = 0
    for i in range(found):
        e, n = at[i], ranked[i]
        while n < MAX_MATCH_TOKENS and n < e and text[e - 1 - n] == text[size - 1 - n]:
            n += 1
        if n >= min_match:
            lines[kept], at[kept], matched[kept] = -1, e, n
            kept += 1
    return kept


@compiled
def _pool_matches(text, slot_owner, pool_tokens, filled, owner, table, found, lines, at, matched):  # type: ignore[no-untyped-def]
    """Append the matches in the pool behind the first `found`; return the new number."""
    size, width, mask = len(text), pool_tokens.shape[1], table.shape[1] - 1
    key, begin = slot_owner, found
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
        size_of = SMALL if which == 0 else (MIDDLE if which == 1 else LARGE)
        if size_of > size:
            continue
        bucket = (keys[which] >> 33) & mask
        for way in range(BUCKET_WAYS):
            entry = np.int64(table[which, bucket, way])
            if entry < 0:
                continue
            line, e = entry // width, entry % width
            if owner[line] != slot_owner or e > filled[line]:
                continue
            tokens, n = pool_tokens[line], 0
            while n < MAX_MATCH_TOKENS and n < e and n < size and tokens[e - 1 - n] == text[size - 1 - n]:
                n += 1
            if n >= size_of:
                lines[found], at[found], matched[found] = line, e, n
                found += 1
        if found > begin:
            break
    return found


@compiled
def _suffix(  # type: ignore[no-untyped-def]
    line_tokens, length, ended, slots, budget, pool_tokens, filled, owner, weight, used, table, slot_owner,
    clock, min_match, match_prior, min_prob, out, count, expected,
):  # fmt: skip
    """Draft by suffix matches; see `DraftSearchOps.search_suffix`."""
    k = out.shape[1]
    lines, at, matched, next_token, votes = np.zeros((5, MAX_OWN_MATCHES + BUCKET_WAYS), np.int64)
    held = np.zeros(line_tokens.shape[1] + k, np.int64)
    for b in range(len(slots)):
        s, had = slots[b], count[b]
        if s < 0 or budget[b] <= had or ended[s] != RUNNING:
            continue
        size = length[s] + had
        text = line_tokens[s, :size]
        if had > 0:
            held[: length[s]] = line_tokens[s, : length[s]]
            held[length[s] : size] = out[b, :had]
            text = held[:size]
        found = _own_matches(text, min_match, lines, at, matched)
        found = _pool_matches(
            text, slot_owner[s], pool_tokens, filled, owner, table, found, lines, at, matched
        )
        prob = np.float32(1.0)
        for j in range(min(budget[b], k) - had):
            alive, total = 0, 0
            for i in range(found):
                line = lines[i]
                if line >= 0 and at[i] + j >= filled[line]:
                    continue
                lines[alive], at[alive], matched[alive] = line, at[i], matched[i]
                if line < 0:
                    next_token[alive] = text[at[i] + j % (size - at[i])]
                    votes[alive] = matched[i] * matched[i]
                else:
                    next_token[alive] = pool_tokens[line, at[i] + j]
                    votes[alive] = min(weight[line], MAX_LINE_WEIGHT) * matched[i] * matched[i]
                total += votes[alive]
                alive += 1
            if alive == 0:
                break
            best_support, token = 0, 0
            for i in range(alive):
                support = 0
                for other in range(alive):
                    if next_token[other] == next_token[i]:
                        support += votes[other]
                if support > best_support:
                    best_support, token = support, next_token[i]
            found, longest = 0, 0
            for i in range(alive):
                if next_token[i] == token:
                    lines[found], at[found], matched[found] = lines[i], at[i], matched[i]
                    longest = max(longest, matched[i])
                    found += 1
            m = np.float32(longest + j)
            prob = prob * (np.float32(best_support) / np.float32(total))
            prob = prob * (m / (m + match_prior))
            if prob < min_prob:
                break
            if j == 0:
                for i in range(found):
                    if lines[i] >= 0:
                        used[lines[i]] = clock[0]
            out[b, had + j] = token
            count[b] += 1
            expected[b] += np.int64(prob * np.float32(FIXED_ONE))


@compiled
def _ngram(  # type: ignore[no-untyped-def]
    tokens, length, ended, slots, budget, min_match, max_match, out, count, matched
):
    """Draft by n-gram matches; see `DraftSearchOps.search_ngram`."""
    for b in range(len(slots)):
        s = slots[b]
        if s < 0 or budget[b] == 0 or ended[s] != RUNNING:
            continue
        text, size = tokens[s], length[s]
        best, at = min_match - 1, -1
        for e in range(size - 1, 0, -1):  # the text continues at e after a match; the latest wins a tie
            if text[e - 1] != text[size - 1]:
                continue
            n = 1
            while n < max_match and n < e and text[e - 1 - n] == text[size - 1 - n]:
                n += 1
            if n > best:
                best, at = n, e
                if n == max_match:
                    break
        if at < 0:
            continue
        count[b], matched[b] = budget[b], best
        for j in range(min(budget[b], out.shape[1])):
            out[b, j] = text[at + j % (size - at)]
