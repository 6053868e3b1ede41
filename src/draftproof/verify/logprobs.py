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


def logprob_rows(ops: Ops, logits: Tensor, wanted: Wanted) -> list[LogprobRow]:
    """One LogprobRow per row: the token itself, then the best, then the ids named. Waits for the device."""
    if not wanted.rows:
        return []
    rows = torch.tensor(wanted.rows, device=logits.device)
    tokens = torch.tensor(wanted.tokens, device=logits.device)
    found = ops.logprobs(logits, rows, tokens, wanted.top)
    columns = found.values.tolist(), found.ids.tolist(), found.ranks.tolist()
    lines = LogprobRow.from_columns(*columns, wanted.tokens, wanted.top)
    for token in wanted.ids:
        named = ops.logprobs(logits, rows, torch.full_like(tokens, token), 0)
        values, ranks = named.values[:, 0].tolist(), named.ranks.tolist()
        for line, value, rank in zip(lines, values, ranks, strict=True):
            line.token_ids.append(token)
            line.logprobs.append(value)
            line.ranks.append(rank)
    return lines
