"""Draft search on the GPU: checks and launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.draft_search import (
    AcceptanceRecord,
    BegunDrafts,
    DraftCandidate,
    DraftSearchOps,
    SuffixOptions,
    SuffixPool,
)
from draftproof.ops.triton import draft_search_kernels
from draftproof.ops.triton.launch import LaunchContext, check_columns
from draftproof.ops.triton.step import ngram
from draftproof.types import DeviceBatch, SlotColumns


class TritonSearch(DraftSearchOps):
    """Draft search in one launch per op."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch

    def search_ngram(self, batch: DeviceBatch, min_match: int, max_match: int) -> tuple[Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        check_columns("slots and budget", (slots, budget), len(slots))
        found = ngram.search_ngram(columns, slots, budget, min_match, max_match, self._launch.pdl)
        self._launch.done("search_ngram")
        return found

    def search_suffix(
        self, batch: DeviceBatch, pool: SuffixPool, options: SuffixOptions, begun: BegunDrafts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        check_columns("slots and budget", (slots, budget), len(slots))
        if begun is not None:
            begun = begun[0].contiguous(), begun[1].contiguous()
            check_columns("drafts begun", (begun[0].view(-1),), len(slots) * columns.draft.shape[1])
            check_columns("drafts begun", (begun[1],), len(slots))
        found = draft_search_kernels.search_suffix(
            columns, slots, budget, pool, options, begun, self._launch.pdl
        )
        self._launch.done("search_suffix")
        return found

    def select_drafts(
        self, batch: DeviceBatch, record: AcceptanceRecord, candidates: Sequence[DraftCandidate], search: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns, slots, budget = batch.columns, batch.slots, batch.budget
        _offered(columns, slots, budget, candidates)
        found = draft_search_kernels.select_drafts(
            columns, slots, budget, record, candidates, self._launch.pdl, search
        )
        self._launch.done("select_drafts")
        return found


def _offered(columns: SlotColumns, slots: Tensor, budget: Tensor, offers: Sequence[DraftCandidate]) -> None:
    shape = (len(slots), columns.draft.shape[1])
    if wrong := [offer.tokens for offer in offers if offer.tokens.shape != shape]:
        raise ConfigError(f"drafts of {list(shape)} are wanted, not {list(wrong[0].shape)}")
    if any(offer.tokens.dtype != torch.int64 for offer in offers):
        raise ConfigError("drafts are int64")
    each = [offer.count for offer in offers] + [
        o.expected_tokens for o in offers if o.expected_tokens is not None
    ]
    check_columns("slots, budget and offers", (slots, budget, *each), len(slots))
