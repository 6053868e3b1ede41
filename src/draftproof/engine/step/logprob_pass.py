"""Logprob pass of a step: committed tokens, named ids and drafts, raw and processed, into the result buffer.

Every part has as many rows as the step has logits rows. Columns of the slots select which of them are
computed, so the pass is captured with the step and needs no host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.engine.step.result_buffer import PackedResults
from draftproof.ops import Ops
from draftproof.types import LogprobKind, Outcome, StepFeatures, Windows


def logprob_pass(
    ops: Ops,
    features: StepFeatures,
    logits: Tensor,
    processed: Tensor,
    windows: Windows,
    outcome: Outcome,
    packed: PackedResults,
) -> Callable[[], None]:
    """Reserve the parts of `packed` and return the function that writes them; logits, processed [L, V]."""
    raw, adjusted = LogprobKind.RAW, LogprobKind.PROCESSED
    scores = {raw: logits, adjusted: processed}
    token_parts = [
        (kind, top, named, packed.add_logprobs(kind, logits.shape[0], top, named))
        for kind, top, named in (
            (raw, features.raw_top, features.raw_named),
            (adjusted, features.processed_top, features.processed_named),
        )
        if top >= 0
    ]
    draft_parts = [
        (kind, packed.add_draft_targets(kind, logits.shape[0]))
        for kind, is_wanted in ((raw, features.has_raw_drafts), (adjusted, features.has_processed_drafts))
        if is_wanted
    ]

    def write() -> None:
        for kind, top, num_named, out in token_parts:
            rows = outcome.pick_rows
            slot = windows.slot[rows.clamp(min=0)].clamp(min=0)  # [L]
            if len(token_parts) > 1:
                rows = torch.where(windows.columns.logprob_kind[slot] == kind, rows, -1)
            named = windows.columns.named_ids[:, :num_named][slot] if num_named else None  # [L, M]
            ops.sampling.logprobs(scores[kind], rows, outcome.pick_tokens, top, out, named)
        for kind, out in draft_parts:
            rows, tokens = _draft_rows(windows, kind)
            ops.sampling.logprobs(scores[kind], rows, tokens, 0, out)

    return write


def _draft_rows(windows: Windows, kind: LogprobKind) -> tuple[Tensor, Tensor]:
    """Return the logits rows [L] of drafts with logprobs of this kind, others -1, and the drafts [L]."""
    is_draft = (windows.draft >= 0) & (windows.columns.draft_kind[windows.slot.clamp(min=0)] == kind)
    rows = torch.arange(len(is_draft), device=is_draft.device)
    return torch.where(is_draft, rows, -1), windows.draft.clamp(min=0)
