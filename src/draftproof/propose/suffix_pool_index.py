"""Where the n-grams of a line go in the table of buckets: a native loop, some microseconds a line."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof.numba_jit import native
from draftproof.ops.contract import draft_search

# numba caches compiled loops by this file alone, so what they take from elsewhere is spelt out here
SMALL, MIDDLE, LARGE, BUCKET_WAYS = 3, 6, 12, 8
HASH_MULTIPLIER = -7046029254386353131
assert draft_search.HASHED_NGRAM_SIZES == (SMALL, MIDDLE, LARGE) and draft_search.BUCKET_WAYS == BUCKET_WAYS
assert draft_search.HASH_MULTIPLIER == HASH_MULTIPLIER


# given, so that it is compiled here: a step has no time for it, whatever the layout of what it is handed
SIGNATURE = "i8(i8[:,:],i8[:],i8[:],i8[:],i8[:],i4[:,:,::1],u1[:,::1],i8[::1])"


@native(SIGNATURE, boundscheck=False)
def index(tokens, begin, end, owners, places, table, heads, at) -> Any:  # type: ignore[no-untyped-def]
    """n lines: tokens [n, wide]; what follows places begin..end of them is to be found.

    Written: table [sizes, buckets, ways], heads [sizes, buckets], the next way of a bucket, and `at`:
    where in the table something was written, as flat places; returns how many.
    """
    wide, mask, count = tokens.shape[1], table.shape[1] - 1, 0
    for i in range(len(tokens)):
        for e in range(begin[i], end[i]):
            key = owners[i]
            for n in range(1, min(e, LARGE) + 1):
                key = (key ^ tokens[i, e - n]) * HASH_MULTIPLIER
                if n != SMALL and n != MIDDLE and n != LARGE:
                    continue
                which = 0 if n == SMALL else (1 if n == MIDDLE else 2)
                bucket = (key >> 33) & mask
                way = heads[which, bucket]
                heads[which, bucket] = (way + 1) % BUCKET_WAYS
                table[which, bucket, way] = np.int32(places[i] * wide + e)
                at[count] = (which * (mask + 1) + bucket) * BUCKET_WAYS + way
                count += 1
    return count
