"""The loop: one step of every running request, plain or speculative, on one path.

    plan, layout, forward, sample, judge, commit, logprobs, propose, settle

Plain decoding is a window without drafts. docs/design.md tells the step as a story.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.engine.commit import commit
from draftproof.engine.invariants import check_step
from draftproof.engine.scheduler import Entry, Scheduler, Sequence
from draftproof.engine.settle import Settler
from draftproof.engine.slots import Slots
from draftproof.models.runner import Runner
from draftproof.ops import Rows
from draftproof.propose import Proposer
from draftproof.types import Draft, ProposeBatch, StepOutput, Windows
from draftproof.verify.sampler import Sampled, Sampler


@dataclass(frozen=True, slots=True)
class Forward:
    """A step's rows and where each entry's begin."""

    rows: Rows
    first: list[int]  # [entries]
    hidden: Tensor  # [rows, hidden]


class Loop:
    """Runs steps. Knows nothing of text, transport, or who the proposer is."""

    def __init__(
        self,
        scheduler: Scheduler,
        slots: Slots,
        runner: Runner,
        sampler: Sampler,
        proposer: Proposer | None,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.slots = slots
        self.runner = runner
        self.sampler = sampler
        self.proposer = proposer
        self.settler = Settler(runner, proposer.sources if proposer else ())
        self.debug = debug
        self._draft_probs: Tensor | None = None  # [S, K, V], for proposers that report them

    def step(self) -> list[StepOutput]:
        """One step; what it did for each request that got somewhere."""
        known = set(map(id, self.scheduler.running))
        entries = self.scheduler.plan()
        if not entries:
            return []
        self._start([s for s in self.scheduler.running if id(s) not in known])
        forward = self._forward(entries)
        outputs = self.settler.prompt_logprobs(entries, forward.first, forward.hidden)
        sampling = [i for i, entry in enumerate(entries) if entry.samples]
        self._advance(entries)
        if sampling:
            outputs = self._decide(entries, sampling, forward, outputs)
        try:
            self._propose(entries, forward)
        except Exception as error:  # a plug-in's code may raise anything
            self._give_up(error)
        if self.debug:
            check_step(self.scheduler, self.slots)
        return outputs

    def end(self, sequence: Sequence) -> None:
        """Remove a request, finished or not."""
        if self.proposer and sequence.slot >= 0:
            self.proposer.stop(sequence.slot)
        self.scheduler.remove(sequence)

    def _start(self, sequences: list[Sequence]) -> None:
        try:
            for sequence in sequences:
                if self.proposer:
                    self.proposer.start(sequence.slot, sequence.request)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A proposer that fails costs its drafts alone: what was committed goes out, and decoding goes on."""
        if self.debug:
            raise error
        logging.getLogger("draftproof").error("the proposer failed and is switched off", exc_info=error)
        self.proposer = None

    # --- the stages -------------------------------------------------------------------------------

    def _forward(self, entries: list[Entry]) -> Forward:
        """Rows computed .. computed + num_rows of each entry: committed tokens, then drafts."""
        columns, device = self.slots.columns, self.slots.device
        counts = torch.tensor([entry.num_rows for entry in entries], device=device)
        slots = torch.tensor([entry.sequence.slot for entry in entries], device=device)
        first = counts.cumsum(0) - counts
        slots = slots.repeat_interleave(counts)
        offset = torch.arange(len(slots), device=device) - first.repeat_interleave(counts)
        positions = columns.computed[slots] + offset
        ahead = positions - columns.length[slots]
        tokens = torch.where(
            ahead < 0,
            columns.tokens[slots, positions.clamp(max=columns.tokens.shape[1] - 1)],
            columns.draft[slots, ahead.clamp(0)],
        )
        rows = self.runner.rows(tokens, positions, slots, columns.page_table)
        return Forward(rows, first.tolist(), self.runner.forward(rows))

    def _advance(self, entries: list[Entry]) -> None:
        """KV of the committed tokens is stored now; that of drafts counts once they are committed."""
        for entry in entries:
            sequence = entry.sequence
            sequence.computed += entry.num_rows - entry.num_draft
            self.slots.columns.computed[sequence.slot] = sequence.computed

    def _decide(
        self,
        entries: list[Entry],
        sampling: list[int],
        forward: Forward,
        outputs: list[StepOutput],
    ) -> list[StepOutput]:
        chosen = [entries[i] for i in sampling]
        windows, at = self._windows(chosen, [forward.first[i] for i in sampling])
        logits = self.runner.logits(forward.hidden[at])
        strategies = [entry.sequence.strategy for entry in chosen]
        sampled = self.sampler(logits, windows, strategies)
        committed = commit(windows, sampled.verdict, _error_limit(windows, sampled))
        results = self.settler.settle(chosen, windows, logits, sampled, committed)
        self._follow(chosen, results)
        prompt = {output.request_id: output for output in outputs}
        return [
            *(self.settler.join(prompt.pop(result.request_id, None), result) for result in results),
            *prompt.values(),
        ]

    def _windows(self, chosen: list[Entry], first: list[int]) -> tuple[Windows, Tensor]:
        """The windows of the sampling entries, and the forward row of each logits row."""
        device, columns = self.slots.device, self.slots.columns
        num_draft = torch.tensor([entry.num_draft for entry in chosen], device=device)
        slots = torch.tensor([entry.sequence.slot for entry in chosen], device=device)
        counts = num_draft + 1
        begin = counts.cumsum(0) - counts
        owner = torch.arange(len(chosen), device=device).repeat_interleave(counts)
        depth = torch.arange(len(owner), device=device) - begin[owner]
        last = [f + entry.num_rows - entry.num_draft - 1 for f, entry in zip(first, chosen, strict=True)]
        probs = self._draft_probs
        windows = Windows(
            columns=columns,
            slots=slots,
            first=begin,
            num_draft=num_draft,
            draft=columns.draft[slots],
            draft_probs=None if probs is None else probs[slots],
            owner=owner,
            depth=depth,
            options=[self.slots.options_of(entry.sequence.slot) for entry in chosen],
        )
        return windows, torch.tensor(last, device=device)[owner] + depth

    def _follow(self, chosen: list[Entry], results: Iterable[StepOutput]) -> None:
        """Bring the host's copies up to date and let the ended requests go."""
        for entry, result in zip(chosen, results, strict=True):
            sequence = entry.sequence
            sequence.budget.record(result.num_draft, result.num_accepted)
            sequence.length += len(result.token_ids)
            sequence.computed = sequence.length - 1
            sequence.num_draft = 0
            if result.finish_reason is not None:
                self.end(sequence)

    def _propose(self, entries: list[Entry], forward: Forward) -> None:
        live = [(i, entry) for i, entry in enumerate(entries) if entry.sequence.slot >= 0]
        if self.proposer is None or not live:
            return
        sequences = [entry.sequence for _, entry in live]
        budget = [sequence.next_budget() for sequence in sequences]
        counts: list[int] = []
        starts: list[int] = []
        index: list[int] = []
        if self.proposer.needs_hidden:
            for i, entry in live:
                first = forward.first[i]
                starts.append(int(forward.rows.positions[first]))
                counts.append(min(entry.sequence.computed - starts[-1], entry.num_rows))
                index.extend(range(first, first + counts[-1]))
        elif not any(budget):
            return
        batch = ProposeBatch(
            columns=self.slots.columns,
            slots=[sequence.slot for sequence in sequences],
            budget=budget,
            lengths=[sequence.length for sequence in sequences],
            hidden=forward.hidden[index] if self.proposer.needs_hidden else None,
            hidden_start=starts,
            hidden_count=counts,
        )
        self._take_draft(sequences, budget, self.proposer.propose(batch))

    def _take_draft(self, sequences: list[Sequence], budget: list[int], draft: Draft) -> None:
        """Put guesses into the slots. A guess outside the vocabulary ends its draft: it cannot stand."""
        columns, vocab, device = self.slots.columns, self.slots.vocab, self.slots.device
        slots = torch.tensor([sequence.slot for sequence in sequences], device=device)
        tokens, count = draft.tokens.to(device), draft.count.to(device)  # a host proposer's are not there
        legal = ((tokens >= 0) & (tokens < vocab)).long().cumprod(1).sum(1)
        count = torch.minimum(torch.minimum(count, legal), torch.tensor(budget, device=device))
        tokens = tokens.clamp(0, vocab - 1)  # what is cut off may still be looked up
        columns.draft[slots] = tokens
        columns.num_draft[slots] = count
        columns.draft_logprob[slots] = torch.nan if draft.logprobs is None else draft.logprobs
        columns.draft_source[slots] = 0 if draft.sources is None else draft.sources
        if draft.probs is not None:
            if self._draft_probs is None:
                shape = (len(columns.length), *draft.probs.shape[1:])
                self._draft_probs = torch.zeros(shape, device=device)
            self._draft_probs[slots] = draft.probs
        elif self._draft_probs is not None:  # certain this time: the law of an earlier draft must not stay
            certain = torch.zeros_like(self._draft_probs[slots])
            self._draft_probs[slots] = certain.scatter_(2, tokens[..., None], 1.0)
        for sequence, number in zip(sequences, count.tolist(), strict=True):
            sequence.num_draft = number


def _error_limit(windows: Windows, sampled: Sampled) -> Tensor:
    """[B] how many tokens come before the first row that failed."""
    limit = torch.full_like(windows.num_draft, windows.draft.shape[1] + 1)
    for row in sampled.errors:
        owner, depth = windows.owner[row], windows.depth[row]
        limit[owner] = torch.minimum(limit[owner], depth)
    return limit
