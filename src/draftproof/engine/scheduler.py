"""Who runs in the next step, with how many rows and drafts, on which pages.

Requests that decode come first, one row each, then their drafts, which take at most half of what is left
while a prompt waits; the rest of the row budget goes to prompts, first come, first served. A request is
admitted when a slot and all the pages it can ever need are free, so it never has to be put aside.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from draftproof.engine.budget import DraftBudget
from draftproof.engine.pages import Pages
from draftproof.engine.slots import Slots
from draftproof.types import Request
from draftproof.verify import Strategy


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine; the host's copy of its lengths."""

    request: Request
    strategy: Strategy
    budget: DraftBudget
    max_length: int
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    num_draft: int = 0

    @property
    def waiting_rows(self) -> int:
        """Committed tokens without KV: 1 while decoding, more while prefilling."""
        return self.length - self.computed

    def next_budget(self) -> int:
        """Drafts to ask for: the last token of a request needs none."""
        if self.waiting_rows != 1:
            return 0
        return min(self.budget.take(), self.max_length - self.length - 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's part in a step: rows computed .. computed + num_rows, the last `num_draft` drafts."""

    sequence: Sequence
    num_rows: int
    num_draft: int
    samples: bool  # its rows reach the newest committed token


class Scheduler:
    """Queues and admission."""

    def __init__(self, slots: Slots, pages: Pages, page_size: int, max_rows: int) -> None:
        self.slots = slots
        self.pages = pages
        self.page_size = page_size
        self.max_rows = max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def pages_for(self, max_length: int) -> int:
        return -(-max_length // self.page_size)

    def plan(self) -> list[Entry]:
        """The entries of the next step, in the order in which requests arrived."""
        rows = self.max_rows
        decoding = [s for s in self.running if s.waiting_rows == 1]
        rows -= len(decoding)
        prompts = len(decoding) < len(self.running) or bool(self.waiting and self.slots.num_free)
        room = rows // 2 if prompts else rows  # guesses must not keep prompts out
        drafts = {}
        for sequence in decoding:
            drafts[sequence.slot] = min(sequence.num_draft, room)
            room -= drafts[sequence.slot]
        rows -= sum(drafts.values())
        entries = []
        for sequence in self.running:
            if sequence.waiting_rows == 1:
                num_draft = drafts[sequence.slot]
                entries.append(Entry(sequence, 1 + num_draft, num_draft, samples=True))
            elif rows:
                entries.append(self._chunk(sequence, rows))
                rows -= entries[-1].num_rows
        while rows and self._admit():
            entries.append(self._chunk(self.running[-1], rows))
            rows -= entries[-1].num_rows
        return entries

    def _chunk(self, sequence: Sequence, rows: int) -> Entry:
        count = min(sequence.waiting_rows, rows)
        return Entry(sequence, count, 0, samples=count == sequence.waiting_rows)

    def _admit(self) -> bool:
        if not self.waiting or not self.slots.num_free:
            return False
        sequence = self.waiting[0]
        need = self.pages_for(sequence.max_length)
        if need > self.pages.num_free:
            return False
        self.waiting.popleft()
        sequence.pages = self.pages.take(need)
        sequence.slot = self.slots.sit(sequence.request, sequence.pages, sequence.max_length)
        sequence.length = len(sequence.request.prompt_token_ids)
        self.running.append(sequence)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is; its slot and pages are free at once."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.slots.stand(sequence.slot)
        self.pages.give_back(sequence.pages)
        sequence.slot, sequence.pages = -1, []
