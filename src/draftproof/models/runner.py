"""Model runner: a model, the storage of its K and V, and its forward pass as the backend captures it.

Storage is indexed by page ids that the engine allocates. A draft model is another runner on the same page
ids, so allocation and rollback happen once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.models.registry import Model
from draftproof.ops import Ops, Rows
from draftproof.ops.contract.kv_layout import resolve_kv_dtype

MAX_LOGITS_ROWS = 16  # rows for which a captured pass with logits allocates memory


class Runner:
    """Compute hidden rows and logits of token rows."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        dtype: torch.dtype,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        taps: Sequence[int] = (),
        kv_cache_dtype: str = "auto",
        captures: bool = True,
    ) -> None:
        """Allocate K and V. `taps`: layers whose residual rows `forward_tapped` returns.

        `captures`: let the backend capture the forward pass, which then consists of its ops alone.
        """
        self.model = model
        self.ops = ops
        self.dtype = dtype
        self.page_size = page_size
        layout = model.kv_layout(model.config, resolve_kv_dtype(kv_cache_dtype, dtype))
        self.caches = layout.allocate(num_pages, page_size, ops.device)

        def run(rows: Rows) -> tuple[Tensor, ...]:
            return model.forward(rows, self.caches, taps)

        def run_with_logits(rows: Rows) -> tuple[Tensor, ...]:
            hidden, *tapped = run(rows)
            return model.logits(hidden), hidden, *tapped

        capture = ops.runtime.capture
        self._forward = capture(run, max_rows) if captures else run
        self._forward_logits = capture(run_with_logits, MAX_LOGITS_ROWS) if captures else None

    def rows(self, tokens: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor) -> Rows:
        """Return rows with the KV index of each computed from the page table."""
        pages = page_table[slots, positions // self.page_size].long()
        index = pages * self.page_size + positions % self.page_size
        return Rows(tokens, positions, slots, index, page_table)

    def forward(self, rows: Rows) -> Tensor:
        """Return the hidden rows [rows, hidden], valid until the next call."""
        return self._forward(rows)[0]

    def forward_selected(self, rows: Rows, output_rows: Tensor) -> Tensor:
        """Run all rows and return the hidden rows of `output_rows` [W] alone: [W, hidden]."""
        return self.model.forward(rows, self.caches, (), output_rows)[0]

    def forward_tapped(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the hidden rows, then the residual rows of each tap, [rows, hidden] each."""
        return self._forward(rows)

    def forward_logits(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return fp32 logits [rows, vocab] of all rows, then what `forward_tapped` returns.

        Few rows are one captured pass: host time limits steps of few rows. All is valid until the next call.
        """
        if self._forward_logits is not None and rows.tokens.shape[0] <= MAX_LOGITS_ROWS:
            return self._forward_logits(rows)
        found = self.forward_tapped(rows)
        return self.logits(found[0]), *found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab] of hidden rows [rows, hidden]."""
        return self.model.logits(hidden)

    def check_ranks(self, error: BaseException | None = None) -> None:
        """Raise EngineDeadError if the model has several ranks and one has ended, or raised `error`."""
