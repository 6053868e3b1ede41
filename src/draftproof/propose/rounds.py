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
from draftproof.types import DeviceBatch, Draft, DraftTraits, Windows

SAMPLING = {"draft_sampling": "shared"}  # "argmax": the likeliest token at any temperature
_WAYS = ("shared", "argmax")


def drafts_greedily(options: Mapping[str, Any]) -> bool:
    way = options["draft_sampling"]
    if way not in _WAYS:
        raise ConfigError(f"draft_sampling must be one of {', '.join(_WAYS)}, got {way!r}")
    return bool(way == "argmax")


class Rounds:
    """The drafts of B entries while they are made. Nothing here waits for the device."""

    def __init__(
        self, ops: Ops, batch: DeviceBatch, greedy: bool, last: Tensor, lag: int, page_size: int
    ) -> None:
        """`last` [B]: below 0 where the model has not seen all that an entry has said: no drafts.
        `lag`: how far behind its own position a draft is stored.
        """
        assert batch.traits is not None
        self.ops, self.greedy, self.columns, self.slots = ops, greedy, batch.columns, batch.slots
        self.traits: DraftTraits = batch.traits
        self.ahead = ops.ahead(
            batch.columns, batch.slots, batch.budget, last, batch.traits.rounds, lag, page_size
        )
        self._logprobs: list[Tensor] = []
        self._probs: list[Tensor] = []

    @property
    def plain(self) -> bool:
        """Nobody truncates, and nobody wants to know more than the drafts."""
        return not (self.traits.scales or self.traits.logprobs or self.traits.probs)

    def rows(self, j: int) -> Rows:
        """The rows of round j, one an entry: of draft j - 1, or of the newest committed token."""
        ahead = self.ahead
        token = ahead.tokens[j - 1] if j else ahead.newest
        return Rows(token, ahead.positions[j], ahead.slots[j], ahead.places[j], self.columns.page_table)

    def windows(self, j: int) -> Windows:
        none = self.slots
        places = self.ahead.slots[j], none, self.ahead.outputs[j], none
        return Windows(self.columns, self.slots, none, none, *places)

    def take(self, j: int, logits: Tensor) -> None:
        """Draft j of each from logits [B, V], as plain sampling would take it."""
        windows = self.windows(j)
        law = self.ops.cut(logits, windows) if self.traits.scales else None
        if self.greedy:
            token = torch.where(windows.slot >= 0, self.ops.argmax(logits), 0)
        else:
            token, _ = self.ops.choose(logits if law is None else law, windows, scaled=law is not None)
        self.ahead.tokens[j].copy_(token)
        if not self.traits.logprobs and not self.traits.probs:
            return
        heat = self.columns.temperature[self.slots.clamp(min=0)]
        if law is None:
            law = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        law = law - self.ops.logsumexp(law)[:, None]
        self._logprobs.append(law.gather(1, token[:, None])[:, 0])
        if self.traits.probs:
            certain = torch.zeros_like(law).scatter_(1, token[:, None], 1.0)
            sampled = (heat > 0)[:, None] & (not self.greedy)
            self._probs.append(torch.where(sampled, law.exp(), certain))

    def draft(self) -> Draft:
        logprobs = None
        if self._logprobs:
            logprobs = self._wide(self._logprobs, torch.full_like(self._logprobs[0], math.nan))
        probs = self._wide(self._probs, torch.zeros_like(self._probs[0])) if self._probs else None
        return Draft(self.ahead.tokens.t(), self.ahead.count, logprobs, probs)

    def _wide(self, columns: list[Tensor], none: Tensor) -> Tensor:
        """[B, …] each -> [B, K, …]."""
        return torch.stack(columns + [none] * (len(self.ahead.tokens) - len(columns)), 1)
