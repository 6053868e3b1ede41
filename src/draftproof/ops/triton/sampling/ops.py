"""Sampling ops on the GPU: checks and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.types import TokenLogprobs
from draftproof.ops.torch.sampling import ComposedSampling
from draftproof.ops.triton import runtime
from draftproof.ops.triton.launch import FP32, INTS, LaunchContext, check_columns
from draftproof.ops.triton.sampling import kernels, logprobs, penalties, sample, topk
from draftproof.ops.triton.sampling import top_p as top_p_kernels
from draftproof.types import Windows


class TritonSampling(ComposedSampling):
    """Sampling ops; what a kernel writes in place must be contiguous, because it is not copied first."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch

    def _rows(self, logits: Tensor, *columns: Tensor) -> Any:
        """logits [R, V] fp32 and int64 columns [R], ready for a kernel."""
        logits = runtime.matrix("logits", logits, None, FP32)
        return logits, *(runtime.vector("ids, seeds or positions", c, len(logits), INTS) for c in columns)

    def argmax(self, logits: Tensor) -> Tensor:
        (logits,) = self._rows(logits)
        out = kernels.argmax(logits) if len(logits) else self._launch.empty((0,), torch.int64)
        self._launch.done("argmax")
        return out

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        scaled, seeds, positions = self._rows(scaled, seeds, positions)
        found = len(scaled)
        out = (
            kernels.gumbel_argmax(scaled, seeds, positions, stream)
            if found
            else self._launch.empty((0,), torch.int64)
        )
        self._launch.done("gumbel_argmax")
        return out

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        seeds = runtime.vector("seeds", seeds, None, INTS)
        positions = runtime.vector("positions", positions, len(seeds), INTS)
        out = (
            kernels.uniform(seeds, positions, stream)
            if len(seeds)
            else self._launch.empty((0,), torch.float64)
        )
        self._launch.done("uniform")
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        (logits,) = self._rows(logits)
        out = kernels.logsumexp(logits) if len(logits) else self._launch.empty((0,), torch.float32)
        self._launch.done("logsumexp")
        return out

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        logits, ids = self._rows(logits, ids)
        out = kernels.rank(logits, ids) if len(logits) else self._launch.empty((0,), torch.int64)
        self._launch.done("rank")
        return out

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        (logits,) = self._rows(logits)
        if not 1 <= k <= logits.shape[1]:
            raise ConfigError(f"top {k} of {logits.shape[1]}")
        if len(logits):
            values, ids = topk.top(logits, k)
        else:
            values, ids = self._launch.empty((0, k), torch.float32), self._launch.empty((0, k), torch.int64)
        self._launch.done("top")
        return values, ids

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        (scaled,) = self._rows(scaled)
        top_k = runtime.vector("top_k", top_k, len(scaled), (torch.int64, torch.int32))
        top_p = runtime.vector("top_p", top_p, len(scaled), (torch.float32, torch.float64))
        min_p = runtime.vector("min_p", min_p, len(scaled), (torch.float32, torch.float64))
        out = top_p_kernels.truncate(scaled, top_k, top_p, min_p) if len(scaled) else torch.empty_like(scaled)
        self._launch.done("truncate")
        return out

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        logits = self._logits(logits, windows)
        out = (
            penalties.apply_penalties(logits, windows, self._launch.early(logits))
            if len(logits)
            else logits.clone()
        )
        self._launch.done("apply_penalties")
        return out

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        _written(base, windows)
        if len(base):
            penalties.apply_bans(base, windows, self._launch.early(base))
        self._launch.done("apply_bans")

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        _written(base, windows)
        allowed = windows.allowed
        words = -(-base.shape[1] // 32)
        if allowed is None or allowed.shape[2] != words or not allowed.is_contiguous():
            raise ConfigError(f"masks must have {words} words a row, in one piece")
        if len(base):
            penalties.apply_grammar_mask(base, windows, self._launch.early(base))
        self._launch.done("apply_grammar_mask")

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        logits = self._logits(logits, windows)
        if not len(logits):
            return windows.slot.clone(), windows.slot.clone()
        found = sample.sample(logits, windows, scaled, self._launch.early(logits))
        self._launch.done("sample")
        return found

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int, out: TokenLogprobs | None = None
    ) -> TokenLogprobs:
        logits = runtime.matrix("logits", logits, None, FP32)
        rows = runtime.vector("rows", rows, None, INTS)
        tokens = runtime.vector("tokens", tokens, len(rows), INTS)
        if not 0 <= top <= logits.shape[1]:
            raise ConfigError(f"top {top} of {logits.shape[1]}")
        if not len(rows) or not logprobs.quick(logits.shape[1], top):
            return super().logprobs(logits, rows, tokens, top, out)
        if out is None:
            out = logprobs.empty(len(rows), top, logits.device)
        check_columns("ranks", (out.ranks,), len(rows))
        check_columns("ids", (out.ids.view(-1),), len(rows) * top)
        if out.values.shape != (len(rows), 1 + top) or not out.values.is_contiguous():
            raise ConfigError(f"values must be [{len(rows)}, {1 + top}], not {list(out.values.shape)}")
        logprobs.logprobs(logits, rows, tokens, top, out, self._launch.early(rows))
        self._launch.done("logprobs")
        return out

    def _logits(self, logits: Tensor, windows: Windows) -> Tensor:
        logits = runtime.matrix("logits", logits, None, FP32)
        check_columns("the logits rows", (windows.slot, windows.depth, windows.position), len(logits))
        return logits


def _written(base: Tensor, windows: Windows) -> None:
    """What is changed in place."""
    if base.dtype != torch.float32 or not base.is_contiguous() or len(base) != len(windows.slot):
        raise ConfigError(f"base must be [{len(windows.slot)}, V] fp32 in one piece")
