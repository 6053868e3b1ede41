"""Drafting round by round with a model, under the target's own noise.

A draft that is drawn with the noise that the target will use at its position agrees with it far more often
than an independent draw would, and whether it does or not changes nothing but the speed.

Where a round has a price a chain may end before its budget does. What is looked at then is how likely the
drafts are that have been made, and what is decided is about further ones alone: a draft that was drawn is
proposed, however unlikely it is. So every draft that is proposed has the law that it was drawn from, given
those before it, which is all that `rejection` asks for; and behind the last of them the target draws with
noise that nothing was chosen by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import Ops, Rows
from draftproof.propose.calibration import Sureness
from draftproof.types import DeviceBatch, Draft, DraftSpec, Windows

SAMPLING = {"draft_sampling": "shared"}  # "argmax": the likeliest token at any temperature
_WAYS = ("shared", "argmax")


def drafts_greedily(options: Mapping[str, Any]) -> bool:
    way = options["draft_sampling"]
    if way not in _WAYS:
        raise ConfigError(f"draft_sampling must be one of {', '.join(_WAYS)}, got {way!r}")
    return bool(way == "argmax")


class Rounds:
    """The drafts of B entries while they are made. Without a price nothing here waits for the device."""

    def __init__(
        self,
        ops: Ops,
        batch: DeviceBatch,
        greedy: bool,
        last: Tensor,
        lag: int,
        page_size: int,
        sureness: Sureness | None = None,
    ) -> None:
        """`last` [B]: below 0 where the model has not seen all that an entry has said: no drafts.
        `lag`: how far behind its own position a draft is stored. `sureness`: what is known of this model's.
        """
        assert batch.spec is not None
        self.ops, self.greedy, self.columns, self.slots = ops, greedy, batch.columns, batch.slots
        self.spec: DraftSpec = batch.spec
        self.ahead = ops.rounds.plan_draft_rows(
            batch.columns, batch.slots, batch.budget, last, batch.spec.rounds, lag, page_size
        )
        self._logprobs: list[Tensor] = []
        self._probs: list[Tensor] = []
        self.sure: Tensor | None = None  # [B] how likely the model thinks the last drafts to be
        self._sureness = sureness if batch.price else None
        self._price, self._verify = batch.price, batch.verify
        if self._sureness is not None:
            self.sure = torch.ones(len(last), device=last.device)
            self._lines: list[int] = batch.slots.tolist()
            self._sureness.learn(batch.columns, self._lines)
            self._hot = (batch.columns.temperature[batch.slots.clamp(min=0)] > 0).tolist()
            self._count: list[int] = self.ahead.count.tolist()
            self._chance = [1.0] * len(self._lines)  # that all drafts made stand
            self._ranges: list[list[int]] = [[] for _ in self._lines]

    @property
    def plain(self) -> bool:
        """Nobody truncates, and nobody wants to know more than the drafts."""
        return not (self.spec.needs_processed or self.spec.needs_logprobs or self.spec.needs_probs)

    def rows(self, j: int) -> Rows:
        """The rows of round j, one an entry: of draft j - 1, or of the newest committed token."""
        ahead = self.ahead
        token = ahead.tokens[j - 1] if j else ahead.last_token
        return Rows(token, ahead.positions[j], ahead.slots[j], ahead.kv_index[j], self.columns.page_table)

    def windows(self, j: int) -> Windows:
        none = self.slots
        places = self.ahead.slots[j], none, self.ahead.output_index[j], none
        return Windows(self.columns, self.slots, none, none, *places)

    def take(self, j: int, logits: Tensor) -> None:
        """Draft j of each from logits [B, V], as plain sampling would take it."""
        windows = self.windows(j)
        law = self.ops.sampling.process_logits(logits, windows) if self.spec.needs_processed else None
        if self.greedy:
            token = torch.where(windows.slot >= 0, self.ops.sampling.argmax(logits), 0)
        else:
            token, _ = self.ops.sampling.sample(
                logits if law is None else law, windows, scaled=law is not None
            )
        self.ahead.tokens[j].copy_(token)
        if self.sure is None and not self.spec.needs_logprobs and not self.spec.needs_probs:
            return
        heat = self.columns.temperature[self.slots.clamp(min=0)]
        if law is None:
            law = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        law = law - self.ops.sampling.logsumexp(law)[:, None]
        own = law.gather(1, token[:, None])[:, 0]
        if self.sure is not None:
            self.sure.copy_(own.exp())
        if self.spec.needs_logprobs or self.spec.needs_probs:
            self._logprobs.append(own)
        if self.spec.needs_probs:
            certain = torch.zeros_like(law).scatter_(1, token[:, None], 1.0)
            sampled = (heat > 0)[:, None] & (not self.greedy)
            self._probs.append(torch.where(sampled, law.exp(), certain))

    def goes_on(self, j: int) -> bool:
        """Draft j is made: is another round likely to bring more than it costs, and for whom?"""
        if self._sureness is None or self.sure is None:
            return j + 1 < self.spec.rounds
        known, gain, leave = self._sureness, 0.0, []
        further, count = known.further(), self._count
        for b, said in enumerate(self.sure.tolist()):
            if count[b] <= j:
                continue
            chance, at = known.chance(said, self._hot[b])
            self._chance[b] *= chance
            self._ranges[b].append(at)
            more = self._chance[b] * further - self._verify
            if count[b] > j + 1 and more > 0:
                gain += more
            elif count[b] > j + 1:
                leave.append(b)
        if gain <= self._price:
            leave = [b for b in range(len(count)) if count[b] > j + 1]
        self._end(leave, j + 1)
        return gain > self._price

    def _end(self, entries: list[int], count: int) -> None:
        """They have so many drafts and no more."""
        ahead = self.ahead
        for b in entries:
            self._count[b] = count
            ahead.count[b] = count
            for part, none in (
                (ahead.slots, -1),
                (ahead.output_index, 0),
                (ahead.positions, 0),
                (ahead.kv_index, 0),
            ):
                part[count:, b] = none

    def draft(self) -> Draft:
        if self._sureness is not None:
            tokens = self.ahead.tokens.t().tolist()
            drafts = [line[:count] for line, count in zip(tokens, self._count, strict=True)]
            self._sureness.note(self.columns, self._lines, drafts, self._ranges)
        logprobs = None
        if self._logprobs:
            logprobs = self._wide(self._logprobs, torch.full_like(self._logprobs[0], math.nan))
        probs = self._wide(self._probs, torch.zeros_like(self._probs[0])) if self._probs else None
        return Draft(self.ahead.tokens.t(), self.ahead.count, logprobs, probs)

    def _wide(self, columns: list[Tensor], none: Tensor) -> Tensor:
        """[B, …] each -> [B, K, …]."""
        return torch.stack(columns + [none] * (len(self.ahead.tokens) - len(columns)), 1)
