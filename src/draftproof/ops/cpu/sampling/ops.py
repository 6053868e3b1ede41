"""Sampling ops on the CPU: checks and kernel calls; native loops where torch calls would dominate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.numba_jit import native
from draftproof.ops.contract.sampling import STREAM_SAMPLE
from draftproof.ops.contract.types import NamedIds, TokenLogprobs
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
MAX_PREPARED = 16  # prepared calls that are kept


class _PreparedSample(NamedTuple):
    """Call of `greedy_tokens`, prepared for logits at an address: host time limits steps of few rows."""

    windows: Windows
    slot: Tensor  # [L] int64, as the call reads it
    address: int  # of the logits
    tokens: Tensor  # [L] int64
    states: Tensor  # [L] int64
    run: Callable[[], None]


class CpuSampling(ComposedSampling):
    """Sampling ops with native primitives."""

    def __init__(self, run: Executor) -> None:
        self._run = run
        self._prepared: dict[int, _PreparedSample] = {}  # by the identity of their windows, which they hold
        run.later.add(kernels.greedy_tokens)

    def argmax(self, logits: Tensor) -> Tensor:
        logits, rows, vocab = check_logits(logits)
        out = self._run.new((rows,), torch.int64)
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
        out = self._run.new((rows,), torch.float32)
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
        named: NamedIds | None = None,
    ) -> TokenLogprobs:
        real = (rows >= 0).nonzero()[:, 0]
        if out is None or real.shape == rows.shape:
            return super().logprobs(logits, rows, tokens, top, out, named)
        if real.shape[0] == 0:
            return out
        # a batch in which few requests have logprobs is mostly padding
        return out.put_rows(real, super().logprobs(logits, rows[real], tokens[real], top, None, named))

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
        logits = logits.contiguous()
        prepared = self._prepared.get(id(windows))
        if prepared is None or prepared.address != logits.data_ptr():
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            prepared = self._prepared[id(windows)] = self._prepare_sample(logits, windows)
        prepared.run()
        states = prepared.states.tolist()
        if not any(states):
            return prepared.tokens, prepared.states
        if kernels.NOT_FINITE in states:
            return super().sample(logits, windows, scaled)
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        temperature = columns.temperature[slot]
        divided = logits if scaled else logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        noisy = self.gumbel_argmax(divided, columns.seed[slot], windows.position, STREAM_SAMPLE)
        return torch.where(prepared.states > 0, noisy, prepared.tokens), torch.zeros_like(noisy)

    def _prepare_sample(self, logits: Tensor, windows: Windows) -> _PreparedSample:
        logits, rows, vocab = check_logits(logits)
        tokens, states = torch.empty(2, rows, dtype=torch.int64).unbind()
        slot = check_ints("slot", windows.slot, rows)
        arguments = [tokens, states, logits, slot, windows.columns.temperature, vocab]
        run = self._run.prepare([kernels.greedy_tokens], rows, arguments, small=rows == 1)
        return _PreparedSample(windows, slot, logits.data_ptr(), tokens, states, run)


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
