"""Logprobs of chosen tokens from their own logits rows: as columns, with no full log-softmax.

A top list is ordered by value down, then id up, so the list for k = 5 is a prefix of that for k = 20 and
one pass with the largest k asked for serves every request of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.ops import Ops
from draftproof.types import LogprobRow


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one request asked for at n rows of the logits."""

    rows: list[int]  # [n] into the logits
    tokens: list[int]  # [n] the token at each row
    top: int  # how many of the best as well; 0 = none
    ids: tuple[int, ...]  # other tokens asked for by id


def logprob_rows(ops: Ops, logits: Tensor, wanted: list[Wanted]) -> list[list[LogprobRow]]:
    """For each `wanted`, one LogprobRow per row: the token itself, then the best, or the ids named."""
    rows = [row for w in wanted for row in w.rows]
    if not rows:
        return [[] for _ in wanted]
    picked = logits[torch.tensor(rows, device=logits.device)]  # [n, V]
    tokens = torch.tensor([t for w in wanted for t in w.tokens], device=logits.device)
    norm = ops.logsumexp(picked)  # [n]
    own = (picked.gather(1, tokens[:, None])[:, 0] - norm).tolist()
    ranks = ops.rank(picked, tokens).tolist()
    top = max(w.top for w in wanted)
    values, ids = ops.top(picked, top) if top else (picked[:, :0], tokens[:, None][:, :0])
    best, best_ids = (values - norm[:, None]).tolist(), ids.tolist()
    out, at = [], 0
    for w in wanted:
        lines = []
        for i, token in enumerate(w.tokens, start=at):
            line = LogprobRow([token], [own[i]], [ranks[i]])
            line.token_ids.extend(best_ids[i][: w.top])
            line.logprobs.extend(best[i][: w.top])
            line.ranks.extend(range(1, w.top + 1))
            lines.append(line)
        if w.ids:
            _add_named(ops, picked[at : at + len(lines)], norm[at : at + len(lines)], w.ids, lines)
        out.append(lines)
        at += len(lines)
    return out


def _add_named(ops: Ops, picked: Tensor, norm: Tensor, ids: tuple[int, ...], lines: list[LogprobRow]) -> None:
    for token in ids:
        named = torch.full((len(picked),), token, device=picked.device)
        values = (picked[:, token] - norm).tolist()
        ranks = ops.rank(picked, named).tolist()
        for line, value, rank in zip(lines, values, ranks, strict=True):
            line.token_ids.append(token)
            line.logprobs.append(value)
            line.ranks.append(rank)
