"""Draft-round ops on the GPU: one launch per op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftproof.ops.contract.draft_rounds import DraftRows
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.contract.sampling import SamplingOps
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.ops.triton import draft_rounds_kernels, runtime
from draftproof.ops.triton.gemm import lm_head_sample
from draftproof.ops.triton.launch import INTS, LaunchContext, check_columns
from draftproof.types import DeviceBatch, Rows, SlotColumns, Windows


class TritonRounds(TorchRounds):
    """Draft-round ops in one launch each."""

    def __init__(self, launch: LaunchContext, forward: ForwardOps, sampling: SamplingOps) -> None:
        super().__init__(forward, sampling)
        self._launch = launch
        self._lm_head_sample = lm_head_sample.LmHeadSample(launch.device)

    def shift_rows(self, rows: Rows, columns: SlotColumns, slots: Tensor) -> tuple[Rows, Tensor]:
        check_columns("the rows", (rows.positions, rows.slots, rows.kv_index), len(rows.tokens))
        check_columns("slots", (slots,), len(slots))
        found = draft_rounds_kernels.shift_rows(rows, columns, slots, self._launch.early(rows.tokens))
        self._launch.done("shift_rows")
        return found

    def plan_draft_rows(
        self, batch: DeviceBatch, last: Tensor, rounds: int, lag: int, page_size: int
    ) -> DraftRows:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        check_columns("slots and budget", (slots, budget, last), len(slots))
        found = draft_rounds_kernels.plan_draft_rows(
            columns, slots, budget, last, rounds, lag, page_size, self._launch.pdl
        )
        self._launch.done("plan_draft_rows")
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
        if sure is not None or not self._lm_head_sample.supports(x, len(out), packed):
            return super().lm_head_sample(x, at, norm, eps, packed, ids, windows, greedy, out, sure)
        x = runtime.matrix("x", x, packed.weight.shape[1], (packed.weight.dtype,))
        norm = runtime.vector("norm", norm, x.shape[1], (x.dtype,))
        lines = [out, windows.slot, windows.position, *([] if at is None else [at])]
        check_columns("what is picked", lines, len(out) if at is not None else len(x))
        if ids is not None:
            ids = runtime.vector("ids", ids, len(packed.weight), INTS)
        rows = self._lm_head_sample(
            x, at, norm, eps, packed, ids, windows, greedy, out, self._launch.early(out)
        )
        self._launch.done("lm_head_sample")
        return rows
