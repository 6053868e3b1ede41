"""Sampling ops in torch.

`ComposedSampling` builds the ops on windows from torch calls and a backend's own primitives (argmax, noise,
logsumexp, rank, top, truncate). It works on any device, but reads through a slot of -1 go to row 0, and
`sample` synchronizes with the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops.contract.sampling import STREAM_SAMPLE, SamplingOps
from draftproof.ops.contract.types import NamedIds, NamedLogprobs, TokenLogprobs
from draftproof.ops.torch.row_by_row import map_rows
from draftproof.types import FinishStatus, LogitAdjust, Windows


class ComposedSampling(SamplingOps):
    """Ops on windows, composed of torch calls and the primitives of a subclass."""

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        flags = torch.where(windows.slot >= 0, columns.adjust[slot], 0)[:, None]
        seen, counts = _occurrences(windows, logits.shape[1])
        penalty = columns.repetition[slot][:, None]
        out = torch.where(logits > 0, logits / penalty, logits * penalty)
        out = torch.where(seen, out, logits)
        out = out - columns.frequency[slot][:, None] * counts
        out = out - columns.presence[slot][:, None] * (counts > 0)
        out = torch.where((flags & LogitAdjust.PENALTY) > 0, out, logits)
        return torch.where((flags & LogitAdjust.BIAS) > 0, out + columns.bias[slot], out)

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        flags = torch.where(windows.slot >= 0, columns.adjust[slot], 0)[:, None]
        length = columns.prompt_len[slot] + windows.position
        below_min = (length < columns.min_length[slot])[:, None] & ((flags & LogitAdjust.MIN_TOKENS) > 0)
        banned = columns.banned[slot] & ((flags & LogitAdjust.ALLOWED_IDS) > 0)
        base.masked_fill_(banned | (columns.ends[slot] & below_min), -math.inf)

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        assert windows.allowed is not None
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        masked = (windows.slot >= 0) & ((columns.adjust[slot] & LogitAdjust.MASK) > 0)
        words = windows.allowed[slot, windows.depth]
        bits = words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32) & 1
        disallowed = bits.flatten(1)[:, : base.shape[1]] == 0
        base.masked_fill_(disallowed & masked[:, None], -math.inf)

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        temperature = columns.temperature[slot]
        sampled = temperature > 0
        tokens = self.argmax(logits)
        if bool(sampled.any()):
            divided = logits if scaled else logits / torch.where(sampled, temperature, 1.0)[:, None]
            noisy = self.gumbel_argmax(divided, columns.seed[slot], windows.position, STREAM_SAMPLE)
            tokens = torch.where(sampled, noisy, tokens)
        peak = logits.amax(-1)  # NaN if one is
        bad = torch.where(torch.isfinite(peak), 0, int(FinishStatus.NOT_FINITE))
        bad = torch.where(peak == -math.inf, int(FinishStatus.NO_ALLOWED_TOKEN), bad)
        real = windows.slot >= 0
        bad = torch.where(real, bad, 0)
        return torch.where(real & (bad == 0), tokens, 0), bad

    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        tokens: Tensor,
        top: int,
        out: TokenLogprobs | None = None,
        named: NamedIds | None = None,
    ) -> TokenLogprobs:
        picked = logits[rows.clamp(min=0)]
        norm = self.logsumexp(picked)[:, None]
        own = picked.gather(1, tokens[:, None])
        values, ids = self.top(picked, top) if top else (own[:, :0], tokens[:, None][:, :0])
        of_named = None if named is None else self._named(picked, norm, named.of_rows(rows))
        found = TokenLogprobs(torch.cat([own, values], 1) - norm, ids, self.rank(picked, tokens), of_named)
        return found if out is None else out.put(found)

    def _named(self, picked: Tensor, norm: Tensor, named: Tensor) -> NamedLogprobs:
        """Return the logprobs of ids [N, M] (-1: of id 0) at rows [N, V] with logsumexp [N, 1]."""
        named = named.clamp(min=0)
        ranks = [self.rank(picked, column.contiguous()) for column in named.unbind(1)]
        return NamedLogprobs(picked.gather(1, named) - norm, torch.stack(ranks, 1))


class TorchSampling(ComposedSampling):
    """Primitives in torch, one row at a time."""

    def argmax(self, logits: Tensor) -> Tensor:
        # torch.argmax does not specify which of equal values it returns
        return _first_ids(lambda row: (row == row.max()).nonzero()[:1, 0], logits)

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        noise = [
            _gumbel(scaled.shape[1], seed, position, stream, scaled.device)
            for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
        ]
        return self.argmax(scaled + torch.stack(noise)) if noise else seeds.new_zeros(0)

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        draws = [_uniform(1, s, p, stream, seeds.device)[0] for s, p in pairs]
        return torch.stack(draws) if draws else seeds.new_zeros(0, dtype=torch.float64)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return map_rows(lambda row: torch.logsumexp(row, 0), logits)

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        value = logits.gather(1, ids[:, None])
        tokens = torch.arange(logits.shape[1], device=logits.device)
        before = (logits > value) | ((logits == value) & (tokens < ids[:, None]))
        return 1 + before.sum(-1)

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = torch.stack([_order(row, k) for row in logits]) if len(logits) else None
        if ids is None:
            ids = torch.zeros((0, k), dtype=torch.int64, device=logits.device)
        return logits.gather(1, ids), ids

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        out = torch.full_like(scaled, -math.inf)
        limits = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
        for r, (k, p, m) in enumerate(limits):
            ids = _kept(scaled[r].clone(), k, p, m)
            out[r, ids] = scaled[r, ids]
        return out


def _occurrences(windows: Windows, vocab: int) -> tuple[Tensor, Tensor]:
    """Return [L, V]: seen in prompt, output or earlier drafts; and the count in output and those drafts."""
    columns, slot = windows.columns, windows.slot.clamp(min=0)
    prompt, length = columns.prompt_len[slot], columns.prompt_len[slot] + windows.position - windows.depth
    width, k = columns.tokens.shape[1], columns.draft.shape[1]
    index = torch.arange(width + k, device=slot.device)
    committed = torch.nn.functional.pad(columns.tokens[slot], (0, k))
    ahead = (index - length[:, None]).clamp(0, k - 1)
    tokens = torch.where(index < length[:, None], committed, columns.draft[slot].gather(1, ahead))
    valid = index < (length + windows.depth)[:, None]
    tokens = torch.where(valid, tokens, 0)
    zeros = torch.zeros((len(slot), vocab), device=slot.device)
    seen = zeros.scatter_add(1, tokens, valid.float()) > 0
    output = valid & (index >= prompt[:, None])
    return seen, zeros.scatter_add(1, tokens, output.float())


def _first_ids(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function` to each row and concatenate its ids; a row without an id gives 0."""
    found = [function(row) for row in x]
    none = torch.zeros(1, dtype=torch.int64, device=x.device)  # a row of NaN equals nothing
    rows = [ids if len(ids) else none for ids in found]
    return torch.cat(rows) if rows else none[:0]


