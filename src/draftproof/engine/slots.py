"""Slots: the tensors of `SlotColumns`, and who sits in which line.

What does not fit a column (bias tables, stop ids, processors) is kept per slot in `SlotOptions`,
made once when the request sits down and never changed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.types import Request, SlotColumns, SlotOptions


class Slots:
    """Lines of the columns, taken and freed. A freed line keeps its old values until it is reused."""

    def __init__(
        self, num_slots: int, max_len: int, k: int, max_pages: int, vocab: int, device: torch.device
    ) -> None:
        def column(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        real = torch.float32
        self.columns = SlotColumns(
            tokens=column(max_len),
            length=column(),
            prompt_len=column(),
            computed=column(),
            draft=column(k),
            num_draft=column(),
            draft_logprob=column(k, dtype=real),
            draft_source=column(k, dtype=torch.int8),
            page_table=column(max_pages, dtype=torch.int32),
            temperature=column(dtype=real),
            top_k=column(),
            top_p=column(dtype=real),
            min_p=column(dtype=real),
            repetition=column(dtype=real),
            presence=column(dtype=real),
            frequency=column(dtype=real),
            seed=column(),
            stop_ids=column(8),
            min_length=column(),
            max_length=column(),
        )
        self.options: list[SlotOptions | None] = [None] * num_slots
        self.device = device
        self.vocab = vocab
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def options_of(self, slot: int) -> SlotOptions:
        options = self.options[slot]
        assert options is not None, f"slot {slot} is empty"
        return options

    def sit(self, request: Request, pages: list[int], max_length: int) -> int:
        """Give `request` a line and fill it; returns the slot."""
        slot, c, params = self._free.pop(), self.columns, request.params
        prompt = len(request.prompt_token_ids)
        c.tokens[slot, :prompt] = torch.tensor(request.prompt_token_ids, device=self.device)
        c.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.device)
        for column, value in (
            (c.length, prompt),
            (c.prompt_len, prompt),
            (c.computed, 0),
            (c.num_draft, 0),
            (c.temperature, 0.0 if params.greedy else params.temperature),
            (c.top_k, params.top_k),
            (c.top_p, params.top_p),
            (c.min_p, params.min_p),
            (c.repetition, params.repetition_penalty),
            (c.presence, params.presence_penalty),
            (c.frequency, params.frequency_penalty),
            (c.seed, request.seed),
            (c.min_length, prompt + params.min_tokens),
            (c.max_length, max_length),
        ):
            column[slot] = value
        self._put_stop_ids(slot, request)
        self.options[slot] = self._options(request)
        return slot

    def stand(self, slot: int) -> None:
        """Free the line."""
        if self.options[slot] is None:
            raise AssertionError(f"slot {slot} is freed twice")
        self.options[slot] = None
        self._free.append(slot)

    def _put_stop_ids(self, slot: int, request: Request) -> None:
        params = request.params
        ids = sorted({*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids})
        missing = len(ids) - self.columns.stop_ids.shape[1]
        if missing > 0:
            wider = torch.nn.functional.pad(self.columns.stop_ids, (0, missing), value=-1)
            self.columns = replace(self.columns, stop_ids=wider)
        self.columns.stop_ids[slot] = -1
        self.columns.stop_ids[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int64)

    def _options(self, request: Request) -> SlotOptions:
        params = request.params
        banned = None
        if params.allowed_token_ids is not None:
            banned = torch.ones(self.vocab, dtype=torch.bool, device=self.device)
            banned[torch.tensor(params.allowed_token_ids, device=self.device)] = False
        bias = params.logit_bias
        return SlotOptions(
            request=request,
            bias_ids=torch.tensor(list(bias), device=self.device) if bias else None,
            bias_values=torch.tensor(list(bias.values()), device=self.device) if bias else None,
            banned=banned,
        )

    def poison(self) -> None:
        """For tests: fill everything that must not be read with impossible values."""
        self.columns.draft_logprob.fill_(math.nan)
        for column in (self.columns.tokens, self.columns.draft):
            column.fill_(-(2**40))
