"""The proposer on the device: what it is given after a commit, and where its guesses go.

One that looks at committed tokens alone drafts at the end of the step itself. One that follows the rows, with
a model of its own, drafts behind it: from the step's rows and what it asked of them, in a graph of its own,
kept by their number and by how far anybody may draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from draftproof.engine.drafting.budget import Ints
from draftproof.engine.sequence import StepPlan
from draftproof.engine.slots import Slots
from draftproof.errors import ConfigError
from draftproof.ops import Ops, Runtime
from draftproof.propose import DeviceProposer, Proposer
from draftproof.types import DeviceBatch, Draft, DraftSpec, FinishStatus, PlanColumns, Rows, StepFeatures
from draftproof.verify.base import Strategy

T = TypeVar("T")
FEW = 8  # entries up to which drafts are captured for any number of rounds, or nearly
COLD = 128 << 20  # bytes, more than a cache of any chip has
PROMPTS = 64, 256  # rows of prompts beside full windows, up to which drafts are captured: of few, of many


class Drafting:
    """Owns the proposer of a step, the features of its rows, and the laws that drafts were drawn from."""

    _rare = False  # are the drafts of the last step of a kind that was not captured at start?

    def __init__(self, proposer: Proposer | None, slots: Slots, max_rows: int, like: Tensor) -> None:
        """`like`: a hidden row."""
        self.proposer = proposer if isinstance(proposer, DeviceProposer) else None
        if proposer is not None and proposer.graph_safe and self.proposer is None:
            raise ConfigError(f"{type(proposer).__name__} is graph_safe: it must be a DeviceProposer")
        self.failure: Exception | None = None  # the proposer's, which is then no longer asked
        # is its model asked behind the next step and for how many rounds at most, the price of a round and of
        # a row: see `Asking`
        self.asks, self.price, self.verify = True, 0.0, 0.0
        self.k: int = slots.columns.draft.shape[1]
        self.most = self.k
        self._queued = 0  # rounds behind the last step, where nobody waits for it
        self.took = 0.0  # seconds of the last drafts, where they are waited for
        self.num_sources = len(proposer.sources) if proposer is not None else 0
        self.several = self.num_sources > 1
        self.reports_probs = proposer is not None and proposer.reports_probs
        self.slots = slots
        self._probs: Tensor | None = None  # [S + 1, K, V]; what padding writes goes to the last line
        count = 0
        if self.proposer is not None and self.proposer.follows_rows:
            count = self.proposer.needs_hidden + len(self.proposer.taps)
        size = (max_rows, count * like.shape[-1])
        self._features = torch.zeros(size, dtype=like.dtype, device=like.device) if count else None

    @property
    def follows_rows(self) -> bool:
        return self.proposer is not None and self.proposer.follows_rows

    @property
    def in_step(self) -> bool:
        """Drafts are made at the end of a step, from what it has committed."""
        return self.proposer is not None and not self.proposer.follows_rows

    def beside(self, function: Callable[[], T], traits: StepFeatures) -> Callable[[], T]:
        """What is told of logprobs, beside the drafts that a step ends with, which need nothing of it."""
        ops, some = self.slots.ops, max(traits.raw_top, traits.processed_top) >= 0
        return (
            ops.runtime.run_parallel(function)
            if self.in_step and some
            else Runtime.run_parallel(ops.runtime, function)
        )  # that waits for it

    def asked_for(self, planned: StepPlan, budget: Ints) -> tuple[int, int]:
        """For how many requests a model drafts behind the last step, in how many rounds fewer than there can
        be."""
        if not self.follows_rows or not self.asks or not np.count_nonzero(budget):
            return 0, 0
        if not self.slots.ops.runtime.asynchronous:
            return len(planned.slots) * (self.rounds > 0), 0
        return len(planned.slots), self.k - self._queued  # what is captured says nothing later

    @property
    def rounds(self) -> int:
        """For how many drafts a model was asked, at most, behind the last step that was waited for."""
        return self.proposer.asked_rounds if self.proposer is not None else 0

    @property
    def probs(self) -> Tensor | None:
        """[S, K, V], once somebody is judged by them."""
        return None if self._probs is None else self._probs[:-1]

    def expect(self, traits: StepFeatures, strategies: Sequence[Strategy]) -> bool:
        """Are draft probabilities read with these traits? Room for them is made when they first are."""
        wanted = self.reports_probs and any(strategies[i].needs_draft_probs for i in traits.strategies)
        if wanted and self._probs is None:
            num_slots, k = self.slots.columns.draft.shape
            shape = (num_slots + 1, k, self.slots.vocab)
            self._probs = torch.zeros(shape, device=self.slots.device)
        return wanted

    def keep(self, hidden: Tensor, *tapped: Tensor) -> None:
        """What the proposer wants of a step's rows, [R, hidden] each: other graphs run before it is read."""
        if self._features is not None and self.proposer is not None:
            wanted = (hidden, *tapped) if self.proposer.needs_hidden else tapped
            torch.cat(wanted, 1, out=self._features[: len(hidden)])

    def traits(
        self, ops: Ops, planned: StepPlan, budget: Ints, traits: StepFeatures, probs: bool
    ) -> DraftSpec:
        rounds = min(int(budget.max(initial=0)), self.most) if self.asks else 0
        self._rare = traits.needs_processed or traits.needs_draft_logprobs or probs
        if ops.runtime.asynchronous:
            self._queued = rounds = self.captured(len(planned.slots), rounds, planned.has_prompts)
        assert self.proposer is not None
        prompts = self.proposer.minds_prompts and bool(planned.chunk.any())
        return DraftSpec(rounds, prompts, traits.needs_processed, traits.needs_draft_logprobs, probs)

    def entries(self, ops: Ops, count: int, rows: int) -> int:
        """For how many entries the drafts of `count` are captured, behind a step of `rows` rows: few numbers,
        since each goes with many of rows."""
        if not ops.runtime.asynchronous:
            return count
        return min(1 << (count - 1).bit_length(), len(self.slots.requests), rows)

    def fewer(self, count: int, wanted: int, prompts: bool) -> int:
        """Rounds than there can be."""
        return self.k - self.captured(count, wanted, prompts) if wanted else 0

    def captured(self, count: int, wanted: int, prompts: bool = False) -> int:
        """Of the numbers of rounds that are captured the least that is enough: powers of two, and three
        quarters of them. Of many entries somebody is likely to want all, and beside prompts it matters
        little; there it is for a hybrid to say that fewer will do (`Asking`), which is never less than half.
        Rare drafts are captured as they come, and of them there are not to be more kinds than needed.
        """
        if wanted and (count > FEW or prompts):
            weighed = self.proposer is not None and self.proposer.weighed >= 0 and not self._rare
            wanted = max(wanted, (self.k + 1) // 2) if weighed else self.k
        if not wanted:
            return 0
        power = 1 << (wanted - 1).bit_length()
        return min(self.k, power * 3 // 4 if wanted <= power * 3 // 4 else power)

    def usual(self, ops: Ops, sizes: Sequence[int]) -> list[tuple[int, int, DraftSpec]]:
        """Rows, entries and traits to capture at start, of steps of these sizes: one that is met later makes
        everybody wait for its capture. Beside a long prompt drafts are a small thing and not captured."""
        num_slots, k = self.slots.columns.draft.shape
        found: dict[tuple[int, int, DraftSpec], int] = {}
        for count in range(1, num_slots + 1) if self.follows_rows else ():
            full = ops.runtime.bucket(count * (1 + k))
            least, most = (
                ops.runtime.bucket(count),
                ops.runtime.bucket(count * (1 + k) + PROMPTS[count > FEW]),
            )
            for rows, wanted in product((n for n in sizes if least <= n <= most), range(k + 1)):
                entries = self.entries(ops, count, rows)
                found[rows, entries, DraftSpec(self.captured(count, wanted, rows > full))] = 0
        return list(found)

    def rare(self, ops: Ops, sizes: Sequence[int]) -> list[tuple[int, int, DraftSpec]]:
        """Drafts beside longer prompts, some of each kind. They are not captured: it is for their kernels."""
        num_slots, k = self.slots.columns.draft.shape
        rows = {n for n in sizes if n in (128, 256, 512, max(sizes))} if self.follows_rows else ()
        rounds = dict.fromkeys((0, self.captured(1, (k + 1) // 2, True), k))
        return [
            (size, self.entries(ops, count, size), DraftSpec(number))
            for size, count, number in product(sorted(rows), dict.fromkeys((1, num_slots)), rounds)
        ]

    def asking(
        self, ops: Ops, sizes: Iterable[int], seconds: Callable[[int, int, DraftSpec], float]
    ) -> dict[int, tuple[float, float]]:
        """What drafts cost by the number of entries, if each verified some, and what is saved with a round
        of them (0: there are always as many); `seconds` times a step's."""
        if not self.follows_rows or self.proposer is None:
            return {}
        num_slots, k = self.slots.columns.draft.shape
        found = {}
        for count in (n for n in sizes if n <= num_slots):
            rows = ops.runtime.bucket(count * (1 + k))
            entries = self.entries(ops, count, rows)
            most = 1 if self.proposer.ends_chains else k  # others pay or are not
            some, none = (seconds(rows, entries, DraftSpec(rounds)) for rounds in (most, 0))
            found[count] = max(0.0, some - none), 0.0
            fewer = self.captured(count, (k + 1) // 2)
            if ops.runtime.asynchronous and self.proposer.weighed >= 0 and fewer < most:
                saved = (some - seconds(rows, entries, DraftSpec(fewer))) / (most - fewer)
                found[count] = found[count][0], min(max(0.0, saved), found[count][0] / k)
        return found

    @contextmanager
    def rehearsed(self, plan: PlanColumns, rows: Rows, entries: int) -> Iterator[Callable[[], object]]:
        """Meanwhile so many entries have said two tokens and want all drafts they can have, which nobody will
        see: rounds for nobody take no time. K and V go to page 0, which nobody has.

        What it yields makes drafts as cold as behind a step, which has read all weights of the target.
        """
        columns, k = self.slots.columns, self.slots.columns.draft.shape[1]
        longest = columns.tokens.shape[1]
        size = max(0, min(entries, len(rows.slots))) if longest > 2 else 0
        values = {"length": 2, "computed": 1, "ended": int(FinishStatus.RUNNING), "seed": -1}
        values["max_length"] = min(k + 4, longest)
        values |= dict.fromkeys(("page_table", "num_draft", "draft"), 0)
        lines = [(getattr(columns, name), value) for name, value in values.items()]
        lines += [(line, 0) for line in (plan.chunk, rows.tokens, rows.positions, rows.kv_index)]
        lines += [(plan.budget, k)]
        lines += [(columns.tokens[:, i : i + 1], i) for i in range(2)]  # not alike, or a search finds drafts
        each = plan.slots, rows.slots
        known = self.proposer.remembers if self.proposer is not None else ()
        held = [(line, line.clone()) for line in (*each, *known, *(line for line, _ in lines))]
        spoils = self._spoils(rows.slots.device)
        try:
            for line, value in lines:
                line[:size] = value
            for line in each:
                line[:size] = torch.arange(size, device=line.device)
            yield spoils.zero_
        finally:
            for line, was in held:
                line.copy_(was)

    def _spoils(self, device: torch.device) -> Tensor:
        """Bytes to write over the caches with; none where there is no room for them."""
        try:
            return torch.empty(COLD * self.slots.ops.runtime.asynchronous, dtype=torch.uint8, device=device)
        except RuntimeError:
            return torch.empty(0, dtype=torch.uint8, device=device)

    def draft(
        self, plan: PlanColumns, rows: Rows | None = None, entries: int = -1, traits: DraftSpec | None = None
    ) -> None:
        """The next drafts. What was committed does not depend on them, nor on whether the proposer fails."""
        if self.proposer is None:
            return
        columns = self.slots.columns
        slots, budget = plan.slots, plan.budget
        batch = DeviceBatch(columns, slots, budget)
        if rows is not None:
            slots, budget, chunk = slots[:entries], budget[:entries], plan.chunk[:entries]
            features = None if self._features is None else self._features[: len(rows.tokens)]
            batch = DeviceBatch(
                columns, slots, budget, chunk, rows, features, traits, self.price, self.verify
            )
        begin = time.perf_counter()
        try:
            look = 0 if self.slots.ops.runtime.asynchronous else self.num_sources
            draft = checked(self.proposer.draft(batch), columns.draft[: len(slots)], look)
            self.slots.ops.step.store_drafts(columns, slots, budget, draft)
            self.put_probs(slots, draft)
        except Exception as error:  # a plug-in's code may raise anything
            self.proposer, self.failure = None, error
            columns.num_draft.zero_()
        if not self.slots.ops.runtime.asynchronous:
            self.took = time.perf_counter() - begin

    def restore(self, proposer: DeviceProposer | None) -> None:
        """Use `proposer` again and forget its failure."""
        self.proposer, self.failure = proposer, None

    def switch_off(self) -> None:
        """Stop using the proposer."""
        self.proposer = None

    def put_probs(self, slots: Tensor, draft: Draft) -> None:
        """The laws of drafts that `store_drafts` has put. Whoever gave none was certain."""
        if self._probs is None:
            return
        lines = torch.where(slots < 0, len(self._probs) - 1, slots)
        probs = draft.probs
        if probs is None:
            tokens = self.slots.columns.draft[slots.clamp(min=0)]
            probs = torch.zeros_like(self._probs[lines]).scatter_(2, tokens[..., None], 1.0)
        self._probs[lines] = probs.to(self._probs.device)


def checked(draft: Draft, like: Tensor, num_sources: int = 0) -> Draft:
    """A plug-in's guesses in the shape [B, K] of `like`: backends rely on it.

    With `num_sources` its numbers are looked at too, for which a device that has a queue would be waited for.
    """
    for part in (draft.tokens, draft.logprobs, draft.sources):
        if part is not None and part.shape != like.shape:
            raise ValueError(f"drafts must have the shape {tuple(like.shape)}, not {tuple(part.shape)}")
    if draft.count.shape != like.shape[:1] or torch.is_floating_point(draft.tokens):
        raise ValueError("a draft needs a count for each request, and integer tokens")
    if num_sources and len(like):
        if int(draft.count.min()) < 0:
            raise ValueError("a request has a negative number of drafts")
        if draft.sources is not None:
            low, high = (int(x) for x in torch.aminmax(draft.sources))
            if low < 0 or high >= num_sources:
                raise ValueError(f"drafts are of a source that is none of the {num_sources} there are")
    return draft
