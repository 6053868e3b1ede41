"""Requests of the scheduler, waiting and running: admission, preemption and removal, with slots and pages."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence as Many

import numpy as np

from draftproof.engine.drafting.policy import DraftPolicy
from draftproof.engine.page_pool import Pages, PrefixCache
from draftproof.engine.sequence import PooledRows, Sequence, SlotMirror
from draftproof.engine.slots import Slots
from draftproof.metrics import Timings

EXTRA_PAGES = 8  # pages allocated at a time while many are free


class RequestQueue:
    """Waiting and running requests."""

    def __init__(
        self,
        slots: Slots,
        pages: Pages,
        page_size: int,
        policy: DraftPolicy,
        prefix_caching: bool = True,
        lookahead: int = 0,
    ) -> None:
        """`lookahead`: tokens behind the newest one that a proposer with KV of its own needs pages for."""
        self.slots = slots
        self.pages = pages
        self.page_size = page_size
        self.policy = policy
        self.prefix_cache = PrefixCache(pages, page_size, prefix_caching)
        self.lookahead = lookahead
        self.mirror = SlotMirror(len(slots.requests))
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []  # since the last plan
        self.held: list[Sequence] = []  # new requests that wait for the end of a pause
        self.holds_new = False
        self.version = 0  # changes with `running`
        self.num_needing_sync = 0  # requests that need the host in every step
        self.num_with_queued_logprobs = 0  # requests with logprobs that are queued behind a step
        self.num_preemptions = 0
        self.num_queried = 0  # prompt tokens that were looked up in the prefix cache
        self.num_cached = 0  # prompt tokens found in the prefix cache
        self.timings = Timings()
        self._arrivals = 0
        self._running_slots = np.zeros(0, np.int64)  # of `running`

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        if self.holds_new:
            self.held.append(sequence)
        else:
            insort(self.waiting, sequence, key=lambda s: s.rank)
        self.num_needing_sync += sequence.needs_sync
        self.num_with_queued_logprobs += sequence.has_queued_logprobs

    def hold_new(self) -> None:
        """Admit no request that was never scheduled until `release_held`; the others run to their ends."""
        self.held += [s for s in self.waiting if s.stats.scheduled_at is None]
        self.waiting[:] = [s for s in self.waiting if s.stats.scheduled_at is not None]
        self.holds_new = True

    def release_held(self) -> None:
        """Queue the requests that were held."""
        for sequence in self.held:
            insort(self.waiting, sequence, key=lambda s: s.rank)
        self.held.clear()
        self.holds_new = False

    def discard_kv(self) -> list[Sequence]:
        """Preempt all running requests and clear the prefix cache; no step may be in flight.

        Return the preempted requests. Rows of a prompt that were computed so far are computed again: their
        logprobs and their mean must not come from two sets of weights.
        """
        preempted = list(self.running)
        for sequence in preempted:
            self._preempt(sequence)
        self.preempted.clear()
        self.pages.clear()
        for sequence in (*self.waiting, *self.held):
            if len(sequence.ids) == len(sequence.request.prompt_token_ids):
                sequence.num_prompt_logprobs, sequence.pooled = 0, PooledRows()
        return preempted

    def do_idle_work(self) -> None:
        """Compute the page digests of the request that is admitted next, while the device is busy."""
        if self.waiting:
            self.prefix_cache.compute_digests(self.waiting[0])

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def _admit_all(self, rows: int) -> list[Sequence]:
        """Admit waiting requests while the first of them would get one of `rows` prompt rows."""
        admitted: list[Sequence] = []
        left = self.mirror.prompt_left
        prompts = [(s.rank, int(left[s.slot])) for s in self.running if left[s.slot]] if self.waiting else []
        admitted_rows = 0  # prompt rows of `admitted`, which precede all that still wait
        while self.waiting and self.slots.num_free:
            first = self.waiting[0]
            rows_before = admitted_rows + sum(count for rank, count in prompts if rank < first.rank)
            if rows_before >= rows or not self._admit(first):
                break
            admitted.append(first)
            admitted_rows += int(left[first.slot])
        if admitted:
            self._running_slots = np.append(self._running_slots, [sequence.slot for sequence in admitted])
        return admitted

    def _admit(self, sequence: Sequence) -> bool:
        """Admit the first waiting request if its tokens and the next one fit on free pages."""
        found = self.prefix_cache.acquire_prefix(sequence)
        tokens = min(len(sequence.ids) + 1 + self.lookahead, sequence.max_length)
        need = self.pages_for(tokens) - len(found)
        spare = len(self.running)  # a page for each running request, or this one is preempted soon
        if need + spare > self.pages.num_free:
            self.pages.release(found)
            return False
        del self.waiting[0]
        if (self.pages.num_free - need) // 2 // (spare + 1) >= EXTRA_PAGES:
            need = min(need + EXTRA_PAGES, self.pages_for(sequence.max_length) - len(found))
        sequence.pages = found + self.pages.take(need)
        sequence.num_published_pages, sequence.num_cached = len(found), len(found) * self.page_size
        if sequence.stats.scheduled_at is None:
            sequence.stats.scheduled_at = time.monotonic()
            self.timings.queue.observe(sequence.stats.scheduled_at - sequence.stats.arrived_at)
            sequence.stats.num_cached_tokens = sequence.num_cached
            self.num_queried += len(sequence.ids) if self.prefix_cache.enabled else 0
            self.num_cached += sequence.num_cached
        slot = sequence.slot = sequence.last_slot = self.slots.take(sequence.request)
        host = self.mirror
        host.length[slot] = host.max_committed[slot] = len(sequence.ids)
        host.prompt_left[slot] = len(sequence.ids) - sequence.num_cached
        host.max_length[slot] = sequence.max_length
        host.in_flight[slot] = host.num_draft[slot] = 0
        host.num_pages[slot] = len(sequence.pages)
        host.generation[slot] += 1
        self.policy.start(slot, sequence.draft_limit, sequence.adaptive)
        self.running.append(sequence)
        self.version += 1
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a running request. No step may be in flight."""
        slot = sequence.slot
        length, left = int(self.mirror.length[slot]), int(self.mirror.prompt_left[slot])
        self._return_to_waiting(sequence, length - left if left else length - 1)
        sequence.stats.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(sequence)

    def requeue(self, sequence: Sequence, computed: int) -> None:
        """Queue a running request again after a failed step, with KV of `computed` tokens before it."""
        sequence.num_published_pages = min(sequence.num_published_pages, computed // self.page_size)
        self._return_to_waiting(sequence, computed)

    def _return_to_waiting(self, sequence: Sequence, computed: int) -> None:
        """Remove a running request and queue it at its rank, with its tokens and full pages kept."""
        length = int(self.mirror.length[sequence.slot])
        ids = sequence.ids if length == len(sequence.ids) else self.slots.read(sequence.slot, length)
        self.prefix_cache.set_tokens_and_publish(sequence, ids, computed)
        self._remove_from_running([sequence])
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request and free its slot and pages; steps in flight may still write to the pages."""
        if sequence.slot < 0:
            (self.held if sequence in self.held else self.waiting).remove(sequence)
            self._record_end(sequence)
        else:
            self.remove_running([sequence])

    def remove_running(self, sequences: Many[Sequence], keeping_pages: Many[Sequence] = ()) -> None:
        """Remove running requests and free their slots.

        Those in `keeping_pages` keep their pages until `release_pages`.
        """
        kept = [(sequence, sequence.pages, sequence.num_published_pages) for sequence in keeping_pages]
        for sequence in keeping_pages:
            sequence.pages = []
        for sequence in sequences:
            self._record_end(sequence)
        self._remove_from_running(sequences)
        for sequence, pages, num_published in kept:
            sequence.pages, sequence.num_published_pages = pages, num_published

    def _record_end(self, sequence: Sequence) -> None:
        """Record the time at which a request ended, and no longer count its options."""
        self.num_needing_sync -= sequence.needs_sync
        self.num_with_queued_logprobs -= sequence.has_queued_logprobs
        sequence.stats.ended_at = time.monotonic()

    def release_pages(self, sequence: Sequence, ids: list[int] | None) -> None:
        """Release the pages of a finished request, published if its tokens `ids` are known."""
        if ids is not None:
            self.prefix_cache.set_tokens_and_publish(sequence, ids, len(ids) - 1)
        self.pages.release(sequence.pages)
        sequence.pages = []

    def _remove_from_running(self, sequences: Many[Sequence]) -> None:
        """Remove requests from the running ones, all at once."""
        if not sequences:
            return
        self.version += 1
        slots = [sequence.slot for sequence in sequences]
        is_removed = np.zeros(len(self.mirror.length), np.bool_)
        is_removed[slots] = True
        self._running_slots = self._running_slots[~is_removed[self._running_slots]]
        self.mirror.generation[slots] += 1
        for sequence in sequences:
            self.slots.free(sequence.slot)
            self.pages.release(sequence.pages)
            sequence.slot, sequence.pages, sequence.num_published_pages = -1, [], 0
        self.running[:] = [sequence for sequence in self.running if sequence.slot >= 0]
