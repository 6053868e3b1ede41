"""The device's part of a step: from a plan to what was committed, over tensors that never move.

    layout, forward, sample, judge, commit, logprobs, propose

Nothing here waits for the device unless a request's options need the host in the middle. A step of
decoding requests is one graph, by its rows and its traits; a step with prompts in it is laid out and run
through the model by the graph of its rows, and judged by the graph of its logits rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import is_
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftproof.engine.drafting.budget import Ints
from draftproof.engine.drafting.device_proposer import Drafting, checked
from draftproof.engine.sequence import StepPlan
from draftproof.engine.sizing import some_of
from draftproof.engine.slots import ALIGN, Slots
from draftproof.engine.step.result_buffer import PackedResults, ResultWriter, room_for
from draftproof.engine.step.step_features import TOPS
from draftproof.models.runner import Runner
from draftproof.ops import Layout, Rows, TokenLogprobs
from draftproof.propose import Proposer
from draftproof.types import (
    TOKENS,
    Choice,
    Draft,
    DraftSpec,
    LogprobKind,
    Outcome,
    PlanColumns,
    Request,
    StepFeatures,
    Windows,
)
from draftproof.verify.sampler import Sampled, Sampler

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # what, how much is done, of how much
Work = list[tuple[Hashable, Callable[[], Any], bool]]  # key, function, apart: see `_graph`
NO_ONE: Mapping[int, Request] = {}
NO_BUDGET = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step leaves on the device; valid until the next one."""

    outcome: Outcome
    windows: Windows
    logits: Tensor | None  # [L, V]; None: no entry sampled
    sampled: Sampled | None
    raw: TokenLogprobs | None  # of the picked rows of requests that want them so
    processed: TokenLogprobs | None
    packed: PackedResults  # what the host reads


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step that was queued."""

    decided: StepTensors
    hidden: Tensor | None  # [R, hidden], where it was asked for


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
        columns, device = slots.columns, slots.device
        num_slots, k = columns.draft.shape
        self.max_rows = self.ops.runtime.bucket(max_rows)
        self.max_logits = self.ops.runtime.bucket(min(max_rows, num_slots * (k + 1)))

        def lines(number: int, size: int) -> Tensor:
            """[number, size] int64; each begins at an address that any kernel likes."""
            padded = -(-size // ALIGN) * ALIGN
            return torch.zeros((number, padded), dtype=torch.int64, device=device)[:, :size]

        self._plan = torch.zeros((4, -(-num_slots // ALIGN) * ALIGN), dtype=torch.int64, device=device)
        self._plan[0] = -1
        self.plan = PlanColumns.from_table(self._plan[:, :num_slots])
        self._told = np.zeros(tuple(self._plan.shape), np.int64)  # the plan as the host tells it
        self._telling = torch.from_numpy(self._told)
        self._sent: bytes | None = None  # as the device has it
        self._from: tuple[Ints, ...] = ()  # what that was made of
        self._rows, self._entries = lines(4, self.max_rows), lines(3, num_slots)
        self._logits, self._picks = lines(5, self.max_logits), lines(2, self.max_logits)
        self.width = TOKENS + k + 1
        room = room_for(num_slots, self.width, k, self.max_logits, TOPS[-1])
        self._results = torch.zeros(room, dtype=torch.uint8, device=device)
        self._picked = torch.zeros(
            (self.max_logits, runner.model.config.hidden_size), dtype=runner.dtype, device=device
        )
        self.drafting = Drafting(proposer, slots, self.max_rows, self._picked)
        outside = self.max_rows, self._picked.shape[1]  # of the graphs' memory
        self._hidden = self._picked.new_zeros(outside) if self.ops.runtime.asynchronous else None
        self._allowed: Tensor | None = None  # masks by slot and depth; made when a grammar first comes
        self._graphs: dict[Hashable, Callable[[], Any]] = {}

    # --- running ------------------------------------------------------------------------------------

    def run(
        self, planned: StepPlan, budget: Ints, traits: StepFeatures, hosted: Mapping[int, Request], keep: bool
    ) -> QueuedStep:
        """Queue a step. `hosted`: requests, by slot, that need the host in it; `keep`: hidden rows too."""
        rows = self.ops.runtime.bucket(planned.num_rows)
        if traits.has_grammar:
            self._masks()
        follow = self._follow(rows, planned, budget, traits)
        if not hosted and not keep and not planned.has_prompts:
            step = self._graph(("decode", rows, traits), lambda: self._whole(rows, traits))
            self._load(planned, budget)
            ran = QueuedStep(step(), None)
            follow()
            return ran
        logits, usual = self.ops.runtime.bucket(max(1, planned.num_logits)), self._ends(rows)
        ends = 0 if keep or planned.scores_prompts else usual
        forward: Callable[[], Tensor] = partial(self._alone, rows, ends)
        if ends == usual:  # others are too seldom and too large to be captured while everybody waits
            forward = self._graph(("forward", rows, ends), forward)
        judge: Callable[[], StepTensors] = partial(self._judge, logits, traits, hosted)
        if not planned.num_logits:
            judge = partial(self._advance, traits)
        elif not hosted:
            judge = self._graph(("judge", logits, traits), judge)
        self._load(planned, budget)
        hidden, picked = forward(), self._picked[:logits]
        if ends:
            picked.copy_(hidden[:logits])
        else:
            torch.index_select(hidden, 0, self._logits[-1, :logits], out=picked)
        ran = QueuedStep(judge(), None if ends else hidden)
        follow()
        return ran

    def _follow(
        self, rows: int, planned: StepPlan, budget: Ints, traits: StepFeatures
    ) -> Callable[[], object]:
        """What comes behind the step: the drafts of a proposer that follows its rows."""
        probs = self.drafting.expect(traits, self.sampler.strategies)
        if not self.drafting.follows_rows:
            return lambda: None
        entries = self.drafting.entries(self.ops, len(planned.slots), rows)
        wanted = self.drafting.traits(self.ops, planned, budget, traits, probs)
        key, draft = self._draft(rows, entries, wanted)
        if not planned.has_prompts or key in self._graphs:  # else: too many sizes to be captured as they come
            draft = self._graph(key, draft, apart=True)
        return draft

    def _draft(self, rows: int, entries: int, wanted: DraftSpec) -> tuple[Hashable, Callable[[], None]]:
        given, draft = (entries, wanted), self.drafting.draft
        return ("draft", rows, *given), lambda: draft(self.plan, self._layout(rows, 0).rows, *given)

    def put(self, planned: StepPlan, budget: Ints, draft: Draft) -> None:
        """Take the guesses of a proposer on the host."""
        send, columns = self.ops.runtime.send, self.slots.columns
        draft = checked(draft, columns.draft[: len(planned.slots)], self.drafting.num_sources)
        slots = send(torch.from_numpy(planned.slots))
        self.ops.step.store_drafts(columns, slots, send(torch.from_numpy(budget)), draft)
        self.drafting.put_probs(slots, draft)

    def allow(self, places: Tensor, masks: Tensor) -> None:
        """Masks [n, words] of the next step, for the rows at slot * (K + 1) + depth."""
        lines = self._masks().view(-1, masks.shape[1])
        lines[self.ops.runtime.send(places)] = self.ops.runtime.send(masks)

    def _masks(self) -> Tensor:
        if self._allowed is None:
            num_slots, k = self.slots.columns.draft.shape
            shape = (num_slots, k + 1, -(-self.slots.vocab // 32))
            self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self.slots.device)
        return self._allowed

    def prepare(self, traits: Sequence[StepFeatures], wide: int, tick: Progress) -> dict[int, float]:
        """Capture what a service will need: decoding of up to `wide` rows, and prompts of any number.

        Returns the seconds of a step by its rows.
        """
        if not self.ops.runtime.asynchronous:
            sizes = some_of(wide)  # in rounds: a busy moment of the machine hits one of them, not one size
            rounds = [
                [self.ops.runtime.seconds(partial(self._rehearse, n), times=1) for n in sizes]
                for _ in range(3)
            ]
            return dict(zip(sizes, np.min(rounds, axis=0).tolist(), strict=True))
        sizes = sorted({self.ops.runtime.bucket(n) for n in range(1, self.max_rows + 1)}, reverse=True)
        decoding = [n for n in sizes if n <= self.ops.runtime.bucket(wide)]
        work: Work = [(*self._draft(*one), True) for one in self.drafting.usual(self.ops, sizes)]
        for size, ends in ((n, self._ends(n)) for n in sizes):
            work.append((("forward", size, ends), partial(self._alone, size, ends), False))
        for trait, size in product(traits, decoding):
            work.append((("decode", size, trait), partial(self._whole, size, trait), False))
            work.append((("judge", size, trait), partial(self._judge, size, trait, NO_ONE), False))
        self.ready(work, tick, *(self._draft(*one)[1] for one in self.drafting.rare(self.ops, sizes)))
        return {n: self.ops.runtime.seconds(self._graphs["decode", n, traits[0]]) for n in decoding}

    def ready(self, work: Work, tick: Progress, *more: Callable[[], object]) -> None:
        """Capture `work`; before, its kernels are compiled side by side, and those of `more`."""
        proposer, functions = self.drafting.proposer, [function for _, function, _ in work]
        self.ops.runtime.compile([self._idle, *functions, *more], partial(tick, "compiling"))
        self.drafting.proposer, self.drafting.failure = proposer, None  # to fail it must have been run
        for done, one in enumerate(work):
            tick("capturing", done, len(work))
            self._graph(*one)
        tick("capturing", len(work), len(work))

    def asking(self, sizes: Iterable[int]) -> dict[int, tuple[float, float]]:
        """Seconds that drafts take behind a step of so many entries, beside keeping up with it; a round."""
        self._idle()
        return self.drafting.asking(self.ops, sizes, self._seconds)

    def _seconds(self, rows: int, entries: int, wanted: DraftSpec) -> float:
        draft = self._graph(*self._draft(rows := min(rows, self.max_rows), entries, wanted), apart=True)
        with self.drafting.rehearsed(self.plan, self._layout(rows, 0).rows, entries) as cold:
            return self.ops.runtime.seconds(lambda: (cold(), draft()), times=3)

    def _rehearse(self, size: int) -> None:
        """What costs in a step of so many rows, for nobody: its keys go to page 0, which nobody has."""
        lines = torch.zeros((4, size), dtype=torch.int64, device=self.slots.device)
        torch.arange(size, out=lines[1])
        rows = Rows(lines[0], lines[1], lines[2], lines[3], torch.zeros_like(self.slots.columns.page_table))
        self.runner.logits(self.runner.forward(rows))

    def forget(self) -> None:
        """Drop what was captured: a backend's options have changed."""
        self._graphs.clear()

    def _graph(self, key: Hashable, function: Callable[[], T], apart: bool = False) -> Callable[[], T]:
        """`function` captured under `key`. A capture runs it, on an empty plan: it then does nothing."""
        if not self.ops.runtime.asynchronous:
            return function
        graph = self._graphs.get(key)
        if graph is None:
            self._idle()
            try:
                graph = self.ops.runtime.graph(function, apart)
            except RuntimeError as error:  # no memory for it, most likely; without it the step is slower
                log = logging.getLogger("draftproof")
                log.warning("a step cannot be captured and runs op by op: %s", error)
                graph = function
            self._graphs[key] = graph
        return graph

    # --- the stages ---------------------------------------------------------------------------------

    def _load(self, planned: StepPlan | None, budget: Ints = NO_BUDGET) -> None:
        """The plan into its buffer; none: an empty one, with which a step does nothing.

        While nobody comes or goes the next plan is the last one, mostly in the same arrays, and is not sent.
        """
        columns = (planned.slots, planned.chunk, planned.drafts, budget) if planned is not None else ()
        if len(columns) == len(self._from) and all(map(is_, columns, self._from)) and self._sent is not None:
            return
        table = self._told
        size = len(planned.slots) if planned is not None else 0
        for line, column in zip(table, columns, strict=False):
            line[:size] = column
        table[0, size:], table[1:, size:] = -1, 0
        plan = table.tobytes()
        if plan != self._sent:
            self._sent = None
            self.ops.runtime.send(self._telling, self._plan)
            self._sent = plan
        self._from = columns

    def _idle(self) -> None:
        """An empty plan, laid out: a step that is run now does nothing."""
        self._load(None)
        self._lay_out(self.max_rows, self.max_logits)

    def _lay_out(self, rows: int, logits: int) -> Layout:
        layout = self._layout(rows, logits)
        self.ops.step.layout(self.plan, self.slots.columns, self.runner.page_size, layout)
        return layout

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
                draft_probs=self.drafting.probs,
                allowed=self._allowed,
            ),
            at,
        )

    def _whole(self, size: int, traits: StepFeatures) -> StepTensors:
        windows = self._lay_out(size, size).windows  # of entries that decode every row has logits
        return self._tail(self._forward(size), windows, traits, NO_ONE)

    def _ends(self, size: int) -> int:
        """How many rows the last layer of a pass with prompts ends with; 0: all.

        Of a prompt's rows the last one alone has logits. There is room for all that may decode with all their
        drafts: no step needs another pass than the one that was captured for its size.
        """
        narrow = 0 < self.ops.forward.gather_last_layer_from_rows <= size and 2 * self.max_logits <= size
        return self.max_logits if narrow and not self.drafting.follows_rows else 0

    def _forward(self, size: int, ends: int = 0) -> Tensor:
        """[size, hidden]; with `ends`, of as many logits rows, [ends, hidden]."""
        layout = self._layout(size, ends)
        if ends:
            return self.runner.some_of(layout.rows, layout.at)
        hidden, *tapped = self.runner.tapped(layout.rows)
        self.drafting.keep(hidden, *tapped)
        return hidden

    def _alone(self, size: int, ends: int) -> Tensor:
        """The forward pass as a graph of its own: its rows are read after the next of the pool has run."""
        self._lay_out(size, self.max_logits)
        hidden = self._forward(size, ends)
        return hidden if self._hidden is None else self._hidden[: len(hidden)].copy_(hidden)

    def _judge(self, size: int, traits: StepFeatures, hosted: Mapping[int, Request]) -> StepTensors:
        """Of the rows that were picked."""
        return self._tail(self._picked[:size], self._layout(0, size).windows, traits, hosted)

    def _advance(self, traits: StepFeatures) -> StepTensors:
        """No entry has reached the end of its prompt."""
        windows = self._layout(0, 1).windows
        none = torch.zeros_like(windows.slot)
        outcome, parts = self._outcome(len(none))
        self.ops.step.commit(self.plan, windows, Choice(none), none, outcome)
        return StepTensors(outcome, windows, None, None, None, None, self._pack(parts, traits))

    def _tail(
        self, hidden: Tensor, windows: Windows, traits: StepFeatures, hosted: Mapping[int, Request]
    ) -> StepTensors:
        """hidden [L, hidden] of the windows' rows."""
        logits = self.runner.logits(hidden)
        sampled = self.sampler(logits, windows, traits, hosted)
        outcome, parts = self._outcome(len(logits))
        self.ops.step.commit(self.plan, windows, sampled.choice, sampled.bad, outcome)
        told = partial(self._logprobs, parts, windows=windows, outcome=outcome, traits=traits)
        logprobs = self.drafting.beside(
            lambda: (told(logits, LogprobKind.RAW), told(sampled.processed, LogprobKind.PROCESSED)), traits
        )
        packed = self._pack(parts, traits)
        if self.drafting.in_step:
            self.drafting.draft(self.plan)
        return StepTensors(outcome, windows, logits, sampled, *logprobs(), packed)

    def _pack(self, parts: ResultWriter, traits: StepFeatures) -> PackedResults:
        """Before the next drafts are made: what is known of those that were verified is still there."""
        columns = self.slots.columns
        drafts = {"draft logprobs": columns.draft_logprob} if traits.needs_draft_logprobs else {}
        if self.drafting.several:
            drafts["draft sources"] = columns.draft_source
        for name, column in drafts.items():
            parts.add(name, tuple(column.shape), column.dtype).copy_(column)
        return parts.packed()

    def _outcome(self, size: int) -> tuple[Outcome, ResultWriter]:
        """Where a step says what it did, and the row of results that begins with it."""
        parts = ResultWriter(self._results)
        table = parts.add("table", (len(self.plan.slots), self.width), torch.int64)
        return Outcome(table, *(line[:size] for line in self._picks)), parts

    def _logprobs(
        self,
        parts: ResultWriter,
        logits: Tensor,
        kind: LogprobKind,
        windows: Windows,
        outcome: Outcome,
        traits: StepFeatures,
    ) -> TokenLogprobs | None:
        tops = {LogprobKind.RAW: traits.raw_top, LogprobKind.PROCESSED: traits.processed_top}
        if tops[kind] < 0:
            return None
        rows = outcome.pick_rows
        if min(tops.values()) >= 0:  # both kinds are wanted: of the others' rows nothing is computed
            slot = windows.slot[rows.clamp(min=0)].clamp(min=0)
            rows = torch.where(windows.columns.logprob_kind[slot] == kind, rows, -1)
        out = parts.logprobs(kind.name.lower(), len(rows), tops[kind])
        return self.ops.sampling.logprobs(logits, rows, outcome.pick_tokens, tops[kind], out)
