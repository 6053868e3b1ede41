"""The device's part of a step: from a plan to what was committed, over tensors that never move.

    layout, forward, sample, judge, commit, logprobs, propose

Nothing here waits for the device unless a request's options need the host in the middle. A step of
decoding requests is one graph, by its rows and its traits; a step with prompts in it is laid out, run
through the forward graph of its rows, and judged by the graph of its logits rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftproof.engine.budget import Ints
from draftproof.engine.packing import Packed
from draftproof.engine.sequence import Planned
from draftproof.engine.slots import ALIGN, Slots
from draftproof.errors import ConfigError
from draftproof.models.runner import Runner
from draftproof.ops import Layout, Rows, TokenLogprobs
from draftproof.propose import DeviceProposer, Proposer
from draftproof.types import (
    TOKENS,
    Choice,
    DeviceBatch,
    Draft,
    Outcome,
    Plan,
    Request,
    Traits,
    Wants,
    Windows,
)
from draftproof.verify.sampler import Sampled, Sampler

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # what, how much is done, of how much
NO_ONE: Mapping[int, Request] = {}
NO_BUDGET = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Decided:
    """What a step leaves on the device; valid until the next one."""

    outcome: Outcome
    windows: Windows
    logits: Tensor | None  # [L, V]; None: no entry sampled
    sampled: Sampled | None
    raw: TokenLogprobs | None  # of the picked rows of requests that want them so
    processed: TokenLogprobs | None
    packed: Packed  # the table, num_draft, and the logprobs: what the host reads


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that was queued."""

    decided: Decided
    hidden: Tensor | None  # [R, hidden], where it was asked for or there were prompts


