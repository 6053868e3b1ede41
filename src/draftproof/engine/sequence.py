"""A request in the engine, the host mirror of the slots, and the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from draftproof.array_types import Bools, Floats32, Floats64, Ints
from draftproof.metrics import RequestStats
from draftproof.types import LogprobKind, Request
from draftproof.verify.grammar_guide import GrammarGuide


@dataclass(frozen=True, slots=True, eq=False)
class PooledRows:
    """Sum of hidden rows of a prompt, added one by one in order: no chunk size changes its bits."""

    count: int = 0
    total: Floats64 = field(default_factory=lambda: np.zeros(0))  # [hidden]; empty without rows

    def plus(self, rows: Floats64) -> PooledRows:
        """Return the sum after the further rows [n, hidden]."""
        total = self.total.copy() if self.count else np.zeros(rows.shape[1])
        for row in rows:
            total += row
        return PooledRows(self.count + len(rows), total)

    def mean(self) -> Floats32:
        """Return the mean of the rows [hidden]."""
        return (self.total / self.count).astype(np.float32)


NO_POOLED_ROWS = PooledRows()


@dataclass(slots=True, eq=False)
class Sequence:
    """State of a request in the engine."""

    request: Request
    max_length: int
    draft_limit: int = 0
    adaptive: bool = True  # False: always `draft_limit` drafts
    strategy: int = 0
    logprob_kind: LogprobKind = LogprobKind.NONE  # of its tokens, within the step
    draft_kind: LogprobKind = LogprobKind.NONE  # of its drafts
    draft_top: int = 0  # likeliest tokens of the drafter that it reports with each draft
    has_long_logprobs: bool = False  # longer lists than a step holds: computed behind the step
    has_host_processors: bool = False  # logits processors or bad words, applied by the host
    guide: GrammarGuide | None = None  # grammar state; the host fills masks before each step
    features_id: int = -1  # cached number of its StepFeatures; -1: not computed yet
    arrival: int = 0
    slot: int = -1
    last_slot: int = -1
    pages: list[int] = field(default_factory=list)
    ids: Many[int] = ()  # committed tokens when it was last admitted; the prompt at first
    digests: list[bytes] = field(default_factory=list)  # of the full pages of `ids`
    num_cached: int = 0  # of `ids`, tokens found in the prefix cache at admission
    num_published_pages: int = 0  # pages published to the prefix cache
    num_failures: int = 0  # consecutive failed steps
    length_at_failure: int = 0  # committed tokens at the last failure
    num_prompt_logprobs: int = 0  # prompt tokens whose logprobs were returned
    pooled: PooledRows = NO_POOLED_ROWS
    stats: RequestStats = field(default_factory=RequestStats)

    def __post_init__(self) -> None:
        self.ids = self.request.prompt_token_ids

    @property
    def rank(self) -> tuple[int, int]:
        """Return the scheduling order: priority, then arrival."""
        return self.request.params.priority, self.arrival

    @property
    def needs_sync(self) -> bool:
        """Return whether the host is needed in every step of the request."""
        has_host_options = self.has_host_processors or self.request.pooling is not None
        return has_host_options or self.guide is not None or self.uses_prediction

    @property
    def uses_prediction(self) -> bool:
        """Return whether drafts may be made from the request's prediction."""
        return self.draft_limit > 0 and len(self.request.prediction_ids) > 0

    @property
    def has_queued_logprobs(self) -> bool:
        """Return whether some of its logprobs are queued behind a step, not in the columns of a step."""
        return self.has_long_logprobs or self.request.params.prompt_logprobs is not None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Return whether logprobs of its prompt are still to be returned."""
        requested = self.request.params.prompt_logprobs is not None
        return requested and self.num_prompt_logprobs < len(self.request.prompt_token_ids) - 1

    @property
    def max_cached_tokens(self) -> int:
        """Return how many tokens of `ids` may come from the prefix cache: all but the newest.

        Cached tokens have no hidden rows. Tokens whose rows are still needed are computed.
        """
        if self.request.pooling == "mean":
            return self.pooled.count
        return self.num_prompt_logprobs if self.needs_prompt_logprobs else len(self.ids) - 1


class SlotMirror:
    """Host mirror of the slots. For steps in flight it holds bounds only."""

    def __init__(self, num_slots: int) -> None:
        def column() -> Ints:
            return np.zeros(num_slots, np.int64)

        self.length = column()  # committed tokens, as of the last step that was read
        self.max_committed = column()  # upper bound of committed tokens once all steps in flight are read
        self.max_length = column()
        self.prompt_left = column()  # prompt tokens that no step is planned for yet
        self.in_flight = column()  # steps not read yet that commit tokens of the slot
        self.num_draft = column()  # upper bound of drafts when the next step begins
        self.matched = column()  # tokens that a search matched for these drafts; 0: not known
        self.num_pages = column()
        self.generation = column()  # number of the slot's request: results of an earlier one do not match


@dataclass(slots=True, eq=False)  # one per step: freezing costs more than filling
class StepPlan:
    """Plan of a step with B entries in order of admission. It is never modified."""

    sequences: list[Sequence]  # [B]
    requests: list[Request]  # [B]
    slots: Ints  # [B]
    chunk: Ints  # [B] prompt rows to compute; 0: the entry decodes
    drafts: Ints  # [B] maximum number of drafts to verify
    is_sampled: Bools  # [B]: the rows reach the newest committed token, so a token is sampled
    generations: Ints  # [B]
    version: int  # of the running set; generations change only with it
    num_rows: int  # upper bound
    num_drafts: int
    has_prompts: bool  # some entries have chunks; otherwise all sample
    zeros: Ints  # [B] zeros
    admitted: list[Sequence] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index in its page table, page
    published: list[int] = field(default_factory=list)  # pages published with this plan

    def with_drafts(self, drafts: Ints, count: int) -> StepPlan:
        """Return the plan of a later step with the same entries and `count` drafts in all."""
        return StepPlan(
            sequences=self.sequences,
            requests=self.requests,
            slots=self.slots,
            chunk=self.chunk,
            drafts=drafts,
            is_sampled=self.is_sampled,
            generations=self.generations,
            version=self.version,
            num_rows=len(self.slots) + count,
            num_drafts=count,
            has_prompts=False,
            zeros=self.zeros,
        )

    @property
    def needs_prompt_rows(self) -> bool:
        """Return whether the hidden rows of a prompt are read: for prompt logprobs or their mean."""
        requests = [self.requests[i] for i in self.chunk.nonzero()[0].tolist()]
        return any(r.params.prompt_logprobs is not None or r.pooling == "mean" for r in requests)

    def chunk_rows(self, entry: int, computed: Ints) -> tuple[int, int, int]:
        """Return start and end of a chunk in its prompt, and what to add to a position for its row.

        computed [B]: tokens with KV before the step. The end is exclusive.
        """
        start = int(computed[entry])
        rows_before = int((np.maximum(self.chunk, 1) + self.drafts)[:entry].sum())
        return start, start + int(self.chunk[entry]), rows_before - start

    @property
    def num_logits(self) -> int:
        """Return the number of logits rows."""
        return int(self.is_sampled.sum()) + self.num_drafts
