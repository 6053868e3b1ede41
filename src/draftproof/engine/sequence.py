"""A request in the engine, and what the host knows of every slot."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from draftproof.arrays import Bools, Ints
from draftproof.engine.slots import SlotInit
from draftproof.metrics import RequestStats
from draftproof.types import LogprobKind, Request
from draftproof.verify.grammar_guide import GrammarGuide


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine."""

    request: Request
    max_length: int
    draft_limit: int = 0
    adaptive: bool = True  # or always as many drafts as it may have
    strategy: int = 0
    logprob_kind: LogprobKind = LogprobKind.NONE
    has_host_processors: bool = False  # the user's code, or bad words, between logits and sampling
    needs_host_logprobs: bool = False  # logprobs that the device does not keep ready
    guide: GrammarGuide | None = None  # grammar state; the host fills masks before each step
    features_id: int = -1  # number of its own ones, once they were asked for
    arrival: int = 0
    slot: int = -1
    last_slot: int = -1
    pages: list[int] = field(default_factory=list)
    ids: Many[int] = ()  # committed tokens when it last sat down: the prompt, later also what it had said
    digests: list[bytes] = field(default_factory=list)  # of the full pages of `ids`
    num_cached: int = 0  # of `ids`, how many had KV when it sat down
    num_published_pages: int = 0  # pages that others can find
    num_failures: int = 0  # steps of it that failed under way, one after the other
    length_at_failure: int = 0  # its committed tokens then
    num_prompt_logprobs: int = 0  # prompt tokens whose logprobs were given out
    stats: RequestStats = field(default_factory=RequestStats)

    def __post_init__(self) -> None:
        self.ids = self.request.prompt_token_ids

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first: the smaller priority, then the earlier one."""
        return self.request.params.priority, self.arrival

    @property
    def slot_init(self) -> SlotInit:
        """What its slot is filled with."""
        return SlotInit(
            *(self.slot, self.request, self.pages, self.max_length),
            *(self.strategy, self.logprob_kind, self.ids, self.num_cached),
        )

    @property
    def needs_sync(self) -> bool:
        """Is the host needed in every step of it?"""
        return self.has_host_processors or self.needs_host_logprobs or self.guide is not None

    @property
    def may_need_sync(self) -> bool:
        """Or in some?"""
        return self.needs_sync or self.request.params.prompt_logprobs is not None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Are logprobs of its prompt still to be given out?"""
        asked = self.request.params.prompt_logprobs is not None
        return asked and self.num_prompt_logprobs < len(self.request.prompt_token_ids) - 1

    @property
    def cacheable(self) -> int:
        """Tokens of `ids` that need not be computed if they are found: the newest always is."""
        return self.num_prompt_logprobs if self.needs_prompt_logprobs else len(self.ids) - 1


class SlotMirror:
    """What the host knows of each slot. Of steps that are under way it knows bounds alone."""

    def __init__(self, num_slots: int) -> None:
        def column() -> Ints:
            return np.zeros(num_slots, np.int64)

        self.length = column()  # committed tokens, as of the last step that was read
        self.max_committed = column()  # committed tokens at most, once all that is under way has been read
        self.max_length = column()
        self.prompt_left = column()  # tokens to compute, before it decodes, that no step is planned for
        self.in_flight = column()  # steps not read yet that commit tokens of it
        self.num_draft = column()  # drafts it may have when the next step begins
        self.num_pages = column()
        self.generation = (
            column()
        )  # changes with whoever sits there: results of a predecessor are known by it


@dataclass(slots=True, eq=False)  # freezing it would cost more than filling it
class StepPlan:
    """A step: B entries, those that came first in front. Nothing in it ever changes."""

    sequences: list[Sequence]  # [B]
    requests: list[Request]  # [B]
    slots: Ints  # [B]
    chunk: Ints  # [B] rows of committed tokens that lack KV; 0: it decodes
    drafts: Ints  # [B] drafts verified at most
    samples: Bools  # [B]: its rows reach its newest committed token
    generations: Ints  # [B]
    version: int  # of those that run: as long as it stays the same, so do the generations
    num_rows: int  # at most
    num_drafts: int
    has_prompts: bool  # some have chunks; else all sample
    zeros: Ints  # [B] zeros
    admitted: list[Sequence] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)  # slot, place in its page table, page
    published: list[int] = field(default_factory=list)  # pages that it fills, found from the next plan on

    def with_drafts(self, drafts: Ints, count: int) -> StepPlan:
        """The same in a later step, in which nobody comes; `count` drafts in all."""
        return StepPlan(
            *(self.sequences, self.requests, self.slots, self.chunk, drafts, self.samples, self.generations),
            *(self.version, len(self.slots) + count, count, False, self.zeros),
        )

    def only(self, at: list[int]) -> StepPlan:
        """Some of its entries."""
        chunk, drafts = self.chunk[at], self.drafts[at]
        return StepPlan(
            [self.sequences[i] for i in at],
            [self.requests[i] for i in at],
            self.slots[at],
            chunk,
            drafts,
            self.samples[at],
            self.generations[at],
            self.version,
            num_rows=int(np.maximum(chunk, 1).sum() + drafts.sum()),
            num_drafts=int(drafts.sum()),
            has_prompts=bool(chunk.any()),
            zeros=np.zeros_like(chunk),
        )

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Does anybody want to know of the rows of a prompt what they say?"""
        chunks = self.chunk.nonzero()[0].tolist()
        return any(self.sequences[i].request.params.prompt_logprobs is not None for i in chunks)

    @property
    def num_logits(self) -> int:
        return int(self.samples.sum()) + self.num_drafts
