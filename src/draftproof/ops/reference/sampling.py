"""Reference definition of the sampling ops: one row, one token at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftproof.ops.contract.sampling import STREAM_SAMPLE, SamplingOps
from draftproof.ops.contract.types import NamedIds, NamedLogprobs, TokenLogprobs
from draftproof.types import FinishStatus, LogitAdjust, Windows

_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the words of Philox-4x32 with ten rounds (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK)
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int, token: int) -> float:
    """Return the uniform draw of a key."""
    words = philox((token // 4, position, stream, 0), (seed & _MASK, seed >> 32 & _MASK))
    return (words[token % 4] + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, stream: int, token: int) -> float:
    """Return the Gumbel noise of a key."""
    return -math.log(-math.log1p(-uniform(seed, position, stream, token)))


class ReferenceSampling(SamplingOps):
    """Sampling ops as loops over rows."""

    def argmax(self, logits: Tensor) -> Tensor:
        return self.top(logits, 1)[1][:, 0]

    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        best = []
        for row, seed, position in zip(scaled, seeds.tolist(), positions.tolist(), strict=True):
            noise = [gumbel(seed, position, stream, i) for i in range(len(row))]
            best.append(row + torch.tensor(noise, dtype=torch.float64).float())
        return self.argmax(torch.stack(best)) if best else torch.zeros(0, dtype=torch.int64)

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        return torch.tensor([uniform(s, p, stream, 0) for s, p in pairs], dtype=torch.float64)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return torch.tensor([float(torch.logsumexp(row.double(), 0)) for row in logits])

    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        ranks = []
        for row, token in zip(logits.tolist(), ids.tolist(), strict=True):
            before = [i for i, x in enumerate(row) if x > row[token] or (x == row[token] and i < token)]
            ranks.append(1 + len(before))
        return torch.tensor(ranks, dtype=torch.int64)

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = [_order(row)[:k] for row in logits]
        index = torch.tensor(ids, dtype=torch.int64).view(len(logits), k)
        return logits.gather(1, index), index

    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        out = torch.full_like(scaled, -math.inf)
        for r, row in enumerate(scaled):
            order = _order(row)
            if int(top_k[r]):
                order = order[: int(top_k[r])]
            kept = row[order].double()
            probs = torch.exp(kept - kept[0])
            mass = torch.cat([torch.zeros(1, dtype=torch.float64), probs.cumsum(0)[:-1]]) / probs.sum()
            keep = probs >= float(min_p[r])
            if float(top_p[r]) < 1:
                keep &= mass < float(top_p[r])
            for token, is_kept in zip(order, keep.tolist(), strict=True):
                if is_kept:
                    out[r, token] = row[token]
        return out

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        columns, out = windows.columns, logits.clone()
        for r, slot in enumerate(windows.slot.tolist()):
            flags = int(columns.adjust[slot]) if slot >= 0 else 0
            if flags & LogitAdjust.PENALTY:
                prompt, depth = int(columns.prompt_len[slot]), int(windows.depth[r])
                length = prompt + int(windows.position[r]) - depth
                output = columns.tokens[slot, prompt:length].tolist() + columns.draft[slot, :depth].tolist()
                seen = set(columns.tokens[slot, :prompt].tolist() + output)
                penalty = columns.repetition[slot]
                for token in range(logits.shape[1]):
                    x = logits[r, token]
                    if token in seen:
                        x = x / penalty if x > 0 else x * penalty
                    x = x - columns.frequency[slot] * output.count(token)
                    out[r, token] = x - columns.presence[slot] * float(token in output)
            if flags & LogitAdjust.BIAS:
                out[r] += columns.bias[slot]
        return out

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        columns = windows.columns
        for r, slot in enumerate(windows.slot.tolist()):
            flags = int(columns.adjust[slot]) if slot >= 0 else 0
            if flags & LogitAdjust.ALLOWED_IDS:
                base[r, columns.banned[slot]] = -math.inf
            if flags & LogitAdjust.MIN_TOKENS:
                length = int(columns.prompt_len[slot]) + int(windows.position[r])
                if length < int(columns.min_length[slot]):
                    base[r, columns.ends[slot]] = -math.inf

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        assert windows.allowed is not None
        for r, slot in enumerate(windows.slot.tolist()):
            if slot < 0 or not int(windows.columns.adjust[slot]) & LogitAdjust.MASK:
                continue
            words = windows.allowed[slot, int(windows.depth[r])].tolist()
            for token in range(base.shape[1]):
                if not words[token // 32] >> token % 32 & 1:
                    base[r, token] = -math.inf

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        columns = windows.columns
        tokens, bad = torch.zeros_like(windows.slot), torch.zeros_like(windows.slot)
        for r, slot in enumerate(windows.slot.tolist()):
            if slot < 0:
                continue
            row = logits[r : r + 1]
            if bool((row == -math.inf).all()):
                bad[r] = FinishStatus.NO_ALLOWED_TOKEN
            elif bool((row.isnan() | (row == math.inf)).any()):
                bad[r] = FinishStatus.NOT_FINITE
            elif columns.temperature[slot] > 0:
                divided = row if scaled else row / columns.temperature[slot].expand_as(row)
                key = columns.seed[slot : slot + 1], windows.position[r : r + 1]
                tokens[r] = self.gumbel_argmax(divided, *key, STREAM_SAMPLE)[0]
            else:
                tokens[r] = self.argmax(row)[0]
        return tokens, bad

    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        tokens: Tensor,
        top: int,
        out: TokenLogprobs | None = None,
        named: NamedIds | None = None,
    ) -> TokenLogprobs:
        values = torch.zeros((len(rows), 1 + top))
        ids = torch.zeros((len(rows), top), dtype=torch.int64)
        ranks = torch.zeros(len(rows), dtype=torch.int64)
        wanted = torch.zeros((len(rows), 0), dtype=torch.int64) if named is None else named.of_rows(rows)
        of_named = NamedLogprobs(torch.zeros(wanted.shape), torch.zeros_like(wanted))
        for n, (r, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            if r < 0:
                continue
            row = logits[r : r + 1]
            norm = self.logsumexp(row)[0]
            ranks[n] = self.rank(row, torch.tensor([token]))[0]
            values[n, 0] = row[0, token] - norm
            if top:
                best, ids[n] = (x[0] for x in self.top(row, top))
                values[n, 1:] = best - norm
            for m, token_id in enumerate(wanted[n].tolist()):
                if token_id >= 0:
                    of_named.values[n, m] = row[0, token_id] - norm
                    of_named.ranks[n, m] = self.rank(row, torch.tensor([token_id]))[0]
        found = TokenLogprobs(values, ids, ranks, None if named is None else of_named)
        return found if out is None else out.put(found)


def _order(row: Tensor) -> list[int]:
    """Return the ids of a row in the order (value down, id up)."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))
