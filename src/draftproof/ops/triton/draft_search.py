"""Draft search on the GPU: checks and launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.draft_search import (
    MAX_CANDIDATES,
    AcceptanceRecord,
    BegunDrafts,
    DraftCandidate,
    DraftSearchOps,
    SuffixOptions,
    SuffixPool,
)
from draftproof.ops.triton import draft_search_kernels as kernels
from draftproof.ops.triton.kernel_utils import LaunchContext, check_columns, launch_options, next_power_of_two
from draftproof.types import DeviceBatch


class TritonSearch(DraftSearchOps):
    """Draft search in one launch per op."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch

    def _drafts(self, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Check the batch and allocate tokens [B, K] and two columns [B]."""
        entries = len(batch.slots)
        check_columns("slots and budget", (batch.slots, batch.budget), entries)
        tokens = self._launch.empty((entries, batch.columns.draft.shape[1]), torch.int64)
        return tokens, *self._launch.empty((2, entries), torch.int64)

    def search_ngram(
        self, batch: DeviceBatch, min_match: int, max_match: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots = batch.columns, batch.slots
        k, max_len = columns.draft.shape[1], columns.tokens.shape[1]
        tokens, counts, matched = self._drafts(batch)
        kernels.ngram_kernel[(len(slots),)](
            slots, batch.budget, columns.finish_status, columns.length, columns.tokens, tokens, counts,
            matched, max_len, k, min_match, LARGEST=max_match, DEPTHS=next_power_of_two(k),
            BLOCK=min(kernels.BLOCK, next_power_of_two(max_len)),
            **launch_options(self._launch.pdl, num_warps=8),
        )  # fmt: skip
        return tokens, counts, matched

    def search_suffix(
        self, batch: DeviceBatch, pool: SuffixPool, options: SuffixOptions, begun: BegunDrafts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns, slots = batch.columns, batch.slots
        k, max_len = columns.draft.shape[1], columns.tokens.shape[1]
        tokens, counts, expected = self._drafts(batch)
        prefix, prefix_count = tokens, counts
        if begun is not None:
            prefix, prefix_count = begun[0].contiguous(), begun[1].contiguous()
            check_columns("drafts begun", (prefix.view(-1),), len(slots) * k)
            check_columns("drafts begun", (prefix_count,), len(slots))
        kernels.suffix_kernel[(len(slots),)](
            slots, batch.budget, columns.finish_status, columns.length, columns.tokens, prefix,
            prefix_count, pool.tokens, pool.filled, pool.owner, pool.weight, pool.used, pool.table,
            pool.slot_owner, pool.clock, tokens, counts, expected, max_len, k, pool.tokens.shape[1],
            pool.table.shape[1], options.min_match, options.match_prior, options.min_prob,
            HAS_PREFIX=begun is not None, DRAFTS=next_power_of_two(k),
            BLOCK=min(kernels.BLOCK, next_power_of_two(max_len + k)),
            **launch_options(self._launch.pdl, num_warps=8),
        )  # fmt: skip
        return tokens, counts, expected

    def select_drafts(
        self, batch: DeviceBatch, record: AcceptanceRecord, candidates: Sequence[DraftCandidate], search: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns, slots = batch.columns, batch.slots
        entries, k = shape = (len(slots), columns.draft.shape[1])
        for one in candidates:
            if one.tokens.shape != shape or one.tokens.dtype != torch.int64:
                raise ConfigError(
                    f"drafts must be {list(shape)} int64, not {list(one.tokens.shape)} {one.tokens.dtype}"
                )
        has_expected = sum((one.expected_tokens is not None) << m for m, one in enumerate(candidates))
        # the kernel has MAX_CANDIDATES parameters of each kind and reads the first M
        padded = [*candidates, *[candidates[0]] * (MAX_CANDIDATES - len(candidates))]
        count = [one.count for one in padded]
        expected = [one.count if one.expected_tokens is None else one.expected_tokens for one in padded]
        check_columns("counts and expected tokens of candidates", (*count, *expected), entries)
        out, counts, room = self._drafts(batch)
        sources = self._launch.empty(shape, torch.int8)
        strides = [one.tokens.stride() for one in padded]
        kernels.select_drafts_kernel[(entries,)](
            slots, batch.budget, columns.seed, columns.length, record.last, record.accepted, record.rejected,
            *(one.tokens for one in padded), *count, *expected, out, counts, sources, room,
            record.last.shape[1], k, *(entry for entry, _ in strides), *(depth for _, depth in strides),
            SEARCH=search, M=len(candidates), HAS_EXPECTED=has_expected, DRAFTS=next_power_of_two(k),
            **launch_options(self._launch.pdl, num_warps=1),
        )  # fmt: skip
        return out, counts, sources, room
