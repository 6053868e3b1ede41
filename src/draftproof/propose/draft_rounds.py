"""Proposers with a model of their own: rounds with the target's sampling noise, early stop of a chain.

A draft that is sampled with the target's noise at its position agrees with the target far more often than an
independent sample would. It changes the speed alone.

With costs a chain may stop before its budget. That depends on the probabilities of the drafts made so far and
concerns later drafts only: a sampled draft is always proposed. So each proposed draft has the distribution
that it was sampled from, given those before it, as `rejection` requires; and behind the last draft the target
samples with noise that no choice depended on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import DraftVocab, Ops, Rows
from draftproof.propose.base import DeviceProposer, ProposerEnv
from draftproof.propose.calibration import Calibration
from draftproof.propose.draft_logprobs import DraftLogprobs
from draftproof.types import DeviceBatch, Draft, DraftSpec, SlotColumns, Windows

DRAFT_SAMPLING = ("shared", "argmax")  # with the target's noise; the likeliest token at any temperature


class DraftRounds:
    """Drafts of B entries while they are made. Without costs nothing here waits for the device."""

    def __init__(
        self,
        ops: Ops,
        batch: DeviceBatch,
        greedy: bool,
        last: Tensor,
        lag: int,
        page_size: int,
        calibration: Calibration | None = None,
    ) -> None:
        """Plan the rows of all rounds.

        last [B]: negative where the model lacks committed tokens of an entry, which then gets no drafts.
        lag: how far behind its own position a draft's row is stored. calibration: of this model.
        """
        assert batch.spec is not None
        self.ops, self.greedy, self.columns, self.slots = ops, greedy, batch.columns, batch.slots
        self.spec: DraftSpec = batch.spec
        self.draft_rows = ops.rounds.plan_draft_rows(batch, last, batch.spec.rounds, lag, page_size)
        self.draft_logprobs: DraftLogprobs | None = None  # logprobs of drafts, where they are read
        if batch.spec.needs_logprobs:
            temperature = batch.columns.temperature
            self.draft_logprobs = DraftLogprobs(ops, self.draft_rows, temperature, batch.spec.top)
        self._probs: list[Tensor] = []
        self.draft_probs: Tensor | None = None  # [B] the model's probability of each entry's last draft
        self._costs = batch.costs
        self._calibration = calibration if batch.costs.round else None
        if self._calibration is not None:
            self.draft_probs = torch.ones(len(last), device=last.device)
            self._lines: list[int] = batch.slots.tolist()
            self._calibration.learn(batch.columns, self._lines)
            self._is_sampled = (self._temperature > 0).tolist()
            self._count: list[int] = self.draft_rows.count.tolist()
            self._survival = [1.0] * len(self._lines)  # probability that all drafts so far are accepted
            self._bins: list[list[int]] = [[] for _ in self._lines]

    @property
    def needs_logits(self) -> bool:
        """Return whether an entry truncates its distribution or needs all of it."""
        return self.spec.needs_processed or self.spec.needs_probs

    def rows(self, j: int) -> Rows:
        """Return the rows of round j, one per entry: of draft j - 1, or of the newest committed token."""
        planned = self.draft_rows
        token = planned.tokens[j - 1] if j else planned.last_token
        return Rows(
            token, planned.positions[j], planned.slots[j], planned.kv_index[j], self.columns.page_table
        )

    def windows(self, j: int) -> Windows:
        """Return the windows of round j, one row per entry."""
        unused = self.slots
        return Windows(
            self.columns,
            slots=self.slots,
            first=unused,
            num_draft=unused,
            slot=self.draft_rows.slots[j],
            depth=unused,
            position=self.draft_rows.output_index[j],
            draft=unused,
        )

    def sample(self, j: int, logits: Tensor, vocab: DraftVocab | None = None) -> None:
        """Sample draft j of each entry from logits [B, V], as plain decoding would.

        With `vocab` logprobs of drafts are those of its ids; the logits of others are -inf.
        """
        windows = self.windows(j)
        logprobs = self.ops.sampling.process_logits(logits, windows) if self.spec.needs_processed else None
        if self.greedy:
            token = torch.where(windows.slot >= 0, self.ops.sampling.argmax(logits), 0)
        else:
            token, _ = self.ops.sampling.sample(
                logits if logprobs is None else logprobs, windows, scaled=logprobs is not None
            )
        self.draft_rows.tokens[j].copy_(token)
        if self.draft_probs is None and not self.spec.needs_logprobs and not self.spec.needs_probs:
            return
        if self.draft_logprobs is not None:
            ranked = logits if logprobs is None else logprobs
            ranked = ranked if vocab is None else ranked.index_select(1, vocab.ids)
            self.draft_logprobs.add(ranked, vocab, is_scaled=logprobs is not None)
            if self.draft_probs is None and not self.spec.needs_probs:
                return
        if logprobs is None:
            logprobs = logits / self._scale
        logprobs = logprobs - self.ops.sampling.logsumexp(logprobs)[:, None]
        if self.draft_probs is not None:
            self.draft_probs.copy_(logprobs.gather(1, token[:, None])[:, 0].exp())
        if self.spec.needs_probs:
            certain = torch.zeros_like(logprobs).scatter_(1, token[:, None], 1.0)
            sampled = (self._temperature > 0)[:, None] & (not self.greedy)
            self._probs.append(torch.where(sampled, logprobs.exp(), certain))

    @cached_property
    def _temperature(self) -> Tensor:
        """Temperature [B] of the entries."""
        return self.columns.temperature[self.slots.clamp(min=0)]

    @cached_property
    def _scale(self) -> Tensor:
        """Divisor [B, 1] of the logits: the temperature, or 1 where it is 0."""
        return torch.where(self._temperature > 0, self._temperature, 1.0)[:, None]

    def should_continue(self, j: int) -> bool:
        """Return whether another round follows draft j, and stop the chains for which it does not pay.

        An entry continues if P(all drafts so far accepted) * P(one more accepted) exceeds the cost of a row;
        the round runs if the sum of these differences exceeds the cost of a round.
        """
        calibration, draft_probs = self._calibration, self.draft_probs
        if calibration is None or draft_probs is None:
            return j + 1 < self.spec.rounds
        gain, stopped = 0.0, []
        next_acceptance, count = calibration.next_acceptance(), self._count
        for b, draft_prob in enumerate(draft_probs.tolist()):
            if count[b] <= j:
                continue
            acceptance, index = calibration.acceptance(draft_prob, self._is_sampled[b])
            self._survival[b] *= acceptance
            self._bins[b].append(index)
            more = self._survival[b] * next_acceptance - self._costs.row
            if count[b] > j + 1 and more > 0:
                gain += more
            elif count[b] > j + 1:
                stopped.append(b)
        if gain <= self._costs.round:
            stopped = [b for b in range(len(count)) if count[b] > j + 1]
        self._stop(stopped, j + 1)
        return gain > self._costs.round

    def _stop(self, entries: list[int], count: int) -> None:
        planned = self.draft_rows
        for b in entries:
            self._count[b] = count
            planned.count[b] = count
            planned.slots[count:, b] = -1
            planned.output_index[count:, b] = 0
            planned.positions[count:, b] = 0
            planned.kv_index[count:, b] = 0

    def draft(self) -> Draft:
        """Return all drafts, with logprobs and distributions where they are needed."""
        if self._calibration is not None:
            tokens = self.draft_rows.tokens.t().tolist()
            drafts = [line[:count] for line, count in zip(tokens, self._count, strict=True)]
            self._calibration.record(self.columns, self._lines, drafts, self._bins)
        logprobs = ranking = None
        if self.draft_logprobs is not None:
            logprobs, ranking = self.draft_logprobs.finish()
        probs = self._stack(self._probs, torch.zeros_like(self._probs[0])) if self._probs else None
        return Draft(self.draft_rows.tokens.t(), self.draft_rows.count, logprobs, probs, ranking=ranking)

    def _stack(self, columns: list[Tensor], padding: Tensor) -> Tensor:
        """Stack [B, ...] of each round to [B, K, ...]."""
        missing = len(self.draft_rows.tokens) - len(columns)
        return torch.stack(columns + [padding] * missing, 1)


class ModelProposer(DeviceProposer):
    """Proposer whose model runs behind steps and stores KV on the engine's pages."""

    runs_behind_steps = True
    stores_kv = True
    reports_probs = True
    respects_budget = True
    defaults = {"model": None, "draft_sampling": "shared"}
    lag = 0  # how far behind its own position a draft's row is stored

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        sampling = self.options["draft_sampling"]
        if sampling not in DRAFT_SAMPLING:
            raise ConfigError(f"draft_sampling must be one of {', '.join(DRAFT_SAMPLING)}, got {sampling!r}")
        self.greedy = bool(sampling == "argmax")
        self.stops_early = not env.ops.runtime.asynchronous
        self.calibration = Calibration(env.num_slots)
        self._none = torch.zeros(env.num_slots, dtype=torch.int64, device=env.ops.device)
        self._no_drafts: dict[int, tuple[SlotColumns, Draft]] = {}  # by the number of entries

    def no_draft(self, batch: DeviceBatch) -> Draft:
        """Return no drafts, without a round."""
        self.num_rounds_run = 0
        count, columns = batch.slots.shape[0], batch.columns
        found = self._no_drafts.get(count)
        if found is None or found[0] is not columns:
            found = self._no_drafts[count] = columns, Draft(columns.draft[:count], self._none[:count])
        return found[1]

    def start_rounds(self, batch: DeviceBatch, last: Tensor) -> DraftRounds:
        """Plan the rounds behind a step; `last` as in `DraftRounds`."""
        env = self.env
        return DraftRounds(env.ops, batch, self.greedy, last, self.lag, env.page_size, self.calibration)
