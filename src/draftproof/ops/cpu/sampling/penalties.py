"""Native loops of penalties, bias and bans, which read the tokens of a row and build no [L, V] tensors."""

from __future__ import annotations

import numpy as np

from draftproof.numba_jit import native
from draftproof.types import LogitAdjust

# numba caches compiled loops by this file alone, so constants of other files are repeated here
PENALTY, BIAS, ALLOWED_IDS, MIN_TOKENS = 1, 2, 4, 8
assert (PENALTY, BIAS) == (LogitAdjust.PENALTY, LogitAdjust.BIAS)
assert (ALLOWED_IDS, MIN_TOKENS) == (LogitAdjust.ALLOWED_IDS, LogitAdjust.MIN_TOKENS)
UNSEEN = -1  # count of a token that is not in the context
compiled = native(boundscheck=False)


@compiled
def _penalize_row(row, context, prompt_len, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    """Apply the penalties of `context`, of which the first `prompt_len` tokens are the prompt, to row [V]."""
    counts = np.full(len(row), UNSEEN, np.int32)  # [V]: occurrences behind the prompt
    for i, token in enumerate(context):
        if 0 <= token < len(row):  # else an invalid id of a custom proposer, which is never accepted
            counts[token] = max(counts[token], 0) + (i >= prompt_len)
    for token in range(len(row)):
        value, count = row[token], counts[token]
        if count != UNSEEN:
            value = value / repetition if value > 0 else value * repetition
        row[token] = value - frequency * np.float32(max(count, 0)) - presence * np.float32(count > 0)


@compiled
def penalize_rows(  # type: ignore[no-untyped-def]
    slot, depth, position, adjust, tokens, prompt_len, draft, repetition, frequency, presence, bias, out
):  # fmt: skip
    """Apply penalties and bias to the rows out [L, V]."""
    for r in range(len(slot)):
        s = slot[r]
        if s < 0:
            continue
        row = out[r]
        if adjust[s] & PENALTY:
            committed = tokens[s, : prompt_len[s] + position[r] - depth[r]]
            context = np.concatenate((committed, draft[s, : depth[r]]))
            _penalize_row(row, context, prompt_len[s], repetition[s], frequency[s], presence[s])
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
