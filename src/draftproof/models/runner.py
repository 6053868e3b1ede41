"""A runner: a model, its KV storage, and its forward pass in the quick form that the backend offers.

Storage is indexed by page ids that the engine accounts for. A draft model is another runner on the
same page ids, so there is one allocation and one rollback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.models.decoder import Llama
from draftproof.ops import Ops, Rows


class Runner:
    """Rows in, hidden rows and logits out."""

    def __init__(
        self,
        model: Llama,
        ops: Ops,
        dtype: torch.dtype,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        taps: Sequence[int] = (),
    ) -> None:
        """`taps`: layers whose residual rows somebody wants to see."""
        self.model = model
        self.ops = ops
        self.dtype = dtype
        self.page_size = page_size
        self.caches = model.kv_layout(model.config, dtype).allocate(num_pages, page_size, ops.device)
        self._forward = ops.runtime.capture(lambda rows: model.forward(rows, self.caches, taps), max_rows)

    def rows(self, tokens: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor) -> Rows:
        """Rows with the place of their K and V worked out from the page table."""
        pages = page_table[slots, positions // self.page_size].long()
        index = pages * self.page_size + positions % self.page_size
        return Rows(tokens, positions, slots, index, page_table)

    def forward(self, rows: Rows) -> Tensor:
        """[rows, hidden], valid until the next call."""
        return self._forward(rows)[0]

    def some_of(self, rows: Rows, wanted: Tensor) -> Tensor:
        """`forward`, but of the rows `wanted` [W] alone: [W, hidden]."""
        return self.model.forward(rows, self.caches, (), wanted)[0]

    def tapped(self, rows: Rows) -> tuple[Tensor, ...]:
        """The same, then [rows, hidden] of each tap."""
        return self._forward(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] fp32."""
        return self.model.logits(hidden)
