"""Pool of earlier outputs for the suffix search: the host's side.

The search runs on the device, on tensors that never move and never grow. The host decides what is in them
and sends the changes in one piece before a step is queued. An output is cut into lines, each with some tokens
before it, to measure a match, and some after it, to be drafted. Lines belong to an owner: the digest of the
request's `cache_salt`. New lines replace those that were not used for longest. A line expires `ttl` seconds
after it was last generated; one that is generated again only gains weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.numba_jit import native
from draftproof.ops import Ops, PendingCopy
from draftproof.ops.contract import draft_search
from draftproof.ops.contract.draft_search import BUCKET_WAYS, HASHED_NGRAM_SIZES, MAX_MATCH_TOKENS, SuffixPool

LINE_TOKENS = 256  # tokens of a line
FOLLOWING_TOKENS = 16  # tokens behind the last indexed one, to be drafted
BODY_TOKENS = LINE_TOKENS - MAX_MATCH_TOKENS - FOLLOWING_TOKENS  # indexed tokens of a line
NO_OWNER = -1  # owner of an unused line
NO_REQUEST = -2  # owner of a free slot; no line has it
MAX_DEFERRED_STEPS = 32  # steps without idle time after which added outputs are stored anyway
MAX_SINGLE_WRITES = 3  # slots up to which single writes are faster than sending all
LINE_COLUMNS = ("filled", "owner", "weight", "used")


def owner_of(salt: str | None) -> int:
    """Return the owner of requests with this salt, as an int64."""
    text = (salt or "").encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def _shape(num_tokens: int) -> tuple[int, int]:
    """Return the number of lines, and of buckets per n-gram size: as many entries as tokens."""
    lines = max(1, num_tokens // LINE_TOKENS)
    return lines, 1 << max(4, (lines * LINE_TOKENS // BUCKET_WAYS - 1).bit_length())


class Pool:
    """Columns of the lines, the next entry of each bucket, and changes to send."""

    def __init__(
        self,
        ops: Ops,
        num_slots: int,
        num_tokens: int,
        ttl: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ops = ops
        self.ttl = ttl
        self.now = clock
        self.num_lines = num_tokens // LINE_TOKENS
        lines, buckets = _shape(num_tokens)
        self._line_columns = torch.zeros((len(LINE_COLUMNS), lines), dtype=torch.int64, device=ops.device)
        self._line_columns[LINE_COLUMNS.index("owner")] = NO_OWNER

        def column(*shape: int, fill: int = -1, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=ops.device)

        self.device = SuffixPool(
            tokens=column(lines, LINE_TOKENS, fill=0, dtype=torch.int32),
            **dict(zip(LINE_COLUMNS, self._line_columns, strict=True)),
            table=column(len(HASHED_NGRAM_SIZES), buckets, BUCKET_WAYS, dtype=torch.int32),
            slot_owner=column(num_slots, fill=NO_REQUEST),
            clock=column(1, fill=0),
        )
        self._filled, self.weight, self._used, self._clock = (*np.zeros((3, lines), np.int64), 0)
        self.owner = np.full(lines, NO_OWNER, np.int64)
        self._created = np.zeros(lines)
        self._next_expiry = np.inf  # time of the first expiry, or earlier
        self._digests: list[bytes] = [b""] * lines
        self._lines: dict[bytes, int] = {}  # line by digest of its content
        sizes = len(HASHED_NGRAM_SIZES)
        self._table = np.full((sizes, buckets, BUCKET_WAYS), -1, np.int32)  # copy of the device's
        self._heads = np.zeros((sizes, buckets), np.uint8)  # next entry of each bucket to overwrite
        self._slots = np.full(num_slots, NO_REQUEST, np.int64)
        self._changed_slots: list[int] = []  # with a new owner
        self._added: list[tuple[int, Ints]] = []
        self._pending_used: PendingCopy | None = None
        self._deferred_steps = 0  # calls of `send` since an output was added

    @staticmethod
    def size(num_tokens: int) -> int:
        """Return the bytes on the device."""
        lines, buckets = _shape(num_tokens)
        table = 4 * len(HASHED_NGRAM_SIZES) * buckets * BUCKET_WAYS
        return lines * (4 * LINE_TOKENS + 8 * len(LINE_COLUMNS)) + table

    def set_owner(self, slot: int, salt: str | None) -> None:
        self._slots[slot] = owner_of(salt)
        self._changed_slots.append(slot)

    def add(self, salt: str | None, ids: Ints, begin: int) -> None:
        """Add an output, ids[begin:]."""
        if not self.num_lines or begin >= len(ids):
            return
        owner = owner_of(salt)
        for first in range(begin, len(ids), BODY_TOKENS):
            low, high = max(0, first - MAX_MATCH_TOKENS), first + BODY_TOKENS + FOLLOWING_TOKENS
            line = np.full(LINE_TOKENS + 2, -1, np.int64)  # then its length and the start of the output
            line[: len(ids[low:high])] = ids[low:high]
            line[LINE_TOKENS:] = len(ids[low:high]), first - low
            self._added.append((owner, line))

    def clear(self) -> None:
        """Remove all lines, and outputs that were added and not stored yet."""
        self._added.clear()
        self._remove(np.flatnonzero(self.owner != NO_OWNER))

    def send(self) -> None:
        """Send new owners and expired lines; store added outputs if there was no idle time for it."""
        if self._next_expiry <= self.now():
            self._expire()
        if self._changed_slots:
            self._send_owners()
        self._deferred_steps += bool(self._added)
        if not self.ops.runtime.asynchronous or self._deferred_steps >= MAX_DEFERRED_STEPS:
            self.store()

    def store(self) -> None:
        """Store added outputs once the use of lines was read. Best called while the device is busy."""
        if self._added and self._pending_used is None:
            self._pending_used = self.ops.runtime.fetch(self.device.used)
        elif self._added and self._pending_used is not None and self._pending_used.is_ready():
            added, self._added = self._added, []
            self._insert(added, self._pending_used().numpy())
            self._pending_used = None
        if not self._added:
            self._deferred_steps = 0

    def _send_owners(self) -> None:
        if len(self._changed_slots) > MAX_SINGLE_WRITES:
            self.ops.runtime.send(torch.from_numpy(self._slots), self.device.slot_owner)
        else:
            for slot in self._changed_slots:
                self.device.slot_owner[slot : slot + 1].fill_(int(self._slots[slot]))
        self._changed_slots.clear()

    def _expire(self) -> None:
        self._remove(np.flatnonzero((self.owner != NO_OWNER) & (self._created + self.ttl <= self.now())))

    def _remove(self, old: Ints) -> None:
        for line in old.tolist():
            del self._lines[self._digests[line]]
        self.owner[old], self._used[old] = NO_OWNER, -1
        alive = self.owner != NO_OWNER
        self._next_expiry = self._created[alive].min() + self.ttl if alive.any() else np.inf
        self._send_columns(old)

    def _insert(self, added: Sequence[tuple[int, Ints]], used: Ints) -> None:
        self._clock += 2  # later uses are newer than the lines stored now
        self._used = np.maximum(self._used, np.where(self.owner == NO_OWNER, -1, used))
        new: dict[bytes, tuple[int, Ints]] = {}
        changed = set()
        for owner, line in added[-self.num_lines :]:
            digest = blake2b(line.tobytes(), digest_size=16, key=owner.to_bytes(8, "little")).digest()
            at = self._lines.get(digest)
            if at is None:
                new.pop(digest, None)
                new[digest] = owner, line
            else:
                self.weight[at] += 1
                self._created[at], self._used[at] = self.now(), self._clock
                changed.add(at)
        self._next_expiry = min(self._next_expiry, self.now() + self.ttl)
        places = self._make_room(len(new))
        for place, (digest, (owner, line)) in zip(places.tolist(), new.items(), strict=True):
            self._digests[place], self._lines[digest] = digest, place
            self.owner[place], self._filled[place], self.weight[place] = owner, line[LINE_TOKENS], 1
            self._created[place], self._used[place] = self.now(), self._clock
        self.device.clock.fill_(self._clock + 1)
        if new:
            self._send_lines(places, np.stack([line for _, line in new.values()]))
        self._send_columns(np.array(sorted({*places.tolist(), *changed}), np.int64))

    def _make_room(self, count: int) -> Ints:
        """Return the lines that were not used for longest; unused ones first."""
        when = np.where(self.owner == NO_OWNER, -1, self._used)
        places = np.argsort(when, kind="stable")[:count] if count > 1 else np.array([when.argmin()])[:count]
        for place in places.tolist():
            if self.owner[place] != NO_OWNER:
                del self._lines[self._digests[place]]
        return places

    def _send_columns(self, lines: Ints) -> None:
        columns = self._filled[lines], self.owner[lines], self.weight[lines], self._used[lines]
        sent = self.ops.runtime.send(torch.from_numpy(np.stack([lines, *columns])))
        self._line_columns.index_copy_(1, sent[0], sent[1:])

    def _send_lines(self, places: Ints, lines: Ints) -> None:
        """Send lines [n, LINE_TOKENS + 2] as `add` makes them, and their index entries."""
        tokens, filled, begin = lines[:, :LINE_TOKENS], lines[:, LINE_TOKENS], lines[:, LINE_TOKENS + 1]
        at = np.empty(len(HASHED_NGRAM_SIZES) * lines.size, np.int64)
        end = np.minimum(filled, begin + BODY_TOKENS)
        at = at[: index_lines(tokens, begin, end, self.owner[places], places, self._table, self._heads, at)]
        # an entry that was written twice is sent twice, with its last value
        flat = np.concatenate([places, tokens.ravel(), at, self._table.reshape(-1)[at]])
        sent = self.ops.runtime.send(torch.from_numpy(flat))
        where, tokens_sent, where_to, entries = sent.split([len(places), tokens.size, len(at), len(at)])
        self.device.tokens.index_copy_(0, where, tokens_sent.view(-1, LINE_TOKENS).to(torch.int32))
        self.device.table.view(-1).index_copy_(0, where_to, entries.to(torch.int32))


# numba's cache key is this file alone, so values of other modules are repeated here
SMALL, MIDDLE, LARGE, NUM_WAYS = 3, 6, 12, 8
HASH_MULTIPLIER = -7046029254386353131
assert HASHED_NGRAM_SIZES == (SMALL, MIDDLE, LARGE) and BUCKET_WAYS == NUM_WAYS
assert draft_search.HASH_MULTIPLIER == HASH_MULTIPLIER


# with a signature it is compiled on import, for any memory layout
SIGNATURE = "i8(i8[:,:],i8[:],i8[:],i8[:],i8[:],i4[:,:,::1],u1[:,::1],i8[::1])"


@native(SIGNATURE, boundscheck=False)
def index_lines(tokens, begin, end, owners, places, table, heads, at) -> Any:  # type: ignore[no-untyped-def]
    """Write the index entries of n lines: tokens [n, width], indexed at positions begin..end.

    Written: table [sizes, buckets, ways], heads [sizes, buckets] with the next way of each bucket, and `at`:
    the flat table positions that were written. Returns their number.
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
                heads[which, bucket] = (way + 1) % NUM_WAYS
                table[which, bucket, way] = np.int32(places[i] * wide + e)
                at[count] = (which * (mask + 1) + bucket) * NUM_WAYS + way
                count += 1
    return count
