"""The loop: one step of every running request, plain or speculative, on one path.

    plan, [ layout, forward, sample, judge, commit, logprobs, propose ], settle

Plain decoding is a window without drafts. What is in brackets is the device's part, `DeviceStep`. With
overlap the next step is planned and queued before the last one is read, so the device never waits for the
host; a step that needs the host in it is waited for. docs/design.md tells the step as a story.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftproof.engine import extras, guided
from draftproof.engine.asked import by_host
from draftproof.engine.budget import Ints
from draftproof.engine.invariants import check_step
from draftproof.engine.scheduler import Busy, Scheduler
from draftproof.engine.sequence import Planned, Sequence
from draftproof.engine.settle import Ending, Extra, LogprobColumns, StepResults, ending_of
from draftproof.engine.slots import Slots
from draftproof.engine.step import DeviceStep, Ran
from draftproof.engine.traits import traits_of
from draftproof.propose import Proposer
from draftproof.types import (
    ENDED,
    FIRST_ROW,
    NUM_ACCEPTED,
    NUM_DRAFT,
    NUM_OUT,
    End,
    LogprobRow,
    ProposeBatch,
    Request,
    Traits,
    Wants,
)

NOTHING = StepResults([], np.zeros((0, 0), np.int64), {})


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was queued and not read yet; it carries who took part in it."""

    planned: Planned
    computed: Ints  # [B] tokens with KV before it; of one that decodes, as far as the host knew
    ran: Ran
    read: Callable[[], Tensor]
    waits: bool  # the host is needed before anything else is planned
    follows: bool  # it was queued while another was under way: the device went from one to the next
    started: float  # by the clock
    complaints: guided.Complaints = field(default_factory=dict)


