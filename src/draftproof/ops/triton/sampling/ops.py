"""Sampling ops on the GPU: checks and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.types import DraftVocab, NamedIds, NamedLogprobs, TokenLogprobs
from draftproof.ops.torch.sampling import ComposedSampling
from draftproof.ops.triton.kernel_utils import FP32, INTS, LaunchContext, check_columns, matrix, vector
from draftproof.ops.triton.sampling import kernels, logprobs, penalties, sample, topk
from draftproof.ops.triton.sampling import topk_topp as top_p_kernels
from draftproof.types import Windows


class TritonSampling(ComposedSampling):
    """Sampling ops; what a kernel writes in place must be contiguous, because it is not copied first."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch

    def argmax(self, logits: Tensor) -> Tensor:
        return kernels.argmax(*_rows(logits))

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        return kernels.gumbel_argmax(*_rows(scaled, seeds, positions), stream)

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        seeds = vector("seeds", seeds, None, INTS)
        return kernels.uniform(seeds, vector("positions", positions, len(seeds), INTS), stream)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return kernels.logsumexp(*_rows(logits))

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        return kernels.rank(*_rows(logits, ids))

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        (logits,) = _rows(logits)
        if not 1 <= k <= logits.shape[1]:
            raise ConfigError(f"top {k} of {logits.shape[1]}")
        return topk.top(logits, k)

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        (scaled,) = _rows(scaled)
        top_k = vector("top_k", top_k, len(scaled), (torch.int64, torch.int32))
        top_p = vector("top_p", top_p, len(scaled), (torch.float32, torch.float64))
        min_p = vector("min_p", min_p, len(scaled), (torch.float32, torch.float64))
        return top_p_kernels.truncate(scaled, top_k, top_p, min_p)

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        logits = _window_rows(logits, windows)
        return penalties.apply_penalties(logits, windows, self._launch.early(logits))

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        _check_in_place(base, windows)
        penalties.apply_bans(base, windows, self._launch.early(base))

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        _check_in_place(base, windows)
        allowed, words = windows.allowed, -(-base.shape[1] // 32)
        if allowed is None or allowed.shape[2] != words or not allowed.is_contiguous():
            raise ConfigError(f"masks must be contiguous, with {words} words per row")
        penalties.apply_grammar_mask(base, windows, self._launch.early(base))

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        logits = _window_rows(logits, windows)
        return sample.sample(logits, windows, scaled, self._launch.early(logits))

    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        tokens: Tensor,
        top: int,
        out: TokenLogprobs | None = None,
        named: NamedIds | None = None,
    ) -> TokenLogprobs:
        logits = matrix("logits", logits, None, FP32)
        rows = vector("rows", rows, None, INTS)
        tokens = vector("tokens", tokens, len(rows), INTS)
        if not 0 <= top <= logits.shape[1]:
            raise ConfigError(f"top {top} of {logits.shape[1]}")
        if not len(rows) or not topk.is_two_stage(logits.shape[1], top):
            return super().logprobs(logits, rows, tokens, top, out, named)
        if named is not None:
            table = matrix("named", named.table, None, (torch.int64,))
            if not 0 < named.width <= table.shape[1]:
                raise ConfigError(f"{named.width} named ids of {table.shape[1]}")
            named = NamedIds(table, vector("slots", named.slots, len(logits), INTS), named.width)
        if out is None:
            ids, values = ((len(rows), top), torch.int64), ((len(rows), 1 + top), torch.float32)
            of_named = None
            if named is not None:
                shape, empty = (len(rows), named.width), self._launch.empty
                of_named = NamedLogprobs(empty(shape, torch.float32), empty(shape, torch.int64))
            ranks = torch.empty_like(rows)
            out = TokenLogprobs(self._launch.empty(*values), self._launch.empty(*ids), ranks, of_named)
        check_columns("ranks", (out.ranks,), len(rows))
        check_columns("ids", (out.ids.view(-1),), len(rows) * top)
        if out.values.shape != (len(rows), 1 + top) or not out.values.is_contiguous():
            raise ConfigError(f"values must be [{len(rows)}, {1 + top}], not {list(out.values.shape)}")
        if named is not None:
            shape = (len(rows), named.width)
            if out.named is None or any(x.shape != shape or not x.is_contiguous() for x in out.named):
                raise ConfigError(f"the named values and ranks must be {list(shape)} and contiguous")
        logprobs.logprobs(logits, rows, tokens, top, out, named, self._launch.early(rows))
        return out

    def draft_logprobs(
        self,
        logits: Tensor,
        slots: Tensor,
        drafts: Tensor,
        top: int,
        out: TokenLogprobs,
        *,
        kind: tuple[Tensor, int] | None = None,
        temperature: Tensor | None = None,
        vocab: DraftVocab | None = None,
    ) -> None:
        count = slots.numel()
        logits = matrix("logits", logits, None, FP32)
        if slots.ndim != 2 or slots.shape != drafts.shape or len(logits) != count:
            raise ConfigError(f"slots and drafts must be [J, B] of {len(logits)} rows, not {slots.shape}")
        if {slots.dtype, drafts.dtype} != {torch.int64} or {slots.stride(1), drafts.stride(1)} != {1}:
            raise ConfigError("slots and drafts must be int64 with contiguous rows")
        if not count or not topk.is_two_stage(logits.shape[1], top):
            options = {"kind": kind, "temperature": temperature, "vocab": vocab}
            super().draft_logprobs(logits, slots, drafts, top, out, **options)
            return
        shapes = [tuple(part.shape) for part in (out.values, out.ids, out.ranks)]
        if shapes != [(count, 1 + top), (count, top), (count,)]:
            raise ConfigError(f"logprobs of {count} drafts cannot be written to {shapes}")
        if not all(part.is_contiguous() for part in (out.values, out.ids, out.ranks)):
            raise ConfigError("the logprobs of drafts must be contiguous")
        early = self._launch.early(logits)
        logprobs.draft_logprobs(logits, slots, drafts, top, out, kind, temperature, vocab, early)


def _rows(logits: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """Return logits [R, V] fp32 and int64 columns [R], ready for a kernel."""
    logits = matrix("logits", logits, None, FP32)
    return logits, *(vector("ids, seeds or positions", column, len(logits), INTS) for column in columns)


def _window_rows(logits: Tensor, windows: Windows) -> Tensor:
    """Return logits [L, V] fp32 of the rows of `windows`, ready for a kernel."""
    logits = matrix("logits", logits, None, FP32)
    check_columns("the logits rows", (windows.slot, windows.depth, windows.position), len(logits))
    return logits


def _check_in_place(base: Tensor, windows: Windows) -> None:
    """Raise ConfigError unless a kernel can change `base` in place."""
    if base.dtype != torch.float32 or not base.is_contiguous() or len(base) != len(windows.slot):
        raise ConfigError(f"base must be [{len(windows.slot)}, V] fp32 and contiguous")
