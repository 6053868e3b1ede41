"""Who runs in the next step, with how many rows and drafts, on which pages.

Requests that decode come first, one row each, then their drafts, which take at most half of what is left
while a prompt waits; the rest of the row budget goes to prompts, first come, first served. A request is
admitted when a slot and all the pages it can ever need are free, so it never has to be put aside.

A step may be planned while earlier ones are still under way. Of a request that decodes nothing need be
known for that but bounds: each step adds one token at least, and one more for every draft at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from draftproof.engine.budget import Bools, DraftBudgets, Ints
from draftproof.engine.pages import Pages
from draftproof.engine.slots import Seat, Slots
from draftproof.types import Request, Wants
from draftproof.verify.grammar import Guide


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine."""

    request: Request
    max_length: int
    draft_limit: int = 0
    strategy: int = 0
    wants: Wants = Wants.NONE
    processed_by_host: bool = False  # the user's code, or bad words, between logits and sampling
    settled_by_host: bool = False  # logprobs that the device does not keep ready
    guide: Guide | None = None  # its place in its grammar: the host makes masks before every step of it
    traits: int = -1  # number of its own ones, once they were asked for
    slot: int = -1
    pages: list[int] = field(default_factory=list)

    @property
    def hosted(self) -> bool:
        """Is the host needed in every step of it?"""
        return self.processed_by_host or self.settled_by_host or self.guide is not None

    @property
    def waited_for(self) -> bool:
        """Or in some?"""
        return self.hosted or self.request.params.prompt_logprobs is not None


class HostColumns:
    """What the host knows of each slot. Of steps that are under way it knows bounds alone."""

    def __init__(self, num_slots: int) -> None:
        def column() -> Ints:
            return np.zeros(num_slots, np.int64)

        self.length = column()  # committed tokens, as of the last step that was read
        self.max_length = column()
        self.prompt_left = column()  # prompt tokens that no step has been planned for
        self.under_way = column()  # steps not read yet that commit tokens of it
        self.num_draft = column()  # drafts it may have when the next step begins
        self.tenant = column()  # changes with whoever sits there: results of a predecessor are known by it


@dataclass(frozen=True, slots=True)
class Planned:
    """A step: B entries, in the order in which requests arrived."""

    sequences: list[Sequence]  # [B]
    slots: Ints  # [B]
    chunk: Ints  # [B] prompt rows; 0: it decodes
    drafts: Ints  # [B] drafts verified at most
    samples: Bools  # [B]: its rows reach its newest committed token
    tenants: Ints  # [B]
    newcomers: list[Sequence]

    def only(self, at: list[int]) -> Planned:
        """Some of its entries."""
        return Planned(
            [self.sequences[i] for i in at],
            self.slots[at],
            self.chunk[at],
            self.drafts[at],
            self.samples[at],
            self.tenants[at],
            [],
        )

    @property
    def num_rows(self) -> int:
        """At most."""
        return int(np.maximum(self.chunk, 1).sum() + self.drafts.sum())

    @property
    def num_logits(self) -> int:
        return int(self.samples.sum() + self.drafts.sum())


