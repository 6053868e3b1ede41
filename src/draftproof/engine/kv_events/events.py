"""Events of the prefix cache, with the encoding of vLLM's `kv_events` since June 2026.

A batch is an array, an event in it a map with its tag under `type`. A block is a page. Its hash is an integer
of 64 bits, from the digest under which the page is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

MEDIUM = "GPU"  # the name in events for the memory of the engine itself


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(KVCacheEvent):
    """Blocks that can be reused from now on, in order; the first one continues the parent."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # of the first block of a salted request
    cache_salt: str | None = None  # digest of the salt, as in `extra_keys`; a field that Dynamo reads


class BlockRemoved(KVCacheEvent):
    """Blocks that cannot be reused any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """All blocks are gone."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one step."""

    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventLog:
    """Events since the last batch."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def stored(self, digests: Sequence[bytes], first: int, last: int, ids: Sequence[int], salt: str) -> None:
        """Record that pages first..last - 1 of a request with these tokens and digests were published."""
        size = self.page_size
        extra: list[tuple[Any, ...] | None] | None = None
        mark: str | None = None
        if salt:  # routers must not match these blocks with requests of another salt
            mark = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            extra = [(mark,) if page == 0 else None for page in range(first, last)]
        self.events.append(
            BlockStored(
                block_hashes=[block_hash(digest) for digest in digests[first:last]],
                parent_block_hash=block_hash(digests[first - 1]) if first else None,
                token_ids=[int(token) for token in ids[first * size : last * size]],
                block_size=size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=extra,
                cache_salt=mark,
            )
        )

    def removed(self, digest: bytes) -> None:
        """Record that a page was withdrawn."""
        last = self.events[-1] if self.events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash(digest))
        else:
            self.events.append(BlockRemoved([block_hash(digest)], MEDIUM))

    def cleared(self) -> None:
        """Record that all pages were withdrawn."""
        self.events.append(AllBlocksCleared())

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return the events and start again."""
        events, self.events = self.events, []
        return events


def block_hash(digest: bytes) -> int:
    """Return the hash of a block: the last 64 bits of the digest of its page."""
    return int.from_bytes(digest[-8:], "big")
