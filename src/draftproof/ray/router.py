"""Request router of Ray Serve that prefers replicas with the prompt's prefix in their cache."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from draftproof.ray.routed_request import RoutedRequest

MAX_RECORDED_BLOCKS = 200_000
MIN_MATCHED_SHARE = 0.1  # of the prompt's blocks; below it the load alone decides


class PrefixRecord:
    """Recently routed blocks of prompts with the replicas that computed them."""

    def __init__(self, max_blocks: int = MAX_RECORDED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._replicas: OrderedDict[bytes, set[Any]] = OrderedDict()  # by hash, least recent first
        self._num_blocks: Counter[Any] = Counter()  # by replica

    def add(self, hashes: Sequence[bytes], replica: Any) -> None:
        """Record that a prompt was routed to a replica."""
        for block in reversed(hashes):  # the first blocks are the most recent: they are shared by most
            having = self._replicas.setdefault(block, set())
            self._num_blocks[replica] += replica not in having
            having.add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._max_blocks:
            _, having = self._replicas.popitem(last=False)
            self._num_blocks.subtract(having)

    def longest_match(self, hashes: Sequence[bytes], replicas: set[Any]) -> set[Any]:
        """Return those of `replicas` with the longest recorded prefix; none if it is short."""
        matched, num_matched = replicas, 0
        for block in hashes:
            having = matched & self._replicas.get(block, set())
            if not having:
                break
            matched, num_matched = having, num_matched + 1
        return matched if num_matched and num_matched >= MIN_MATCHED_SHARE * len(hashes) else set()

    def fewest_blocks(self, replicas: Sequence[Any]) -> list[Any]:
        """Return those of `replicas` with the fewest recorded blocks, whose caches have the most room."""
        fewest = min((self._num_blocks[replica] for replica in replicas), default=0)
        return [replica for replica in replicas if self._num_blocks[replica] == fewest]

    def remove(self, replica: Any) -> None:
        """Remove a replica that ended."""
        del self._num_blocks[replica]
        for replicas in self._replicas.values():
            replicas.discard(replica)


class PrefixRouter(LocalityMixin, RequestRouter):
    """Router by prefix. A new prefix goes to the shortest queue, between equal ones to the emptiest cache."""

    def initialize_state(self, max_queue_difference: int = 8) -> None:
        """Set the difference of queue lengths from which the load alone decides."""
        self._max_queue_difference = max_queue_difference
        self._record = PrefixRecord()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas with the longest prefix or for a new one, then two at random."""
        by_load = [r for r in self.apply_locality_routing(pending_request) if r in self.curr_replicas]
        ranks = [random.sample(by_load, min(2, len(by_load)))]
        hashes = _hashes(pending_request)
        if hashes:
            lengths = {r.replica_id: self._queue_length(r.replica_id) for r in candidate_replicas}
            shortest = min(lengths.values(), default=0)
            limit = shortest + self._max_queue_difference
            matched = self._record.longest_match(hashes, set(lengths))
            chosen = [replica for replica in matched if lengths[replica] <= limit]
            if not matched:
                idle = [replica for replica, length in lengths.items() if length == shortest]
                chosen = self._record.fewest_blocks(idle)
            ranks.insert(0, chosen)
        return [[self.curr_replicas[replica] for replica in rank] for rank in ranks if rank]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the prefix of a request."""
        self._record.add(_hashes(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove the replica from the record."""
        super().on_replica_actor_died(replica_id)
        self._record.remove(replica_id)

    def _queue_length(self, replica_id: ReplicaID) -> int:
        return self.replica_queue_len_cache.get(replica_id) or 0


def _hashes(pending_request: PendingRequest | None) -> Sequence[bytes]:
    if pending_request is None or not pending_request.args:
        return ()
    request = pending_request.args[0]
    return request.prefix_hashes if isinstance(request, RoutedRequest) else ()
