"""Drafting round by round with a model, under the target's own noise.

A draft that is drawn with the noise that the target will use at its position agrees with it far more often
than an independent draw would, and whether it does or not changes nothing but the speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import Ops, Rows
from draftproof.types import DeviceBatch, Draft, DraftTraits, End, Windows

ALIGN = 16  # int64s
SAMPLING = {"draft_sampling": "shared"}  # "argmax": the likeliest token at any temperature
_WAYS = ("shared", "argmax")


def drafts_greedily(options: Mapping[str, Any]) -> bool:
    way = options["draft_sampling"]
    if way not in _WAYS:
        raise ConfigError(f"draft_sampling must be one of {', '.join(_WAYS)}, got {way!r}")
    return bool(way == "argmax")


class Rounds:
    """The drafts of B entries while they are made. Nothing here waits for the device.

    What the rounds need beside the drafts themselves is worked out for all of them at once: on a device a
    round is so short that every launch counts.
    """

    def __init__(self, ops: Ops, batch: DeviceBatch, greedy: bool, lag: int, page_size: int) -> None:
        """`lag`: how far behind its own position a draft is stored."""
        assert batch.traits is not None
        self.ops, self.greedy, self.columns, self.slots = ops, greedy, batch.columns, batch.slots
        self.traits: DraftTraits = batch.traits
        columns, rounds, self.k = batch.columns, batch.traits.rounds, batch.columns.draft.shape[1]
        size = len(batch.slots)
        self.line = batch.slots.clamp(min=0)
        # a line a round; they lie apart, so that each begins at an address that any kernel likes
        slots, budget = (
            torch.nn.functional.pad(column, (0, -size % ALIGN), value=-1)
            for column in (batch.slots, batch.budget)
        )
        line = slots.clamp(min=0)
        length = columns.length[line]  # [B] committed tokens
        room = columns.max_length[line] - length - 1
        live = (slots >= 0) & (columns.ended[line] == End.NOT_YET)
        count = torch.where(live, torch.minimum(budget, room), 0).clamp(0, rounds)
        self.count = count[:size]  # drafts each is to have
        j = torch.arange(rounds, device=length.device)[:, None]
        on = count > j  # [rounds, B]
        self.active = torch.where(on, slots, -1)[:, :size]
        self.outputs = torch.where(on, length - columns.prompt_len[line] + j, 0)[:, :size]  # the noise's keys
        # in round j >= 1 draft j - 1 is stored; it stands at length + j - 1
        positions = torch.where(on, length - 1 - lag + j, 0).clamp(min=0)
        page = columns.page_table[line, positions // page_size].long()
        self.positions = positions[:, :size]
        self.places = torch.where(on, page * page_size + positions % page_size, 0)[:, :size]
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._probs: list[Tensor] = []

    def rows(self, j: int) -> Rows:
        """The rows of round j >= 1: draft j - 1 of each."""
        table = self.columns.page_table
        return Rows(self._tokens[j - 1], self.positions[j], self.active[j], self.places[j], table)

    def take(self, j: int, logits: Tensor) -> None:
        """Draft j of each from logits [B, V], as plain sampling would take it."""
        none = self.slots
        places = self.active[j], none, self.outputs[j], none
        windows = Windows(self.columns, self.slots, none, none, *places)
        law = self.ops.cut(logits, windows) if self.traits.scales else None
        if self.greedy:
            token = torch.where(self.active[j] >= 0, self.ops.argmax(logits), 0)
        else:
            token, _ = self.ops.choose(logits if law is None else law, windows, scaled=law is not None)
        self._tokens.append(token)
        if not self.traits.logprobs and not self.traits.probs:
            return
        heat = self.columns.temperature[self.line]
        if law is None:
            law = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        law = law - self.ops.logsumexp(law)[:, None]
        self._logprobs.append(law.gather(1, token[:, None])[:, 0])
        if self.traits.probs:
            certain = torch.zeros_like(law).scatter_(1, token[:, None], 1.0)
            sampled = (heat > 0)[:, None] & (not self.greedy)
            self._probs.append(torch.where(sampled, law.exp(), certain))

    def draft(self, ready: Tensor | None = None) -> Draft:
        """ready [B]: the model has seen all that these have said; the others have no drafts."""
        count = self.count if ready is None else torch.where(ready, self.count, 0)
        tokens = self._wide(self._tokens, torch.zeros_like(self.slots))
        logprobs = None
        if self._logprobs:
            logprobs = self._wide(self._logprobs, torch.full_like(self._logprobs[0], math.nan))
        probs = self._wide(self._probs, torch.zeros_like(self._probs[0])) if self._probs else None
        return Draft(tokens, count, logprobs, probs)

    def _wide(self, columns: list[Tensor], none: Tensor) -> Tensor:
        """[B, …] each -> [B, K, …]."""
        return torch.stack(columns + [none] * (self.k - len(columns)), 1)
