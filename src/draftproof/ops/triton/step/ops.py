"""Step ops on the GPU: checks and launches without synchronisation, of shapes known to the host."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.step import StepOps
from draftproof.ops.contract.types import Layout
from draftproof.ops.triton.kernel_utils import LaunchContext, check_columns, launch_options, next_power_of_two
from draftproof.ops.triton.step import commit, layout
from draftproof.ops.triton.step.store_drafts import store_drafts_kernel, store_ranking_kernel
from draftproof.types import (
    TOKENS,
    Choice,
    Draft,
    DraftRanking,
    Outcome,
    PlanColumns,
    SlotColumns,
    Windows,
)


class TritonStep(StepOps):
    """Step ops; what a kernel writes in place must be contiguous, because it is not copied first."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        entries, count, logits = len(plan.slots), len(rows.tokens), len(out.at)
        check_columns("the plan", (plan.slots, plan.chunk, plan.drafts), entries)
        check_columns("the rows", (rows.tokens, rows.positions, rows.slots, rows.kv_index), count)
        check_columns("the windows", (windows.slots, windows.first, windows.num_draft), entries)
        each = (windows.slot, windows.depth, windows.position, windows.draft, out.at)
        check_columns("the logits rows", each, logits)
        k, padding_programs = columns.draft.shape[1], triton.cdiv(max(count, logits), layout.BLOCK)
        layout.layout_kernel[(entries + padding_programs,)](
            plan.slots, plan.chunk, plan.drafts,
            columns.finish_status, columns.length, columns.computed, columns.num_draft, columns.prompt_len,
            columns.tokens, columns.draft, columns.page_table,
            rows.tokens, rows.positions, rows.slots, rows.kv_index,
            windows.slots, windows.first, windows.num_draft, *each,
            entries, count, logits, columns.tokens.shape[1], k, columns.page_table.shape[1],
            PAGE=page_size, ENTRIES=next_power_of_two(entries), DEPTHS=next_power_of_two(k + 1),
            BLOCK=layout.BLOCK, **launch_options(self._launch.pdl, num_warps=4),
        )  # fmt: skip

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        columns, accept, recovered = windows.columns, choice.accept, choice.recovered
        each = (windows.draft, choice.token, bad, *(() if recovered is None else (recovered,)))
        check_columns("drafts, sampled tokens and error codes", each, len(windows.draft))
        check_columns("the picks", (out.pick_rows, out.pick_tokens), len(out.pick_rows))
        if accept is not None and accept.dtype != torch.bool:
            raise ConfigError(f"accept must be bool, not {accept.dtype}")
        k = columns.draft.shape[1]
        shape = (len(plan.slots), TOKENS + k + 1)
        if out.table.shape != shape or not out.table.is_contiguous():
            raise ConfigError(f"the outcome table must be {list(shape)}, not {list(out.table.shape)}")
        entries = len(windows.slots)
        num_entries, num_depths = next_power_of_two(entries), next_power_of_two(k + 1)
        warps = min(8, max(1, num_entries * num_depths // 64))
        commit.commit_kernel[(1,)](
            plan.slots, plan.chunk, windows.slots, windows.first, windows.num_draft,
            windows.draft, choice.token, bad if accept is None else accept.view(torch.uint8),
            bad if recovered is None else recovered, bad,
            columns.tokens, columns.length, columns.computed, columns.num_draft, columns.finish_status,
            columns.max_length, columns.logprob_kind, columns.ends.view(torch.uint8),
            out.table, out.pick_rows, out.pick_tokens,
            entries, len(bad), len(out.pick_rows), columns.ends.shape[1], columns.tokens.shape[1], k,
            out.table.shape[1],
            ACCEPT=accept is not None, RECOVERED=recovered is not None, ENTRIES=num_entries,
            DEPTHS=num_depths, PICK_BLOCK=commit.PICK_BLOCK,
            **launch_options(self._launch.pdl, num_warps=warps),
        )  # fmt: skip

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        check_columns("slots and budget", (slots, budget), len(slots))
        shape = (len(slots), columns.draft.shape[1])
        if draft.tokens.shape != shape or draft.count.shape != shape[:1]:
            raise ConfigError(f"drafts must be {list(shape)}, not {list(draft.tokens.shape)}")

        def on_device(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(columns.draft.device, dtype).contiguous()  # drafts of a host proposer are copied

        logprobs, sources = columns.draft_logprob, columns.draft_source
        if draft.logprobs is not None:
            logprobs = draft.logprobs.to(columns.draft.device, torch.float32)
        if draft.sources is not None:
            sources = on_device(draft.sources, torch.int8)
        tokens = draft.tokens.to(columns.draft.device, torch.int64)
        store_drafts_kernel[(len(slots),)](
            slots, budget, tokens, on_device(draft.count, torch.int64), logprobs, sources,
            columns.draft, columns.num_draft, columns.draft_logprob, columns.draft_source,
            columns.finish_status, columns.length, columns.max_length, columns.ends.shape[1], shape[1],
            *tokens.stride(), *logprobs.stride(),
            LOGPROBS=draft.logprobs is not None, SOURCES=draft.sources is not None,
            DEPTHS=next_power_of_two(shape[1]), **launch_options(self._launch.pdl, num_warps=1),
        )  # fmt: skip

    def store_ranking(self, held: DraftRanking, slots: Tensor, ranking: DraftRanking | None) -> None:
        check_columns("slots", (slots,), len(slots))
        depth, width = held.top_ids.shape[1:]
        found, top = held if ranking is None else ranking, 0
        if ranking is not None:
            top = ranking.top_ids.shape[2]
            shape = (len(slots), depth)
            if ranking.ranks.shape != shape or ranking.top_logprobs.shape != (*shape, top) or top > width:
                raise ConfigError(f"the ranking of drafts must be {list(shape)}, with at most {width} tokens")
            if top > 1 and {ranking.top_ids.stride(2), ranking.top_logprobs.stride(2)} != {1}:
                raise ConfigError("the likeliest tokens of a draft must be contiguous")
        tops = found.top_ids, found.top_logprobs
        store_ranking_kernel[(len(slots), depth)](
            slots, found.ranks, *tops, held.ranks, held.top_ids, held.top_logprobs, depth, top, width,
            *found.ranks.stride(), *tops[0].stride()[:2], *tops[1].stride()[:2],
            HAS_RANKS=ranking is not None, TOP=next_power_of_two(top) if top else 0,
            **launch_options(self._launch.pdl, num_warps=1),
        )  # fmt: skip