def _order(row: Tensor, k: int) -> Tensor:
    """Return the first k ids in the order (value down, id up)."""
    if 4 * k < len(row):
        edge = row.topk(k).values[-1]
        ids = (row >= edge).nonzero()[:, 0]
        if len(ids) >= k:  # fewer only if the row holds NaN
            return ids[row[ids].sort(descending=True, stable=True).indices[:k]]
    return row.sort(descending=True, stable=True).indices[:k]


def _kept(row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the ids kept by top-k, then top-p, then min-p."""
    best = row.max()
    size = min(top_k or len(row), len(row))
    if top_p >= 1:
        ids = _order(row, size) if size < len(row) else torch.arange(size, device=row.device)
    else:
        total = torch.exp((row - best).double()).sum()
        take = min(size, 256)
        while True:  # each pass extends the prefix of the one before
            ids = _order(row, take)
            mass = torch.exp((row[ids] - best).double()).cumsum(0)
            whole = mass[-1] if size < len(row) and take == size else total
            if take == size or (size == len(row) and bool(mass[-1] >= top_p * whole)):
                break
            take = min(size, take * 16) if size == len(row) else size
        before = torch.cat([mass.new_zeros(1), mass[:-1]])
        ids = ids[before < top_p * whole]
    return ids[torch.exp((row[ids] - best).double()) >= min_p]


def _mulhilo(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low word of constant * x, both 32 bits, in int64 without overflow."""
    low = constant * (x & 0xFFFF)  # < 2^48
    high = constant * (x >> 16) + (low >> 16)
    return (high >> 16) & 0xFFFFFFFF, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _uniform(count: int, seed: int, position: int, stream: int, device: torch.device) -> Tensor:
    """Return the uniform draws of the ids 0..count-1, fp64."""
    c0 = torch.arange((count + 3) // 4, device=device)
    c1 = torch.full_like(c0, position)
    c2 = torch.full_like(c0, stream)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        left_high, left_low = _mulhilo(0xD2511F53, c0)
        right_high, right_low = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = right_high ^ c1 ^ k0, right_low, left_high ^ c3 ^ k1, left_low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = torch.stack([c0, c1, c2, c3], dim=-1).view(-1)[:count]
    return (words.double() + 0.5) * 2.0**-32


def _gumbel(count: int, seed: int, position: int, stream: int, device: torch.device) -> Tensor:
    """Return the Gumbel noise of the ids 0..count-1, fp32."""
    u = _uniform(count, seed, position, stream, device)
    return (-torch.log(-torch.log1p(-u))).float()