class DeviceStep:
    """Owns the buffers and the captured graphs."""

    def __init__(
        self,
        runner: Runner,
        slots: Slots,
        sampler: Sampler,
        proposer: Proposer | None,
        max_rows: int,
    ) -> None:
        self.ops = runner.ops
        self.runner = runner
        self.slots = slots
        self.sampler = sampler
        self.proposer = proposer if isinstance(proposer, DeviceProposer) else None
        if proposer is not None and proposer.graph_safe and self.proposer is None:
            raise ConfigError(f"{type(proposer).__name__} is graph_safe: it must be a DeviceProposer")
        if self.proposer is not None and (len(self.proposer.sources) > 1 or self.proposer.reports_probs):
            raise ConfigError(
                f"{type(proposer).__name__} drafts on the device and has several sources or reports its "
                "probabilities: only a proposer on the host may do that yet"
            )
        self.failure: Exception | None = None  # the proposer's, which is then no longer asked
        columns, device = slots.columns, slots.device
        num_slots, k = columns.draft.shape
        self.max_rows = self.ops.bucket(max_rows)
        self.max_logits = self.ops.bucket(min(max_rows, num_slots * (k + 1)))

        def lines(number: int, size: int) -> Tensor:
            """[number, size] int64; each begins at an address that any kernel likes."""
            padded = -(-size // ALIGN) * ALIGN
            return torch.zeros((number, padded), dtype=torch.int64, device=device)[:, :size]

        self._plan = torch.zeros((4, -(-num_slots // ALIGN) * ALIGN), dtype=torch.int64, device=device)
        self._plan[0] = -1
        self.plan = Plan.of(self._plan[:, :num_slots])
        self._sent: bytes | None = None  # the plan as the device has it
        self._rows = lines(4, self.max_rows)
        self._entries = lines(3, num_slots)
        self._logits = lines(5, self.max_logits)
        self._picks = lines(2, self.max_logits)
        self.width = TOKENS + k + 1
        self._table = torch.zeros((num_slots, self.width), dtype=torch.int64, device=device)
        self._picked = torch.zeros(
            (self.max_logits, runner.model.config.hidden_size), dtype=runner.dtype, device=device
        )
        self.draft_probs: Tensor | None = None  # [S, K, V]
        if proposer is not None and proposer.reports_probs:
            self.draft_probs = torch.zeros((num_slots, k, slots.vocab), device=device)
        self._allowed: Tensor | None = None  # masks by slot and depth; made when a grammar first comes
        self._graphs: dict[Hashable, Callable[[], Any]] = {}

    # --- running ------------------------------------------------------------------------------------

    def run(
        self, planned: Planned, budget: Ints, traits: Traits, hosted: Mapping[int, Request], keep: bool
    ) -> Ran:
        """Queue a step. `hosted`: requests, by slot, that need the host in it; `keep`: hidden rows too."""
        rows, logits = self.ops.bucket(planned.num_rows), self.ops.bucket(max(1, planned.num_logits))
        if traits.masks:
            self._masks()
        if not hosted and not keep and not planned.chunk.any():
            step = self._graph(("decode", rows, traits), lambda: self._whole(rows, traits))
            self._load(planned, budget)
            return Ran(step(), None)
        layout, picked = self._layout(rows, logits), self._picked[:logits]
        forward = self._graph(("forward", rows), lambda: self.runner.forward(layout.rows))
        judge: Callable[[], Decided] = partial(self._tail, picked, layout.windows, traits, hosted)
        if not planned.num_logits:
            judge = partial(self._advance, layout.windows)
        elif not hosted:
            judge = self._graph(("judge", logits, traits), judge)
        self._load(planned, budget)
        self.ops.layout(self.plan, self.slots.columns, self.runner.page_size, layout)
        hidden = forward()
        torch.index_select(hidden, 0, layout.at, out=picked)
        return Ran(judge(), hidden)

    def put(self, planned: Planned, budget: Ints, draft: Draft) -> None:
        """Take the guesses of a proposer on the host."""
        send, columns = self.ops.send, self.slots.columns
        draft = _checked(draft, columns.draft[: len(planned.slots)])
        slots = send(torch.from_numpy(planned.slots))
        self.ops.put_draft(columns, slots, send(torch.from_numpy(budget)), draft)
        if self.draft_probs is not None:
            certain = torch.zeros_like(self.draft_probs[slots])
            certain.scatter_(2, columns.draft[slots][..., None], 1.0)
            self.draft_probs[slots] = certain if draft.probs is None else draft.probs

    def allow(self, places: Tensor, masks: Tensor) -> None:
        """Masks [n, words] of the next step, for the rows at slot * (K + 1) + depth."""
        lines = self._masks().view(-1, masks.shape[1])
        lines[self.ops.send(places)] = self.ops.send(masks)

    def _masks(self) -> Tensor:
        if self._allowed is None:
            num_slots, k = self.slots.columns.draft.shape
            shape = (num_slots, k + 1, -(-self.slots.vocab // 32))
            self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self.slots.device)
        return self._allowed

    def prepare(self, traits: Sequence[Traits], wide: int, tick: Progress) -> dict[int, float]:
        """Capture what a service will need: decoding of up to `wide` rows, and prompts of any number.

        Returns the seconds of a step by its rows.
        """
        if not self.ops.asynchronous:
            sizes = _some_of(wide)  # in rounds: a busy moment of the machine hits one of them, not one size
            rounds = [
                [self.ops.seconds(partial(self._rehearse, n), times=1) for n in sizes] for _ in range(3)
            ]
            return dict(zip(sizes, np.min(rounds, axis=0).tolist(), strict=True))
        sizes = sorted({self.ops.bucket(n) for n in range(1, self.max_rows + 1)}, reverse=True)
        decoding = [n for n in sizes if n <= self.ops.bucket(wide)]
        work: list[tuple[str, int, Traits | None]] = [("forward", n, None) for n in sizes]
        work += [(kind, n, t) for t in traits for n in decoding for kind in ("decode", "judge")]
        for done, (kind, size, trait) in enumerate(work):
            tick("capturing", done, len(work))
            layout = self._layout(size, min(size, self.max_logits))
            if trait is None:
                self._graph((kind, size), partial(self.runner.forward, layout.rows))
            elif kind == "decode":
                self._graph((kind, size, trait), partial(self._whole, size, trait))
            else:
                tail = partial(self._tail, self._picked[:size], layout.windows, trait, NO_ONE)
                self._graph((kind, size, trait), tail)
        tick("capturing", len(work), len(work))
        return {n: self.ops.seconds(self._graphs["decode", n, traits[0]]) for n in decoding}

    def _rehearse(self, size: int) -> None:
        """What costs in a step of so many rows, for nobody: its keys go to page 0, which nobody has."""
        tokens, positions, slots, kv_index = torch.zeros(
            (4, size), dtype=torch.int64, device=self.slots.device
        )
        torch.arange(size, out=positions)
        none = torch.zeros_like(self.slots.columns.page_table)
        rows = Rows(tokens, positions, slots, kv_index, none)
        self.runner.logits(self.runner.forward(rows))

    def forget(self) -> None:
        """Drop what was captured: a backend's options have changed."""
        self._graphs.clear()

    def _graph(self, key: Hashable, function: Callable[[], T]) -> Callable[[], T]:
        """`function` captured under `key`. A capture runs it, on an empty plan: it then does nothing."""
        if not self.ops.asynchronous:
            return function
        if key not in self._graphs:
            self._load(None)
            layout = self._layout(self.max_rows, self.max_logits)
            self.ops.layout(self.plan, self.slots.columns, self.runner.page_size, layout)
            try:
                self._graphs[key] = self.ops.graph(function)
            except RuntimeError as error:  # no memory for it, most likely; without it the step is slower
                log = logging.getLogger("draftproof")
                log.warning("a step cannot be captured and runs op by op: %s", error)
                self._graphs[key] = function
        return self._graphs[key]

    # --- the stages ---------------------------------------------------------------------------------

    def _load(self, planned: Planned | None, budget: Ints = NO_BUDGET) -> None:
        """The plan into its buffer; none: an empty one, with which a step does nothing."""
        table = np.zeros(tuple(self._plan.shape), np.int64)
        table[0] = -1
        if planned is not None:
            columns = [planned.slots, planned.chunk, planned.drafts, budget]
            table[:, : len(planned.slots)] = columns
        plan = table.tobytes()
        if plan == self._sent:  # while nobody comes or goes the next plan is the last one
            return
        self._sent = None
        self.ops.send(torch.from_numpy(table), self._plan)
        self._sent = plan

    def _layout(self, rows: int, logits: int) -> Layout:
        """The buffers of a step of this size."""
        columns = self.slots.columns
        tokens, positions, slots, kv_index = (line[:rows] for line in self._rows)
        who, first, num_draft = self._entries
        slot, depth, position, draft, at = (line[:logits] for line in self._logits)
        return Layout(
            Rows(tokens, positions, slots, kv_index, columns.page_table),
            Windows(
                *(columns, who, first, num_draft, slot, depth, position, draft),
                draft_probs=self.draft_probs,
                allowed=self._allowed,
            ),
            at,
        )

    def _whole(self, size: int, traits: Traits) -> Decided:
        layout = self._layout(size, size)
        self.ops.layout(self.plan, self.slots.columns, self.runner.page_size, layout)
        hidden = self.runner.forward(layout.rows)  # of entries that decode every row has logits
        return self._tail(hidden, layout.windows, traits, NO_ONE)

    def _advance(self, windows: Windows) -> Decided:
        """No entry has reached the end of its prompt."""
        none = torch.zeros_like(windows.slot)
        outcome = self._outcome(len(none))
        self.ops.commit(self.plan, windows, Choice(none), none, outcome)
        return Decided(outcome, windows, None, None, None, None, self._pack(outcome))

    def _tail(
        self, hidden: Tensor, windows: Windows, traits: Traits, hosted: Mapping[int, Request]
    ) -> Decided:
        """hidden [L, hidden] of the windows' rows."""
        ops = self.ops
        logits = self.runner.logits(hidden)
        sampled = self.sampler(logits, windows, traits, hosted)
        outcome = self._outcome(len(logits))
        ops.commit(self.plan, windows, sampled.choice, sampled.bad, outcome)
        raw = self._logprobs(logits, Wants.RAW, windows, outcome, traits)
        processed = self._logprobs(sampled.processed, Wants.PROCESSED, windows, outcome, traits)
        self._draft()
        packed = self._pack(outcome, raw, processed)
        return Decided(outcome, windows, logits, sampled, raw, processed, packed)

    def _pack(self, outcome: Outcome, *found: TokenLogprobs | None) -> Packed:
        tensors = [outcome.table, self.slots.columns.num_draft]
        for some in found:
            if some is not None:
                tensors += [some.ids, some.ranks, some.values]
        return Packed.of(tensors)

    def _draft(self) -> None:
        """The next drafts. What was committed does not depend on them, nor on whether the proposer fails."""
        if self.proposer is None:
            return
        columns = self.slots.columns
        batch = DeviceBatch(columns, self.plan.slots, self.plan.budget)
        try:
            draft = _checked(self.proposer.draft(batch), columns.draft)
            self.ops.put_draft(columns, batch.slots, batch.budget, draft)
        except Exception as error:  # a plug-in's code may raise anything
            self.proposer, self.failure = None, error
            columns.num_draft.zero_()

    def _outcome(self, size: int) -> Outcome:
        return Outcome(self._table, *(line[:size] for line in self._picks))

    def _logprobs(
        self, logits: Tensor, kind: Wants, windows: Windows, outcome: Outcome, traits: Traits
    ) -> TokenLogprobs | None:
        tops = {Wants.RAW: traits.raw_top, Wants.PROCESSED: traits.processed_top}
        if tops[kind] < 0:
            return None
        rows = outcome.pick_rows
        if min(tops.values()) >= 0:  # both kinds are wanted: of the others' rows nothing is computed
            slot = windows.slot[rows.clamp(min=0)].clamp(min=0)
            rows = torch.where(windows.columns.wants[slot] == kind, rows, -1)
        return self.ops.logprobs(logits, rows, outcome.pick_tokens, tops[kind])


def _some_of(most: int) -> list[int]:
    """Row counts that stand for all: powers of two, and the middle between two of them."""
    sizes = [n for power in range(12) for n in (1 << power, 3 << power)]
    return [n for n in sorted(sizes) if n < most] + [most]


def _checked(draft: Draft, like: Tensor) -> Draft:
    """A plug-in's guesses in the shape [B, K] of `like`: backends rely on it."""
    for part in (draft.tokens, draft.logprobs, draft.sources):
        if part is not None and part.shape != like.shape:
            raise ValueError(f"drafts must have the shape {tuple(like.shape)}, not {tuple(part.shape)}")
    if draft.count.shape != like.shape[:1] or torch.is_floating_point(draft.tokens):
        raise ValueError("a draft needs a count for each request, and integer tokens")
    return draft