class Scheduler:
    """Queues and admission."""

    def __init__(
        self, slots: Slots, pages: Pages, page_size: int, max_rows: int, budgets: DraftBudgets
    ) -> None:
        self.slots = slots
        self.pages = pages
        self.page_size = page_size
        self.max_rows = max_rows
        self.budgets = budgets
        self.host = HostColumns(len(slots.requests))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.version = 0  # changes with `running`
        self.num_hosted = 0  # requests here that are waited for
        self._lines = np.zeros(0, np.int64)  # slots of `running`

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.num_hosted += sequence.waited_for

    def pages_for(self, max_length: int) -> int:
        return -(-max_length // self.page_size)

    def plan(self) -> Planned | None:
        """The next step; None if there is nothing to do that would not be in vain."""
        rows = self.max_rows
        lines, host = self._lines, self.host
        left = host.prompt_left[lines]
        # one that is under way and may still be short of its end; it may have ended by a stop token as well
        decodes = (left == 0) & (host.length[lines] + host.under_way[lines] < host.max_length[lines])
        rows -= int(decodes.sum())
        prompts = bool(left.any()) or bool(self.waiting and self.slots.num_free)
        room = rows // 2 if prompts else rows  # guesses must not keep prompts out
        drafts = np.where(decodes, host.num_draft[lines], 0)
        if drafts.sum() > room:
            drafts = np.diff(np.minimum(np.cumsum(drafts), room), prepend=0)
        rows -= int(drafts.sum())
        chunk = np.zeros_like(left)
        for i in left.nonzero()[0].tolist():
            chunk[i] = min(int(left[i]), rows)
            rows -= int(chunk[i])
        newcomers, first = [], []
        while rows and self._admit():
            newcomers.append(self.running[-1])
            first.append(min(rows, len(newcomers[-1].request.prompt_token_ids)))
            rows -= first[-1]
        if newcomers:
            none = np.zeros(len(first), np.int64)
            chunk, drafts = np.append(chunk, first), np.append(drafts, none)
            decodes = np.append(decodes, none > 0)
            self._lines = np.append(lines, [s.slot for s in newcomers])
        takes_part = decodes | (chunk > 0)
        if not takes_part.any():
            return None
        return self._planned(takes_part, chunk, drafts, newcomers)

    def _planned(self, takes_part: Bools, chunk: Ints, drafts: Ints, newcomers: list[Sequence]) -> Planned:
        """Keep the columns up to date with what is under way from now on."""
        host = self.host
        if takes_part.all():
            lines, sequences = self._lines, list(self.running)
        else:
            at = takes_part.nonzero()[0]
            lines, chunk, drafts = self._lines[at], chunk[at], drafts[at]
            sequences = [self.running[i] for i in at.tolist()]
        host.prompt_left[lines] -= chunk
        samples = host.prompt_left[lines] == 0
        host.under_way[lines] += samples
        host.num_draft[lines] = 0
        return Planned(sequences, lines, chunk, drafts, samples, host.tenant[lines], newcomers)

    def budget(self, planned: Planned) -> Ints:
        """[B] drafts to ask for after this step. The last token of a request needs none."""
        host, lines = self.host, planned.slots
        least = host.length[lines] + host.under_way[lines]
        room = np.maximum(host.max_length[lines] - least - 1, 0)
        wanted = np.where(planned.samples & (room > 0), lines, -1)
        budget = np.zeros_like(lines)
        budget[wanted >= 0] = self.budgets.take(wanted[wanted >= 0])
        allowed: Ints = np.minimum(budget, room)
        return allowed

    def settle(self, planned: Planned, num_out: Ints, drafted: Ints, accepted: Ints) -> Bools:
        """Take in what a step did; [B] which entries are still those that were planned."""
        host, lines = self.host, planned.slots
        here: Bools = host.tenant[lines] == planned.tenants
        mine = lines[here]
        host.length[mine] += num_out[here]
        host.under_way[mine] -= planned.samples[here]
        self.budgets.record(mine, planned.drafts[here], drafted[here], accepted[here])
        return here

    def _admit(self) -> bool:
        if not self.waiting or not self.slots.num_free:
            return False
        sequence = self.waiting[0]
        need = self.pages_for(sequence.max_length)
        if need > self.pages.num_free:
            return False
        self.waiting.popleft()
        sequence.pages = self.pages.take(need)
        slot = sequence.slot = self.slots.take(sequence.request)
        prompt = len(sequence.request.prompt_token_ids)
        host = self.host
        host.length[slot] = host.prompt_left[slot] = prompt
        host.max_length[slot] = sequence.max_length
        host.under_way[slot] = host.num_draft[slot] = 0
        host.tenant[slot] += 1
        self.budgets.start(slot, sequence.draft_limit)
        self.running.append(sequence)
        self.version += 1
        return True

    def seats(self, newcomers: list[Sequence]) -> list[Seat]:
        return [Seat(s.slot, s.request, s.pages, s.max_length, s.strategy, s.wants) for s in newcomers]

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is; its slot and pages are free at once.

        A step under way may still write to the pages; whoever gets them writes later.
        """
        self.num_hosted -= sequence.waited_for
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.version += 1
        at = self.running.index(sequence)
        del self.running[at]
        self._lines = np.delete(self._lines, at)
        self.host.tenant[sequence.slot] += 1
        self.slots.stand(sequence.slot)
        self.pages.give_back(sequence.pages)
        sequence.slot, sequence.pages = -1, []
