"""Who runs in the next step, with how many rows and drafts, on which pages.

Requests that decode come first, one row each, then their drafts, which take at most half of what is left
while a prompt waits; the rest of the row budget goes to prompts, by rank: priority, then arrival. Nobody is
seated before those of better rank that wait. Pages are taken as a request grows. When they run out, drafts
go first; then the running request of the worst rank is put aside: it gives its pages back, waits at its old
place, and goes on from its committed tokens, with the same bits.

So nobody starves. Of those that run, the one of the best rank is never put aside and has a row in every
plan: it is through after as many plans as it may have tokens (`max_length`), and one more for each step that
is queued behind its last (`pacing`). Those that run cannot become more while the first in the queue waits. So
the first in the queue is seated after at most the sum of these over those that run. A worse rank waits for
better ones, within a priority for earlier ones alone.

A step may be planned while earlier ones are still under way. Of a request that decodes nothing need be
known for that but bounds: each step adds one token at least, and one more for every draft at most. Only to
put one aside the host must know all: then what is under way is read first.
"""

from __future__ import annotations

import time
from bisect import insort

import numpy as np

from draftproof.arrays import Bools, Ints
from draftproof.engine.drafting.policy import DraftPolicy
from draftproof.engine.fast_path import FastPath
from draftproof.engine.page_pool import Pages
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.sequence import Sequence, SlotMirror, StepPlan
from draftproof.engine.slots import Slots
from draftproof.metrics import Timings

AHEAD = 8  # pages taken at a time, where there are plenty
SOON = 4  # pages: whoever has no more room than that is given some when somebody else is


class Busy(Exception):
    """The next step cannot be planned before the last one was read."""


