"""Drafting with a model on the GPU: what surrounds its forward passes, in a launch each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftproof.ops import Rows
from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.ops.triton.step.ops import INTS, StepOps, plain
from draftproof.types import SlotColumns, Windows

try:
    from draftproof.ops.triton import draft_rounds_kernels, elementwise, runtime
    from draftproof.ops.triton.gemm import lm_head_sample
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "triton":
        raise


class DraftOps(StepOps):
    def open_drafts(self) -> None:
        self._pick = lm_head_sample.Pick(self.device)

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        plain("the rows", (rows.positions, rows.slots, rows.kv_index), len(rows.tokens))
        plain("slots", (slots,), len(slots))
        found = draft_rounds_kernels.shift_rows(rows, columns, slots, self._few(rows.tokens))
        self._done("shift_rows")
        return found

    def plan_draft_rows(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        last: Tensor,
        rounds: int,
        lag: int,
        page_size: int,
    ) -> DraftRows:
        plain("slots and budget", (slots, budget, last), len(slots))
        found = draft_rounds_kernels.plan_draft_rows(
            columns, slots, budget, last, rounds, lag, page_size, self.pdl
        )
        self._done("plan_draft_rows")
        return found

    def lm_head_sample(
        self,
        x: Tensor,
        at: Tensor | None,
        norm: Tensor,
        eps: float,
        packed: Any,
        ids: Tensor | None,
        windows: Windows,
        greedy: bool,
        out: Tensor,
        sure: Tensor | None = None,
    ) -> Tensor:
        if sure is not None or not self._pick.takes(x, len(out), packed):
            return super().lm_head_sample(x, at, norm, eps, packed, ids, windows, greedy, out, sure)
        x = runtime.matrix("x", x, packed.weight.shape[1], (packed.weight.dtype,))
        norm = runtime.vector("norm", norm, x.shape[1], (x.dtype,))
        lines = [out, windows.slot, windows.position, *([] if at is None else [at])]
        plain("what is picked", lines, len(out) if at is not None else len(x))
        if ids is not None:
            ids = runtime.vector("ids", ids, len(packed.weight), INTS)
        rows = self._pick(x, at, norm, eps, packed, ids, windows, greedy, out, self._few(out))
        self._done("lm_head_sample")
        return rows

    def embed_norm_concat(
        self,
        tokens: Tensor,
        table: Tensor,
        token_norm: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        if not len(residual):
            return super().embed_norm_concat(tokens, table, token_norm, residual, norm, eps)
        residual, table = runtime.matrix("residual", residual), runtime.matrix("embedding", table)
        wide, kind = residual.shape[1], (residual.dtype,)
        norms = [runtime.vector("norm", weight, wide, kind) for weight in (token_norm, norm)]
        tokens = runtime.vector("tokens", tokens, len(residual), INTS)
        out = torch.empty((len(residual), 2 * wide), dtype=residual.dtype, device=residual.device)
        elementwise.joined_norms(tokens, table, residual, *norms, out, eps, self._few(residual))
        self._done("embed_norm_concat")
        return out
