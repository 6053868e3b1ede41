"""Slots: the device tensors of `SlotColumns` and the request in each line.

All requests admitted by a plan are filled in with one copy to the device. No copy blocks: assigning a number
to an indexed tensor (`x[index] = 0`) would, `index_fill_` does not. Options that do not fit a column
(processors, bad words) are read from the request by the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial

import numpy as np
import torch
from torch import Tensor

from draftproof.array_types import Ints, ragged_indices
from draftproof.engine.sequence import Sequence
from draftproof.ops import Ops
from draftproof.types import MAX_NAMED_IDS, LogitAdjust, Request, SlotColumns

INTS = (
    *("length", "prompt_len", "computed", "finish_status", "num_draft", "top_k", "seed"),
    *("min_length", "max_length", "adjust", "logprob_kind", "draft_kind", "strategy"),
)
REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
MAX_COPIED_TOKENS = 1 << 20  # of slots that share a copy
ALIGN = 16  # lines: aligns the start of every column for vector loads


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
            named_ids=column(MAX_NAMED_IDS),
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

    def fill(self, admitted: Many[Sequence]) -> None:
        """Set the values of the slots of newly admitted requests."""
        if not admitted:
            return
        c, count, wide = self.columns, len(admitted), self.columns.page_table.shape[1]
        slots = np.array([sequence.slot for sequence in admitted])
        pages = np.zeros((count, wide + wide % 2), np.int32)  # in whole words
        for line, sequence in zip(pages, admitted, strict=True):
            line[: len(sequence.pages)] = sequence.pages
        prompts = [np.array(sequence.ids, np.int64) for sequence in admitted]  # faster than torch
        places, tokens = _flat(slots, c.tokens.shape[1], prompts)
        naming = [s for s in admitted if s.logprob_kind and s.request.params.logprob_token_ids]
        named = [np.array(s.request.params.logprob_token_ids, np.int64) for s in naming]
        marks = [s.slot * self.vocab + token for s in admitted for token in _end_ids(s.request)]
        parts = (
            slots,
            np.array([_ints(sequence) for sequence in admitted], np.int64).T.ravel(),
            np.array([_reals(s.request) for s in admitted], np.float32).T.ravel().view(np.int64),
            pages.ravel().view(np.int64),
            places,
            tokens,
            *_flat(np.array([s.slot for s in naming], np.int64), MAX_NAMED_IDS, named),
            np.array(marks, np.int64),
        )
        sent = self.ops.runtime.send(torch.from_numpy(np.concatenate(parts)))
        lines, ints, reals, tables, *flat, ends = sent.split([len(part) for part in parts])
        self._ints.index_copy_(1, lines, ints.view(-1, count))
        self._reals.index_copy_(1, lines, reals.view(torch.float32).view(-1, count))
        c.page_table.index_copy_(0, lines, tables.view(torch.int32).view(count, -1)[:, :wide])
        c.tokens.view(-1).index_copy_(0, *flat[:2])
        c.ends.index_fill_(0, lines, False)
        c.named_ids.index_fill_(0, lines, -1)
        if named:
            c.named_ids.view(-1).index_copy_(0, *flat[2:])
        if marks:
            c.ends.view(-1).index_fill_(0, ends, True)
        for sequence in admitted:
            self._fill_planes(sequence)

    def _fill_planes(self, sequence: Sequence) -> None:
        params, send = sequence.request.params, self.ops.runtime.send
        if params.logit_bias:
            line = self.columns.bias[sequence.slot].zero_()
            ids = send(torch.tensor(list(params.logit_bias)))
            line[ids] = send(torch.tensor(list(params.logit_bias.values()), dtype=torch.float32))
        if params.allowed_token_ids is not None:
            line = self.columns.banned[sequence.slot].fill_(True)
            line.index_fill_(0, send(torch.tensor(list(params.allowed_token_ids))), False)

    def grow(self, pages: Many[tuple[int, int, int]]) -> None:
        """Add pages: (slot, index in its page table, page)."""
        if pages:
            lines, places, ids = self.ops.runtime.send(torch.tensor(pages)).unbind(1)
            self.columns.page_table.index_put_((lines, places), ids.to(torch.int32))

    def read(self, slot: int, length: int) -> list[int]:
        """Return the first `length` tokens of a slot. Waits for the device."""
        ids: list[int] = self.ops.runtime.fetch(self.columns.tokens[slot, :length])().tolist()
        return ids

    def fetch_tokens(self, slots: Many[int], lengths: Ints) -> list[Callable[[], Tensor]]:
        """Start copies of the first `lengths` [S] tokens of some slots; return how to read each of them.

        Slots share copies of bounded size, since the host's part of a copy takes longer than the transfer.
        """
        reads: list[Callable[[], Tensor]] = []
        counts: list[int] = lengths[list(slots)].tolist()
        first = longest = 0
        for i, count in enumerate(counts):
            longest = max(longest, count)
            if (i + 1 - first) * longest > MAX_COPIED_TOKENS and i > first:
                reads += self._fetch_lines(slots[first:i], counts[first:i])
                first, longest = i, count
        return reads + self._fetch_lines(slots[first:], counts[first:])

    def _fetch_lines(self, slots: Many[int], lengths: Many[int]) -> list[Callable[[], Tensor]]:
        """Start one copy of the tokens of some slots."""
        if not slots:
            return []
        if len(slots) == 1:
            return [self.ops.runtime.fetch(self.columns.tokens[slots[0], : lengths[0]])]
        lines = self.ops.runtime.send(torch.tensor(slots))
        copy = self.ops.runtime.fetch(self.columns.tokens[:, : max(lengths)].index_select(0, lines))
        return [partial(_line_of, copy, i, length) for i, length in enumerate(lengths)]

    def poison(self) -> None:
        """Fill everything that must not be read with impossible values (for tests)."""
        for column in (self.columns.draft_logprob, self.columns.bias):
            column.fill_(math.nan)
        for column in (self.columns.tokens, self.columns.draft):
            column.fill_(-(2**40))


def _line_of(copy: Callable[[], Tensor], i: int, length: int) -> Tensor:
    """Return the first `length` tokens of line `i` of a copy."""
    return copy()[i, :length]


def _flat(lines: Ints, width: int, rows: Many[Ints]) -> tuple[Ints, Ints]:
    """Return places [N] in the flat columns of `width` values a line, and the values [N] of `rows` there."""
    if not rows:
        return lines, lines
    line, place = ragged_indices(np.array([len(row) for row in rows]))
    return lines[line] * width + place, np.concatenate(rows)


def _end_ids(request: Request) -> set[int]:
    params = request.params
    return {*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids}


def adjustments(request: Request) -> int:
    """Return the `LogitAdjust` flags of the options that change the logits of a request."""
    params = request.params
    flags = 0  # operators of an IntFlag take a microsecond
    if params.penalises:
        flags += LogitAdjust.PENALTY
    if params.logit_bias:
        flags += LogitAdjust.BIAS
    if params.allowed_token_ids is not None:
        flags += LogitAdjust.ALLOWED_IDS
    if params.min_tokens:
        flags += LogitAdjust.MIN_TOKENS
    if request.grammar is not None:
        flags += LogitAdjust.MASK
    return flags


def _ints(sequence: Sequence) -> tuple[int, ...]:
    """Return the integer columns in the order of INTS."""
    request, params = sequence.request, sequence.request.params
    prompt = len(request.prompt_token_ids)
    progress = len(sequence.ids), prompt, sequence.num_cached, 0, 0
    limits = params.top_k, request.seed, prompt + params.min_tokens, sequence.max_length
    kinds = int(sequence.logprob_kind), int(sequence.draft_kind)
    return *progress, *limits, adjustments(request), *kinds, sequence.strategy


def _reals(request: Request) -> tuple[float, ...]:
    """Return the float columns in the order of REALS."""
    params = request.params
    temperature = 0.0 if params.greedy else params.temperature
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return temperature, params.top_p, params.min_p, *penalties