class Loop:
    """Runs steps. Knows nothing of text, transport, or who the proposer is."""

    def __init__(
        self,
        scheduler: Scheduler,
        slots: Slots,
        device: DeviceStep,
        proposer: Proposer | None,
        overlap: bool,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.slots = slots
        self.device = device
        self.proposer = proposer
        self.sources = proposer.sources if proposer else ()
        self.overlap = overlap
        self.debug = debug
        self._flights: deque[Flight] = deque()
        self._retiring: deque[tuple[Sequence, Callable[[], Tensor]]] = deque()
        self._heard: deque[tuple[Request, Callable[[], Tensor]]] = deque()
        self._last_read: float | None = None
        self._traits: tuple[int, Traits] | None = None

    def step(self) -> StepResults:
        """One step's results: of the one before, while the next is under way, if steps overlap."""
        if self._flights and self._host_is_needed():
            return self._settle(self._flights.popleft())
        try:
            flight = self._launch()
        except Busy:  # somebody must be put aside, and for that all must be known
            return self._settle(self._flights.popleft())
        if flight is not None:
            self._flights.append(flight)
            if self.overlap and not flight.waits and len(self._flights) == 1:
                return NOTHING
        return self._settle(self._flights.popleft()) if self._flights else NOTHING

    def end(self, sequence: Sequence) -> None:
        """Remove a request, finished or not; what is still under way of it is nobody's."""
        if sequence.slot >= 0:
            self._hear(sequence)
            self._stop(sequence.slot)
        self.scheduler.remove(sequence)
        self._rest()

    def _stop(self, slot: int) -> None:
        if self.proposer is not None:
            self.proposer.stop(slot)

    @property
    def _host_drafts(self) -> bool:
        return self.proposer is not None and not self.proposer.graph_safe

    @property
    def _device_drafts(self) -> bool:
        return self.device.drafting.proposer is not None

    # --- planning and queueing ----------------------------------------------------------------------

    def _host_is_needed(self) -> bool:
        """By a request that runs, or may run in the next step."""
        scheduler = self.scheduler
        if not scheduler.num_hosted:
            return False
        return any(s.hosted or s.in_prompt for s in (*scheduler.running, *scheduler.waiting))

    def _launch(self) -> Flight | None:
        scheduler, host, started = self.scheduler, self.scheduler.host, time.perf_counter()
        waits = self._host_drafts or not self.overlap or self._host_is_needed()
        if waits and self._device_drafts:
            self._count_drafts()
        planned = scheduler.plan(idle=not self._flights)
        for sequence in scheduler.put_aside:
            self._stop(sequence.last_slot)
        if planned is None:
            return None
        self.slots.grow(planned.grown)
        lines = planned.slots
        before = host.length[lines] - host.prompt_left[lines] - planned.chunk  # nothing of it is under way
        computed = np.where(planned.chunk > 0, before, host.length[lines] - 1)
        self.slots.seat(scheduler.seats(planned.newcomers))
        self._start(planned.newcomers)
        budget = np.zeros_like(planned.slots)
        if self._device_drafts:
            budget = scheduler.budget(planned)
        middle = {}
        complaints: guided.Complaints = {}
        if scheduler.num_hosted:
            complaints = guided.send_masks(planned, self.slots, self.device)
            middle = {s.slot: s.request for s in planned.sequences if s.processed_by_host}
        keep = self._host_drafts and self.proposer is not None and self.proposer.needs_hidden
        ran = self.device.run(planned, budget, self._traits_now(), middle, keep)
        read = self.device.ops.fetch(ran.decided.packed.data)
        if self.device.drafting.failure is not None and self.proposer is not None:
            self._give_up(self.device.drafting.failure)
        host.num_draft[planned.slots] = budget if self._device_drafts else 0
        return Flight(planned, computed, ran, read, waits, bool(self._flights), started, complaints)

    def _count_drafts(self) -> None:
        """Nothing is under way: the device can say how many drafts there are, not how many there may be."""
        counts = self.device.ops.fetch(self.slots.columns.num_draft)().numpy()
        lines = np.array([s.slot for s in self.scheduler.running], np.int64)
        self.scheduler.host.num_draft[lines] = counts[lines]

    def _traits_now(self) -> Traits:
        """Of all that run: they change seldom."""
        version = self.scheduler.version
        if self._traits is None or self._traits[0] != version:
            strategies = self.device.sampler.strategies
            vocab = self.slots.vocab
            self._traits = version, traits_of(self.scheduler.running, strategies, vocab)
        return self._traits[1]

    # --- settling -----------------------------------------------------------------------------------

    def _settle(self, flight: Flight) -> StepResults:
        planned = flight.planned
        found = flight.ran.decided.packed.open(flight.read())
        self._clock(flight)
        self._reap()
        table = found["table"][: len(planned.slots)]
        columns = self._columns(found)
        thoughts, source = (
            found[name][planned.slots] if name in found else None
            for name in ("draft logprobs", "draft sources")
        )
        asked = flight.waits and self.scheduler.num_hosted
        extras_of = self._extras(flight, table, thoughts, source) if asked else {}
        here = self.scheduler.settle(planned, table[:, NUM_OUT], table[:, NUM_ACCEPTED])
        if flight.waits and self.scheduler.num_hosted:
            guided.take_in(planned, table, here)
        endings = self._endings(flight, table, here)
        told = here & planned.samples
        told[list(extras_of)] |= here[list(extras_of)]
        if not told.all():
            at = told.nonzero()[0]
            place = {b: i for i, b in enumerate(at.tolist())}
            extras_of = {place[b]: x for b, x in extras_of.items() if b in place}
            endings = {place[b]: x for b, x in endings.items()}
            requests = [planned.sequences[b].request for b in at.tolist()]
            table, source = table[at], None if source is None else source[at]
        else:
            requests = [s.request for s in planned.sequences]
        results = StepResults(requests, table, columns, self.sources, source, endings, extras_of)
        if self._host_drafts:
            self._propose(flight)
        self._rest()
        if self.debug and not self._flights:
            check_step(self.scheduler, self.slots)
        return results

    def _clock(self, flight: Flight) -> None:
        """What a step of so many rows costs: from the last one that was read, if it was queued by then."""
        now = time.perf_counter()
        decodes = not flight.planned.chunk.any()
        since = self._last_read if flight.follows else flight.started
        if decodes and since is not None:
            rows = self.device.ops.bucket(flight.planned.num_rows)
            self.scheduler.budgets.costs.observe(rows, now - since)
        self._last_read = now if decodes else None

    def _columns(self, found: dict[str, NDArray[Any]]) -> dict[Wants, LogprobColumns]:
        return {
            kind: LogprobColumns(found[name], found[f"{name} ids"], found[f"{name} ranks"])
            for kind, name in ((Wants.RAW, "raw"), (Wants.PROCESSED, "processed"))
            if name in found
        }

    def _endings(self, flight: Flight, table: Ints, here: np.ndarray) -> dict[int, Ending]:
        """Let the ended requests go."""
        sampled, endings = flight.ran.decided.sampled, {}
        errors = sampled.errors if sampled else {}
        for b in (here & (table[:, ENDED] > 0)).nonzero()[0].tolist():
            sequence = flight.planned.sequences[b]
            mine = guided.errors_of(table[b], errors, flight.complaints.get(b))
            ending = ending_of(sequence.request, table[b], mine)
            assert ending is not None
            endings[b] = ending
            if ending.reason == "error":
                if table[b, ENDED] == End.NOT_FINITE:
                    self.scheduler.doubt(sequence)
                self.end(sequence)
            else:
                self._retire(sequence)
        return endings

    def _retire(self, sequence: Sequence) -> None:
        """It ended by itself: what it said may be asked again. Its pages are free once that is read."""
        scheduler = self.scheduler
        length = int(scheduler.host.length[sequence.slot])
        tokens = self.slots.columns.tokens[sequence.slot, :length]
        if not scheduler.prefix_caching or not length // scheduler.page_size > sequence.num_known:
            self.end(sequence)
            return
        read = self.device.ops.fetch(tokens)
        self._retiring.append((sequence, read))
        self._hear(sequence, read)
        self._stop(sequence.slot)
        scheduler.retire(sequence)

    def _rest(self) -> None:
        """Nothing is under way, or nobody is left to whom it matters: leave no page behind."""
        if not self._flights or not (self.scheduler.running or self.scheduler.waiting):
            self._reap()

    def _reap(self) -> None:
        """Those whose tokens have come."""
        while self._retiring:
            sequence, read = self._retiring.popleft()
            self.scheduler.bury(sequence, read().tolist())
        while self._heard:
            request, read = self._heard.popleft()
            self._tell_proposer("learn", request, read().numpy())

    def _extras(
        self, flight: Flight, table: Ints, thoughts: NDArray[Any] | None, source: NDArray[Any] | None
    ) -> dict[int, Extra]:
        """What the columns do not hold, for those who asked. thoughts, source [B, K]: of their drafts."""
        planned, found = flight.planned, {}
        for b, sequence in enumerate(planned.sequences):
            params = sequence.request.params
            prompts = params.prompt_logprobs is not None and planned.chunk[b] > 0
            if not prompts and not sequence.settled_by_host:
                continue
            extra = found[b] = Extra()
            if prompts:
                extra.prompt_logprobs = self._prompt_logprobs(flight, b) or None
            if planned.samples[b] and sequence.settled_by_host:
                names = [0] * table.shape[1] if source is None else source[b].tolist()
                own = [] if thoughts is None else thoughts[b].tolist()
                self._ask(flight, b, table[b], extra, own, names)
            if extra == Extra():
                del found[b]
        return found

    def _prompt_logprobs(self, flight: Flight, b: int) -> list[LogprobRow]:
        planned, hidden = flight.planned, flight.ran.hidden
        assert hidden is not None
        rows = np.maximum(planned.chunk, 1) + planned.drafts
        first = int(rows[:b].sum())
        mine = hidden[first : first + int(planned.chunk[b])]
        sequence, computed = planned.sequences[b], int(flight.computed[b])
        told = max(0, sequence.prompt_scored - computed)  # before it was put aside
        lines = extras.prompt_logprobs(self.device.runner, sequence.request, computed + told, mine[told:])
        sequence.prompt_scored += len(lines)
        return lines

    def _ask(
        self, flight: Flight, b: int, line: Ints, extra: Extra, own: list[float], source: list[int]
    ) -> None:
        sequence, decided = flight.planned.sequences[b], flight.ran.decided
        request, ops = sequence.request, self.device.ops
        assert decided.logits is not None and decided.sampled is not None
        logits = decided.logits if request.params.logprobs_mode == "raw" else decided.sampled.processed
        if by_host(request.params, self.slots.vocab):
            extra.logprobs = extras.token_logprobs(ops, request, line, logits)
        if request.params.include_draft_logprobs:
            count, first = int(line[NUM_DRAFT]), int(line[FIRST_ROW])
            drafts = decided.windows.draft[first : first + count].tolist()
            sources = [self.sources[n] for n in source[:count]]
            start = int(self.scheduler.host.length[sequence.slot]) - len(request.prompt_token_ids)
            extra.drafts = extras.draft_records(ops, line, start, drafts, own, sources, logits)

    # --- the proposer -------------------------------------------------------------------------------

    def _start(self, newcomers: list[Sequence]) -> None:
        for sequence in newcomers:
            self._tell_proposer("start", sequence.slot, sequence.request)
        self._tell_proposer("prepare")

    def _hear(self, sequence: Sequence, read: Callable[[], Tensor] | None = None) -> None:
        """What one that leaves has said, for a proposer that learns from it."""
        if self.proposer is not None and self.proposer.learns:
            line = self.slots.columns.tokens[sequence.slot]
            length = int(self.scheduler.host.length[sequence.slot])
            self._heard.append((sequence.request, read or self.device.ops.fetch(line[:length])))

    def _tell_proposer(self, what: str, *arguments: Any) -> None:
        if self.proposer is not None:
            try:
                getattr(self.proposer, what)(*arguments)
            except Exception as error:  # a plug-in's code may raise anything
                self._give_up(error)

    def _propose(self, flight: Flight) -> None:
        try:
            self._ask_proposer(flight)
        except Exception as error:  # a plug-in's code may raise anything
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A proposer that fails costs its drafts alone: what was committed goes out, and decoding goes on."""
        if self.debug:
            raise error
        logging.getLogger("draftproof").error("the proposer failed and is switched off", exc_info=error)
        self.proposer = self.device.drafting.proposer = None
        self._heard.clear()

    def _ask_proposer(self, flight: Flight) -> None:
        proposer, scheduler, host = self.proposer, self.scheduler, self.scheduler.host
        assert proposer is not None
        planned = flight.planned.only([i for i, s in enumerate(flight.planned.sequences) if s.slot >= 0])
        budget = scheduler.budget(planned)
        if not len(planned.slots) or not (budget.any() or proposer.needs_hidden):
            return
        hidden, starts, counts = self._hidden_rows(flight) if proposer.needs_hidden else (None, [], [])
        batch = ProposeBatch(
            columns=self.slots.columns,
            slots=planned.slots.tolist(),
            budget=budget.tolist(),
            lengths=host.length[planned.slots].tolist(),
            hidden=hidden,
            hidden_start=starts,
            hidden_count=counts,
        )
        self.device.put(planned, budget, proposer.propose(batch))
        self._count_drafts()

    def _hidden_rows(self, flight: Flight) -> tuple[Tensor, list[int], list[int]]:
        """Rows of live entries whose input token is committed, and their positions."""
        planned, hidden = flight.planned, flight.ran.hidden
        assert hidden is not None
        index: list[int] = []
        starts, counts = [], []
        rows = np.maximum(planned.chunk, 1) + planned.drafts
        for b, sequence in enumerate(planned.sequences):
            if sequence.slot < 0:
                continue
            first, start = int(rows[:b].sum()), int(flight.computed[b])
            stored = int(self.scheduler.host.length[sequence.slot]) - 1 - start
            starts.append(start)
            counts.append(min(int(rows[b]), stored))
            index.extend(range(first, first + counts[-1]))
        return hidden[index], starts, counts
