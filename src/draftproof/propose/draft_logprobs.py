"""Logprobs, ranks and likeliest tokens of drafts by the drafter, for requests that report drafts.

The next round needs the draft alone. So a head that samples without logits in memory stores them beside its
drafts, and the logprobs of several rounds are one pass over them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops import DraftVocab, Ops, TokenLogprobs
from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.types import DraftRanking

MAX_STORED_BYTES = 1 << 28  # logits of rounds that wait for their pass


class DraftLogprobs:
    """Logprobs of B drafts in each of K rounds, under the temperature of each request."""

    def __init__(self, ops: Ops, draft_rows: DraftRows, temperature: Tensor, top: int) -> None:
        """Allocate the results; temperature [S], top: likeliest tokens of each draft.

        Without a draft, also in rounds that are not added, the logprob is NaN and the rank 0.
        """
        shape, device = draft_rows.tokens.shape, temperature.device
        self._ops, self._draft_rows, self._temperature, self._top = ops, draft_rows, temperature, top
        self._values = torch.empty((*shape, 1 + top), device=device)
        self._ids = torch.empty((*shape, top), dtype=torch.int64, device=device)
        self._ranks = torch.empty(shape, dtype=torch.int64, device=device)
        self._count = 0  # rounds with logprobs
        self._num_stored = 0  # rounds behind them whose logits wait in `_logits_buffer`
        self._logits_buffer: Tensor | None = None  # [rounds, B, N]
        self._vocab: DraftVocab | None = None  # of its columns

    def add(self, logits: Tensor, vocab: DraftVocab | None, is_scaled: bool = False) -> None:
        """Compute the logprobs of the next round's drafts from logits [B, N] in `vocab`.

        is_scaled: the logits are over the temperature already, truncated where a request does so.
        """
        self._add_stored()
        self._add(1, logits, vocab, None if is_scaled else self._temperature)

    def logits_buffer(self, width: int, vocab: DraftVocab | None) -> Tensor:
        """Return memory [B, width] for the logits of the next round, which `add_buffered` then adds."""
        if vocab is not self._vocab:
            self._add_stored()
        if self._logits_buffer is None:
            rounds, count = self._draft_rows.slots.shape
            size = min(rounds - self._count, max(1, MAX_STORED_BYTES // (4 * count * width)))
            self._logits_buffer, self._vocab = self._values.new_empty((size, count, width)), vocab
        return self._logits_buffer[self._num_stored]

    def add_buffered(self) -> None:
        """Add the round whose logits are in `logits_buffer`; its drafts are made."""
        assert self._logits_buffer is not None
        self._num_stored += 1
        if self._num_stored == len(self._logits_buffer):
            self._add_stored()

    def _add_stored(self) -> None:
        if self._logits_buffer is not None:
            logits, count = self._logits_buffer[: self._num_stored].flatten(0, 1), self._num_stored
            self._logits_buffer, self._num_stored = None, 0
            self._add(count, logits, self._vocab, self._temperature)

    def _add(self, count: int, logits: Tensor, vocab: DraftVocab | None, temperature: Tensor | None) -> None:
        """Compute the logprobs of the next `count` rounds."""
        rounds = slice(self._count, self._count + count)
        self._count += count
        values, ids, ranks = (part[rounds].flatten(0, 1) for part in (self._values, self._ids, self._ranks))
        self._ops.sampling.draft_logprobs(
            logits,
            self._draft_rows.slots[rounds],
            self._draft_rows.tokens[rounds],
            self._top,
            TokenLogprobs(values, ids, ranks),
            temperature=temperature,
            vocab=vocab,
        )

    def finish(self) -> tuple[Tensor, DraftRanking]:
        """Return the logprobs [B, K] of all drafts and their ranking."""
        self._add_stored()
        if self._count < len(self._ranks):
            for part, none in ((self._values, math.nan), (self._ids, 0), (self._ranks, 0)):
                part[self._count :].fill_(none)
        values, ids, ranks = (each.transpose(0, 1) for each in (self._values, self._ids, self._ranks))
        return values[..., 0], DraftRanking(ranks, ids, values[..., 1:])
