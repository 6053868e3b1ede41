"""Slots: the tensors of `SlotColumns`, and who sits in which line.

Newcomers are seated together, with one copy to the device for all their numbers, and never with one that
waits for it: a number that is assigned to an indexed tensor (`x[index] = 0`) is such a copy, `index_fill_` is
not. What does not fit a column (processors, bad words) is read from the request by the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.ops import Ops
from draftproof.types import LogitAdjust, LogprobKind, Request, SlotColumns

INTS = (
    *("length", "prompt_len", "computed", "ended", "num_draft", "top_k", "seed"),
    *("min_length", "max_length", "adjust", "logprob_kind", "strategy"),
)
REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
ALIGN = 16  # lines; a column then begins at an address that any kernel likes


class SlotInit(NamedTuple):
    """A request and the line it is to have."""

    slot: int
    request: Request
    pages: Sequence[int]
    max_length: int
    strategy: int = 0
    logprob_kind: LogprobKind = LogprobKind.NONE
    token_ids: Sequence[int] = ()  # its committed tokens, prompt included, if it was here before
    computed: int = 0  # committed tokens that have KV on its pages

    @property
    def ids(self) -> Sequence[int]:
        return self.token_ids or self.request.prompt_token_ids


class Slots:
    """Lines of the columns, taken and freed. A freed line keeps its old values until it is reused."""

    def __init__(self, num_slots: int, max_len: int, k: int, max_pages: int, vocab: int, ops: Ops) -> None:
        device = ops.device
        padded = -(-num_slots // ALIGN) * ALIGN
        self._ints = torch.zeros((len(INTS), padded), dtype=torch.int64, device=device)
        self._reals = torch.zeros((len(REALS), padded), dtype=torch.float32, device=device)

        def column(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        self.columns = SlotColumns(
            tokens=column(max_len),
            draft=column(k),
            draft_logprob=column(k, dtype=torch.float32),
            draft_source=column(k, dtype=torch.int8),
            page_table=column(max_pages, dtype=torch.int32),
            ends=column(vocab, dtype=torch.bool),
            bias=column(vocab, dtype=torch.float32),
            banned=column(vocab, dtype=torch.bool),
            **{name: line[:num_slots] for name, line in zip(INTS, self._ints, strict=True)},
            **{name: line[:num_slots] for name, line in zip(REALS, self._reals, strict=True)},
        )
        self.requests: list[Request | None] = [None] * num_slots
        self.ops = ops
        self.device = device
        self.vocab = vocab
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request) -> int:
        """A line for `request`; `seat` fills it."""
        slot = self._free.pop()
        self.requests[slot] = request
        return slot

    def free(self, slot: int) -> None:
        """Free the line."""
        if self.requests[slot] is None:
            raise AssertionError(f"slot {slot} is freed twice")
        self.requests[slot] = None
        self._free.append(slot)

    def fill(self, seats: Sequence[SlotInit]) -> None:
        """Fill the lines of newcomers."""
        if not seats:
            return
        c, count, wide = self.columns, len(seats), self.columns.page_table.shape[1]
        slots = np.array([seat.slot for seat in seats])
        pages = np.zeros((count, wide + wide % 2), np.int32)  # in whole words
        for line, seat in zip(pages, seats, strict=True):
            line[: len(seat.pages)] = seat.pages
        prompts = [np.array(seat.ids, np.int64) for seat in seats]  # quicker than torch
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = slots * c.tokens.shape[1] - np.cumsum(lengths) + lengths
        marks = [seat.slot * self.vocab + token for seat in seats for token in end_ids(seat.request)]
        parts = (
            slots,
            np.array([_ints(seat) for seat in seats], np.int64).T.ravel(),
            np.array([_reals(seat.request) for seat in seats], np.float32).T.ravel().view(np.int64),
            pages.ravel().view(np.int64),
            np.repeat(starts, lengths) + np.arange(lengths.sum()),  # where the tokens go
            np.concatenate(prompts),
            np.array(marks, np.int64),
        )
        sent = self.ops.runtime.send(torch.from_numpy(np.concatenate(parts)))
        lines, ints, reals, tables, places, tokens, ends = sent.split([len(part) for part in parts])
        self._ints.index_copy_(1, lines, ints.view(-1, count))
        self._reals.index_copy_(1, lines, reals.view(torch.float32).view(-1, count))
        c.page_table.index_copy_(0, lines, tables.view(torch.int32).view(count, -1)[:, :wide])
        c.tokens.view(-1).index_copy_(0, places, tokens)
        c.ends.index_fill_(0, lines, False)
        if marks:
            c.ends.view(-1).index_fill_(0, ends, True)
        for seat in seats:
            self._fill_planes(seat)

    def _fill_planes(self, seat: SlotInit) -> None:
        params, send = seat.request.params, self.ops.runtime.send
        if params.logit_bias:
            line = self.columns.bias[seat.slot].zero_()
            ids = send(torch.tensor(list(params.logit_bias)))
            line[ids] = send(torch.tensor(list(params.logit_bias.values()), dtype=torch.float32))
        if params.allowed_token_ids is not None:
            line = self.columns.banned[seat.slot].fill_(True)
            line.index_fill_(0, send(torch.tensor(list(params.allowed_token_ids))), False)

    def grow(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """More pages: (slot, place in its table, page)."""
        if pages:
            lines, places, ids = self.ops.runtime.send(torch.tensor(pages)).unbind(1)
            self.columns.page_table.index_put_((lines, places), ids.to(torch.int32))

    def read(self, slot: int, length: int) -> list[int]:
        """Its first tokens. Waits for the device."""
        ids: list[int] = self.ops.runtime.fetch(self.columns.tokens[slot, :length])().tolist()
        return ids

    def poison(self) -> None:
        """For tests: fill everything that must not be read with impossible values."""
        for column in (self.columns.draft_logprob, self.columns.bias):
            column.fill_(math.nan)
        for column in (self.columns.tokens, self.columns.draft):
            column.fill_(-(2**40))


def end_ids(request: Request) -> set[int]:
    """The tokens that end it."""
    params = request.params
    return {*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids}


def adjustments(request: Request) -> LogitAdjust:
    params = request.params
    found = LogitAdjust(0)
    if params.penalises:
        found |= LogitAdjust.PENALTY
    if params.logit_bias:
        found |= LogitAdjust.BIAS
    if params.allowed_token_ids is not None:
        found |= LogitAdjust.ALLOWED_IDS
    if params.min_tokens:
        found |= LogitAdjust.MIN_TOKENS
    if request.grammar is not None:
        found |= LogitAdjust.MASK
    return found


def _ints(seat: SlotInit) -> tuple[int, ...]:
    """In the order of INTS."""
    request, params = seat.request, seat.request.params
    prompt = len(request.prompt_token_ids)
    return (
        len(seat.ids),
        prompt,
        seat.computed,
        0,
        0,
        params.top_k,
        request.seed,
        prompt + params.min_tokens,
        seat.max_length,
        int(adjustments(request)),
        int(seat.logprob_kind),
        seat.strategy,
    )


def _reals(request: Request) -> tuple[float, ...]:
    """In the order of REALS."""
    params = request.params
    return (
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
