"""Logprobs, ranks and likeliest tokens of drafts by the drafter, for requests that report drafts.

The next round needs the draft alone. So the logprobs of a round are computed beside the rounds that follow,
where the drafter can give the logits of a row again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops import Ops, TokenLogprobs
from draftproof.types import DraftRanking


class DraftRanks:
    """Logprobs of B drafts in each of K rounds, under the temperature of each request."""

    def __init__(self, ops: Ops, scale: Tensor, rounds: int, top: int) -> None:
        """Allocate the results; scale [B, 1]: divisor of the logits, top: likeliest tokens of each draft.

        Drafts of rounds that are not added have NaN as their logprob and rank 0.
        """
        shape, device = (rounds, len(scale)), scale.device
        self._ops, self._scale, self._top = ops, scale, top
        self._values = torch.full((*shape, 1 + top), math.nan, device=device)
        self._ids = torch.zeros((*shape, top), dtype=torch.int64, device=device)
        self._ranks = torch.zeros(shape, dtype=torch.int64, device=device)
        self._entries = torch.arange(len(scale), device=device)
        self._unfinished: list[Callable[[], None]] = []
        self._rows: list[Tensor] = []  # input of unfinished rounds: the allocator must not reuse the memory

    def add(self, j: int, slots: Tensor, scaled: Tensor, tokens: Tensor) -> None:
        """Compute the logprobs of the drafts `tokens` [B] of round j; slots [B], -1: no draft.

        scaled [B, V]: logits over the temperature, truncated where a request does so.
        """
        rows = torch.where(slots >= 0, self._entries, -1)
        out = TokenLogprobs(self._values[j], self._ids[j], self._ranks[j])
        self._ops.sampling.logprobs(scaled, rows, tokens, self._top, out)

    def add_beside(
        self, j: int, slots: Tensor, row: Tensor, logits: Callable[[Tensor], Tensor], tokens: Tensor
    ) -> None:
        """Compute the logprobs of round j beside the ops that follow, which may overwrite row [B, hidden].

        logits: of rows, [B, V].
        """
        row = row.clone()
        self._rows.append(row)
        self._unfinished.append(
            self._ops.runtime.run_parallel(lambda: self.add(j, slots, logits(row) / self._scale, tokens))
        )

    def finish(self) -> tuple[Tensor, DraftRanking]:
        """Return the logprobs [B, K] of all drafts and their ranking."""
        for join in self._unfinished:
            join()
        values, ids, ranks = (each.transpose(0, 1) for each in (self._values, self._ids, self._ranks))
        return values[..., 0], DraftRanking(ranks, ids, values[..., 1:])
