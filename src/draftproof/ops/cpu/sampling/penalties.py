"""Native loops of penalties, bias and bans, which read the tokens of a row and build no [L, V] tensors."""

from __future__ import annotations

import numpy as np

from draftproof.numba_jit import native
from draftproof.types import LogitAdjust

# numba caches compiled loops by this file alone, so constants of other files are repeated here
PENALTY, BIAS, ALLOWED_IDS, MIN_TOKENS = 1, 2, 4, 8
assert (PENALTY, BIAS) == (LogitAdjust.PENALTY, LogitAdjust.BIAS)
assert (ALLOWED_IDS, MIN_TOKENS) == (LogitAdjust.ALLOWED_IDS, LogitAdjust.MIN_TOKENS)
UNSEEN = -1
compiled = native(boundscheck=False)


@compiled
def penalize_rows(  # type: ignore[no-untyped-def]
    slot, depth, position, adjust, tokens, prompt_len, draft, repetition, frequency, presence, bias,
    counts, out,
):  # fmt: skip
    """Apply penalties and bias to the rows out [L, V]; counts [V] int64 is scratch that holds UNSEEN."""
    for r in range(len(slot)):
        s = slot[r]
        if s < 0:
            continue
        row = out[r]
        if adjust[s] & PENALTY:
            committed = prompt_len[s] + position[r] - depth[r]
            for i in range(committed + depth[r]):
                token = tokens[s, i] if i < committed else draft[s, i - committed]
                if not 0 <= token < len(row):  # an invalid id of a custom proposer: it is never accepted
                    continue
                if i < prompt_len[s]:
                    counts[token] = max(counts[token], 0)
                else:
                    counts[token] = max(counts[token], 0) + 1
            for token in range(len(row)):
                if counts[token] == UNSEEN:  # -0.0 minus a product of a negative penalty and 0 is 0.0
                    row[token] = row[token] - frequency[s] * np.float32(0) - presence[s] * np.float32(0)
            for i in range(committed + depth[r]):
                token = tokens[s, i] if i < committed else draft[s, i - committed]
                count = counts[token] if 0 <= token < len(row) else UNSEEN
                if count == UNSEEN:  # no id, or an earlier occurrence was penalised
                    continue
                counts[token] = UNSEEN
                value = row[token]
                value = value / repetition[s] if value > 0 else value * repetition[s]
                value = value - frequency[s] * np.float32(count)
                row[token] = value - presence[s] * np.float32(count > 0)
        if adjust[s] & BIAS:
            for token in range(len(row)):
                row[token] += bias[s, token]


@compiled
def ban_tokens(slot, position, adjust, prompt_len, min_length, banned, ends, base):  # type: ignore[no-untyped-def]
    """Write -inf to base [L, V] outside of the allowed ids, and at end tokens below the minimum length."""
    for r in range(len(slot)):
        s = slot[r]
        if s < 0:
            continue
        row = base[r]
        if adjust[s] & ALLOWED_IDS:
            for token in range(len(row)):
                if banned[s, token]:
                    row[token] = -np.inf
        if adjust[s] & MIN_TOKENS and prompt_len[s] + position[r] < min_length[s]:
            for token in range(len(row)):
                if ends[s, token]:
                    row[token] = -np.inf
