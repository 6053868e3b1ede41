"""The pool of earlier responses: which lines of it hold what, whose they are, and which make room for others.

The search runs on the device, on tensors that never move and never grow. The host decides what is in them
and sends changes before a step is queued, in one piece. A response is cut into lines, each with the tokens
before it, so that a match can be measured, and some after it, so that it can be followed. Lines are owned
by a digest of the request's `cache_salt`, which the search compares.

Room is made by the longest unused line: the device notes when drafts were taken from one. A line that
nobody has said again within `ttl` seconds is nobody's from then on. A response that is said again is not
stored again, but counts for more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftproof.ops import Ops, PendingCopy
from draftproof.ops.contract.draft_search import BUCKET_WAYS, HASHED_NGRAM_SIZES, MAX_MATCH_TOKENS, SuffixPool
from draftproof.propose.suffix_pool_index import index

Ints = NDArray[np.int64]
WIDE = 256  # tokens of a line
AFTER = 16  # tokens behind the last that is found, to follow
BODY = WIDE - MAX_MATCH_TOKENS - AFTER  # tokens of a response that are found in a line of it
NOBODY = -1  # owner of a line
FREE = -2  # owner of a slot: never that of a line
PATIENCE = 32  # steps in which there is no time, after which what was told is taken in all the same
FEW = 3  # seats that are quicker written one by one than sent
LAYERS = ("filled", "owner", "weight", "used")


def owner_of(salt: str | None) -> int:
    """Whose request it is, as a number that fits a column."""
    text = (salt or "").encode("utf-8", "surrogatepass")  # any text will do
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def _shape(num_tokens: int) -> tuple[int, int]:
    """Lines, and buckets for each size: as many places as tokens."""
    lines = max(1, num_tokens // WIDE)
    return lines, 1 << max(4, (lines * WIDE // BUCKET_WAYS - 1).bit_length())


class Pool:
    """The host's side: columns of the lines, the heads of the buckets, and what is still to be sent."""

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
        self.num_lines = num_tokens // WIDE
        lines, buckets = _shape(num_tokens)
        self._facts = torch.zeros((len(LAYERS), lines), dtype=torch.int64, device=ops.device)
        self._facts[LAYERS.index("owner")] = NOBODY

        def column(*shape: int, fill: int = -1, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=ops.device)

        self.device = SuffixPool(
            tokens=column(lines, WIDE, fill=0, dtype=torch.int32),
            **dict(zip(LAYERS, self._facts, strict=True)),
            table=column(len(HASHED_NGRAM_SIZES), buckets, BUCKET_WAYS, dtype=torch.int32),
            slot_owner=column(num_slots, fill=FREE),
            clock=column(1, fill=0),
        )
        self._filled, self.weight, self._used, self._clock = (*np.zeros((3, lines), np.int64), 0)
        self.owner = np.full(lines, NOBODY, np.int64)
        self._born = np.zeros(lines)
        self._dies = np.inf  # the first of them, at the earliest
        self._digests: list[bytes] = [b""] * lines
        self._lines: dict[bytes, int] = {}  # where a content is
        self._table = np.full(
            (len(HASHED_NGRAM_SIZES), buckets, BUCKET_WAYS), -1, np.int32
        )  # as it is on the device
        self._heads = np.zeros(
            (len(HASHED_NGRAM_SIZES), buckets), np.uint8
        )  # of each bucket, the next to be overwritten
        self._slots = np.full(num_slots, FREE, np.int64)
        self._seats: list[int] = []  # that have changed
        self._told: list[tuple[int, Ints]] = []
        self._when_used: PendingCopy | None = None
        self._put_off = 0  # calls of `send` for which something has waited

    @staticmethod
    def size(num_tokens: int) -> int:
        """Bytes on the device."""
        lines, buckets = _shape(num_tokens)
        return (
            4 * lines * WIDE + 8 * lines * len(LAYERS) + 4 * len(HASHED_NGRAM_SIZES) * buckets * BUCKET_WAYS
        )

    # --- what is told -------------------------------------------------------------------------------

    def seat(self, slot: int, salt: str | None) -> None:
        self._slots[slot] = owner_of(salt)
        self._seats.append(slot)

    def tell(self, salt: str | None, ids: Ints, begin: int) -> None:
        """A response is ids[begin:]."""
        if not self.num_lines or begin >= len(ids):
            return
        owner = owner_of(salt)
        for first in range(begin, len(ids), BODY):
            low, high = max(0, first - MAX_MATCH_TOKENS), first + BODY + AFTER
            line = np.full(WIDE + 2, -1, np.int64)  # its length and where the response begins come last
            line[: len(ids[low:high])] = ids[low:high]
            line[WIDE:] = len(ids[low:high]), first - low
            self._told.append((owner, line))

    # --- what is sent -------------------------------------------------------------------------------

    def send(self) -> None:
        """Bring the device up to date: seats, what has expired; what was told, if there was never time."""
        if self._dies <= self.now():
            self._expire()
        if self._seats:
            self._send_seats()
        self._put_off += bool(self._told)
        if not self.ops.runtime.asynchronous or self._put_off >= PATIENCE:
            self.learn()

    def learn(self) -> None:
        """Take in what was told, once it is known which lines were used. Best done while a device works."""
        if self._told and self._when_used is None:
            self._when_used = self.ops.runtime.fetch(self.device.used)
        elif self._told and self._when_used is not None and self._when_used.is_ready():
            # it lay behind the steps that were under way
            told, self._told = self._told, []
            self._take_in(told, self._when_used().numpy())
            self._when_used = None
        if not self._told:
            self._put_off = 0

    def _send_seats(self) -> None:
        if len(self._seats) > FEW:
            self.ops.runtime.send(torch.from_numpy(self._slots), self.device.slot_owner)
        else:
            for slot in self._seats:
                self.device.slot_owner[slot : slot + 1].fill_(int(self._slots[slot]))
        self._seats.clear()

    def _expire(self) -> None:
        old = np.flatnonzero((self.owner != NOBODY) & (self._born + self.ttl <= self.now()))
        for line in old.tolist():
            del self._lines[self._digests[line]]
        self.owner[old], self._used[old] = NOBODY, -1
        alive = self.owner != NOBODY
        self._dies = self._born[alive].min() + self.ttl if alive.any() else np.inf
        self._send_facts(old)

    def _take_in(self, told: Sequence[tuple[int, Ints]], used: Ints) -> None:
        self._clock += 2  # what is used from now on was used after what comes now
        self._used = np.maximum(self._used, np.where(self.owner == NOBODY, -1, used))
        new: dict[bytes, tuple[int, Ints]] = {}
        changed = set()
        for owner, line in told[-self.num_lines :]:
            digest = blake2b(line.tobytes(), digest_size=16, key=owner.to_bytes(8, "little")).digest()
            at = self._lines.get(digest)
            if at is None:
                new.pop(digest, None)  # the same twice: once is enough
                new[digest] = owner, line
            else:
                self.weight[at] += 1
                self._born[at], self._used[at] = self.now(), self._clock
                changed.add(at)
        self._dies = min(self._dies, self.now() + self.ttl)
        places = self._make_room(len(new))
        for place, (digest, (owner, line)) in zip(places.tolist(), new.items(), strict=True):
            self._digests[place], self._lines[digest] = digest, place
            self.owner[place], self._filled[place], self.weight[place] = owner, line[WIDE], 1
            self._born[place], self._used[place] = self.now(), self._clock
        self.device.clock.fill_(self._clock + 1)
        if new:
            self._send_lines(places, np.stack([line for _, line in new.values()]))
        self._send_facts(np.array(sorted({*places.tolist(), *changed}), np.int64))

    def _make_room(self, count: int) -> Ints:
        """The lines that were not used for longest; nobody's have never been."""
        when = np.where(self.owner == NOBODY, -1, self._used)
        places = np.argsort(when, kind="stable")[:count] if count > 1 else np.array([when.argmin()])[:count]
        for place in places.tolist():
            if self.owner[place] != NOBODY:
                del self._lines[self._digests[place]]
        return places

    def _send_facts(self, lines: Ints) -> None:
        columns = self._filled[lines], self.owner[lines], self.weight[lines], self._used[lines]
        sent = self.ops.runtime.send(torch.from_numpy(np.stack([lines, *columns])))
        self._facts.index_copy_(1, sent[0], sent[1:])

    def _send_lines(self, places: Ints, lines: Ints) -> None:
        """lines [n, WIDE + 2] as `tell` makes them."""
        tokens, filled, begin = lines[:, :WIDE], lines[:, WIDE], lines[:, WIDE + 1]
        at = np.empty(len(HASHED_NGRAM_SIZES) * lines.size, np.int64)
        end = np.minimum(filled, begin + BODY)
        at = at[: index(tokens, begin, end, self.owner[places], places, self._table, self._heads, at)]
        # a place that was written twice comes twice, with what it holds now
        flat = np.concatenate([places, tokens.ravel(), at, self._table.reshape(-1)[at]])
        sent = self.ops.runtime.send(torch.from_numpy(flat))
        where, said, where_to, entries = sent.split([len(places), tokens.size, len(at), len(at)])
        self.device.tokens.index_copy_(0, where, said.view(-1, WIDE).to(torch.int32))
        self.device.table.view(-1).index_copy_(0, where_to, entries.to(torch.int32))
