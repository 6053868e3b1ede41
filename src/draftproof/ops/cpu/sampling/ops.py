"""Sampling ops on the CPU: checks and kernel calls; native loops where torch calls would dominate."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftproof.numba_jit import native
from draftproof.ops.contract.sampling import STREAM_SAMPLE
from draftproof.ops.contract.types import TokenLogprobs
from draftproof.ops.cpu.argument_checks import check_doubles, check_ints, check_logits
from draftproof.ops.cpu.executor import Executor
from draftproof.ops.cpu.sampling import kernels
from draftproof.ops.cpu.sampling.penalties import ban_tokens, penalize_rows
from draftproof.ops.torch.sampling import ComposedSampling
from draftproof.types import LogitAdjust, Windows

# numba caches compiled loops by this file alone, so constants of other files are repeated here
MASK = 16
assert int(LogitAdjust.MASK) == MASK
compiled = native(boundscheck=False)


class CpuSampling(ComposedSampling):
    """Sampling ops with native primitives."""

    def __init__(self, run: Executor) -> None:
        self._run = run
        run.later.add(kernels.argmax)

    def argmax(self, logits: Tensor) -> Tensor:
        logits, rows, vocab = check_logits(logits)
        out = torch.empty(rows, dtype=torch.int64)
        self._run.call(kernels.argmax, rows, [out], [logits], [vocab], small=rows == 1)
        return out

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        scaled, rows, vocab = check_logits(scaled)
        keys = [check_ints("seeds", seeds, rows), check_ints("positions", positions, rows)]
        out = torch.empty(rows, dtype=torch.int64)
        self._run.call(kernels.gumbel_argmax, rows, [out], [scaled, *keys], [vocab, stream], small=rows == 1)
        return out

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        seeds = check_ints("seeds", seeds)
        rows = seeds.shape[0]
        out = torch.empty(rows, dtype=torch.float64)
        inputs = [seeds, check_ints("positions", positions, rows)]
        self._run.call(kernels.uniform, rows, [out], inputs, [stream], small=True)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        logits, rows, vocab = check_logits(logits)
        out = torch.empty(rows, dtype=torch.float32)
        self._run.call(kernels.logsumexp, rows, [out], [logits], [vocab], small=rows == 1)
        return out

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        logits, rows, vocab = check_logits(logits)
        out = torch.empty(rows, dtype=torch.int64)
        inputs = [logits, check_ints("ids", ids, rows)]
        self._run.call(kernels.rank, rows, [out], inputs, [vocab], small=rows == 1)
        return out

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits, rows, vocab = check_logits(logits)
        if not 0 <= k <= vocab:
            raise ValueError(f"top {k} of {vocab}")
        values, ids = torch.empty(rows, k, dtype=torch.float32), torch.empty(rows, k, dtype=torch.int64)
        if k:
            scratch = kernels.scratch_bytes(vocab)
            self._run.call(kernels.top, rows, [values, ids], [logits], [vocab, k], scratch, rows == 1)
        return values, ids

    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        tokens: Tensor,
        top: int,
        out: TokenLogprobs | None = None,
        named: Tensor | None = None,
    ) -> TokenLogprobs:
        real = (rows >= 0).nonzero()[:, 0]
        if out is None or real.shape == rows.shape:
            return super().logprobs(logits, rows, tokens, top, out, named)
        if real.shape[0] == 0:
            return out
        # a batch in which few requests have logprobs is mostly padding
        of_real = None if named is None else named[real]
        return out.put_rows(real, super().logprobs(logits, rows[real], tokens[real], top, None, of_real))

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        scaled, rows, vocab = check_logits(scaled)
        limits = [check_ints("top_k", top_k, rows), check_doubles(top_p, rows), check_doubles(min_p, rows)]
        out, scratch = torch.empty_like(scaled), kernels.scratch_bytes(vocab)
        self._run.call(kernels.truncate, rows, [out], [scaled, *limits], [vocab], scratch, rows == 1)
        return out

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        columns, out = windows.columns, logits.clone()
        penalize_rows(
            slot=windows.slot.numpy(),
            depth=windows.depth.numpy(),
            position=windows.position.numpy(),
            adjust=columns.adjust.numpy(),
            tokens=columns.tokens.numpy(),
            prompt_len=columns.prompt_len.numpy(),
            draft=columns.draft.numpy(),
            repetition=columns.repetition.numpy(),
            frequency=columns.frequency.numpy(),
            presence=columns.presence.numpy(),
            bias=columns.bias.numpy(),
            out=out.numpy(),
        )
        return out

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        columns = windows.columns
        ban_tokens(
            slot=windows.slot.numpy(),
            position=windows.position.numpy(),
            adjust=columns.adjust.numpy(),
            prompt_len=columns.prompt_len.numpy(),
            min_length=columns.min_length.numpy(),
            banned=columns.banned.numpy(),
            ends=columns.ends.numpy(),
            base=base.numpy(),
        )

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        assert windows.allowed is not None
        columns = windows.columns
        _mask(*(x.numpy() for x in (windows.slot, windows.depth, columns.adjust, windows.allowed, base)))

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        columns = windows.columns
        num_rows = logits.shape[0]
        temperatures, seeds = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int64)
        inputs = [x.numpy() for x in (windows.slot, columns.temperature, columns.seed)]
        any_sampled = _keys(*inputs, temperatures, seeds)
        tokens = self.argmax(logits)
        sums = logits.sum(-1)  # NaN if one is, or after an overflow; a twelfth of the time of `isnan`
        if not _are_finite(logits.numpy(), tokens.numpy(), sums.numpy()):
            return super().sample(logits, windows, scaled)
        if any_sampled:
            temperature = torch.from_numpy(temperatures)
            divided = logits if scaled else logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
            keys = torch.from_numpy(seeds), windows.position
            tokens = torch.where(temperature > 0, self.gumbel_argmax(divided, *keys, STREAM_SAMPLE), tokens)
        return torch.where(windows.slot >= 0, tokens, 0), torch.zeros_like(tokens)


@compiled
def _are_finite(logits, tokens, sums):  # type: ignore[no-untyped-def]
    """Return whether the largest logit of every row, that of its token, is finite and no sum is NaN."""
    found = True
    for r in range(len(tokens)):
        found &= np.isfinite(logits[r, tokens[r]]) and not np.isnan(sums[r])
    return found


@compiled
def _keys(slot, temperature, seed, temperatures, seeds):  # type: ignore[no-untyped-def]
    """Write temperature and seed of each row; return whether any row is sampled."""
    any_sampled = False
    for r in range(len(slot)):
        if slot[r] >= 0:
            temperatures[r], seeds[r] = temperature[slot[r]], seed[slot[r]]
            any_sampled = any_sampled or temperatures[r] > 0
    return any_sampled


@compiled
def _mask(slot, depth, adjust, allowed, base):  # type: ignore[no-untyped-def]
    """Write -inf to base where the grammar mask of a row has a 0 bit."""
    for r in range(len(slot)):
        if slot[r] < 0 or adjust[slot[r]] & MASK == 0:
            continue
        words = allowed[slot[r], depth[r]]
        for w in range(len(words)):
            word = words[w]
            if word == -1:
                continue
            for t in range(32 * w, min(32 * w + 32, base.shape[1])):
                if word >> (t - 32 * w) & 1 == 0:
                    base[r, t] = -np.inf
