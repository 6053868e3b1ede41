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

SAMPLING = {"draft_sampling": "shared"}  # "greedy": the likeliest token at any temperature
_WAYS = ("shared", "greedy")


def drafts_greedily(options: Mapping[str, Any]) -> bool:
    way = options["draft_sampling"]
    if way not in _WAYS:
        raise ConfigError(f"draft_sampling must be one of {', '.join(_WAYS)}, got {way!r}")
    return bool(way == "greedy")


class Rounds:
    """The drafts of B entries while they are made. Nothing here waits for the device."""

    def __init__(self, ops: Ops, batch: DeviceBatch, greedy: bool) -> None:
        assert batch.traits is not None
        self.ops, self.greedy = ops, greedy
        self.traits: DraftTraits = batch.traits
        self.columns, self.slots = batch.columns, batch.slots
        self.line = batch.slots.clamp(min=0)
        self.length = batch.columns.length[self.line]  # [B] committed tokens
        self.heat = batch.columns.temperature[self.line]
        room = batch.columns.max_length[self.line] - self.length - 1
        live = (batch.slots >= 0) & (batch.columns.ended[self.line] == End.NOT_YET)
        count = torch.minimum(batch.budget, room).clamp(0, self.traits.rounds)
        self.count = torch.where(live, count, 0)  # [B] drafts it is to have
        like = batch.columns.draft[: len(self.slots)]
        self.tokens = torch.zeros_like(like)
        self.logprobs = torch.full_like(batch.columns.draft_logprob[: len(self.slots)], math.nan)
        self._probs: list[Tensor] = []

    def only(self, ready: Tensor) -> None:
        """ready [B]: the model has seen all that these have said; the others have no drafts."""
        self.count = torch.where(ready, self.count, 0)

    def rows(self, j: int, ahead: int, page_size: int) -> Rows:
        """The rows of round j >= 1: draft j - 1 of each, stored `ahead` of the newest committed token."""
        on = self.count > j
        table = self.columns.page_table
        position = torch.where(on, self.length - 1 + ahead, 0)
        page = table[self.line, position // page_size].long()
        place = torch.where(on, page * page_size + position % page_size, 0)
        tokens = torch.where(on, self.tokens[:, j - 1], 0)
        return Rows(tokens, position, torch.where(on, self.slots, -1), place, table)

    def take(self, j: int, logits: Tensor) -> None:
        """Draft j of each from logits [B, V], as plain sampling would take it."""
        on = self.count > j
        none = torch.zeros_like(self.slots)
        position = torch.where(on, self.length - self.columns.prompt_len[self.line] + j, 0)
        slot = torch.where(on, self.slots, -1)
        windows = Windows(self.columns, self.slots, none, none, slot, none, position, none)
        law = self.ops.cut(logits, windows) if self.traits.scales else None
        if self.greedy:
            token = self.ops.argmax(logits)
        else:
            token, _ = self.ops.choose(logits if law is None else law, windows, scaled=law is not None)
        self.tokens[:, j] = token
        if not self.traits.logprobs and not self.traits.probs:
            return
        if law is None:
            law = logits / torch.where(self.heat > 0, self.heat, 1.0)[:, None]
        law = law - self.ops.logsumexp(law)[:, None]
        self.logprobs[:, j] = law.gather(1, token[:, None])[:, 0]
        if self.traits.probs:
            certain = torch.zeros_like(law).scatter_(1, token[:, None], 1.0)
            sampled = (self.heat > 0)[:, None] & (not self.greedy)
            self._probs.append(torch.where(sampled, law.exp(), certain))

    def draft(self) -> Draft:
        probs = None
        if self.traits.probs and self._probs:
            rest = self.tokens.shape[1] - len(self._probs)
            probs = torch.stack(self._probs + [torch.zeros_like(self._probs[0])] * rest, 1)
        return Draft(self.tokens, self.count, self.logprobs, probs)
