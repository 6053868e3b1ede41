"""Step ops on the GPU: few launches, no synchronization, shapes known to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.step import StepOps
from draftproof.ops.contract.types import Layout
from draftproof.ops.triton.launch import LaunchContext, check_columns
from draftproof.ops.triton.step import commit, layout, ngram
from draftproof.types import TOKENS, Choice, Draft, Outcome, PlanColumns, SlotColumns, Windows


class TritonStep(StepOps):
    """Step ops; what a kernel writes in place must be contiguous, because it is not copied first."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        check_columns("the plan", (plan.slots, plan.chunk, plan.drafts), len(plan.slots))
        check_columns("the rows", (rows.tokens, rows.positions, rows.slots, rows.kv_index), len(rows.tokens))
        check_columns("the windows", (windows.slots, windows.first, windows.num_draft), len(plan.slots))
        each = (windows.slot, windows.depth, windows.position, windows.draft, out.at)
        check_columns("the logits rows", each, len(out.at))
        layout.layout(plan, columns, page_size, out, self._launch.pdl)
        self._launch.done("layout")

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        each = [windows.draft, choice.token, bad]
        each += [x for x in (choice.recovered,) if x is not None]
        check_columns("what was chosen", each, len(windows.draft))
        check_columns("the picks", (out.pick_rows, out.pick_tokens), len(out.pick_rows))
        if choice.accept is not None and choice.accept.dtype != torch.bool:
            raise ConfigError(f"accept must be bool, not {choice.accept.dtype}")
        wide = (len(plan.slots), TOKENS + windows.columns.draft.shape[1] + 1)
        if out.table.shape != wide or not out.table.is_contiguous():
            raise ConfigError(f"the outcome's table must be {list(wide)}, not {list(out.table.shape)}")
        commit.commit(plan, windows, choice, bad, out, self._launch.pdl)
        self._launch.done("commit")

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        check_columns("slots and budget", (slots, budget), len(slots))
        shape = (len(slots), columns.draft.shape[1])
        if draft.tokens.shape != shape or draft.count.shape != shape[:1]:
            raise ConfigError(f"a draft of {list(shape)} is wanted, not {list(draft.tokens.shape)}")

        def there(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(columns.draft.device, dtype).contiguous()  # a host proposer's is not there

        own = None if draft.logprobs is None else there(draft.logprobs, torch.float32)
        sources = None if draft.sources is None else there(draft.sources, torch.int8)
        tokens = draft.tokens.to(columns.draft.device, torch.int64)
        count = there(draft.count, torch.int64)
        made = Draft(tokens, count, logprobs=own, sources=sources)
        ngram.store_drafts(columns, slots, budget, made, self._launch.pdl)
        self._launch.done("store_drafts")
