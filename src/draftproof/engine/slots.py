"""Slots: the device tensors of `SlotColumns` and the request in each line.

All requests admitted by a plan are filled in with one copy to the device. No copy blocks: assigning a number
to an indexed tensor (`x[index] = 0`) would, `index_fill_` does not. Options that do not fit a column
(processors, bad words) are read from the request by the host.
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
ALIGN = 16  # lines: aligns the start of every column for vector loads


class SlotInit(NamedTuple):
    """Values to fill a slot with."""

    slot: int
    request: Request
    pages: Sequence[int]
    max_length: int
    strategy: int = 0
    logprob_kind: LogprobKind = LogprobKind.NONE
    token_ids: Sequence[int] = ()  # committed tokens, prompt included; empty: the prompt
    computed: int = 0  # committed tokens with KV on the pages

    @property
    def ids(self) -> Sequence[int]:
        """Return the committed tokens."""
        return self.token_ids or self.request.prompt_token_ids


class Slots:
    """Allocator of slots. A freed slot keeps its old values until it is reused."""

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
        """Return the number of free slots."""
        return len(self._free)

    def take(self, request: Request) -> int:
        """Allocate a slot for `request`; `fill` sets its values."""
        slot = self._free.pop()
        self.requests[slot] = request
        return slot

    def free(self, slot: int) -> None:
        """Free a slot."""
        if self.requests[slot] is None:
            raise AssertionError(f"slot {slot} is freed twice")
        self.requests[slot] = None
        self._free.append(slot)

    def fill(self, inits: Sequence[SlotInit]) -> None:
        """Set the values of newly allocated slots."""
        if not inits:
            return
        c, count, wide = self.columns, len(inits), self.columns.page_table.shape[1]
        slots = np.array([init.slot for init in inits])
        pages = np.zeros((count, wide + wide % 2), np.int32)  # in whole words
        for line, init in zip(pages, inits, strict=True):
            line[: len(init.pages)] = init.pages
        prompts = [np.array(init.ids, np.int64) for init in inits]  # faster than torch
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = slots * c.tokens.shape[1] - np.cumsum(lengths) + lengths
        marks = [init.slot * self.vocab + token for init in inits for token in end_ids(init.request)]
        parts = (
            slots,
            np.array([_ints(init) for init in inits], np.int64).T.ravel(),
            np.array([_reals(init.request) for init in inits], np.float32).T.ravel().view(np.int64),
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
        for init in inits:
            self._fill_planes(init)

    def _fill_planes(self, init: SlotInit) -> None:
        params, send = init.request.params, self.ops.runtime.send
        if params.logit_bias:
            line = self.columns.bias[init.slot].zero_()
            ids = send(torch.tensor(list(params.logit_bias)))
            line[ids] = send(torch.tensor(list(params.logit_bias.values()), dtype=torch.float32))
        if params.allowed_token_ids is not None:
            line = self.columns.banned[init.slot].fill_(True)
            line.index_fill_(0, send(torch.tensor(list(params.allowed_token_ids))), False)

    def grow(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Add pages: (slot, index in its page table, page)."""
        if pages:
            lines, places, ids = self.ops.runtime.send(torch.tensor(pages)).unbind(1)
            self.columns.page_table.index_put_((lines, places), ids.to(torch.int32))

    def read(self, slot: int, length: int) -> list[int]:
        """Return the first `length` tokens of a slot. Waits for the device."""
        ids: list[int] = self.ops.runtime.fetch(self.columns.tokens[slot, :length])().tolist()
        return ids

    def poison(self) -> None:
        """Fill everything that must not be read with impossible values (for tests)."""
        for column in (self.columns.draft_logprob, self.columns.bias):
            column.fill_(math.nan)
        for column in (self.columns.tokens, self.columns.draft):
            column.fill_(-(2**40))


def end_ids(request: Request) -> set[int]:
    """Return the tokens that finish a request."""
    params = request.params
    return {*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids}


def adjustments(request: Request) -> LogitAdjust:
    """Return the flags of the options that change the logits of a request."""
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


def _ints(init: SlotInit) -> tuple[int, ...]:
    """Return the integer columns in the order of INTS."""
    request, params = init.request, init.request.params
    prompt = len(request.prompt_token_ids)
    return (
        len(init.ids),
        prompt,
        init.computed,
        0,
        0,
        params.top_k,
        request.seed,
        prompt + params.min_tokens,
        init.max_length,
        int(adjustments(request)),
        int(init.logprob_kind),
        init.strategy,
    )


def _reals(request: Request) -> tuple[float, ...]:
    """Return the float columns in the order of REALS."""
    params = request.params
    return (
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