class Scheduler:
    """Queues, admission and pages."""

    def __init__(
        self,
        slots: Slots,
        pages: Pages,
        page_size: int,
        max_rows: int,
        policy: DraftPolicy,
        prefix_caching: bool = True,
        lookahead: int = 0,
        drafts_before_plan: bool = False,
    ) -> None:
        """`lookahead`: tokens behind the newest that a proposer with KV of its own wants pages for.

        `drafts_before_plan`: a step is planned when its drafts are known, and asking costs nothing.
        So all are asked for, and the plan says which are verified. Else only so many are asked for.
        """
        self.slots = slots
        self.pages = pages
        self.page_size = page_size
        self.max_rows = max_rows
        self.policy = policy
        self.prefix_cache = PrefixCache(pages, page_size, prefix_caching)
        self.lookahead = lookahead
        self.drafts_before_plan = drafts_before_plan
        self.mirror = SlotMirror(len(slots.requests))
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []  # since the last plan
        self.version = 0  # changes with `running`
        self.num_needing_sync = 0  # requests here that are waited for
        self.num_preemptions = 0
        self.num_queried = 0  # prompt tokens that were looked for in the cache
        self.num_cached = 0  # and found
        self.timings = Timings()
        self._arrivals = 0
        self._lines = np.zeros(0, np.int64)  # slots of `running`
        self._fast_path = FastPath(self.mirror, policy, page_size, max_rows, lookahead)

    def add(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, sequence, key=lambda s: s.rank)
        self.num_needing_sync += sequence.may_need_sync

    def meanwhile(self) -> None:
        """While there is time: read the one that comes next, who will then be seated sooner."""
        if self.waiting:
            self.prefix_cache.read(self.waiting[0])

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # --- planning -----------------------------------------------------------------------------------

    def plan(self, idle: bool = True, counted: bool = False) -> StepPlan | None:
        """The next step; None if there is nothing to do that would not be in vain.

        `idle`: nothing is under way. If it must be so and is not: Busy. `counted`: it is known how many
        drafts there are, which may say what was drawn; then none is left out because of their number.
        """
        self.preempted.clear()
        if not self.drafts_before_plan and not (self.waiting and self.slots.num_free):  # nobody comes
            planned = self._fast_path.plan(self.running, self._lines, self.version)
            if planned is not None:
                return planned
        while True:
            decodes, drafts = self._decoding()
            short = self._missing_pages(decodes, drafts, self.lookahead)
            if short.sum() > self.pages.num_free:
                newest = min(self.lookahead, 1)  # a drafter stores the newest token as well
                drafts = np.minimum(drafts, np.maximum(self._room() - newest, 0))  # guesses go first
                short = self._missing_pages(decodes, drafts, newest)
            if short.sum() <= self.pages.num_free:
                break
            if not idle:
                raise Busy
            self._preempt(max(self.running, key=lambda s: s.rank))
        grown = self._grow(short)
        rows = self.max_rows - int(decodes.sum() + drafts.sum())
        newcomers = [] if self.preempted else self._admit_all(rows)
        if newcomers:
            none = np.zeros(len(newcomers), np.int64)
            decodes, drafts = np.append(decodes, none > 0), np.append(drafts, none)
        chunk = self._chunks(rows)
        if (
            drafts.any() and chunk.any() and not (self.drafts_before_plan or counted)
        ):  # it may be too large for both
            drafts = self.policy.refit(self._lines, drafts, int(decodes.sum() + chunk.sum()))
        takes_part = decodes | (chunk > 0)
        if not takes_part.any():
            return None
        planned = self._planned(takes_part, chunk, drafts, newcomers, grown)
        self._fast_path.after(planned if takes_part.all() and not planned.has_prompts else None)
        return planned

    def _decoding(self) -> tuple[Bools, Ints]:
        """Which of the running ones decode, and with how many drafts."""
        lines, host = self._lines, self.mirror
        left = host.prompt_left[lines]
        # one that is under way and may still be short of its end; it may have ended by a stop token as well
        decodes: Bools = (left == 0) & (host.length[lines] + host.in_flight[lines] < host.max_length[lines])
        rows = self.max_rows - int(decodes.sum())
        prompts = bool(left.any()) or bool(self.waiting and self.slots.num_free)
        room = rows // 2 if prompts else rows  # guesses must not keep prompts out
        drafts: Ints = np.where(decodes, host.num_draft[lines], 0)
        if self.drafts_before_plan:
            keys = int(host.length[lines].sum())
            drafts[decodes] = self.policy.select(lines[decodes], drafts[decodes], keys)
        if drafts.sum() > room:
            drafts = np.diff(np.minimum(np.cumsum(drafts), room), prepend=0)
        return decodes, drafts

    def _chunks(self, rows: int) -> Ints:
        """Prompt rows of each: all that the best rank wants, then the next."""
        left = self.mirror.prompt_left[self._lines]
        chunk = np.zeros_like(left)
        if not left.any():
            return chunk
        for i in sorted(left.nonzero()[0].tolist(), key=lambda i: self.running[i].rank):
            chunk[i] = min(int(left[i]), rows)
            rows -= int(chunk[i])
        return chunk

    def _room(self) -> Ints:
        """Tokens that each can surely store on its pages beyond the newest."""
        lines, host = self._lines, self.mirror
        room: Ints = np.maximum(host.num_pages[lines] * self.page_size - host.max_committed[lines], 0)
        return room

    def _missing_pages(self, decodes: Bools, drafts: Ints, lookahead: int = 0) -> Ints:
        """Pages that each lacks for the rows of this step, if all that is under way has stood."""
        lines, host = self._lines, self.mirror
        rows = np.minimum(host.max_committed[lines] + drafts + lookahead, host.max_length[lines])
        need = -(-rows // self.page_size) - host.num_pages[lines]
        short: Ints = np.where(decodes, np.maximum(need, 0), 0)
        return short

    def _grow(self, short: Ints) -> list[tuple[int, int, int]]:
        """Pages for those that lack some; where there are plenty a few more, and for those too that will lack
        some soon. So it happens seldom: it is a copy to the device, and looking at everybody."""
        if not short.any():
            return []
        grown, wanted = [], short > 0
        if self.pages.num_free // 2 // len(self.running) >= AHEAD:
            wanted |= self._room() < SOON * self.page_size
        for i in wanted.nonzero()[0].tolist():
            sequence, slot = self.running[i], int(self._lines[i])
            most = self.pages_for(sequence.max_length) - len(sequence.pages)
            plenty = self.pages.num_free // 2 // len(self.running)
            count = min(most, max(int(short[i]), min(AHEAD, plenty)))
            count = max(int(short[i]), min(count, self.pages.num_free - int(short[i + 1 :].sum())))
            for page in self.pages.take(count):
                grown.append((slot, len(sequence.pages), page))
                sequence.pages.append(page)
            self.mirror.num_pages[slot] = len(sequence.pages)
        return grown

    def _planned(
        self,
        takes_part: Bools,
        chunk: Ints,
        drafts: Ints,
        newcomers: list[Sequence],
        grown: list[tuple[int, int, int]],
    ) -> StepPlan:
        """Keep the columns up to date with what is under way from now on."""
        host = self.mirror
        if takes_part.all():
            lines, sequences = self._lines, list(self.running)
        else:
            at = takes_part.nonzero()[0]
            lines, chunk, drafts = self._lines[at], chunk[at], drafts[at]
            sequences = [self.running[i] for i in at.tolist()]
        host.prompt_left[lines] -= chunk
        samples = host.prompt_left[lines] == 0
        host.in_flight[lines] += samples
        host.max_committed[lines] += np.where(samples, 1 + drafts, 0)
        host.num_draft[lines] = 0
        num_drafts = int(drafts.sum())
        known: list[int] = []
        for i in chunk.nonzero()[0].tolist():
            computed = len(sequences[i].ids) - int(host.prompt_left[lines[i]])
            known += self.prefix_cache.publish_pages(sequences[i], computed)
        return StepPlan(
            sequences,
            [s.request for s in sequences],
            *(lines, chunk, drafts, samples, host.generation[lines], self.version),
            num_rows=int(np.maximum(chunk, 1).sum()) + num_drafts,
            num_drafts=num_drafts,
            has_prompts=bool(chunk.any()),
            zeros=np.zeros_like(lines),
            admitted=newcomers,
            new_pages=grown,
            published=known,
        )

    def draft_room(self, planned: StepPlan) -> Ints | None:
        """Return how many drafts [B] fit before each request's last token and on its pages.

        None: no request is near its end. The last token of a request needs no draft.
        """
        mirror, lines = self.mirror, planned.slots
        if self._fast_path.far_from_ends(lines) and not self.drafts_before_plan:
            return None
        min_committed = mirror.length[lines] + mirror.in_flight[lines]
        room = np.maximum(mirror.max_length[lines] - min_committed - 1, 0)
        if self.lookahead:  # all drafts but the last are stored before they are verified
            stored = mirror.num_pages[lines] * self.page_size - mirror.max_committed[lines]
            room = np.minimum(room, np.maximum(stored + 1, 0))
        return np.where(planned.samples, room, 0)

    def settle(self, planned: StepPlan, num_out: Ints) -> Bools:
        """Take in what a step did; [B] which entries are still those that were planned."""
        host, mine, samples, drafts = self.mirror, planned.slots, planned.samples, planned.drafts
        here: Bools = host.generation[mine] == planned.generations
        if planned.has_prompts:
            self._first_tokens(planned, here & samples & (num_out > 0))
        if planned.version != self.version:  # somebody came or went meanwhile
            mine, num_out = mine[here], num_out[here]
            samples, drafts = samples[here], drafts[here]
        host.length[mine] += num_out
        host.in_flight[mine] -= samples
        fell = 1 + drafts - num_out
        host.max_committed[mine] -= np.where(samples, fell, 0) if planned.has_prompts else fell
        return here

    def _first_tokens(self, planned: StepPlan, told: Bools) -> None:
        """Whoever has come to the end of its prompt, unless it was there before it was put aside."""
        for b in (told & (planned.chunk > 0)).nonzero()[0].tolist():
            stats = planned.sequences[b].stats
            if stats.first_token_at is None:
                stats.first_token_at = time.monotonic()
                self.timings.first_token.observe(stats.first_token_at - stats.arrived_at)

    # --- coming and going ---------------------------------------------------------------------------

    def _admit_all(self, rows: int) -> list[Sequence]:
        """SlotInit those who wait, as long as the next of them would have one of the rows in this step."""
        newcomers: list[Sequence] = []
        left = self.mirror.prompt_left
        prompts = [(s.rank, int(left[s.slot])) for s in self.running if left[s.slot]] if self.waiting else []
        seated = 0  # rows that newcomers want: each of them comes before whoever waits behind it
        while self.waiting and self.slots.num_free:
            front = self.waiting[0]
            wanted = seated + sum(count for rank, count in prompts if rank < front.rank)
            if wanted >= rows or not self._admit(front):
                break
            newcomers.append(front)
            seated += int(left[front.slot])
        return newcomers

    def _admit(self, sequence: Sequence) -> bool:
        """SlotInit the first that waits, if there are pages for its tokens and the next one."""
        found = self.prefix_cache.find(sequence)
        tokens = min(len(sequence.ids) + 1 + self.lookahead, sequence.max_length)
        need = self.pages_for(tokens) - len(found)
        spare = len(self.running)  # those that run will want a page soon, or the newcomer is out again
        if need + spare > self.pages.num_free:
            self.pages.release(found)
            return False
        del self.waiting[0]
        if (self.pages.num_free - need) // 2 // (spare + 1) >= AHEAD:  # as in `_grow`
            need = min(need + AHEAD, self.pages_for(sequence.max_length) - len(found))
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
        self._lines = np.append(self._lines, slot)
        self.version += 1
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Nothing is under way: its tokens are known, and it goes on from them when its turn comes."""
        slot = sequence.slot
        length, left = int(self.mirror.length[slot]), int(self.mirror.prompt_left[slot])
        self._wait_again(sequence, length - left if left else length - 1)
        sequence.stats.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(sequence)

    def requeue(self, sequence: Sequence, computed: int) -> None:
        """A step of it never came to be, and nobody can find what that was to fill. It waits again."""
        sequence.num_published_pages = min(sequence.num_published_pages, computed // self.page_size)
        self._wait_again(sequence, computed)

    def _wait_again(self, sequence: Sequence, computed: int) -> None:
        length = int(self.mirror.length[sequence.slot])
        ids = sequence.ids if length == len(sequence.ids) else self.slots.read(sequence.slot, length)
        self.prefix_cache.remember(sequence, ids, computed)
        self._leave(sequence)
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is; its slot and pages are free at once.

        A step under way may still write to the pages; whoever gets them writes later.
        """
        self.num_needing_sync -= sequence.may_need_sync
        sequence.stats.ended = time.monotonic()
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def finish_keep_pages(self, sequence: Sequence) -> None:
        """It ended; its pages are kept until `bury`."""
        self.num_needing_sync -= sequence.may_need_sync
        sequence.stats.ended = time.monotonic()
        pages, known = sequence.pages, sequence.num_published_pages
        sequence.pages = []
        self._leave(sequence)
        sequence.pages, sequence.num_published_pages = pages, known

    def release_pages(self, sequence: Sequence, ids: list[int] | None) -> None:
        """`ids` is all it ever said; None: nobody knows."""
        if ids is not None:
            self.prefix_cache.remember(sequence, ids, len(ids) - 1)
        self.pages.release(sequence.pages)
        sequence.pages = []

    def _leave(self, sequence: Sequence) -> None:
        self.version += 1
        self.running.remove(sequence)
        self._lines = self._lines[self._lines != sequence.slot]
        self.mirror.generation[sequence.slot] += 1
        self.slots.free(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.num_published_pages = -1, [], 0
